"""loramux tenant and tier."""

from __future__ import annotations

from pathlib import Path

import click

from loramux.tenants import SERVICE_CLASSES, Tenant
from loramux_api.cli.house import day, with_tenants
from loramux_api.cli.options import config_option, json_option, put


@click.group()
def tenant() -> None:
    """Make, list, move and suspend tenants (customers).

    A tenant owns its adapters, keys and usage; no other tenant sees any of them.

    \b
    Example:
      loramux tenant create acme --config configs/single-node.toml
    """


@tenant.command("create")
@click.argument("name")
@click.option("--tier", default="standard", show_default=True, help="Its level of service (see `loramux tier ls`).")
@config_option()
@json_option
def create_tenant(name: str, tier: str, config: Path, as_json: bool) -> None:
    """Make the tenant NAME: a-z, 0-9, '.', '_' and '-'.

    Its adapters will be called NAME/something. It begins with one project, `default`.

    \b
    Example:
      loramux tenant create acme --config configs/single-node.toml
    """
    made = with_tenants(config, lambda tenants: tenants.create(name, tier))
    put(as_json, made, f"Tenant {made.name} is there. Next: loramux key create --tenant {made.name} --config {config}")


@tenant.command("ls")
@config_option()
@json_option
def list_tenants(config: Path, as_json: bool) -> None:
    """List the tenants.

    \b
    Example:
      loramux tenant ls --config configs/single-node.toml
    """
    found = with_tenants(config, lambda tenants: tenants.list_tenants())
    put(as_json, found, "\n".join(map(_line, found)) or "No tenants yet.")


@tenant.command("move")
@click.argument("name")
@click.option("--tier", required=True, help="The new level of service.")
@config_option()
@json_option
def move_tenant(name: str, tier: str, config: Path, as_json: bool) -> None:
    """Give the tenant NAME another tier, from its next request on.

    \b
    Example:
      loramux tenant move acme --tier interactive --config configs/single-node.toml
    """
    moved = with_tenants(config, lambda tenants: tenants.move(name, tier))
    put(as_json, moved, _line(moved))


@tenant.command("suspend")
@click.argument("name")
@config_option()
@json_option
def suspend_tenant(name: str, config: Path, as_json: bool) -> None:
    """Refuse every request of the tenant NAME from now on. Nothing is deleted.

    \b
    Example:
      loramux tenant suspend acme --config configs/single-node.toml
    """
    changed = with_tenants(config, lambda tenants: tenants.suspend(name))
    put(as_json, changed, _line(changed))


@tenant.command("resume")
@click.argument("name")
@config_option()
@json_option
def resume_tenant(name: str, config: Path, as_json: bool) -> None:
    """Serve the suspended tenant NAME again.

    \b
    Example:
      loramux tenant resume acme --config configs/single-node.toml
    """
    changed = with_tenants(config, lambda tenants: tenants.resume(name))
    put(as_json, changed, _line(changed))


@click.group()
def tier() -> None:
    """Levels of service: a class of the scheduler, and a weight in it.

    \b
    Example:
      loramux tier put gold --class interactive --weight 4 --config configs/single-node.toml
    """


@tier.command("put")
@click.argument("name")
@click.option("--class", "service_class", type=click.Choice(SERVICE_CLASSES), required=True, help="The scheduler's.")
@click.option("--weight", type=click.IntRange(1, 1000), default=1, show_default=True, help="A tenant's share in it.")
@config_option()
@json_option
def put_tier(name: str, service_class: str, weight: int, config: Path, as_json: bool) -> None:
    """Make the tier NAME, or change it for all tenants that have it.

    \b
    Example:
      loramux tier put gold --class interactive --weight 4 --config configs/single-node.toml
    """
    made = with_tenants(config, lambda tenants: tenants.tiers.put(name, service_class, weight))
    put(as_json, made, f"Tier {made.name}: {made.service_class}, weight {made.weight}.")


@tier.command("ls")
@config_option()
@json_option
def list_tiers(config: Path, as_json: bool) -> None:
    """List the tiers.

    \b
    Example:
      loramux tier ls --config configs/single-node.toml
    """
    found = with_tenants(config, lambda tenants: tenants.tiers.all())
    put(as_json, found, "\n".join(f"{one.name}\t{one.service_class}\tweight {one.weight}" for one in found))


@tier.command("rm")
@click.argument("name")
@config_option()
@json_option
def remove_tier(name: str, config: Path, as_json: bool) -> None:
    """Forget the tier NAME, which no tenant has.

    \b
    Example:
      loramux tier rm gold --config configs/single-node.toml
    """
    removed = with_tenants(config, lambda tenants: tenants.tiers.remove(name))
    put(as_json, removed, f"Tier {removed.name} is gone.")


def _line(one: Tenant) -> str:
    state = "live" if one.suspended_at is None else f"suspended since {day(one.suspended_at)}"
    return f"{one.name}\t{one.tier}\tsince {day(one.created_at)}\t{state}"
