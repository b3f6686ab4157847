"""Reconciliation: the ledger against the engines' own counts, its daily sums, closed periods, invoices and checkpoints.

The engines' counts are compared weights by weights, over settled requests: prompt tokens, those of them found in a
cache, and output tokens, billed and waived together. What an engine counted is written in the transaction that settles,
so that both survive a crash or neither does; the numbers themselves come from two sides (the steps that ran; the texts
and events that the gateway saw). Requests that were interrupted, or whose engine died, are in neither: their use is
unknown, and it is not charged.

The hash chain alone does not prove that history is unchanged, since it can be computed again from any entry on. So
every closed period must still end with the hash that it was closed with, every frozen invoice must still have its
digest and follow from the ledger and the prices, and every checkpoint outside the database must agree.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

import msgspec
from sqlalchemy.ext.asyncio import AsyncSession

from loramux.billing.catalog import subscriptions_of
from loramux.billing.checkpoints import Checkpoints
from loramux.billing.errors import LedgerAltered
from loramux.billing.invoices import Bill, Invoice, Tax, bill, digest, invoice_lines, read_invoice
from loramux.billing.periods import Period, closed_period
from loramux.records import Database
from loramux.records.billing import InvoiceRow, PeriodRepository, PeriodRow
from loramux.records.daily_usage import DailyUsageRepository
from loramux.records.engine_counts import EngineCountRepository
from loramux.records.ledger import LedgerRepository
from loramux.records.usage import QuantityRepository
from loramux.units import TokenCounts


class Comparison(msgspec.Struct, frozen=True, kw_only=True):
    """One set of weights, by both counts."""

    base_model: str
    adapter_digest: str
    """Empty for the base model itself."""
    engine: TokenCounts
    ledger: TokenCounts
    drift: int
    """Tokens by which they differ; 0 if all is well."""


class Reconciliation(msgspec.Struct, frozen=True, kw_only=True):
    """The numbers of things that were verified, and both token counts."""

    entries: int
    """Length of the chain, every link of which was computed again."""
    periods: int
    invoices: int
    checkpoints: int
    """Outside the database; 0 where none was written yet, and then a rewritten open month is not noticed."""
    drift_tokens: int
    weights: tuple[Comparison, ...]


async def reconcile(database: Database, checkpoints: Checkpoints | None = None) -> Reconciliation:
    """Verify the chain, daily sums, closed periods, invoices and checkpoints, and compare both counts in one snapshot.

    Raises ChainBroken, or LedgerAltered with everything that does not agree.
    """
    async with database.read() as session:
        head = await LedgerRepository(session).verify()
        periods = await PeriodRepository(session).all()
        invoices = await PeriodRepository(session).invoices()
        problems = [*await _period_problems(session, periods), *await _invoice_problems(session, periods, invoices)]
        problems += await DailyUsageRepository(session).problems()
        counts = EngineCountRepository(session)
        engines, ledger = await counts.engines(), await counts.ledger()
    num_checkpoints = 0
    if checkpoints is not None:
        num_checkpoints, contradictions = await checkpoints.contradictions()
        problems += contradictions
    if problems:
        raise LedgerAltered(problems)
    weights = tuple(
        Comparison(
            base_model=key[0],
            adapter_digest=key[1],
            engine=(engine := engines.get(key, TokenCounts())),
            ledger=(billed := ledger.get(key, TokenCounts())),
            drift=engine.drift(billed),
        )
        for key in sorted(engines.keys() | ledger.keys())
    )
    return Reconciliation(
        entries=head.sequence,
        periods=len(periods),
        invoices=len(invoices),
        checkpoints=num_checkpoints,
        drift_tokens=sum(one.drift for one in weights),
        weights=weights,
    )


async def _period_problems(session: AsyncSession, periods: Sequence[PeriodRow]) -> list[str]:
    """Check that periods follow each other without a gap, and end with the hashes that they were closed with."""
    problems, after = [], 0
    for row in periods:
        if row.first_sequence != after + 1:
            problems.append(f"period {row.id} begins with entry {row.first_sequence}, and {after + 1} comes next")
        if row.digest != await PeriodRepository(session).hash_at(row.last_sequence):
            problems.append(f"the entries of {row.id}, a closed month, are not what it was closed with")
        after = row.last_sequence
    return problems


async def _invoice_problems(
    session: AsyncSession, periods: Sequence[PeriodRow], invoices: Sequence[InvoiceRow]
) -> list[str]:
    """Check that frozen invoices have their digests, belong to their periods and follow from the ledger."""
    closed = {row.id: row for row in periods}
    problems = []
    for row in invoices:
        if row.digest != digest(row.document):
            problems.append(f"the document of invoice {row.id} is not what was frozen")
            continue
        kept, period = read_invoice(row.document), closed[row.period_id]
        span = kept.first_sequence, kept.last_sequence, kept.ledger_digest
        if span != (period.first_sequence, period.last_sequence, period.digest):
            problems.append(f"invoice {row.id} is of other entries than its month {row.period_id}")
        elif not _agree(kept, await _bill_again(session, row, closed_period(period), kept.terms.tax), row):
            problems.append(f"invoice {row.id} does not follow from the ledger and the prices")
    return problems


async def _bill_again(session: AsyncSession, row: InvoiceRow, period: Period, tax: Tax | None) -> Bill:
    quantities = await QuantityRepository(session, row.tenant_id).daily(period.span)
    subscriptions = await subscriptions_of(session, row.tenant_id)
    return await asyncio.to_thread(bill, period, subscriptions, quantities, tax)


def _agree(kept: Invoice, again: Bill, row: InvoiceRow) -> bool:
    """Compare what decides the amounts; descriptions may differ between releases."""
    frozen, computed = (
        [(one.meter, one.price_id, one.quantity, one.amount) for one in lines]
        for lines in (kept.lines, invoice_lines(again))
    )
    totals = again.total == row.total and again.amount(row.total) == kept.total
    return frozen == computed and totals and again.currency.code == row.currency == kept.currency
