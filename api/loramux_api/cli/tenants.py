"""loramux tenant, tier and project, limit and budget: tenants, their rates and their spending."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

import click

from loramux.accounts.tenants.entities import Tenant
from loramux.accounts.tenants.tenants import SERVICE_CLASSES
from loramux.data.entities import ALLOWED_AT_FIRST, CHOSEN
from loramux.money.limits.budgets import BudgetState, format_money
from loramux.money.limits.definitions import LIMITS
from loramux.money.limits.limits import PERIODS, Limit, Limits
from loramux.money.pricing import NANO
from loramux_api.cli.common import (
    CommandGroup,
    config_option,
    day,
    json_option,
    put,
    table,
    tenant_option,
    with_account,
    with_limits,
    with_tenants,
)
from loramux_api.cli.default_server import config_argument

_name = click.argument("name", type=click.Choice(list(LIMITS)), metavar="NAME")
_NAMES = "\b\nNAME is one of:\n  " + "\n  ".join(LIMITS)
_subject_option = click.option("--subject", help="Id of a project, key or member; default: the whole tenant.")


@click.group(cls=CommandGroup)
def tenant() -> None:
    """Create, list, move and suspend tenants (customers).

    A tenant owns its adapters, keys and usage; no other tenant sees any of them.

    \b
    Example:
      loramux tenant create acme --config configs/single-node.toml
    """


@tenant.command("create")
@click.argument("name")
@click.option("--tier", default="standard", show_default=True, help="Its tier; `loramux tier ls` lists them.")
@config_option()
@json_option
def create_tenant(name: str, tier: str, config: Path, as_json: bool) -> None:
    """Create the tenant NAME, which consists of a-z, 0-9, '.', '_' and '-'.

    The tenant's adapters are called NAME/ADAPTER. The tenant starts with one project, `default`.

    \b
    Example:
      loramux tenant create acme --config configs/single-node.toml
    """
    made = with_tenants(config, lambda tenants: tenants.create(name, tier))
    following = f"loramux key create --tenant {made.name}{config_argument(config)}"
    put(as_json, made, f"Tenant {made.name} is created. Next: {following}")


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
    put(as_json, found, _tenants_table(found) or "No tenants yet; make one: loramux tenant create NAME")


@tenant.command("move")
@click.argument("name")
@click.option("--tier", required=True, help="The new tier.")
@config_option()
@json_option
def move_tenant(name: str, tier: str, config: Path, as_json: bool) -> None:
    """Move the tenant NAME to another tier, from its next request on.

    \b
    Example:
      loramux tenant move acme --tier interactive --config configs/single-node.toml
    """
    moved = with_tenants(config, lambda tenants: tenants.move(name, tier))
    put(as_json, moved, _tenants_table([moved]))


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
    put(as_json, changed, _tenants_table([changed]))


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
    put(as_json, changed, _tenants_table([changed]))


@tenant.command("zero-retention")
@click.argument("name")
@click.option("--on/--off", "zero_retention", default=True, show_default=True, help="Begin it, or end it.")
@config_option()
@json_option
def set_zero_retention(name: str, zero_retention: bool, config: Path, as_json: bool) -> None:
    """From now on, store no text of the requests and answers of the tenant NAME.

    Kept answers, files and batches of the tenant are deleted.

    \b
    Example:
      loramux tenant zero-retention acme --on --config configs/single-node.toml
    """
    changed = with_tenants(config, lambda tenants: tenants.set_zero_retention(name, zero_retention))
    put(as_json, changed, _tenants_table([changed]))


@tenant.command("allow-judges")
@click.argument("name")
@click.option("--on/--off", "allow_judges", default=True, show_default=True, help="Allow it, or no longer.")
@config_option()
@json_option
def set_allow_judges(name: str, allow_judges: bool, config: Path, as_json: bool) -> None:
    """Let evaluations of the tenant NAME show prompts and answers to judges: models of third parties.

    \b
    Example:
      loramux tenant allow-judges acme --on --config configs/single-node.toml
    """
    changed = with_tenants(config, lambda tenants: tenants.set_allow_judges(name, allow_judges))
    put(as_json, changed, _tenants_table([changed]))


@click.group(cls=CommandGroup)
def tier() -> None:
    """Manage tiers: a class of the scheduler, a weight in it, and the service tiers that requests may use.

    \b
    Example:
      loramux tier put gold --class interactive --weight 4 --config configs/single-node.toml
    """


@tier.command("put")
@click.argument("name")
@click.option("--class", "service_class", type=click.Choice(SERVICE_CLASSES), required=True, help="Scheduler class.")
@click.option(
    "--weight", type=click.IntRange(1, 1000), default=1, show_default=True, help="A tenant's weight in the class."
)
@click.option(
    "--service-tier",
    "service_tiers",
    type=click.Choice(CHOSEN),
    multiple=True,
    default=ALLOWED_AT_FIRST,
    show_default=True,
    help="A service tier that requests may ask for in addition to `default`. Repeatable.",
)
@config_option()
@json_option
def put_tier(
    name: str, service_class: str, weight: int, service_tiers: tuple[str, ...], config: Path, as_json: bool
) -> None:
    """Create the tier NAME, or change it for all its tenants.

    \b
    Example:
      loramux tier put gold --class interactive --weight 4 --service-tier priority --service-tier batch \
        --config configs/single-node.toml
    """
    made = with_tenants(config, lambda tenants: tenants.tiers.put(name, service_class, weight, service_tiers))
    allows = ", ".join(made.service_tiers) or "no other service tier"
    put(as_json, made, f"Tier {made.name}: {made.service_class}, weight {made.weight}, allows {allows}.")


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
    rows = [(one.name, one.service_class, one.weight, " ".join(one.service_tiers)) for one in found]
    put(as_json, found, table(("tier", "class", "weight", "service tiers"), rows))


@tier.command("rm")
@click.argument("name")
@config_option()
@json_option
def remove_tier(name: str, config: Path, as_json: bool) -> None:
    """Delete the tier NAME. The tier must have no tenants.

    \b
    Example:
      loramux tier rm gold --config configs/single-node.toml
    """
    removed = with_tenants(config, lambda tenants: tenants.tiers.remove(name))
    put(as_json, removed, f"Tier {removed.name} is deleted.")


@click.group(cls=CommandGroup)
def project() -> None:
    """Manage a tenant's projects. Limits and invoice lines can be set per project.

    \b
    Example:
      loramux project create web --tenant acme --config configs/single-node.toml
    """


@project.command("create")
@click.argument("name")
@tenant_option
@config_option()
@json_option
def create_project(name: str, tenant_name: str, config: Path, as_json: bool) -> None:
    """Create the project NAME, or restore it with its keys if it is archived.

    \b
    Example:
      loramux project create web --tenant acme --config configs/single-node.toml
    """
    made = with_account(config, tenant_name, lambda account: account.projects.create(name))
    put(as_json, made, f"Project {made.name} ({made.id}) is created.")


@project.command("ls")
@tenant_option
@config_option()
@json_option
def list_projects(tenant_name: str, config: Path, as_json: bool) -> None:
    """List a tenant's projects.

    \b
    Example:
      loramux project ls --tenant acme --config configs/single-node.toml
    """
    found = with_account(config, tenant_name, lambda account: account.projects.all())
    rows = [(one.id, one.name, day(one.archived_at)) for one in found]
    put(as_json, found, table(("id", "project", "archived"), rows))


@project.command("archive")
@click.argument("name")
@tenant_option
@config_option()
@json_option
def archive_project(name: str, tenant_name: str, config: Path, as_json: bool) -> None:
    """Archive the project NAME: its keys are refused from their next request on, until it is restored.

    \b
    Example:
      loramux project archive web --tenant acme --config configs/single-node.toml
    """
    put(
        as_json,
        with_account(config, tenant_name, lambda account: account.projects.archive(name)),
        f"Project {name} is archived: its keys are refused until `loramux project create {name}` restores it.",
    )


@click.group(cls=CommandGroup)
def limit() -> None:
    """Limit the rates of tenants, projects and keys.

    \b
    Example:
      loramux limit set tokens_per_minute 100000 --tenant acme --config configs/single-node.toml
    """


@limit.command("set", epilog=_NAMES)
@_name
@click.argument("value", type=click.IntRange(0))
@tenant_option
@_subject_option
@config_option()
@json_option
def set_limit(name: str, value: int, tenant_name: str, subject: str | None, config: Path, as_json: bool) -> None:
    """Set the limit NAME of a tenant to VALUE, from its next request on.

    VALUE is a whole number of what the name says; bytes for the names that end with bytes.

    \b
    Example:
      loramux limit set concurrent_requests 32 --tenant acme --config configs/single-node.toml
    """
    made = with_limits(
        config, tenant_name, lambda limits, tenant: limits.put(tenant.id, subject or tenant.id, name, value)
    )
    put(as_json, made, _limits_table([made]))


@limit.command("rm", epilog=_NAMES)
@_name
@tenant_option
@_subject_option
@config_option()
@json_option
def remove_limit(name: str, tenant_name: str, subject: str | None, config: Path, as_json: bool) -> None:
    """Remove the limit NAME. The limit of the tenant's tier applies again, if there is one.

    \b
    Example:
      loramux limit rm concurrent_requests --tenant acme --config configs/single-node.toml
    """
    removed = with_limits(
        config, tenant_name, lambda limits, tenant: limits.remove(tenant.id, subject or tenant.id, name)
    )
    put(as_json, removed, f"{removed.name} is no longer limited for {removed.subject}.")


@limit.command("set-tier", epilog=_NAMES)
@_name
@click.argument("value", type=click.IntRange(0))
@click.option("--tier", required=True, help="Tier name. A tenant's own limit takes precedence.")
@config_option()
@json_option
def set_tier_limit(name: str, value: int, tier: str, config: Path, as_json: bool) -> None:
    """Set the limit NAME of every tenant of a tier to VALUE.

    \b
    Example:
      loramux limit set-tier requests_per_minute 600 --tier standard --config configs/single-node.toml
    """
    made = with_tenants(config, lambda tenants: Limits(tenants.changes).put_for_tier(tier, name, value))
    put(as_json, made, _limits_table([made]))


@limit.command("ls")
@tenant_option
@config_option()
@json_option
def list_limits(tenant_name: str, config: Path, as_json: bool) -> None:
    """List a tenant's limits, with those of its tier.

    \b
    Example:
      loramux limit ls --tenant acme --config configs/single-node.toml
    """
    found = with_limits(config, tenant_name, lambda limits, tenant: limits.of(tenant.id, tenant.tier))
    put(as_json, found, _limits_table(found) or f"{tenant_name} has no limits.")


@click.group(cls=CommandGroup)
def budget() -> None:
    """Limit what tenants, projects and keys may spend in a day, in a month, or in total.

    \b
    Example:
      loramux budget set month 500 --tenant acme --config configs/single-node.toml
    """


@budget.command("set")
@click.argument("period", type=click.Choice(PERIODS))
@click.argument("amount", type=str)
@tenant_option
@_subject_option
@config_option()
@json_option
def set_budget(period: str, amount: str, tenant_name: str, subject: str | None, config: Path, as_json: bool) -> None:
    """Set a tenant's budget to AMOUNT (12 or 12.50, at most nine decimal places) per PERIOD, UTC.

    \b
    Example:
      loramux budget set month 500 --tenant acme --config configs/single-node.toml
    """
    nano = _nano(amount)

    made = with_limits(
        config, tenant_name, lambda limits, tenant: limits.put_budget(tenant.id, subject or tenant.id, period, nano)
    )
    put(as_json, made, table(("of", "period", "amount"), [(made.subject, made.period, amount)]))


@budget.command("rm")
@click.argument("period", type=click.Choice(PERIODS))
@tenant_option
@_subject_option
@config_option()
@json_option
def remove_budget(period: str, tenant_name: str, subject: str | None, config: Path, as_json: bool) -> None:
    """Remove a budget. Invoices do not change.

    \b
    Example:
      loramux budget rm month --tenant acme --config configs/single-node.toml
    """
    removed = with_limits(
        config, tenant_name, lambda limits, tenant: limits.remove_budget(tenant.id, subject or tenant.id, period)
    )
    put(as_json, removed, f"{removed.subject} no longer has a {removed.period} budget.")


@budget.command("ls")
@tenant_option
@config_option()
@json_option
def list_budgets(tenant_name: str, config: Path, as_json: bool) -> None:
    """List a tenant's budgets, with the spending of the current periods.

    \b
    Example:
      loramux budget ls --tenant acme --config configs/single-node.toml
    """
    found = with_limits(config, tenant_name, lambda limits, tenant: limits.budgets(tenant.id))
    heads = ("of", "period", "amount", "spent", "of it for answers left unread", "reserved")
    put(as_json, found, table(heads, map(_budget_row, found)) or f"{tenant_name} has no budget.")


def _nano(amount: str) -> int:
    whole, _, part = amount.partition(".")
    if not (whole.isdecimal() and amount.isascii() and (part.isdecimal() or not part)) or len(part) > 9:
        raise click.BadParameter("an amount is 12 or 12.50, with at most nine decimal places", param_hint="AMOUNT")
    return int(whole) * NANO + int(part.ljust(9, "0"))


def _budget_row(state: BudgetState) -> tuple[str, ...]:
    amounts = (state.budget.amount, state.spent, state.abandoned, state.held)
    return (state.budget.subject, state.budget.period, *(format_money(nanos, state.currency) for nanos in amounts))


def _limits_table(found: Iterable[Limit]) -> str:
    return table(("of", "limit", "value"), [(one.subject, one.name, f"{one.value:,}") for one in found])


def _tenants_table(found: Iterable[Tenant]) -> str:
    return table(("tenant", "tier", "since", "state", "notes"), map(_tenant_row, found))


def _tenant_row(one: Tenant) -> tuple[str, ...]:
    state = "live" if one.suspended_at is None else f"suspended since {day(one.suspended_at)}"
    notes = (("zero retention", one.zero_retention), ("judges allowed", one.allow_judges))
    return one.name, one.tier, day(one.created_at), state, ", ".join(note for note, holds in notes if holds)
