"""The two operations on a request's row, open and settle, and the transaction that writes a batch of them.

Opening is durable before the engine sees the request; settling is durable before the client sees its usage.
`Settlement.billed` is the only rule of billing: delivered tokens are billed, unless the platform itself failed.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Literal

import msgspec
from sqlalchemy.ext.asyncio import AsyncSession

from loramux.common.units import TokenCounts
from loramux.data.records.database import Database
from loramux.data.records.errors import RowRefused
from loramux.data.records.leases import dead_servers
from loramux.data.records.ledger import (
    EngineCountRepository,
    EntryContent,
    LedgerEntry,
    LedgerHead,
    LedgerRepository,
    Weights,
    weights_of,
)
from loramux.data.records.requests import (
    INTERRUPTED,
    SETTLED,
    BilledRequest,
    OpenedRequest,
    RequestRepository,
    is_shadow,
)
from loramux.money.limits.admission import AdmissionBatch
from loramux.money.limits.budgets import ChargedUsage, Prices
from loramux.money.limits.definitions import RateLimitStatus
from loramux.money.limits.errors import LimitsError
from loramux.money.usage.errors import RequestRefused, UnknownRequest
from loramux.money.usage.idempotency import AnswerStorage, StoredAnswer, claim_keys, conclude_claims

USAGE = "usage"
SWEEP_BATCH = 500

EndedBy = Literal["completion", "caller", "platform"]
"""The cause of a request's end.

`completion`: every choice reached its end; an aborted choice counts too. `caller`: the caller disconnected or read too
slowly. `platform`: the server or its engine failed, or refused the request before its first token.
"""

STATUS: dict[EndedBy, str] = {"completion": "completed", "caller": "cancelled", "platform": "failed"}

NOTHING = TokenCounts()
MAX_BILLED_LOADS = 1
"""Maximum number of adapter loads that are billed for a request: the platform pays for later loads of a preempted
request.
"""


class Settlement(msgspec.Struct, frozen=True, kw_only=True):
    """The end of a request: its cause, the delivered tokens, and all other computed tokens."""

    request_id: str
    ended_by: EndedBy
    finish_reason: str | None
    delivered: TokenCounts = NOTHING
    """Tokens that the caller could read: the tokens of each choice up to and including the last, and the answered
    prompts, each counted once.
    """
    undelivered: TokenCounts = NOTHING
    """Tokens that the engine computed in addition to `delivered`. These tokens are recorded and never billed."""
    adapter_loads: int = 0
    """Reads of adapter weights into the pool for this request."""
    answer: bytes | None = None
    """Answer to a repeated request with the same idempotency key; None frees the key."""
    engine_count: TokenCounts | None = None
    """The engine's own count of delivered and undelivered tokens; None if the engine died; both numbers are then 0."""
    is_shadow: bool = False
    """True if no caller sent the request, so that nothing is billed."""
    prompt_tokens: int | None = None
    """Tokens of the request's prompts, each counted once; None: the number of computed tokens."""
    bills_abandoned: bool = False
    """True if `abandoned` is billed too."""

    @property
    def status(self) -> str:
        """The ledger's word for the request's end."""
        return STATUS[self.ended_by]

    @property
    def abandoned(self) -> TokenCounts:
        """Tokens that were computed for a caller that disconnected before it could read them. Each prompt counts once.

        These tokens are waived, unless a setting bills them. Abandoned tokens count against budgets in both cases.
        Otherwise a caller that always disconnects before the answer could use the engine without limit.
        """
        if self.ended_by != "caller" or self.is_shadow:
            return NOTHING
        return prompts_once(self.undelivered, self.delivered.prompt, self.prompt_tokens)

    @property
    def billed(self) -> TokenCounts:
        """All delivered tokens, for every end of the request. No tokens if the platform failed or no caller sent the
        request.
        """
        if self.ended_by == "platform" or self.is_shadow:
            return NOTHING
        return self.delivered + self.abandoned if self.bills_abandoned else self.delivered

    @property
    def unbilled(self) -> TokenCounts:
        """Abandoned tokens that are not billed: only budgets count their cost."""
        return NOTHING if self.bills_abandoned else self.abandoned

    @property
    def waived(self) -> TokenCounts:
        """All other tokens that the engine computed."""
        return self.delivered + self.undelivered - self.billed

    @property
    def limited_tokens(self) -> int:
        """The tokens that limits per minute count, including tokens computed for a caller that has disconnected."""
        return (self.delivered + self.undelivered if self.ended_by == "caller" else self.billed).total

    @property
    def billed_loads(self) -> int:
        """Adapter loads that are billed; 0 for a request without an answer."""
        return min(self.adapter_loads, MAX_BILLED_LOADS) if self.billed.prompt else 0


def prompts_once(computed: TokenCounts, delivered: int, prompts: int | None) -> TokenCounts:
    """Return the computed tokens, with at most the part of the prompts that is not among the `delivered` tokens.

    Several choices compute one prompt several times; tokens that were not found in the cache count first, those of
    images before all.
    """
    prompt = computed.prompt if prompts is None else min(computed.prompt, max(0, prompts - delivered))
    uncached = min(prompt, computed.prompt - computed.cached)
    image = min(uncached, computed.image)
    return TokenCounts(prompt=prompt, cached=prompt - uncached, output=computed.output, image=image)


UsageOperation = OpenedRequest | Settlement
SettlementOutcome = LedgerEntry | RateLimitStatus | StoredAnswer
"""The ledger entry of a settlement; the rate limits' state, or a stored answer, of an opened request."""


def unused(request_id: str, ended_by: EndedBy) -> Settlement:
    """Return the settlement of a request that is recorded and costs nothing."""
    return Settlement(request_id=request_id, finish_reason=None, ended_by=ended_by)


class SettlementWriter:
    """Writes batches of operations for one server process, which `server_id` names."""

    def __init__(
        self, database: Database, server_id: str, prices: Prices, answers: AnswerStorage, *, bill_abandoned: bool
    ) -> None:
        self._database = database
        self._bill_abandoned = bill_abandoned
        self._server_id = server_id
        self._prices = prices
        self._answers = answers

    async def commit(self, batch: Sequence[UsageOperation]) -> list[SettlementOutcome | Exception]:
        """Write the whole batch in one transaction, and settlements of requests that this batch opens in a second
        transaction.

        Raises RequestRefused; then nothing was written, and the batch can be written again.
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
        """Close requests that dead servers left open, as interrupted and free of charge; return their number."""
        swept = 0
        while batch := await self._sweep_batch():
            swept += batch
        return swept

    async def _commit(
        self, opened: Sequence[OpenedRequest], settled: dict[str, Settlement]
    ) -> tuple[dict[str, SettlementOutcome | Exception], dict[str, LedgerEntry | Exception]]:
        outcomes: dict[str, SettlementOutcome | Exception] = {}
        entries: dict[str, LedgerEntry | Exception] = {}
        async with self._database.begin() as session:
            # Lock order: the ledger's head first, then limits and budgets. All code that locks both keeps this order.
            head = await LedgerRepository(session).lock() if settled else None
            requests, admission = RequestRepository(session), AdmissionBatch(session, self._database.now())
            closed = await requests.close(settled, SETTLED, self._database.now()) if settled else {}
            await admission.read(opened, _holders(closed), self._prices)
            if opened:
                outcomes = await self._open(session, opened, admission)
            if head is not None:
                ends = [(closed[id], self._end_of(closed[id], one)) for id, one in settled.items() if id in closed]
                entries = await self._settle(session, head, ends, admission)
                entries |= await self._find_settled(session, settled.keys() - closed.keys())
            await admission.write()
        return outcomes, entries

    async def _open(
        self, session: AsyncSession, opened: Sequence[OpenedRequest], admission: AdmissionBatch
    ) -> dict[str, SettlementOutcome | Exception]:
        """Insert the rows of admitted requests.

        If the row exists and belongs to this server, the answer of an earlier commit was lost with the connection.
        Another server's row is refused.
        """
        requests, now = RequestRepository(session), self._database.now()
        outcomes: dict[str, SettlementOutcome | Exception] = {}
        if any(one.claim for one in opened):
            outcomes |= await claim_keys(session, opened, now, self._answers)
        fresh = [request for request in opened if request.id not in outcomes]
        outcomes |= {request.id: _admit(admission, request) for request in fresh}
        if refused := [one.id for one in fresh if one.claim and isinstance(outcomes[one.id], Exception)]:
            await conclude_claims(session, dict.fromkeys(refused), self._answers)
        admitted = [one for one in fresh if not isinstance(outcomes[one.id], Exception)]
        holders = [one.id for one in admitted if admission.holds(one.id)]
        if not admitted or await requests.add(admitted, holders, self._server_id, now):
            return outcomes
        owners = await requests.owners([one.id for one in admitted])
        await requests.note_holds(holders)
        return outcomes | {
            id: RequestRefused(f"there is another request {id} already")
            for id, server in owners.items()
            if server != self._server_id
        }

    async def _settle(
        self,
        session: AsyncSession,
        head: LedgerHead,
        closed: Sequence[tuple[BilledRequest, Settlement]],
        admission: AdmissionBatch,
    ) -> dict[str, LedgerEntry | Exception]:
        """Append the entries of closed requests, and release the requests' holds on limits and budgets."""
        now = self._database.now()
        contents = [_content(row, settlement, now) for row, settlement in closed]
        appended = await LedgerRepository(session).append(head, contents)
        if counts := _by_weights(closed):
            await EngineCountRepository(session).add(self._server_id, counts)
        if answers := {row.id: settlement.answer for row, settlement in closed if row.has_claim}:
            await conclude_claims(session, answers, self._answers)
        for row, settlement in closed:
            if row.has_holds:
                charged = ChargedUsage(settlement.billed, settlement.billed_loads)
                admission.release(row.id, charged, settlement.unbilled, settlement.limited_tokens)
        return {entry.request_id: entry for entry in appended}

    def _end_of(self, row: BilledRequest, settlement: Settlement) -> Settlement:
        """Return the settlement with facts of the request's row: the row's tier shows if the request is a shadow."""
        return msgspec.structs.replace(
            settlement,
            is_shadow=is_shadow(row.tier),
            prompt_tokens=row.prompt_tokens,
            bills_abandoned=self._bill_abandoned,
        )

    async def _find_settled(self, session: AsyncSession, ids: Collection[str]) -> dict[str, LedgerEntry | Exception]:
        """Return the entries of requests that were settled before, and UnknownRequest for the others."""
        known = await LedgerRepository(session).of_requests(USAGE, ids) if ids else {}
        return {id: known.get(id) or UnknownRequest(f"request {id} was never opened") for id in ids}

    async def _sweep_batch(self) -> int:
        async with self._database.begin() as session:
            requests, ledger = RequestRepository(session), LedgerRepository(session)
            head = await ledger.lock()
            dead = await dead_servers(session, await requests.servers_with_open(besides=self._server_id))
            left = await requests.left_open(dead, SWEEP_BATCH)
            if left:
                await self._interrupt(session, head, left)
        return len(left)

    async def _interrupt(self, session: AsyncSession, head: LedgerHead, left: list[str]) -> None:
        """Close requests whose server died: free of charge, holds released, idempotency keys free again."""
        requests, ledger, now = RequestRepository(session), LedgerRepository(session), self._database.now()
        admission = AdmissionBatch(session, now)
        closed = await requests.close(left, INTERRUPTED, now)
        await admission.read([], _holders(closed), self._prices)
        ends = [(closed[id], unused(id, "platform")) for id in left]
        await ledger.append(
            head,
            [
                msgspec.structs.replace(_content(row, end, now), kind=INTERRUPTED, status=INTERRUPTED)
                for row, end in ends
            ],
        )
        for id in _holders(closed):
            admission.release(id, ChargedUsage(), NOTHING, 0)
        await admission.write()
        await conclude_claims(session, {row.id: None for row in closed.values() if row.has_claim}, self._answers)


def _holders(closed: Mapping[str, BilledRequest]) -> list[str]:
    return [id for id, row in closed.items() if row.has_holds]


def _admit(admission: AdmissionBatch, request: OpenedRequest) -> RateLimitStatus | LimitsError:
    try:
        return admission.admit(request)
    except LimitsError as error:
        return error


def _content(row: BilledRequest, settlement: Settlement, now: int) -> EntryContent:
    billed, waived = settlement.billed, settlement.waived
    return EntryContent(
        kind=USAGE,
        tenant_id=row.tenant_id,
        key_id=row.key_id,
        request_id=row.id,
        model=row.model,
        adapter_digest=row.adapter_digest,
        input_tokens=billed.prompt,
        cached_tokens=billed.cached,
        output_tokens=billed.output,
        finish_reason=settlement.finish_reason,
        status=settlement.status,
        created_at=now,
        base_model=row.base_model,
        tier=row.tier,
        project_id=row.project_id,
        tags=row.tags,
        user_id=row.user_id,
        waived_input_tokens=waived.prompt,
        waived_cached_tokens=waived.cached,
        waived_output_tokens=waived.output,
        adapter_load=settlement.billed_loads,
        image_tokens=billed.image,
        waived_image_tokens=waived.image,
    )


def _by_weights(settled: Iterable[tuple[BilledRequest, Settlement]]) -> dict[Weights, TokenCounts]:
    sums: dict[Weights, TokenCounts] = {}
    for row, settlement in settled:
        if settlement.engine_count is not None:
            weights = weights_of(row.base_model, row.model, row.adapter_digest)
            sums[weights] = sums.get(weights, NOTHING) + settlement.engine_count
    return sums
