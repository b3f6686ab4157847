"""Open requests and settle them: what one batch of the writer does in its transaction."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from loramux.records import Database, ProjectId, RowRefused, TenantId
from loramux.records.ledger import LedgerDraft, LedgerEntry, LedgerRepository
from loramux.records.locks import gone
from loramux.records.models import RequestRow
from loramux.records.requests import INTERRUPTED, OPEN, SETTLED, RequestRepository
from loramux.usage.errors import RequestRefused, UnknownRequest

USAGE = "usage"
SWEEP_BATCH = 500


class OpenedRequest(msgspec.Struct, frozen=True, kw_only=True):
    """A request about to be queued; prompt_tokens and max_tokens are the most it can come to cost."""

    id: str
    tenant: TenantId
    key_id: str
    """Or the member who asks in person."""
    project_id: ProjectId | None = None
    model: str
    """As resolved: `tenant/adapter@3`, or the base model's name."""
    adapter_digest: str | None
    prompt_tokens: int
    max_tokens: int


class Settlement(msgspec.Struct, frozen=True, kw_only=True):
    """How a request ended, in whole tokens; cached_tokens are part of input_tokens."""

    request_id: str
    input_tokens: int
    cached_tokens: int
    output_tokens: int
    """Every token generated up to and including the one that ended it, also those the client never saw."""
    finish_reason: str | None
    status: str
    """`completed`, `cancelled` or `failed`."""


Operation = OpenedRequest | Settlement
Outcome = LedgerEntry | None
"""A settlement's entry; None for an opened request."""


def unused(request_id: str, status: str) -> Settlement:
    """The end of a request that is recorded and costs nothing."""
    return Settlement(
        request_id=request_id,
        input_tokens=0,
        cached_tokens=0,
        output_tokens=0,
        finish_reason=None,
        status=status,
    )


class Settler:
    """Writes for one server process, which `server_id` names."""

    def __init__(self, database: Database, server_id: str) -> None:
        self._database = database
        self._server_id = server_id

    async def commit(self, batch: Sequence[Operation]) -> list[Outcome | Exception]:
        """Write the whole batch in one transaction. Raises RequestRefused, and then nothing was written."""
        try:
            return await self._commit(batch)
        except RowRefused as error:
            raise RequestRefused(f"the database refuses it: {error}") from error

    async def sweep(self) -> int:
        """Settle what other servers left open, as interrupted and free of charge; the number of requests."""
        swept = 0
        while batch := await self._sweep_batch():
            swept += batch
        return swept

    async def _commit(self, batch: Sequence[Operation]) -> list[Outcome | Exception]:
        opened = [operation for operation in batch if isinstance(operation, OpenedRequest)]
        settled = [operation for operation in batch if isinstance(operation, Settlement)]
        async with self._database.begin() as session:
            refused = await self._open(RequestRepository(session), opened) if opened else {}
            entries = (
                await self._settle(RequestRepository(session), LedgerRepository(session), settled) if settled else {}
            )
        return [
            entries[operation.request_id] if isinstance(operation, Settlement) else refused.get(operation.id)
            for operation in batch
        ]

    async def _open(self, requests: RequestRepository, opened: Sequence[OpenedRequest]) -> dict[str, Exception]:
        """Insert the rows; one that a lost connection made us write twice is fine, another one's id is not."""
        existing = await requests.by_id([request.id for request in opened])
        now = self._database.now()
        rows = {request.id: self._row(request, now) for request in opened if request.id not in existing}
        if rows:
            await requests.add(list(rows.values()))
        return {
            id: RequestRefused(f"there is another request {id} already")
            for id, row in existing.items()
            if row.server_id != self._server_id
        }

    async def _settle(
        self, requests: RequestRepository, ledger: LedgerRepository, settled: Sequence[Settlement]
    ) -> dict[str, LedgerEntry | Exception]:
        """Append what is not in the ledger yet. The head comes first: it makes two servers take turns."""
        head = await ledger.lock()
        ids = sorted({settlement.request_id for settlement in settled})
        rows = await requests.by_id(ids)
        entries = await ledger.of_requests(USAGE, ids)
        now = self._database.now()
        drafts = {
            settlement.request_id: _draft(rows[settlement.request_id], settlement, now)
            for settlement in settled
            if settlement.request_id in rows and settlement.request_id not in entries
        }
        appended = await ledger.append(head, list(drafts.values()))
        if drafts:
            await requests.close(list(drafts), SETTLED, now)
        unknown: dict[str, LedgerEntry | Exception] = {
            id: UnknownRequest(f"request {id} was never opened") for id in ids if id not in rows
        }
        return unknown | entries | {entry.request_id: entry for entry in appended}

    async def _sweep_batch(self) -> int:
        async with self._database.begin() as session:
            requests, ledger = RequestRepository(session), LedgerRepository(session)
            head = await ledger.lock()
            dead = await gone(session, await requests.servers_with_open(besides=self._server_id))
            left = await requests.left_open(dead, SWEEP_BATCH)
            now = self._database.now()
            await ledger.append(head, [_draft(row, unused(row.id, INTERRUPTED), now, kind=INTERRUPTED) for row in left])
            if left:
                await requests.close([row.id for row in left], INTERRUPTED, now)
        return len(left)

    def _row(self, request: OpenedRequest, now: int) -> dict[str, object]:
        return {
            "id": request.id,
            "tenant_id": request.tenant,
            "project_id": request.project_id,
            "key_id": request.key_id,
            "server_id": self._server_id,
            "model": request.model,
            "adapter_digest": request.adapter_digest,
            "prompt_tokens": request.prompt_tokens,
            "max_tokens": request.max_tokens,
            "status": OPEN,
            "created_at": now,
        }


def _draft(row: RequestRow, settlement: Settlement, now: int, kind: str = USAGE) -> LedgerDraft:
    return LedgerDraft(
        kind=kind,
        tenant_id=row.tenant_id,
        key_id=row.key_id,
        request_id=row.id,
        model=row.model,
        adapter_digest=row.adapter_digest,
        input_tokens=settlement.input_tokens,
        cached_tokens=settlement.cached_tokens,
        output_tokens=settlement.output_tokens,
        finish_reason=settlement.finish_reason,
        status=settlement.status,
        created_at=now,
    )
