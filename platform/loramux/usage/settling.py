"""Open requests and settle them: what one batch of the writer does in its transaction."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence

from sqlalchemy.ext.asyncio import AsyncSession

from loramux.limits import Books, Demand, LimitsError, Prices, Standing, Used
from loramux.records import Database, RowRefused
from loramux.records.counts import Counted, CountRepository, Weights
from loramux.records.ledger import LedgerDraft, LedgerEntry, LedgerRepository
from loramux.records.ledger_models import LedgerHeadRow
from loramux.records.locks import gone
from loramux.records.requests import INTERRUPTED, OPEN, SETTLED, BilledRequest, RequestRepository
from loramux.usage import claims
from loramux.usage.errors import RequestRefused, UnknownRequest
from loramux.usage.operations import OpenedRequest, Operation, Outcome, Settlement, unused

USAGE = "usage"
SWEEP_BATCH = 500


QUANTITIES = (
    "input_tokens",
    "cached_tokens",
    "output_tokens",
    "waived_input_tokens",
    "waived_cached_tokens",
    "waived_output_tokens",
    "adapter_load",
)
INHERITED = ("tenant_id", "key_id", "project_id", "model", "adapter_digest", "base_model", "tier", "tags")


class Settler:
    """Writes for one server process, which `server_id` names."""

    def __init__(self, database: Database, server_id: str, prices: Prices) -> None:
        self._database = database
        self._server_id = server_id
        self._prices = prices

    async def commit(self, batch: Sequence[Operation]) -> list[Outcome | Exception]:
        """Write the whole batch in one transaction, and the end of what begins in it in another.

        Raises RequestRefused, and then the batch can be written again.
        """
        opened = [operation for operation in batch if isinstance(operation, OpenedRequest)]
        settled = {one.request_id: one for one in reversed(batch) if isinstance(one, Settlement)}
        late = {one.id: settled.pop(one.id) for one in opened if one.id in settled}
        try:
            outcomes, entries = await self._commit(opened, settled)
            if late:
                entries |= (await self._commit([], late))[1]
        except RowRefused as error:
            raise RequestRefused(f"the database refuses it: {error}") from error
        return [
            entries[operation.request_id] if isinstance(operation, Settlement) else outcomes[operation.id]
            for operation in batch
        ]

    async def sweep(self) -> int:
        """Settle what other servers left open, as interrupted and free of charge; the number of requests."""
        swept = 0
        while batch := await self._sweep_batch():
            swept += batch
        return swept

    async def _commit(
        self, opened: Sequence[OpenedRequest], settled: dict[str, Settlement]
    ) -> tuple[dict[str, Outcome | Exception], dict[str, LedgerEntry | Exception]]:
        outcomes: dict[str, Outcome | Exception] = {}
        entries: dict[str, LedgerEntry | Exception] = {}
        async with self._database.begin() as session:
            # the ledger's head comes first, then the books: whoever locks both does it in this order
            head = await LedgerRepository(session).lock() if settled else None
            requests, books = RequestRepository(session), Books(session, self._database.now())
            closed = await requests.close(settled, SETTLED, self._database.now()) if settled else {}
            await books.read([_demand(request) for request in opened], _holders(closed), self._prices)
            if opened:
                outcomes = await self._open(session, opened, books)
            if head is not None:
                ends = [(closed[id], settlement) for id, settlement in settled.items() if id in closed]
                entries = await self._settle(session, head, ends, books)
                entries |= await self._known(session, settled.keys() - closed.keys())
            await books.write()
        return outcomes, entries

    async def _open(
        self, session: AsyncSession, opened: Sequence[OpenedRequest], books: Books
    ) -> dict[str, Outcome | Exception]:
        """Insert the rows of what is admitted; one that a lost connection made us write twice is fine."""
        requests, now = RequestRepository(session), self._database.now()
        outcomes: dict[str, Outcome | Exception] = {**await claims.judge(session, _claimants(opened), now)}
        fresh = [request for request in opened if request.id not in outcomes]
        outcomes |= {request.id: _admitted(books, request) for request in fresh}
        if refused := [one.id for one in fresh if one.claim and isinstance(outcomes[one.id], Exception)]:
            await claims.settle(session, dict.fromkeys(refused))
        rows = {
            one.id: self._row(one, now) | {"has_holds": books.holds(one.id)}
            for one in fresh
            if not isinstance(outcomes[one.id], Exception)
        }
        if not rows or await requests.add(list(rows.values())):
            return outcomes
        owners = await requests.owners(rows)
        await requests.note_holds([id for id in owners if rows[id]["has_holds"]])
        return outcomes | {
            id: RequestRefused(f"there is another request {id} already")
            for id, server in owners.items()
            if server != self._server_id
        }

    async def _settle(
        self,
        session: AsyncSession,
        head: LedgerHeadRow,
        closed: Sequence[tuple[BilledRequest, Settlement]],
        books: Books,
    ) -> dict[str, LedgerEntry | Exception]:
        """Append what is not in the ledger yet, and give back what the requests held."""
        now = self._database.now()
        drafts = [_draft(row, settlement, now) for row, settlement in closed]
        appended = await LedgerRepository(session).append(head, drafts)
        if counted := _by_weights(closed):
            await CountRepository(session).add(self._server_id, counted)
        await claims.settle(session, {row.id: settlement.answer for row, settlement in closed if row.has_claim})
        for row, settlement in closed:
            if row.has_holds:
                books.release(row.id, _used(settlement))
        return {entry.request_id: entry for entry in appended}

    async def _known(self, session: AsyncSession, ids: Collection[str]) -> dict[str, LedgerEntry | Exception]:
        """What became of requests that were settled before."""
        known = await LedgerRepository(session).of_requests(USAGE, ids) if ids else {}
        return {id: known.get(id) or UnknownRequest(f"request {id} was never opened") for id in ids}

    async def _sweep_batch(self) -> int:
        async with self._database.begin() as session:
            requests, ledger = RequestRepository(session), LedgerRepository(session)
            head = await ledger.lock()
            dead = await gone(session, await requests.servers_with_open(besides=self._server_id))
            left = await requests.left_open(dead, SWEEP_BATCH)
            if left:
                await self._interrupt(session, head, left)
        return len(left)

    async def _interrupt(self, session: AsyncSession, head: LedgerHeadRow, left: list[str]) -> None:
        """What died with its server costs nothing, gives everything back, and may be sent again."""
        requests, ledger, now = RequestRepository(session), LedgerRepository(session), self._database.now()
        books = Books(session, now)
        closed = await requests.close(left, INTERRUPTED, now)
        await books.read([], _holders(closed), self._prices)
        drafts = [_draft(closed[id], unused(id, INTERRUPTED), now, INTERRUPTED) for id in left]
        await ledger.append(head, drafts)
        for id in _holders(closed):
            books.release(id, Used())
        await books.write()
        await claims.settle(session, {row.id: None for row in closed.values() if row.has_claim})

    def _row(self, request: OpenedRequest, now: int) -> dict[str, object]:
        return {
            "id": request.id,
            "tenant_id": request.tenant,
            "key_id": request.key_id,
            "project_id": request.project_id,
            "server_id": self._server_id,
            "model": request.model,
            "adapter_digest": request.adapter_digest,
            "base_model": request.base_model,
            "tier": request.tier,
            "tags": request.tags,
            "prompt_tokens": request.prompt_tokens,
            "max_tokens": request.max_tokens,
            "has_claim": request.claim is not None,
            "status": OPEN,
            "created_at": now,
        }


def _holders(closed: Mapping[str, BilledRequest]) -> list[str]:
    return [id for id, row in closed.items() if row.has_holds]


def _demand(request: OpenedRequest) -> Demand:
    return Demand(
        request_id=request.id,
        tenant=request.tenant,
        tier=request.tier,
        project=request.project_id,
        key=request.key_id,
        prompt_tokens=request.prompt_tokens,
        max_tokens=request.max_tokens,
        waiting=request.waiting,
    )


def _admitted(books: Books, request: OpenedRequest) -> Standing | LimitsError:
    try:
        return books.admit(_demand(request))
    except LimitsError as error:
        return error


def _claimants(opened: Sequence[OpenedRequest]) -> list[claims.Claimant]:
    return [
        claims.Claimant(request_id=one.id, tenant=one.tenant, key_id=one.key_id, claim=one.claim)
        for one in opened
        if one.claim is not None
    ]


def _used(settlement: Settlement) -> Used:
    return Used(settlement.input_tokens, settlement.cached_tokens, settlement.output_tokens, settlement.adapter_load)


def _draft(row: BilledRequest, settlement: Settlement, now: int, kind: str = USAGE) -> LedgerDraft:
    return LedgerDraft(
        kind=kind,
        request_id=row.id,
        finish_reason=settlement.finish_reason,
        status=settlement.status,
        created_at=now,
        **{name: getattr(row, name) for name in INHERITED},
        **{name: getattr(settlement, name) for name in QUANTITIES},
    )


def _by_weights(settled: Iterable[tuple[BilledRequest, Settlement]]) -> dict[Weights, Counted]:
    sums: dict[Weights, Counted] = {}
    for row, settlement in settled:
        if settlement.counted is not None:
            weights = row.base_model, row.adapter_digest or ""
            sums[weights] = sums.get(weights, Counted()) + settlement.counted
    return sums
