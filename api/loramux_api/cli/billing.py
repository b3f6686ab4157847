"""loramux usage and price: what was used, what it costs, and the proof of both, on the database of --config."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from decimal import Decimal, InvalidOperation
from pathlib import Path
from typing import TypeVar

import click

from loramux.billing import Drift, Invoice, Month, read_plans, reconcile
from loramux.gateway import BillingDesk, open_billing
from loramux_api.cli.options import config_option, json_option, put, settings_of

T = TypeVar("T")
period_option = click.option("--period", required=True, metavar="YYYY-MM", help="A month, UTC.")


@click.group()
def usage() -> None:
    """Close periods, write invoices and exports, and prove them.

    \b
    Example:
      loramux usage reconcile --config configs/single-node.toml
      loramux usage close --period 2026-11 --config configs/single-node.toml
      loramux usage invoice --tenant acme --period 2026-11 --config configs/single-node.toml
    """


@usage.command("reconcile")
@config_option()
@json_option
def reconcile_command(config: Path, as_json: bool) -> None:
    """Verify the ledger's chain, and compare it with what the engines counted by themselves.

    Exits with 1 where they differ by a single token, or where an entry was altered.

    \b
    Example:
      loramux usage reconcile --config configs/single-node.toml
    """
    result = with_desk(config, lambda desk: reconcile(desk.database))
    if result.drift_tokens:
        worst = max(result.weights, key=lambda one: one.drift)
        raise Drift(
            f"the engines and the ledger differ by {result.drift_tokens} tokens, most of them ({worst.drift}) for "
            f"{worst.base_model} {worst.adapter_digest}: the engines have {worst.engine}, the ledger {worst.ledger}"
        )
    put(as_json, result, f"{result.entries} entries, none altered; engines and ledger agree to the token.")


@usage.command("close")
@period_option
@config_option()
@json_option
def close(period: str, config: Path, as_json: bool) -> None:
    """Close a month that is over: freeze its entries and everybody's invoice. It is not undone.

    Adapters' storage is brought up to date first. What comes later, corrections too, goes to the next month.

    \b
    Example:
      loramux usage close --period 2026-11 --config configs/single-node.toml
    """

    async def run(desk: BillingDesk) -> list[Invoice]:
        await desk.usage.accrue()
        return await desk.billing.close(Month.parse(period))

    made = with_desk(config, run)
    lines = [f"{one.id}\t{one.total} {one.currency}" for one in made]
    put(as_json, made, "\n".join([f"{period} is closed.", *lines]))


@usage.command("invoice")
@click.option("--tenant", "tenant_name", required=True, help="Whose invoice.")
@period_option
@click.option("--html", type=click.Path(dir_okay=False, path_type=Path), help="Write it there as a page.")
@click.option("--pdf", type=click.Path(dir_okay=False, path_type=Path), help="Write it there as a PDF.")
@config_option()
@json_option
def invoice(tenant_name: str, period: str, html: Path | None, pdf: Path | None, config: Path, as_json: bool) -> None:
    """Show a tenant's invoice: the final one of a closed month, or a draft of the open one.

    On paper it comes from `billing.issuer` of the settings.

    \b
    Example:
      loramux usage invoice --tenant acme --period 2026-11 --pdf acme.pdf --config configs/single-node.toml
    """
    from loramux.exports import InvoiceFormat, write_invoice

    made = with_desk(config, lambda desk: desk.billing.invoice(tenant_name, Month.parse(period)))
    files: dict[InvoiceFormat, Path | None] = {"html": html, "pdf": pdf}
    for kind, file in files.items():
        if file is not None:
            file.write_bytes(write_invoice(made, kind, settings_of(config).billing))
    lines = [f"{line.description}\t{line.quantity}\t{line.amount}" for line in made.lines]
    put(as_json, made, "\n".join([f"{made.id} ({made.status})", *lines, f"Total\t\t{made.total} {made.currency}"]))


@usage.command("correct")
@click.argument("event_id")
@click.option("--change", "changes", multiple=True, required=True, metavar="NAME=NUMBER", help="output_tokens=-100")
@click.option("--reason", required=True, help="Why; the same correction for the same reason is made once.")
@config_option()
@json_option
def correct(event_id: str, changes: tuple[str, ...], reason: str, config: Path, as_json: bool) -> None:
    """Add to, or take from, what the ledger entry EVENT_ID says, by a new entry in the open period that names it.

    \b
    Example:
      loramux usage correct evt_0123 --change output_tokens=-100 --reason ticket-7 --config configs/single-node.toml
    """
    amounts = dict(_change(text) for text in changes)
    entry = with_desk(config, lambda desk: desk.billing.correct(event_id, amounts, reason))
    put(as_json, entry, f"Entry {entry.sequence} ({entry.event_id}) corrects {entry.corrects}.")


@usage.command("margin")
@period_option
@click.option("--gpu-cost", required=True, help="What the GPUs cost in that month, in the plans' currency: '1800.00'.")
@config_option()
@json_option
def margin(period: str, gpu_cost: str, config: Path, as_json: bool) -> None:
    """Show what every tenant's models bring in beside their share of what the GPUs cost.

    A share counts computed prompt tokens once and generated ones twice, as the scheduler does.

    \b
    Example:
      loramux usage margin --period 2026-11 --gpu-cost 1800 --config configs/single-node.toml
    """
    nanos = _nanos(gpu_cost)
    found = with_desk(config, lambda desk: desk.billing.margins(Month.parse(period), nanos))
    lines = [f"{one.tenant_name}\t{one.model}\t{one.price}\t{one.cost}\t{one.margin}\t{one.currency}" for one in found]
    put(as_json, found, "\n".join(["tenant\tmodel\tprice\tcost\tmargin\tcurrency", *lines]))


@click.group()
def price() -> None:
    """Add price lists, and give them to tenants.

    \b
    Example:
      loramux price apply configs/prices/standard.toml --config configs/single-node.toml
    """


@price.command("apply")
@click.argument("file", type=click.Path(dir_okay=False, path_type=Path))
@config_option()
@json_option
def apply(file: Path, config: Path, as_json: bool) -> None:
    """Add the plans and prices in FILE that are not there yet. Prices never change; they are followed by later ones.

    \b
    Example:
      loramux price apply configs/prices/standard.toml --config configs/single-node.toml
    """
    drafts = read_plans(file)
    added = with_desk(config, lambda desk: desk.catalog.apply(drafts))
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
    found = with_desk(config, lambda desk: desk.catalog.plans())
    lines = [f"{one.name}\t{one.currency.code}\t{len(one.prices)} prices" for one in found]
    put(as_json, found, "\n".join(lines) or "No plans yet.")


@price.command("give")
@click.argument("plan_name")
@click.option("--tenant", "tenant_name", required=True, help="To whom.")
@click.option("--from", "month", required=True, metavar="YYYY-MM", help="From the first day of this month on.")
@config_option()
@json_option
def give(plan_name: str, tenant_name: str, month: str, config: Path, as_json: bool) -> None:
    """Give the plan PLAN_NAME to a tenant, until it gets another.

    \b
    Example:
      loramux price give standard --tenant acme --from 2026-11 --config configs/single-node.toml
    """
    with_desk(config, lambda desk: desk.catalog.subscribe(tenant_name, plan_name, Month.parse(month)))
    given = {"tenant": tenant_name, "plan": plan_name, "from": month}
    put(as_json, given, f"{tenant_name} has the plan {plan_name} from {month} on.")


def with_desk(config: Path, act: Callable[[BillingDesk], Awaitable[T]]) -> T:
    """Open the records of `config`, and do something with them."""

    async def run() -> T:
        async with open_billing(settings_of(config)) as desk:
            return await act(desk)

    return asyncio.run(run())


def _change(text: str) -> tuple[str, int]:
    name, _, number = text.partition("=")
    try:
        return name, int(number)
    except ValueError:
        told = f"{text!r} is not NAME=NUMBER, such as output_tokens=-100"
        raise click.BadParameter(told, param_hint="--change") from None


def _nanos(amount: str) -> int:
    try:
        return int(Decimal(amount).scaleb(9).to_integral_exact())
    except (InvalidOperation, ValueError):
        raise click.BadParameter(f"{amount!r} is no amount, such as 1800.00", param_hint="--gpu-cost") from None
