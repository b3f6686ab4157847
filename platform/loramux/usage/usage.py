"""Usage, from a request's first row to the proof of the bill."""

from __future__ import annotations

import asyncio
from contextlib import AsyncExitStack, suppress

from loramux.limits import NoPrices, Prices, Standing
from loramux.records import Database, Principal, TenantId
from loramux.records.counts import Counted
from loramux.records.identity import new_id
from loramux.records.ledger import LedgerEntry, LedgerRepository
from loramux.records.locks import alive
from loramux.records.requests import AnsweredRequest, RequestRepository
from loramux.records.usage import UsageRepository, UsageTotals
from loramux.usage import claims
from loramux.usage.claims import Answered
from loramux.usage.errors import UsageClosed
from loramux.usage.group_commit import GroupCommit
from loramux.usage.holdings import HoldingMeter
from loramux.usage.operations import OpenedRequest, Operation, Outcome, Settlement, unused
from loramux.usage.query import SECOND, UsagePage, UsageQuery
from loramux.usage.settling import Settler


class Usage:
    """What every tenant used. `open` and `settle` need start(); the questions do not."""

    def __init__(self, database: Database, prices: Prices | None = None) -> None:
        """`prices` are what budgets count with; None: nothing costs anything."""
        self._database = database
        self.server_id = new_id("server")
        """From `start` to `stop`, others see that it is alive (`records.locks.gone`)."""
        self._settler = Settler(database, self.server_id, prices or NoPrices())
        self._writer: GroupCommit[Operation, Outcome] = GroupCommit(self._settler.commit)
        self._life = AsyncExitStack()
        self.drift_tokens = 0
        """Tokens by which what this server settled differs from what its engine counted for it."""

    async def start(self) -> None:
        """Begin to write, as a server that others see alive."""
        await self._life.enter_async_context(alive(self._database, self.server_id))
        self._writer.start()

    async def stop(self) -> None:
        """Write what was submitted, then end."""
        await self._writer.stop()
        await self._life.aclose()

    async def open(self, request: OpenedRequest) -> Standing | Answered:
        """Write the request's row, durably, before the engine sees it, and take what it needs of its limits.

        Answered where its idempotency key was answered before; then nothing is opened. A caller that is cancelled while
        it waits leaves no open row: it is settled with nothing used. Raises what `Books.admit` raises,
        IdempotencyMismatch, StillRunning, RequestRefused, UsageClosed.
        """
        try:
            outcome = await self._writer.submit(request)
        except asyncio.CancelledError:
            self._abandon(request)
            raise
        assert isinstance(outcome, Standing | Answered)
        return outcome

    async def settle(self, settlement: Settlement) -> LedgerEntry:
        """Put the request on the bill, durably, before its client sees the usage.

        Once per request: settling again returns the entry that there is. A caller that is cancelled while it
        waits has settled all the same. Raises UnknownRequest, RequestRefused, UsageClosed.
        """
        entry = await self._writer.submit(settlement)
        assert isinstance(entry, LedgerEntry)
        if settlement.counted is not None:
            self.drift_tokens += settlement.counted.drift(_billed(entry))
        return entry

    def _abandon(self, request: OpenedRequest) -> None:
        with suppress(UsageClosed):  # then the next boot's sweep closes it
            self._writer.post(unused(request.id, "cancelled")).add_done_callback(_forget)

    async def sweep(self) -> int:
        """At boot: close the requests that dead servers left open, as interrupted and free of charge; how many.

        A server that was thought dead and still settles puts its usage on the bill all the same.
        """
        return await self._settler.sweep()

    async def accrue(self) -> int:
        """Put adapters' storage and pins on the bill, up to the last day that is over; the number of entries."""
        stored = await HoldingMeter(self._database, "storage").accrue()
        return stored + await HoldingMeter(self._database, "residency").accrue()

    async def forget_answers(self) -> None:
        """Remove the answers whose idempotency keys have expired."""
        async with self._database.begin() as session:
            await claims.forget_expired(session, self._database.now())

    async def completions(self, principal: Principal, query: UsageQuery) -> UsagePage:
        """The caller's usage in buckets of time. Raises InvalidQuery."""
        now = self._database.now() // SECOND
        async with self._database.read() as session:
            usage = UsageRepository(session, principal.tenant)
            totals = await usage.by_bucket(query.window(now), query.recorded_groups)
        return query.answer(totals, now)

    async def answered_by(
        self, principal: Principal, adapter: str, before: str | None = None, limit: int = 100
    ) -> list[AnsweredRequest]:
        """The caller's requests to `adapter` of its own, or to `tenant/adapter`, newest first.

        `before`: the id of the last page's last request.
        """
        owner, _, name = adapter.rpartition("/")
        owner = owner or principal.tenant_name
        if not principal.may_use(f"{owner}/{name}"):
            return []
        async with self._database.read() as session:
            return await RequestRepository(session).answered_by(principal.tenant, owner, name, before, limit)

    async def rows(self, tenant: TenantId) -> list[UsageTotals]:
        """Everything the tenant used, by model."""
        async with self._database.read() as session:
            return await UsageRepository(session, tenant).by_model()

    async def verify_chain(self) -> int:
        """Prove that no ledger entry was altered; the number of entries. Raises ChainBroken."""
        async with self._database.read() as session:
            return (await LedgerRepository(session).verify()).sequence


def _billed(entry: LedgerEntry) -> Counted:
    """What an entry says that the engine did, paid or not."""
    return Counted(
        prompt_tokens=entry.input_tokens + entry.waived_input_tokens,
        cached_tokens=entry.cached_tokens + entry.waived_cached_tokens,
        output_tokens=entry.output_tokens + entry.waived_output_tokens,
    )


def _forget(outcome: asyncio.Future[Outcome]) -> None:
    """Nobody waits for it: look at its exception, so that asyncio does not complain."""
    if not outcome.cancelled():
        outcome.exception()
