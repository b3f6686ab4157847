"""Bills: from the ledger and the catalogue to periods that close and invoices that stay."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec
from sqlalchemy.ext.asyncio import AsyncSession

from loramux.billing.catalog import subscriptions_of
from loramux.billing.costs import CostPage, CostsQuery, cost_page, costs_of
from loramux.billing.errors import BillingError, InvoiceNotFound, PeriodNotOpen, UnknownEntry
from loramux.billing.invoices import Bill, Invoice, bill, digest, document, invoice
from loramux.billing.margin import Earned, Margin, margins
from loramux.billing.periods import SECOND, Month, Period, closed_period, demand_closable
from loramux.records import Database, Principal, TenantId
from loramux.records.billing import PeriodRepository
from loramux.records.billing_models import InvoiceRow, PeriodRow
from loramux.records.ledger import LedgerDraft, LedgerEntry, LedgerRepository
from loramux.records.locks import PRICES, exclusive
from loramux.records.models import TenantRow
from loramux.records.quantities import QuantityRepository, Span
from loramux.records.tenants import TenantRepository
from loramux.tenants import Changes

FOREVER = 2**62

CORRECTABLE = (
    "input_tokens",
    "cached_tokens",
    "output_tokens",
    "waived_input_tokens",
    "waived_cached_tokens",
    "waived_output_tokens",
    "adapter_load",
    "adapter_byte_seconds",
    "adapter_resident_byte_seconds",
)


class Billing:
    """The operator's side of the bill; every change is audited."""

    def __init__(self, database: Database) -> None:
        self._database = database
        self._changes = Changes.of_this_machine(database)

    async def periods(self) -> list[Period]:
        """Every closed period, and the one that is open."""
        async with self._database.read() as session:
            return await _periods(session, self._database.now())

    async def snapshot(self) -> list[Period]:
        """Every period with a last entry: the open one's is the ledger's, now."""
        async with self._database.read() as session:
            last = await PeriodRepository(session).last_before(FOREVER)
            return [
                msgspec.structs.replace(one, span=Span(one.span.first, one.span.last or last))
                for one in await _periods(session, self._database.now())
            ]

    async def tenants(self) -> list[tuple[TenantId, str]]:
        """Everybody who may have a bill, by name."""
        async with self._database.read() as session:
            return [(row.id, row.name) for row in await TenantRepository(session).all()]

    async def bill(self, tenant: TenantId, period: Period, group_by: Sequence[str]) -> Bill:
        """One tenant's bill of one period, divided by `group_by` (of `records.quantities`)."""
        async with self._database.read() as session:
            return await _bill(session, tenant, period, group_by)

    async def close(self, month: Month) -> list[Invoice]:
        """Freeze a month: its entries, their digest, and the invoices of all who have a plan. Raises PeriodNotOpen.

        Its entries are all that follow the period before and were written before the month's end, and what lies between
        them. Entries that come later belong to the next period, whatever they are about.
        """
        async with self._changes.begin() as change:
            session = change.session
            await exclusive(session, PRICES)
            await LedgerRepository(session).lock()
            periods = PeriodRepository(session)
            latest, now = await periods.latest(), self._database.now()
            demand_closable(month, Month.parse(latest.id) if latest else None, now)
            first = latest.last_sequence + 1 if latest else 1
            last = max(first - 1, await periods.last_before(month.ends_at))
            row = PeriodRow(
                id=str(month),
                starts_at=month.starts_at,
                ends_at=month.ends_at,
                first_sequence=first,
                last_sequence=last,
                digest=await periods.hash_at(last),
                closed_at=now,
            )
            await periods.add(row)
            period = closed_period(row)
            await change.note("period.close", str(month), tenant=None, after=period)
            made = [await _keep(session, period, tenant, now) for tenant in await TenantRepository(session).all()]
            return [invoice for invoice in made if invoice is not None]

    async def invoice(self, tenant_name: str, month: Month) -> Invoice:
        """A tenant's invoice: as it was kept for a closed month, a draft of this moment for an open one.

        Raises BillingError where there is no such tenant, and PeriodNotOpen for a later month.
        """
        async with self._database.read() as session:
            tenant = await _tenant(session, tenant_name)
            kept = await PeriodRepository(session).invoice(tenant.id, str(month))
            if kept is not None:
                return msgspec.json.decode(kept.document, type=Invoice)
            period = await _open_period(session, self._database.now())
            if month != period.month:
                raise PeriodNotOpen(
                    f"{tenant_name} has no invoice for {month}; the open month is {period.month}", "period"
                )
            return invoice(await _bill(session, tenant.id, period), tenant.id, tenant.name)

    async def own_invoice(self, principal: Principal, month: str) -> Invoice:
        """The caller's, of a month such as 2026-11, as `invoice` has it. Raises InvoiceNotFound."""
        try:
            return await self.invoice(principal.tenant_name, Month.parse(month))
        except BillingError as error:
            raise InvoiceNotFound(error.message, "month") from None

    async def bills(self, tenant: TenantId, group_by: Sequence[str], since: int) -> list[Bill]:
        """A tenant's bills of the periods that may be about a time after `since`, in microseconds.

        Each is divided by `group_by` (of `records.quantities`). Late entries are in later periods.
        """
        async with self._database.read() as session:
            return [
                await _bill(session, tenant, period, group_by)
                for period in await _periods(session, self._database.now())
                if not period.is_closed or period.month.next.ends_at > since
            ]

    async def costs(self, principal: Principal, query: CostsQuery) -> CostPage:
        """The caller's costs by day, as OpenAI's endpoint has them."""
        divided_by, now = query.divided_by, self._database.now() // SECOND
        bills = await self.bills(principal.tenant, divided_by, query.plan(now).start * SECOND)
        return cost_page(query, costs_of(bills, divided_by), now)

    async def margins(self, month: Month, gpu_nanos: int) -> list[Margin]:
        """What every tenant's models brought in a month beside their share of what the GPUs cost, in nano-units.

        Raises PeriodNotOpen for a month without entries of its own.
        """
        async with self._database.read() as session:
            known = [one for one in await _periods(session, self._database.now()) if one.month == month]
            if not known:
                raise PeriodNotOpen(f"nothing is billed in {month}", "period")
            return margins(
                [await _earned(session, row, known[0]) for row in await TenantRepository(session).all()], gpu_nanos
            )

    async def correct(self, event_id: str, changes: dict[str, int], reason: str) -> LedgerEntry:
        """Add `changes` (signed quantities) to what an entry says, as a new entry in the open period, which names it.

        The same correction with the same reason again changes nothing. Raises UnknownEntry, or BillingError for
        a quantity that entries do not have.
        """
        unknown = sorted(set(changes) - set(CORRECTABLE))
        if unknown or not any(changes.values()):
            raise BillingError(
                f"a correction changes some of {', '.join(CORRECTABLE)}", unknown[0] if unknown else None
            )
        async with self._changes.begin() as change:
            ledger = LedgerRepository(change.session)
            head = await ledger.lock()
            original = await ledger.entry(event_id)
            if original is None:
                raise UnknownEntry(f"the ledger has no entry {event_id[:80]!r}", "event_id")
            correction = _correction(original, changes, reason, self._database.now())
            known = await ledger.of_requests(correction.kind, [correction.request_id])
            if correction.request_id in known:
                return known[correction.request_id]
            [entry] = await ledger.append(head, [correction])
            await change.note("ledger.correct", entry.event_id, tenant=entry.tenant_id, after=entry)
            return entry


async def _keep(session: AsyncSession, period: Period, tenant: TenantRow, now: int) -> Invoice | None:
    """Make a tenant's invoice; a tenant without a plan has none."""
    of = await _bill(session, tenant.id, period)
    if of.subscriptions.plan_at(period.month.ends_at - 1) is None:
        return None
    made = invoice(of, tenant.id, tenant.name)
    text = document(made)
    row = InvoiceRow(
        id=made.id,
        tenant_id=tenant.id,
        period_id=made.period,
        currency=made.currency,
        total=of.total,
        document=text,
        digest=digest(text),
        created_at=now,
    )
    await PeriodRepository(session).add(row)
    return made


async def _bill(session: AsyncSession, tenant: TenantId, period: Period, group_by: Sequence[str] = ()) -> Bill:
    quantities = await QuantityRepository(session, tenant).daily(period.span, group_by)
    return bill(period, await subscriptions_of(session, tenant), quantities)


async def _earned(session: AsyncSession, tenant: TenantRow, period: Period) -> Earned:
    quantities = await QuantityRepository(session, tenant.id).daily(period.span, ("model",))
    made = bill(period, await subscriptions_of(session, tenant.id), quantities)
    return Earned(tenant_name=tenant.name, bill=made, quantities=quantities)


async def _periods(session: AsyncSession, now: int) -> list[Period]:
    closed = [closed_period(row) for row in await PeriodRepository(session).all()]
    return [*closed, await _open_period(session, now)]


async def _open_period(session: AsyncSession, now: int) -> Period:
    """The month after the one that was closed last; before any was, this month, with everything there is."""
    latest = await PeriodRepository(session).latest()
    if latest is None:
        return Period(month=Month.at(now), span=Span(1, None), digest=None)
    return Period(month=Month.parse(latest.id).next, span=Span(latest.last_sequence + 1, None), digest=None)


async def _tenant(session: AsyncSession, name: str) -> TenantRow:
    tenant = await TenantRepository(session).named(name)
    if tenant is None:
        raise BillingError(f"there is no tenant {name[:80]!r}", "tenant")
    return tenant


def _correction(original: LedgerEntry, changes: dict[str, int], reason: str, now: int) -> LedgerDraft:
    told = ",".join(f"{name}={changes[name]}" for name in sorted(changes))
    return LedgerDraft(
        kind="correction",
        tenant_id=original.tenant_id,
        key_id=original.key_id,
        request_id=f"{original.event_id}:{told}:{reason}",
        model=original.model,
        adapter_digest=original.adapter_digest,
        finish_reason=None,
        status="corrected",
        created_at=now,
        base_model=original.base_model,
        tier=original.tier,
        project_id=original.project_id,
        tags=original.tags,
        corrects=original.event_id,
        occurred_at=original.occurred_at or original.created_at,
        **{"input_tokens": 0, "cached_tokens": 0, "output_tokens": 0} | changes,
    )
