"""Billing: closed periods and frozen invoices, computed from the ledger and the price plans."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import suppress
from decimal import Decimal

import msgspec
from sqlalchemy.ext.asyncio import AsyncSession

from loramux.accounts.tenants.entities import Changes
from loramux.common.identity import Principal, TenantId
from loramux.common.jobs import run_blocking
from loramux.common.settings.server import BillingSettings
from loramux.common.units import DAY, SECOND, SECONDS_PER_DAY
from loramux.data.records.billing import BillingProfileRow, InvoiceRow, PeriodRepository, PeriodRow, ProfileRepository
from loramux.data.records.database import PRICES, Database, advisory_lock
from loramux.data.records.ledger import EntryContent, LedgerEntry, LedgerRepository
from loramux.data.records.tenants import TenantRepository, TenantRow
from loramux.data.records.usage import (
    QUANTITIES,
    DailyQuantities,
    DailyUsageRepository,
    Division,
    QuantityRepository,
    Span,
    UsageRepository,
    UsageWindow,
)
from loramux.money.billing.catalog import named_tenant, subscriptions_of
from loramux.money.billing.costs import CostPage, CostsQuery, Margin, Revenue, cost_page, costs_of, margins
from loramux.money.billing.errors import BillingError, InvalidCorrection, InvoiceNotFound, PeriodNotOpen, UnknownEntry
from loramux.money.billing.invoices import (
    Bill,
    Invoice,
    InvoiceParty,
    Tax,
    Terms,
    bill,
    digest,
    document,
    invoice,
    read_invoice,
)
from loramux.money.billing.periods import Month, Period, check_closable, closed_period
from loramux.money.usage.errors import InvalidQuery

MAX_TEXT = 200
MAX_LINES = 8
MAX_ROWS = 50_000
"""Maximum number of groups, counted per day, in one answer about costs, because more groups would delay other callers.
"""

CORRECTABLE = tuple(name for name in QUANTITIES if name != "requests")
PARTS = (
    (("cached_tokens", "image_tokens"), "input_tokens"),
    (("waived_cached_tokens", "waived_image_tokens"), "waived_input_tokens"),
)
"""Quantities that are parts of another one, without overlap."""


class _DryRun(Exception):
    """Signal that rolls a transaction back after all its checks."""


class Correction(msgspec.Struct, frozen=True, kw_only=True):
    """An entry's totals, earlier corrections included, before and after this correction."""

    corrects: str
    entry: LedgerEntry | None
    """The new entry; None for a dry run."""
    before: dict[str, int]
    after: dict[str, int]


class BillingService:
    """Bills, periods, invoices and corrections; every change is audited."""

    def __init__(self, database: Database, settings: BillingSettings | None = None) -> None:
        """`settings` has the seller and the tax of new invoices."""
        self._database = database
        self._settings = settings or BillingSettings()
        self._changes = Changes.local(database)

    async def periods(self) -> list[Period]:
        """List every closed period, and the open one."""
        async with self._database.read() as session:
            return await _periods(session, self._database.now())

    async def snapshot(self) -> list[Period]:
        """List every period with a last entry: the open period ends at the current end of the ledger."""
        async with self._database.read() as session:
            head = await LedgerRepository(session).head()
            return [
                msgspec.structs.replace(one, span=Span(one.span.first, one.span.last or head.sequence))
                for one in await _periods(session, self._database.now())
            ]

    async def tenants(self) -> list[tuple[TenantId, str]]:
        """List all tenants by name."""
        async with self._database.read() as session:
            return [(row.id, row.name) for row in await TenantRepository(session).all()]

    async def bill(self, tenant: TenantId, period: Period, group_by: Sequence[str]) -> Bill:
        """Return one tenant's bill of one period, divided by `group_by` (of `records.usage`)."""
        async with self._database.read() as session:
            terms = await self._terms(session, tenant, period)
            made = await _bill(session, tenant, period, group_by, terms)
        # invoices of earlier releases have no seller
        return msgspec.structs.replace(made, issuer=made.issuer or self._settings.issuer)

    async def close(self, month: Month, *, dry_run: bool = False) -> list[Invoice]:
        """Freeze a month: its range of entries, their digest, and the invoice of every tenant with a plan.

        `dry_run` returns the invoices and freezes nothing. If the month is not over, the invoices show its current
        state.

        The range begins after the previous period's last entry and ends with the last entry that was written before the
        month's end. Later entries belong to the next period, even if the usage is older. Raises PeriodNotOpen.
        """
        made: list[Invoice] = []
        with suppress(_DryRun):
            made = await self._close(month, made, dry_run)
        return made

    async def _close(self, month: Month, made: list[Invoice], dry_run: bool) -> list[Invoice]:
        async with self._changes.begin() as change:
            session = change.session
            await advisory_lock(session, PRICES)
            await LedgerRepository(session).lock()
            periods = PeriodRepository(session)
            latest, now = await periods.latest(), self._database.now()
            check_closable(month, Month.parse(latest.id) if latest else None, now, preview=dry_run)
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
            frozen = [
                await self._freeze(session, period, tenant, now) for tenant in await TenantRepository(session).all()
            ]
            made += [invoice for invoice in frozen if invoice is not None]
            if dry_run:
                raise _DryRun  # rolls the transaction back
            return made

    async def invoice(self, tenant_name: str, month: Month) -> Invoice:
        """Return a tenant's invoice: the frozen invoice of a closed month, or a draft for the open month.

        Raises BillingError if the tenant does not exist, and PeriodNotOpen for a later month.
        """
        async with self._database.read() as session:
            tenant = await named_tenant(session, tenant_name)
            return await self._invoice(session, tenant.id, tenant.name, month)

    async def own_invoice(self, principal: Principal, month: str) -> Invoice:
        """Return the caller's invoice of a month such as 2026-11, like `invoice`, without its ledger entries' range.

        Raises InvoiceNotFound.
        """
        try:
            async with self._database.read() as session:
                tenant, name = principal.tenant, principal.tenant_name
                made = await self._invoice(session, tenant, name, Month.parse(month))
        except BillingError as error:
            raise InvoiceNotFound(error.message, "month") from None
        return msgspec.structs.replace(made, first_sequence=None, last_sequence=None)

    async def costs(self, principal: Principal, query: CostsQuery) -> CostPage:
        """Return the caller's costs by day, as OpenAI's endpoint does. Raises InvalidQuery for too many groups."""
        now, allowed, project = self._database.now() // SECOND, principal.models, principal.bound_project
        own = [*(["model"] if allowed is not None else []), *(["project_id"] if project is not None else [])]
        divided_by = tuple(dict.fromkeys([*query.divided_by, *own]))
        plan, left = query.plan(now), MAX_ROWS
        found: list[tuple[Period, list[DailyQuantities]]] = []
        async with self._database.read() as session:
            subscriptions = await subscriptions_of(session, principal.tenant)
            repository = QuantityRepository(session, principal.tenant)
            named = await _top_models(session, principal, query, now)
            # steps of a price count the whole month; only the requested days are divided
            division = Division(divided_by, plan.indices, named)
            for period in await _periods(session, self._database.now()):
                if not await _may_have_costs(session, period, plan.indices):
                    continue
                quantities = await repository.daily_of(period.span, division, left + 1)
                found.append((period, quantities))
                left -= len(quantities)
                if left < 0:
                    raise InvalidQuery(
                        f"there are more than {MAX_ROWS} groups; leave some names out of group_by", "group_by"
                    )

        def compute() -> CostPage:
            bills = [bill(period, subscriptions, quantities) for period, quantities in found]
            costs = costs_of(bills, divided_by)
            # a minimum has neither model nor project, because it belongs to the whole tenant
            if project is not None:
                costs = [cost for cost in costs if cost.keys.get("project_id") == project]
            if allowed is not None:
                costs = [cost for cost in costs if (cost.keys.get("model") or "").partition("@")[0] in allowed]
            return cost_page(query, costs, now)

        # in a thread, because dividing amounts exactly over many groups takes long
        return await run_blocking(principal.tenant, compute)

    async def margins(self, month: Month, gpu_cost: int | Mapping[str, int]) -> list[Margin]:
        """Return the revenue of every tenant's models in a month and their shares of the GPUs' cost.

        `gpu_cost` is in nano-units, by currency if the plans have several. Raises MissingCurrency, and PeriodNotOpen
        for a month without entries.
        """
        async with self._database.read() as session:
            known = [one for one in await _periods(session, self._database.now()) if one.month == month]
            if not known:
                raise PeriodNotOpen(f"nothing is billed in {month}", "period")
            return margins(
                [await _revenue(session, row, known[0]) for row in await TenantRepository(session).all()], gpu_cost
            )

    async def correct(
        self, event_id: str, changes: dict[str, int], reason: str, *, dry_run: bool = False
    ) -> Correction:
        """Correct an entry by `changes` (signed quantities): a new entry in the open period names the corrected one.

        A repetition of the same correction with the same reason has no effect. `dry_run` writes no entry. Raises
        UnknownEntry. Raises InvalidCorrection for an unknown quantity, a total below zero, more cached than prompt
        tokens, or the correction of a correction.
        """
        unknown = sorted(set(changes) - set(CORRECTABLE))
        if unknown or not any(changes.values()):
            raise InvalidCorrection(
                f"a correction changes some of {', '.join(CORRECTABLE)}", unknown[0] if unknown else None
            )
        async with self._changes.begin() as change:
            ledger = LedgerRepository(change.session)
            head = await ledger.lock()
            original = await ledger.entry(event_id)
            if original is None:
                raise UnknownEntry(f"the ledger has no entry {event_id[:80]!r}", "event_id")
            if original.corrects is not None:
                raise InvalidCorrection(
                    f"{event_id} is a correction itself; correct {original.corrects}, the entry that it corrects",
                    "event_id",
                )
            before = _totals([original, *await ledger.corrections_of(original)])
            content = _correction(original, changes, reason, self._database.now())
            known = (await ledger.of_requests(content.kind, [content.request_id])).get(content.request_id)
            if known is not None:
                return Correction(corrects=event_id, entry=known, before=before, after=before)
            after = before | {name: before[name] + number for name, number in changes.items()}
            _check_totals(before, after)
            if dry_run:
                return Correction(corrects=event_id, entry=None, before=before, after=after)
            [entry] = await ledger.append(head, [content])
            await change.note("ledger.correct", entry.event_id, tenant=entry.tenant_id, after=entry)
            return Correction(corrects=event_id, entry=entry, before=before, after=after)

    async def profile(self, tenant_name: str) -> InvoiceParty:
        """Return a tenant's name, address and tax id on invoices. Raises BillingError."""
        async with self._database.read() as session:
            tenant = await named_tenant(session, tenant_name)
            return _party(await ProfileRepository(session).get(tenant.id), tenant.name)

    async def set_profile(self, tenant_name: str, party: InvoiceParty, *, tax_exempt: bool = False) -> InvoiceParty:
        """Set a tenant's name, address and tax id on invoices from the open month on. Raises BillingError."""
        texts = [party.name, *party.address, *([] if party.tax_id is None else [party.tax_id])]
        if not all(text.strip() and text.isprintable() and len(text) <= MAX_TEXT for text in texts):
            raise BillingError(
                f"a billing address has a name, and lines of 1 to {MAX_TEXT} printable characters", "name"
            )
        if len(party.address) > MAX_LINES:
            raise BillingError(f"a billing address has at most {MAX_LINES} lines", "address")
        async with self._changes.begin() as change:
            tenant = await named_tenant(change.session, tenant_name)
            profiles = ProfileRepository(change.session)
            before = await profiles.get(tenant.id)
            old = None if before is None else _party(before, tenant.name)
            await profiles.put(
                BillingProfileRow(
                    tenant_id=tenant.id,
                    name=party.name,
                    address="\n".join(party.address),
                    tax_id=party.tax_id,
                    tax_exempt=tax_exempt,
                    updated_at=self._database.now(),
                )
            )
            await change.note("billing.profile", tenant.id, tenant=tenant.id, before=old, after=party)
        return party

    async def _invoice(self, session: AsyncSession, tenant: TenantId, name: str, month: Month) -> Invoice:
        kept = await PeriodRepository(session).invoice(tenant, str(month))
        if kept is not None:
            return read_invoice(kept.document)
        period = await _open_period(session, self._database.now())
        if month != period.month:
            raise PeriodNotOpen(f"{name} has no invoice for {month}; the open month is {period.month}", "period")
        terms = await self._terms(session, tenant, period, name)
        return invoice(await _bill(session, tenant, period, terms=terms), tenant, name, terms)

    async def _freeze(self, session: AsyncSession, period: Period, tenant: TenantRow, now: int) -> Invoice | None:
        """Freeze a tenant's invoice. A tenant without a plan has no invoice."""
        terms = await self._terms(session, tenant.id, period, tenant.name)
        issued = now // SECOND
        days = self._settings.payment_days
        due = None if days is None else issued + days * SECONDS_PER_DAY
        of = await _bill(session, tenant.id, period, terms=terms)
        if of.subscriptions.plan_at(period.month.ends_at - 1) is None:
            return None
        made = invoice(of, tenant.id, tenant.name, msgspec.structs.replace(terms, issued_at=issued, due_at=due))
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

    async def _terms(self, session: AsyncSession, tenant: TenantId, period: Period, name: str = "") -> Terms:
        """Return a frozen invoice's terms, or those that a new invoice of the tenant would have."""
        kept = await PeriodRepository(session).invoice(tenant, str(period.month))
        if kept is not None:
            return read_invoice(kept.document).terms
        profile, settings = await ProfileRepository(session).get(tenant), self._settings
        percent = Decimal(settings.tax_percent)
        is_exempt = profile is not None and profile.tax_exempt
        return Terms(
            seller=InvoiceParty(name=settings.issuer, address=settings.address, tax_id=settings.tax_id),
            buyer=_party(profile, name),
            tax=Tax(name=settings.tax_name, percent=percent, is_exempt=is_exempt) if percent else None,
            note=settings.payment_note,
        )


async def _may_have_costs(session: AsyncSession, period: Period, days: range) -> bool:
    """Return True if a period's entries may be about these days; late entries are about earlier months."""
    if period.is_closed and period.month.next.ends_at <= days.start * DAY:
        return False  # entries written in a month are about that month or about earlier days
    if period.month.starts_at < days.stop * DAY:
        return True
    earliest = await DailyUsageRepository(session).earliest_subject(period.span.first, period.span.last)
    return earliest is not None and earliest < days.stop


async def _top_models(
    session: AsyncSession, principal: Principal, query: CostsQuery, now: int
) -> tuple[str, ...] | None:
    """Return the models that keep their names. A key with a list of models sees only its models, so their names are all
    kept.
    """
    if query.top_models is None or principal.models is not None:
        return None
    start, end = query.whole(now)
    window = UsageWindow(start=start * SECOND, end=end * SECOND, width=DAY, project_id=principal.bound_project)
    return tuple(await UsageRepository(session, principal.tenant).top_models(window, query.top_models))


def _party(profile: BillingProfileRow | None, tenant_name: str) -> InvoiceParty:
    if profile is None:
        return InvoiceParty(name=tenant_name)
    return InvoiceParty(name=profile.name, address=tuple(profile.address.splitlines()), tax_id=profile.tax_id)


async def _bill(
    session: AsyncSession, tenant: TenantId, period: Period, group_by: Sequence[str] = (), terms: Terms | None = None
) -> Bill:
    quantities = await QuantityRepository(session, tenant).daily(period.span, group_by)
    return bill(period, await subscriptions_of(session, tenant), quantities, terms)


async def _revenue(session: AsyncSession, tenant: TenantRow, period: Period) -> Revenue:
    quantities = await QuantityRepository(session, tenant.id).daily(period.span, ("model",))
    made = bill(period, await subscriptions_of(session, tenant.id), quantities)
    return Revenue(tenant_name=tenant.name, bill=made, quantities=quantities)


async def _periods(session: AsyncSession, now: int) -> list[Period]:
    closed = [closed_period(row) for row in await PeriodRepository(session).all()]
    return [*closed, await _open_period(session, now)]


async def _open_period(session: AsyncSession, now: int) -> Period:
    """Return the month after the last closed month. If no month was closed, return this month with all entries."""
    latest = await PeriodRepository(session).latest()
    if latest is None:
        return Period(month=Month.at(now), span=Span(1, None), digest=None)
    return Period(month=Month.parse(latest.id).next, span=Span(latest.last_sequence + 1, None), digest=None)


def _totals(entries: Sequence[LedgerEntry]) -> dict[str, int]:
    return {name: sum(getattr(entry, name) for entry in entries) for name in CORRECTABLE}


def _check_totals(before: Mapping[str, int], after: Mapping[str, int]) -> None:
    for name, number in after.items():
        if number < 0:
            raise InvalidCorrection(
                f"{name} of this entry is {before[name]}, earlier corrections included, and would be {number}; "
                f"take off {before[name]} at most",
                name,
            )
    for parts, whole in PARTS:
        if (together := sum(after[part] for part in parts)) > after[whole]:
            named = [part for part in parts if after[part]]
            are = "is" if len(named) == 1 else "are"
            raise InvalidCorrection(
                f"{' and '.join(named)} {are} part of {whole} and would be {together} of {after[whole]}; correct both",
                named[0],
            )


def _correction(original: LedgerEntry, changes: dict[str, int], reason: str, now: int) -> EntryContent:
    changed = ",".join(f"{name}={changes[name]}" for name in sorted(changes))
    return EntryContent(
        kind="correction",
        tenant_id=original.tenant_id,
        key_id=original.key_id,
        request_id=f"{original.event_id}:{changed}:{reason}",
        model=original.model,
        adapter_digest=original.adapter_digest,
        finish_reason=None,
        status="corrected",
        created_at=now,
        base_model=original.base_model,
        tier=original.tier,
        project_id=original.project_id,
        tags=original.tags,
        user_id=original.user_id,
        corrects=original.event_id,
        occurred_at=original.occurred_at or original.created_at,
        **{"input_tokens": 0, "cached_tokens": 0, "output_tokens": 0} | changes,
    )
