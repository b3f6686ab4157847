"""Usage: this service opens and settles requests, meters adapters' storage and pins, and sums the usage of tenants.

The storage meter writes bytes times seconds of stored and of pinned revisions: one ledger entry for each revision and
day.
"""

from __future__ import annotations

import asyncio
from collections import deque
from contextlib import AsyncExitStack, suppress
from functools import partial
from typing import Literal

import msgspec

from loramux.common.identity import Principal, TenantId, new_id
from loramux.common.jobs import run_blocking
from loramux.common.units import DAY, SECOND
from loramux.data.entities import AnsweredRequest, IdempotencyClaim, ServedRequest
from loramux.data.records.contents import PINNED, STORED, StorageMeterRepository, UnbilledSpan
from loramux.data.records.database import Database
from loramux.data.records.errors import RecordsUnavailable
from loramux.data.records.leases import server_liveness
from loramux.data.records.ledger import EntryContent, LedgerEntry, LedgerRepository
from loramux.data.records.requests import BACKGROUND, ClaimRepository, OpenedRequest, RequestRepository, service_tier
from loramux.data.records.traffic_log import TrafficLogRepository
from loramux.data.records.usage import DailyUsageRepository, UsageRepository, UsageTotals
from loramux.money.limits.admission import check_request_rate
from loramux.money.limits.budgets import NoPrices, Prices
from loramux.money.limits.definitions import RateLimitStatus
from loramux.money.usage.errors import InvalidQuery, TooManyUnsettled, UnknownRequest, UsageClosed
from loramux.money.usage.group_commit import GroupCommit
from loramux.money.usage.idempotency import AnswerStorage, IdempotencyGuard, StoredAnswer
from loramux.money.usage.query import UsagePage, UsageQuery
from loramux.money.usage.settlement import Settlement, SettlementOutcome, SettlementWriter, UsageOperation, unused

SUM_BATCH = 1_000
"""Entries that one transaction adds to the daily sums. A settlement on SQLite waits for this transaction, some 10
ms."""
MAX_ROWS = 50_000
"""Maximum number of sums in one answer, because more would delay other callers."""

Kind = Literal["storage", "residency"]
METERED = {"storage": STORED, "residency": PINNED}
STATUS = {"storage": "stored", "residency": "pinned"}
MAX_UNSETTLED = 16_384
"""Waiting settlements from which no request is opened any more. A settlement takes about a kilobyte, without a stored
answer."""
SETTLED_TOGETHER = 256
"""Waiting settlements that are submitted at once, when the database answers again: a few transactions."""
GRACE = 600 * SECOND
"""Microseconds between a day's end and its entries. After this time every row that began on that day is committed."""
BATCH = 500


class UsageService:
    """Opens and settles requests, and sums the usage of tenants. `open` and `settle` need start(); queries do not."""

    def __init__(
        self,
        database: Database,
        prices: Prices | None = None,
        answers: AnswerStorage | None = None,
        *,
        bill_abandoned: bool = False,
    ) -> None:
        """`prices` are used for requests of tenants with a budget; None: all usage is free.

        `answers` stores the answers of requests with an idempotency key; None: no other process can read the answers.
        With `bill_abandoned`, tokens that were computed for callers that disconnected before they could read them are
        billed.
        """
        self._database = database
        self.server_id = new_id("server")
        """Id under which other servers see this one alive between `start` and `stop`
        (`records.leases.dead_servers`)."""
        self._answers = answers or AnswerStorage.temporary()
        self._operations = SettlementWriter(
            database, self.server_id, prices or NoPrices(), self._answers, bill_abandoned=bill_abandoned
        )
        self._writer: GroupCommit[UsageOperation, SettlementOutcome] = GroupCommit(self._operations.commit)
        self._life = AsyncExitStack()
        self.unsettled: deque[Settlement] = deque()
        """Settlements that the database did not accept. `settle_late` submits them again.

        They are at most MAX_UNSETTLED and those of the requests that were open when this number was reached: from then
        on no request is opened, and so no settlement is dropped.
        """
        self._num_abandoned = 0
        """Requests whose callers left while they were opened, and that the writer has not settled yet."""
        self.drift_tokens = 0
        """Difference in tokens between this server's settlements and its engines' counts."""

    def guard(self, principal: Principal, claim: IdempotencyClaim) -> IdempotencyGuard:
        """Return the guard that makes a change once under the caller's idempotency key."""
        return IdempotencyGuard(principal, claim, self._answers)

    async def start(self) -> None:
        """Start the writer, and hold the lock by which other servers see this one alive."""
        await self._life.enter_async_context(server_liveness(self._database, self.server_id))
        self._writer.start()

    async def stop(self) -> None:
        """Write the submitted operations, then release the lock."""
        await self._writer.stop()
        await self._life.aclose()

    async def ensure_rate(self, principal: Principal) -> None:
        """Raise RateReached if the caller's limits leave no request in this minute."""
        async with self._database.read() as session:
            await check_request_rate(session, principal, self._database.now())

    async def open(self, request: OpenedRequest) -> RateLimitStatus | StoredAnswer:
        """Admit the request and write its row, durably, before the engine sees it.

        Returns StoredAnswer if the idempotency key was answered before; then no row is opened. If the caller is
        cancelled while it waits, the request is settled without usage, so no open row remains; if the database does not
        accept this settlement, it is added to `unsettled`. Raises the errors of
        `AdmissionBatch.admit`, IdempotencyMismatch, StillRunning, RequestRefused, TooManyUnsettled, UsageClosed.
        """
        if (waiting := len(self.unsettled) + self._num_abandoned) >= MAX_UNSETTLED:
            raise TooManyUnsettled(
                f"{waiting} requests wait to be settled, and no other is opened until they are fewer"
            )
        try:
            outcome = await self._writer.submit(request, patient=_is_patient(request))
        except asyncio.CancelledError:
            self._abandon(request)
            raise
        assert isinstance(outcome, RateLimitStatus | StoredAnswer)
        return outcome

    async def settle(self, settlement: Settlement, *, patient: bool = False) -> LedgerEntry:
        """Append the request's entry to the ledger, durably, before its client sees the usage.

        A request is settled once: settling again returns the existing entry. If the caller is cancelled while it waits,
        the request is still settled. Other settlements precede a `patient` settlement. Raises UnknownRequest,
        RequestRefused, UsageClosed.
        """
        entry = await self._writer.submit(settlement, patient=patient)
        assert isinstance(entry, LedgerEntry)
        if settlement.engine_count is not None:
            self.drift_tokens += settlement.engine_count.drift(entry.billed + entry.waived)
        return entry

    async def settle_late(self) -> None:
        """Settle the requests whose end the database did not accept. Raises RecordsUnavailable if the database still
        does not accept one of them.
        """
        while self.unsettled:
            due = [self.unsettled.popleft() for _ in range(min(len(self.unsettled), SETTLED_TOGETHER))]
            outcomes = await asyncio.gather(*map(self.settle, due), return_exceptions=True)
            refused = [
                (settlement, outcome)
                for settlement, outcome in zip(due, outcomes, strict=True)
                # An unknown request's opening was not committed either.
                if isinstance(outcome, BaseException) and not isinstance(outcome, UnknownRequest)
            ]
            kept = [settlement for settlement, outcome in refused if isinstance(outcome, RecordsUnavailable)]
            self.unsettled.extendleft(reversed(kept))
            for _, outcome in refused:
                raise outcome

    def _abandon(self, request: OpenedRequest) -> None:
        with suppress(UsageClosed):  # then the sweep at the next start closes the request
            settlement = unused(request.id, "caller")
            end = self._writer.post(settlement, patient=_is_patient(request))
            self._num_abandoned += 1
            end.add_done_callback(partial(self._note_abandoned, settlement))

    def _note_abandoned(self, settlement: Settlement, end: asyncio.Future[SettlementOutcome]) -> None:
        """Keep the settlement if the database did not accept it. No task awaits `end`, so its exception is read here:
        else asyncio would log it.
        """
        self._num_abandoned -= 1
        if not end.cancelled() and isinstance(end.exception(), RecordsUnavailable):
            self.unsettled.append(settlement)

    async def sweep(self) -> int:
        """Close the requests that dead servers left open, as interrupted and free of charge; return their number.

        This runs at start-up. If a server that seemed dead settles later, its usage is still billed.
        """
        return await self._operations.sweep()

    async def interrupt(self, request_id: str) -> bool:
        """Close the requests that dead servers left open; return False if this request is still open."""
        await self.sweep()
        async with self._database.read() as session:
            return not await RequestRepository(session).is_open(request_id)

    async def accrue(self) -> int:
        """Bill adapters' storage and pins up to the last full day; return the number of entries."""
        stored = await StorageMeter(self._database, "storage").accrue()
        return stored + await StorageMeter(self._database, "residency").accrue()

    async def sum_days(self) -> int:
        """Add new entries to the daily sums; return their number."""
        summed = 0
        while batch := await self._sum_batch():
            summed += batch
        return summed

    async def rebuild_days(self) -> int:
        """Make the daily sums again from the ledger; return the number of entries."""
        async with self._database.begin() as session:
            await DailyUsageRepository(session).clear()
        return await self.sum_days()

    async def _sum_batch(self) -> int:
        async with self._database.begin() as session:
            return await DailyUsageRepository(session).advance(SUM_BATCH)

    async def forget_answers(self) -> None:
        """Delete the stored answers whose idempotency keys have expired."""
        async with self._database.begin() as session:
            await ClaimRepository(session).remove_expired(self._database.now())

    async def completions(self, principal: Principal, query: UsageQuery) -> UsagePage:
        """Sum the caller's usage in buckets of time. Raises InvalidQuery."""
        now = self._database.now() // SECOND
        async with self._database.read() as session:
            usage = UsageRepository(session, principal.tenant)
            window = query.window(now, principal.models, principal.bound_project)
            if query.top_models is not None:
                named = await usage.top_models(query.whole_window(window, now), query.top_models)
                window = msgspec.structs.replace(window, named=tuple(named))
            totals = await usage.by_bucket(window, query.recorded_groups, MAX_ROWS + 1)
        if len(totals) > MAX_ROWS:
            raise InvalidQuery(f"the page has more than {MAX_ROWS} sums; ask for fewer buckets or groups", "limit")
        return await run_blocking(principal.tenant, query.answer, totals, now)

    async def answered_by(
        self,
        principal: Principal,
        adapter: str,
        before: str | None = None,
        limit: int = 100,
        *,
        background: bool = True,
    ) -> list[AnsweredRequest]:
        """List the caller's requests to the tenant's `adapter`, or to `tenant/adapter`, newest first.

        `before` is the id of the previous page's last request. With `background`, requests without a waiting caller are
        included.
        """
        owner, _, name = adapter.rpartition("/")
        owner = owner or principal.tenant_name
        if not principal.may_use(f"{owner}/{name}"):
            return []
        async with self._database.read() as session:
            return await RequestRepository(session).answered_by(
                principal.tenant, owner, name, before, limit, principal.bound_project, background=background
            )

    async def served_since(self, since: int, base: str | None, limit: int) -> list[ServedRequest]:
        """List the newest `limit` requests of all tenants that arrived after `since`, in order of arrival; of one base
        if given.
        """
        async with self._database.read() as session:
            return await TrafficLogRepository(session).served_since(since, base, limit)

    async def rows(self, tenant: TenantId) -> list[UsageTotals]:
        """Sum all usage of the tenant, by model."""
        async with self._database.read() as session:
            return await UsageRepository(session, tenant).by_model()

    async def verify_chain(self) -> int:
        """Recompute the ledger's hash chain and return the number of entries. Raises ChainBroken."""
        async with self._database.read() as session:
            return (await LedgerRepository(session).verify()).sequence


def _is_patient(request: OpenedRequest) -> bool:
    return service_tier(request.tier) in BACKGROUND


class StorageMeter:
    """Adds storage and pins to the ledger up to the last full day. Idempotent, and safe on several servers at once."""

    def __init__(self, database: Database, kind: Kind) -> None:
        self._database = database
        self._kind = kind

    async def accrue(self) -> int:
        """Append the missing entries and return their number."""
        written = 0
        while batch := await self._accrue_batch():
            written += batch
        return written

    async def _accrue_batch(self) -> int:
        async with self._database.begin() as session:
            ledger, meter = LedgerRepository(session), StorageMeterRepository(session, METERED[self._kind])
            head = await ledger.lock()
            now = self._database.now()
            due = await meter.due((now - GRACE) // DAY * DAY, BATCH)
            await ledger.append(head, [_content(self._kind, one, now) for one in due if _byte_seconds(one)])
            await meter.counted({one.id: _end(one) for one in due})
            return len(due)


def _end(span: UnbilledSpan) -> int:
    """Return the end of the span's first day that is not billed yet."""
    return min((span.counted_until // DAY + 1) * DAY, span.until)


def _byte_seconds(span: UnbilledSpan) -> int:
    return span.size_bytes * (_end(span) // SECOND - span.counted_until // SECOND)


def _content(kind: Kind, span: UnbilledSpan, now: int) -> EntryContent:
    start = span.counted_until
    return EntryContent(
        kind=kind,
        tenant_id=span.tenant_id,
        key_id="",
        request_id=f"{span.id}:{start}",
        model=span.model,
        adapter_digest=span.digest,
        base_model="",
        input_tokens=0,
        cached_tokens=0,
        output_tokens=0,
        finish_reason=None,
        status=STATUS[kind],
        created_at=now,
        occurred_at=start // DAY * DAY,
        adapter_byte_seconds=_byte_seconds(span) if kind == "storage" else 0,
        adapter_resident_byte_seconds=_byte_seconds(span) if kind == "residency" else 0,
    )
