"""loramux price and usage: price lists and their tenants, closed months, invoices, exports and the verification of the
ledger.

Commands work on the database of --config, and need no running server.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack
from decimal import Decimal, InvalidOperation
from pathlib import Path

import click
import msgspec

from loramux.common.settings.file import load_settings
from loramux.data.entities import ParkedEvent
from loramux.money.billing.catalog import read_plans
from loramux.money.billing.errors import LedgerDrift, PeriodNotOpen
from loramux.money.billing.invoices import Invoice, InvoiceParty, display_quantity
from loramux.money.billing.periods import Month, Period
from loramux.money.billing.reconcile import Reconciliation, reconcile
from loramux.money.exports.delivery import SinkDelivery
from loramux.money.exports.focus import FOCUS_COLUMNS, GROUP_BY, Seller, focus_rows
from loramux.money.exports.tables import FORMATS, LEDGER_COLUMNS, ExportedFile, Row, ledger_pages, write_table
from loramux.money.pricing import Currency, UnknownCurrency, plain_builtins, plain_text
from loramux.server.platform import BillingServices, open_sinks
from loramux_api.cli.common import (
    CommandGroup,
    config_option,
    json_option,
    period_option,
    put,
    table,
    tenant_option,
    with_billing,
)


@click.group(cls=CommandGroup)
def price() -> None:
    """Add price lists, and assign them to tenants.

    \b
    Example:
      loramux price apply standard --config configs/single-node.toml
    """


@price.command("apply")
@click.argument("file", type=click.Path(dir_okay=False, path_type=Path))
@config_option()
@json_option
def apply(file: Path, config: Path, as_json: bool) -> None:
    """Add the plans and prices in FILE that are missing. A price never changes; a later price succeeds it.

    FILE `standard` is the list that loramux ships, an example.

    \b
    Example:
      loramux price apply standard
      loramux price apply prices.toml --config configs/single-node.toml
    """
    from loramux.simulator.scenario import configs_folder

    drafts = read_plans(configs_folder() / "prices" / "standard.toml" if str(file) == "standard" else file)
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
    rows = [(one.name, one.currency.code, len(one.prices)) for one in found]
    put(
        as_json,
        found,
        table(("plan", "currency", "prices"), rows) or "No plans yet; add some: loramux price apply FILE",
    )


@price.command("assign")
@click.argument("plan_name")
@tenant_option
@click.option("--from", "month", required=True, metavar="YYYY-MM", help="First month of the plan.")
@click.option("--replace", is_flag=True, help="Replace a plan that was assigned from the same month, which is open.")
@config_option()
@json_option
def assign(plan_name: str, tenant_name: str, month: str, replace: bool, config: Path, as_json: bool) -> None:
    """Assign the plan PLAN_NAME to a tenant, until another plan replaces it.

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
    """Remove the plan that a tenant has from a month on. The previous plan applies again.

    \b
    Example:
      loramux price unassign --tenant acme --from 2026-11 --config configs/single-node.toml
    """
    with_billing(config, lambda desk: desk.catalog.unsubscribe(tenant_name, Month.parse(month)))
    put(as_json, {"tenant": tenant_name, "from": month}, f"{tenant_name} has no plan of its own from {month} on.")


class Delivered(msgspec.Struct, frozen=True):
    """Entries delivered to a sink by this command, and events that the sink has refused so far."""

    sink: str
    entries: int
    parked: list[ParkedEvent]


dry_run_option = click.option("--dry-run", is_flag=True, help="Check and show the result, and write nothing.")


@click.group(cls=CommandGroup)
def usage() -> None:
    """Close periods, write invoices and exports, and verify them.

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
    """Verify the ledger, closed months, invoices and checkpoints, and compare it with the engines' token counts.

    Exits with 1 if the counts differ by a single token, or if an entry, a closed month or an invoice was altered.

    \b
    Example:
      loramux usage reconcile --config configs/single-node.toml
    """

    async def run(desk: BillingServices) -> Reconciliation:
        return await reconcile(desk.database, await desk.open_checkpoints())

    result = with_billing(config, run)
    if result.drift_tokens:
        worst = max(result.weights, key=lambda one: one.drift)
        raise LedgerDrift(
            f"the engines and the ledger differ by {result.drift_tokens} tokens, most of them ({worst.drift}) for "
            f"{worst.base_model} {worst.adapter_digest}: the engines have {worst.engine}, the ledger {worst.ledger}"
        )
    put(
        as_json,
        result,
        f"{result.entries} entries, {result.periods} closed months, {result.invoices} invoices and "
        f"{result.checkpoints} checkpoints outside the database, none altered; engines and ledger agree to the token.",
    )


@usage.command("rebuild-sums")
@config_option()
@json_option
def rebuild_sums(config: Path, as_json: bool) -> None:
    """Make the daily sums, which usage and cost queries read, again from the ledger. Servers may run at the same time.

    \b
    Example:
      loramux usage rebuild-sums --config configs/single-node.toml
    """
    number = with_billing(config, lambda desk: desk.usage.rebuild_days())
    put(as_json, {"entries": number}, f"{number} entries added up by day.")


@usage.command("close")
@period_option
@dry_run_option
@config_option()
@json_option
def close(period: str, dry_run: bool, config: Path, as_json: bool) -> None:
    """Close a month that is over: freeze its entries and all invoices. This cannot be undone.

    Storage is accounted up to now first. Later entries and corrections belong to the next month. A dry run also shows
    the current invoices of a month that is not over yet.

    \b
    Example:
      loramux usage close --period 2026-11 --config configs/single-node.toml
    """

    async def run(desk: BillingServices) -> list[Invoice]:
        if not dry_run:
            await desk.usage.accrue()
        made = await desk.billing.close(Month.parse(period), dry_run=dry_run)
        if not dry_run:
            await (await desk.open_checkpoints()).write()
        return made

    made = with_billing(config, run)
    lines = [table(("invoice", "total", "currency"), [(one.id, one.total, one.currency) for one in made])]
    state = f"If {period} were closed now:" if dry_run else f"{period} is closed."
    put(as_json, plain_builtins(made), "\n".join([state, *lines]))


@usage.command("invoice")
@tenant_option
@period_option
@click.option("--html", type=click.Path(dir_okay=False, path_type=Path), help="Write it to this file as HTML.")
@click.option("--pdf", type=click.Path(dir_okay=False, path_type=Path), help="Write it to this file as PDF.")
@config_option()
@json_option
def invoice(tenant_name: str, period: str, html: Path | None, pdf: Path | None, config: Path, as_json: bool) -> None:
    """Show a tenant's invoice: the final invoice of a closed month, or a draft for the open month.

    `billing.issuer` of the settings is the sender in HTML and PDF.

    \b
    Example:
      loramux usage invoice --tenant acme --period 2026-11 --pdf acme.pdf --config configs/single-node.toml
    """
    from loramux.money.exports.invoice_render import InvoiceFormat, write_invoice

    made = with_billing(config, lambda desk: desk.billing.invoice(tenant_name, Month.parse(period)))
    files: dict[InvoiceFormat, Path | None] = {"html": html, "pdf": pdf}
    for kind, file in files.items():
        if file is not None:
            file.write_bytes(write_invoice(made, kind, load_settings(config).billing))
    rows: list[tuple[object, ...]] = [
        (line.description, display_quantity(line.meter, line.quantity), line.amount) for line in made.lines
    ]
    if made.terms.tax is not None:
        rows.append((f"{made.terms.tax.name} {plain_text(made.terms.tax.percent)} %", "", made.tax_amount))
    rows.append(("Total", "", f"{made.total} {made.currency}"))
    lines = table(("line", "quantity", "amount"), rows)
    put(as_json, plain_builtins(made), f"{made.id} ({made.status})\n{lines}")


@usage.command("address")
@tenant_option
@click.option("--name", help="Name of the buyer on invoices; without it the present address is shown.")
@click.option("--line", "lines", multiple=True, help="A line of the address; repeatable.")
@click.option("--tax-id", help="Tax number of the buyer.")
@click.option("--tax-exempt", is_flag=True, help="The buyer pays no tax, or accounts for it (reverse charge).")
@config_option()
@json_option
def address(
    tenant_name: str,
    name: str | None,
    lines: tuple[str, ...],
    tax_id: str | None,
    tax_exempt: bool,
    config: Path,
    as_json: bool,
) -> None:
    """Show or set a tenant's address and tax number on invoices; closed months keep their old address.

    \b
    Example:
      loramux usage address --tenant acme --name "Acme GmbH" --line "Hauptstr. 1" --line "10115 Berlin" \\
        --tax-id DE123456789 --config configs/single-node.toml
    """

    async def run(desk: BillingServices) -> InvoiceParty:
        if name is None:
            return await desk.billing.profile(tenant_name)
        party = InvoiceParty(name=name, address=lines, tax_id=tax_id)
        return await desk.billing.set_profile(tenant_name, party, tax_exempt=tax_exempt)

    party = with_billing(config, run)
    put(as_json, party, "\n".join([party.name, *party.address, *([party.tax_id] if party.tax_id else [])]))


@usage.command("correct")
@click.argument("event_id")
@click.option(
    "--change",
    "changes",
    multiple=True,
    required=True,
    metavar="NAME=NUMBER",
    help="Amount to add, such as output_tokens=-100; repeatable.",
)
@click.option("--reason", required=True, help="Reason. A correction with the same reason is made only once.")
@dry_run_option
@config_option()
@json_option
def correct(event_id: str, changes: tuple[str, ...], reason: str, dry_run: bool, config: Path, as_json: bool) -> None:
    """Correct the ledger entry EVENT_ID by a new entry in the open period.

    \b
    Example:
      loramux usage correct evt_0123 --change output_tokens=-100 --reason ticket-7 --config configs/single-node.toml
    """
    amounts = dict(_change(text) for text in changes)
    made = with_billing(config, lambda desk: desk.billing.correct(event_id, amounts, reason, dry_run=dry_run))
    totals = [f"{name}\t{made.before[name]}\t-> {made.after[name]}" for name in sorted(amounts)]
    entry = made.entry
    first = (
        f"Nothing was written. {event_id} would have:"
        if entry is None
        else f"Entry {entry.sequence} ({entry.event_id}) corrects {entry.corrects}, which now has:"
    )
    put(as_json, made if entry is None else entry, "\n".join([first, *totals]))


@usage.command("margin")
@period_option
@click.option(
    "--gpu-cost",
    "gpu_costs",
    required=True,
    multiple=True,
    help="Cost of all GPUs in that month, such as 1800.00 or USD=1800.00; repeat it for each currency of the plans.",
)
@config_option()
@json_option
def margin(period: str, gpu_costs: tuple[str, ...], config: Path, as_json: bool) -> None:
    """Compare the revenue of each tenant's models with their share of the GPUs' cost, in the tenant's currency.

    The share counts computed prompt tokens once and generated tokens twice, as the scheduler does.

    \b
    Example:
      loramux usage margin --period 2026-11 --gpu-cost 1800 --config configs/single-node.toml
      loramux usage margin --period 2026-11 --gpu-cost USD=1800 --gpu-cost JPY=270000 --config configs/production.toml
    """
    cost = _gpu_cost(gpu_costs)
    found = with_billing(config, lambda desk: desk.billing.margins(Month.parse(period), cost))
    rows = [
        (one.tenant_name, one.model, *map(plain_text, (one.price, one.cost, one.margin)), one.currency) for one in found
    ]
    heads = ("tenant", "model", "price", "cost", "margin", "currency")
    put(as_json, plain_builtins(found), table(heads, rows) or f"No usage in {period}.")


@usage.command("export")
@period_option
@click.option(
    "--format", "kind", type=click.Choice(sorted(FORMATS)), default="csv", show_default=True, help="File format."
)
@click.option("--focus", is_flag=True, help="Export costs in the FOCUS 1.2 format instead of ledger entries.")
@click.option("--provider", help="Provider and issuer in the FOCUS format; default: the setting billing.issuer.")
@click.option(
    "--out",
    type=click.Path(file_okay=False, path_type=Path),
    default=Path(),
    help="Output folder; default: the current one.",
)
@config_option()
@json_option
def export(period: str, kind: str, focus: bool, provider: str | None, out: Path, config: Path, as_json: bool) -> None:
    """Write a period's ledger or costs as one file, and a manifest with its number of rows and sha256.

    The name contains the range of entries. The file of a closed period is always the same.

    \b
    Example:
      loramux usage export --period 2026-11 --format parquet --out exports --config configs/single-node.toml
      loramux usage export --period 2026-11 --focus --out exports --config configs/single-node.toml
    """
    month = Month.parse(period)

    async def run(desk: BillingServices) -> ExportedFile:
        found = await _period(desk, month)
        stem = f"{'focus' if focus else 'ledger'}-{month}-{found.span.first:012}-{found.span.last:012}"
        if focus:
            return await write_table(out, stem, kind, FOCUS_COLUMNS, _focus(desk, found, provider))
        return await write_table(out, stem, kind, LEDGER_COLUMNS, ledger_pages(desk.database, found.span))

    made = with_billing(config, run)
    put(as_json, made, f"{out / made.file}: {made.rows} rows, sha256 {made.sha256}")


@usage.command("deliver")
@click.option("--sink", "names", multiple=True, help="Sink name; repeatable. Default: all sinks of the settings.")
@config_option()
@json_option
def deliver(names: tuple[str, ...], config: Path, as_json: bool) -> None:
    """Deliver the ledger to the sinks now, and list events that they refused.

    A running server does this every few seconds. Only one process delivers at a time.

    \b
    Example:
      loramux usage deliver --sink openmeter --config configs/production.toml
    """
    settings = load_settings(config)

    async def run(desk: BillingServices) -> list[Delivered]:
        delivery = SinkDelivery(desk.database)
        async with AsyncExitStack() as stack:
            sinks = [sink for sink in await open_sinks(settings, stack) if not names or sink.name in names]
            return [Delivered(one.name, await delivery.run(one), await delivery.parked(one.name)) for one in sinks]

    done = with_billing(config, run)
    lines = [f"{one.sink}: {one.entries} entries delivered, {len(one.parked)} events parked" for one in done]
    lines += [f"  {event.event_id}\t{event.reason}" for one in done for event in one.parked]
    put(as_json, done, "\n".join(lines) or "The settings have no such sink.")


def _change(text: str) -> tuple[str, int]:
    name, _, number = text.partition("=")
    try:
        return name, int(number)
    except ValueError:
        message = f"{text!r} is not NAME=NUMBER, such as output_tokens=-100"
        raise click.BadParameter(message, param_hint="--change") from None


def _gpu_cost(texts: Sequence[str]) -> int | dict[str, int]:
    """Return the cost in nano-units: one number, or one number per currency."""
    if len(texts) == 1 and "=" not in texts[0]:
        return _nanos(texts[0])
    costs: dict[str, int] = {}
    for text in texts:
        code, _, amount = text.rpartition("=")
        if not code or code in costs:
            message = f"{text[:40]!r}: write several costs as CURRENCY=AMOUNT, each currency once, such as USD=1800.00"
            raise click.BadParameter(message, param_hint="--gpu-cost")
        try:
            costs[Currency.of(code).code] = _nanos(amount)
        except UnknownCurrency as error:
            raise click.BadParameter(str(error), param_hint="--gpu-cost") from None
    return costs


def _nanos(amount: str) -> int:
    try:
        return int(Decimal(amount).scaleb(9).to_integral_exact())
    except (InvalidOperation, ValueError):
        raise click.BadParameter(f"{amount!r} is not an amount such as 1800.00", param_hint="--gpu-cost") from None


async def _period(desk: BillingServices, month: Month) -> Period:
    """Return the period. An open period has the entries that were written so far."""
    found = [one for one in await desk.billing.snapshot() if one.month == month]
    if not found:
        raise PeriodNotOpen(f"nothing is billed in {month}", "period")
    return found[0]


async def _focus(desk: BillingServices, period: Period, provider: str | None) -> AsyncIterator[list[Row]]:
    for tenant_id, tenant_name in await desk.billing.tenants():
        bill = await desk.billing.bill(tenant_id, period, GROUP_BY)
        seller = Seller(provider=provider or bill.issuer, tenant_id=tenant_id, tenant_name=tenant_name)
        yield focus_rows(bill, seller)
