"""loramux limit and budget."""

from __future__ import annotations

from pathlib import Path

import click

from loramux.limits import LIMITS, PERIODS, Limit, Limits
from loramux_api.cli.house import tenant_option, with_limits, with_tenants
from loramux_api.cli.options import config_option, json_option, put

NANO = 1_000_000_000
_name = click.argument("name", type=click.Choice(list(LIMITS)))
_subject = click.option("--on", "subject", help="A project, key or member, by its id; default: the whole tenant.")


@click.group()
def limit() -> None:
    """What tenants, projects and keys may use.

    \b
    Example:
      loramux limit set tokens_per_minute 100000 --tenant acme --config configs/single-node.toml
    """


@limit.command("set")
@_name
@click.argument("value", type=click.IntRange(0))
@tenant_option
@_subject
@config_option()
@json_option
def set_limit(name: str, value: int, tenant_name: str, subject: str | None, config: Path, as_json: bool) -> None:
    """Let the tenant have at most VALUE of NAME, from its next request on.

    \b
    Example:
      loramux limit set concurrent_requests 32 --tenant acme --config configs/single-node.toml
    """
    made = with_limits(
        config, tenant_name, lambda limits, tenant: limits.put(tenant.id, subject or tenant.id, name, value)
    )
    put(as_json, made, _line(made))


@limit.command("rm")
@_name
@tenant_option
@_subject
@config_option()
@json_option
def remove_limit(name: str, tenant_name: str, subject: str | None, config: Path, as_json: bool) -> None:
    """Take the limit NAME away; that of the tenant's tier counts again, if it has one.

    \b
    Example:
      loramux limit rm concurrent_requests --tenant acme --config configs/single-node.toml
    """
    removed = with_limits(
        config, tenant_name, lambda limits, tenant: limits.remove(tenant.id, subject or tenant.id, name)
    )
    put(as_json, removed, f"{removed.name} is no longer limited on {removed.subject}.")


@limit.command("set-tier")
@_name
@click.argument("value", type=click.IntRange(0))
@click.option("--tier", required=True, help="Whose tenants, unless they have a limit of their own.")
@config_option()
@json_option
def set_tier_limit(name: str, value: int, tier: str, config: Path, as_json: bool) -> None:
    """Let every tenant of a tier have at most VALUE of NAME.

    \b
    Example:
      loramux limit set-tier requests_per_minute 600 --tier standard --config configs/single-node.toml
    """
    made = with_tenants(config, lambda tenants: Limits(tenants.changes).put_for_tier(tier, name, value))
    put(as_json, made, _line(made))


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
    put(as_json, found, "\n".join(map(_line, found)) or f"{tenant_name} has no limits.")


@click.group()
def budget() -> None:
    """The most money that tenants, projects and keys may spend in a day, a month, or in all.

    \b
    Example:
      loramux budget set month 500 --tenant acme --config configs/single-node.toml
    """


@budget.command("set")
@click.argument("period", type=click.Choice(PERIODS))
@click.argument("amount", type=str)
@tenant_option
@_subject
@config_option()
@json_option
def set_budget(period: str, amount: str, tenant_name: str, subject: str | None, config: Path, as_json: bool) -> None:
    """Let the tenant spend at most AMOUNT (12 or 12.50, exact to nine places) in a PERIOD, UTC.

    \b
    Example:
      loramux budget set month 500 --tenant acme --config configs/single-node.toml
    """
    nano = _nano(amount)

    made = with_limits(
        config, tenant_name, lambda limits, tenant: limits.put_budget(tenant.id, subject or tenant.id, period, nano)
    )
    put(as_json, made, f"{made.subject}\t{made.period}\t{amount}")


@budget.command("rm")
@click.argument("period", type=click.Choice(PERIODS))
@tenant_option
@_subject
@config_option()
@json_option
def remove_budget(period: str, tenant_name: str, subject: str | None, config: Path, as_json: bool) -> None:
    """Take a budget away; the bill stays as it is.

    \b
    Example:
      loramux budget rm month --tenant acme --config configs/single-node.toml
    """
    removed = with_limits(
        config, tenant_name, lambda limits, tenant: limits.remove_budget(tenant.id, subject or tenant.id, period)
    )
    put(as_json, removed, f"{removed.subject} has no {removed.period} budget any more.")


@budget.command("ls")
@tenant_option
@config_option()
@json_option
def list_budgets(tenant_name: str, config: Path, as_json: bool) -> None:
    """List a tenant's budgets, and what the current periods have come to.

    \b
    Example:
      loramux budget ls --tenant acme --config configs/single-node.toml
    """
    found = with_limits(config, tenant_name, lambda limits, tenant: limits.budgets(tenant.id))
    lines = [f"{s.budget.period}\t{s.budget.amount} nano\tspent {s.spent}\theld {s.held}" for s in found]
    put(as_json, found, "\n".join(lines) or f"{tenant_name} has no budget.")


def _nano(amount: str) -> int:
    whole, _, part = amount.partition(".")
    if not (whole.isdecimal() and amount.isascii() and (part.isdecimal() or not part)) or len(part) > 9:
        raise click.BadParameter("an amount is written 12 or 12.50, with at most nine places", param_hint="AMOUNT")
    return int(whole) * NANO + int(part.ljust(9, "0"))


def _line(one: Limit) -> str:
    return f"{one.subject}\t{one.name}\t{one.value}"
