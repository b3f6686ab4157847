"""loramux usage export and deliver."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import AsyncExitStack
from pathlib import Path

import click
import msgspec

from loramux.billing import Month, Period, PeriodNotOpen
from loramux.exports import (
    FOCUS_COLUMNS,
    FORMATS,
    LEDGER_COLUMNS,
    Delivery,
    ExportedFile,
    Parked,
    focus_rows,
    ledger_pages,
    write_table,
)
from loramux.exports.columns import Row
from loramux.exports.focus import GROUP_BY, Seller
from loramux.gateway import BillingDesk, open_sinks
from loramux_api.cli.billing import period_option, usage, with_desk
from loramux_api.cli.options import config_option, json_option, put, settings_of


class Delivered(msgspec.Struct, frozen=True):
    """What one sink has got now, and what it did not take so far."""

    sink: str
    entries: int
    parked: list[Parked]


@usage.command("export")
@period_option
@click.option("--format", "kind", type=click.Choice(sorted(FORMATS)), default="csv", show_default=True)
@click.option("--focus", is_flag=True, help="Costs as FOCUS 1.2 has them, instead of the ledger's entries.")
@click.option("--provider", default="loramux", show_default=True, help="Who sells, in FOCUS.")
@click.option("--out", type=click.Path(file_okay=False, path_type=Path), default=Path(), help="Folder; default: here.")
@config_option()
@json_option
def export(period: str, kind: str, focus: bool, provider: str, out: Path, config: Path, as_json: bool) -> None:
    """Write a period's ledger, or its costs, as one file; a manifest beside it has its rows and its sha256.

    The name says which entries are in it: a closed period's file is always the same.

    \b
    Example:
      loramux usage export --period 2026-11 --format parquet --out exports --config configs/single-node.toml
      loramux usage export --period 2026-11 --focus --out exports --config configs/single-node.toml
    """
    month = Month.parse(period)

    async def run(desk: BillingDesk) -> ExportedFile:
        found = await _period(desk, month)
        stem = f"{'focus' if focus else 'ledger'}-{month}-{found.span.first:012}-{found.span.last:012}"
        if focus:
            return await write_table(out, stem, kind, FOCUS_COLUMNS, _focus(desk, found, provider))
        return await write_table(out, stem, kind, LEDGER_COLUMNS, ledger_pages(desk.database, found.span))

    made = with_desk(config, run)
    put(as_json, made, f"{out / made.file}: {made.rows} rows, sha256 {made.sha256}")


@usage.command("deliver")
@click.option("--sink", "names", multiple=True, help="Only this one; default: all sinks of the settings.")
@config_option()
@json_option
def deliver(names: tuple[str, ...], config: Path, as_json: bool) -> None:
    """Bring the ledger to the sinks now, and show what they did not take.

    A server does this by itself every few seconds; only one does it at a time.

    \b
    Example:
      loramux usage deliver --sink openmeter --config configs/production.toml
    """
    settings = settings_of(config)

    async def run(desk: BillingDesk) -> list[Delivered]:
        delivery = Delivery(desk.database)
        async with AsyncExitStack() as stack:
            sinks = [sink for sink in await open_sinks(settings, stack) if not names or sink.name in names]
            return [Delivered(one.name, await delivery.run(one), await delivery.parked(one.name)) for one in sinks]

    done = with_desk(config, run)
    lines = [f"{one.sink}: {one.entries} entries delivered, {len(one.parked)} events parked" for one in done]
    lines += [f"  {event.event_id}\t{event.reason}" for one in done for event in one.parked]
    put(as_json, done, "\n".join(lines) or "The settings have no such sink.")


async def _period(desk: BillingDesk, month: Month) -> Period:
    """The period, an open one as it is at this moment."""
    found = [one for one in await desk.billing.snapshot() if one.month == month]
    if not found:
        raise PeriodNotOpen(f"nothing is billed in {month}", "period")
    return found[0]


async def _focus(desk: BillingDesk, period: Period, provider: str) -> AsyncIterator[list[Row]]:
    for tenant_id, tenant_name in await desk.billing.tenants():
        bill = await desk.billing.bill(tenant_id, period, GROUP_BY)
        yield focus_rows(bill, Seller(provider=provider, tenant_id=tenant_id, tenant_name=tenant_name))
