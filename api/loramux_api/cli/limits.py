"""loramux limit and budget."""

from __future__ import annotations

from pathlib import Path

import click

from loramux.limits import LIMITS, PERIODS, BudgetState, Limit, Limits, format_money
from loramux_api.cli.common import (
    config_option,
    json_option,
    option_with_old_name,
    put,
    tenant_option,
    with_limits,
    with_tenants,
)

NANO = 1_000_000_000
_name = click.argument("name", type=click.Choice(list(LIMITS)))
_subject_option = option_with_old_name(
    "--subject", "--on", help="Id of a project, key or member; default: the whole tenant."
)


@click.group()
def limit() -> None:
    """Limit the rates of tenants, projects and keys.

    \b
    Example:
      loramux limit set tokens_per_minute 100000 --tenant acme --config configs/single-node.toml
    """


@limit.command("set")
@_name
@click.argument("value", type=click.IntRange(0))
@tenant_option
@_subject_option
@config_option()
@json_option
def set_limit(name: str, value: int, tenant_name: str, subject: str | None, config: Path, as_json: bool) -> None:
    """Set the limit NAME of a tenant to VALUE, from its next request on.

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


@limit.command("set-tier")
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
    put(as_json, made, f"{made.subject}\t{made.period}\t{amount}")


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
    lines = [_budget_line(state) for state in found]
    put(as_json, found, "\n".join(lines) or f"{tenant_name} has no budget.")


def _nano(amount: str) -> int:
    whole, _, part = amount.partition(".")
    if not (whole.isdecimal() and amount.isascii() and (part.isdecimal() or not part)) or len(part) > 9:
        raise click.BadParameter("an amount is 12 or 12.50, with at most nine decimal places", param_hint="AMOUNT")
    return int(whole) * NANO + int(part.ljust(9, "0"))


def _budget_line(state: BudgetState) -> str:
    budget = state.budget
    amount, spent, held = (format_money(nanos, state.currency) for nanos in (budget.amount, state.spent, state.held))
    return f"{budget.subject}\t{budget.period}\t{amount}\tspent {spent}\theld {held}"


def _line(one: Limit) -> str:
    return f"{one.subject}\t{one.name}\t{one.value}"
