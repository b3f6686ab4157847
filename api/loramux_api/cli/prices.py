"""loramux price: price lists, and which tenant has which."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click

from loramux.billing import Month, read_plans
from loramux_api.cli.common import (
    config_option,
    json_option,
    put,
    tenant_option,
    warn_of_old_name,
    with_billing,
)


@click.group()
def price() -> None:
    """Add price lists, and assign them to tenants.

    \b
    Example:
      loramux price apply configs/prices/standard.toml --config configs/single-node.toml
    """


@price.command("apply")
@click.argument("file", type=click.Path(dir_okay=False, path_type=Path))
@config_option()
@json_option
def apply(file: Path, config: Path, as_json: bool) -> None:
    """Add the plans and prices in FILE that are missing. A price never changes; a later price succeeds it.

    \b
    Example:
      loramux price apply configs/prices/standard.toml --config configs/single-node.toml
    """
    drafts = read_plans(file)
    added = with_billing(config, lambda desk: desk.catalog.apply(drafts))
    put(as_json, {"added": added}, f"{added} plans and prices were added.")


@price.command("ls")
@config_option()
@json_option
def list_plans(config: Path, as_json: bool) -> None:
    """List the plans.

    \b
    Example:
      loramux price ls --config configs/single-node.toml
    """
    found = with_billing(config, lambda desk: desk.catalog.plans())
    lines = [f"{one.name}\t{one.currency.code}\t{len(one.prices)} prices" for one in found]
    put(as_json, found, "\n".join(lines) or "No plans yet.")


@price.command("assign")
@click.argument("plan_name")
@tenant_option
@click.option("--from", "month", required=True, metavar="YYYY-MM", help="First month of the plan.")
@click.option("--replace", is_flag=True, help="Replace a plan that was assigned from the same month, which is open.")
@config_option()
@json_option
def assign(plan_name: str, tenant_name: str, month: str, replace: bool, config: Path, as_json: bool) -> None:
    """Assign the plan PLAN_NAME to a tenant, until another plan succeeds it.

    \b
    Example:
      loramux price assign standard --tenant acme --from 2026-11 --config configs/single-node.toml
      loramux price assign large --tenant acme --from 2026-11 --replace --config configs/single-node.toml
    """
    first = Month.parse(month)
    with_billing(config, lambda desk: desk.catalog.subscribe(tenant_name, plan_name, first, replace=replace))
    assigned = {"tenant": tenant_name, "plan": plan_name, "from": month}
    put(as_json, assigned, f"{tenant_name} has the plan {plan_name} from {month} on.")


@price.command("unassign")
@tenant_option
@click.option("--from", "month", required=True, metavar="YYYY-MM", help="First month of the plan; it must be open.")
@config_option()
@json_option
def unassign(tenant_name: str, month: str, config: Path, as_json: bool) -> None:
    """Take back the plan that a tenant has from a month on; the plan from before applies again.

    \b
    Example:
      loramux price unassign --tenant acme --from 2026-11 --config configs/single-node.toml
    """
    with_billing(config, lambda desk: desk.catalog.unsubscribe(tenant_name, Month.parse(month)))
    put(as_json, {"tenant": tenant_name, "from": month}, f"{tenant_name} has no plan of its own from {month} on.")


@price.command("give", hidden=True, params=assign.params)
def give(**arguments: Any) -> None:
    """Run `loramux price assign`, under its old name.

    \b
    Example:
      loramux price give standard --tenant acme --from 2026-11 --config configs/single-node.toml
    """
    warn_of_old_name("price give", "price assign")
    assert assign.callback is not None
    assign.callback(**arguments)
