"""Statements about the ledger: append under the lock of its head, and prove that nothing was altered."""

from __future__ import annotations

import hashlib
import json
from collections.abc import AsyncIterator, Collection, Sequence
from typing import Any

import msgspec
from sqlalchemy import Row, select, update
from sqlalchemy.ext.asyncio import AsyncSession

from loramux.records.bulk import among, insert_rows
from loramux.records.errors import ChainBroken
from loramux.records.identity import TenantId
from loramux.records.ledger_models import LedgerHeadRow, LedgerRow

GENESIS = "0" * 64
"""The hash before the first entry."""

PAGE = 1000


class LedgerDraft(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """A line of the bill before it has its place in the chain. Quantities are whole tokens and byte-seconds."""

    kind: str
    """`usage`; `interrupted` for a request whose server died: recorded, and never billed; `storage` and `residency`
    of a revision for a span of time; `correction` of an earlier entry, the only kind whose quantities may be
    negative."""
    tenant_id: TenantId
    key_id: str
    request_id: str
    """Of other kinds than usage: what the entry is about and when, so that it is written once."""
    model: str
    """As resolved: `tenant/adapter@3`, or the base model's name."""
    adapter_digest: str | None
    input_tokens: int
    cached_tokens: int
    """How many of input_tokens were not computed again."""
    output_tokens: int
    finish_reason: str | None
    status: str
    created_at: int
    base_model: str = ""
    tier: str = ""
    """The service class that it ran in."""
    project_id: str | None = None
    tags: str = ""
    """A JSON object of texts with sorted keys; empty without tags."""
    waived_input_tokens: int = 0
    """What the engine did for this request and nobody pays; cached ones are a part, as above."""
    waived_cached_tokens: int = 0
    waived_output_tokens: int = 0
    adapter_load: int = 0
    adapter_byte_seconds: int = 0
    adapter_resident_byte_seconds: int = 0
    corrects: str | None = None
    """The event_id of the entry that a correction is about."""
    occurred_at: int | None = None
    """When what it bills happened, where that is not created_at: prices of that moment apply."""


class LedgerEntry(LedgerDraft, frozen=True, kw_only=True, omit_defaults=True):
    """A line of the bill: `hash` covers every other field, so that no line changes unseen."""

    sequence: int
    event_id: str
    """The same for the same event, whoever writes it and however often."""
    prev_hash: str
    hash: str = ""


def event_id(kind: str, request_id: str) -> str:
    """The id of the event that a request, or whatever else, can have one of."""
    return "evt_" + hashlib.sha256(f"{kind}:{request_id}".encode()).hexdigest()[:32]


def chain_hash(entry: LedgerEntry) -> str:
    """SHA-256 over all fields but `hash` as JSON: keys sorted, no spaces, ASCII.

    Fields that entries did not always have are left out where they say nothing, so that old entries keep their hashes.
    """
    canonical = _encode(msgspec.structs.replace(entry, hash="") if entry.hash else entry)
    if not canonical.isascii():
        canonical = json.dumps(json.loads(canonical), sort_keys=True, separators=(",", ":")).encode()
    return hashlib.sha256(canonical).hexdigest()


_encode = msgspec.json.Encoder(order="sorted").encode


class LedgerRepository:
    """The ledger."""

    def __init__(self, session: AsyncSession) -> None:
        self._session = session

    async def lock(self) -> LedgerHeadRow:
        """The head, held until this transaction ends: what is read after it cannot be appended by anybody else."""
        return (await self._session.scalars(select(LedgerHeadRow).with_for_update())).one()

    async def append(self, head: LedgerHeadRow, drafts: Sequence[LedgerDraft]) -> list[LedgerEntry]:
        """Add entries behind `head`, which the caller locked."""
        entries: list[LedgerEntry] = []
        sequence, last = head.sequence, head.hash
        for draft in drafts:
            sequence += 1
            entry = _follow(draft, sequence, last)
            entries.append(entry)
            last = entry.hash
        if entries:
            await insert_rows(self._session, LedgerRow, [msgspec.structs.asdict(entry) for entry in entries])
            await self._session.execute(update(LedgerHeadRow).values(sequence=sequence, hash=last))
        return entries

    async def of_requests(self, kind: str, request_ids: Collection[str]) -> dict[str, LedgerEntry]:
        """The entries of one kind that these requests already have, by request id."""
        events = [event_id(kind, id) for id in request_ids]
        statement = select(*COLUMNS).where(among(self._session, LedgerRow.event_id, events))
        return {row.request_id: _entry(row) for row in await self._session.execute(statement)}

    async def entry(self, event_id: str) -> LedgerEntry | None:
        """The entry of that event."""
        row = (await self._session.execute(select(*COLUMNS).where(LedgerRow.event_id == event_id))).one_or_none()
        return None if row is None else _entry(row)

    async def after(self, sequence: int, limit: int, until: int | None = None) -> list[LedgerEntry]:
        """The entries that follow `sequence`, in order, up to and including `until`."""
        statement = select(*COLUMNS).where(LedgerRow.sequence > sequence)
        if until is not None:
            statement = statement.where(LedgerRow.sequence <= until)
        rows = await self._session.execute(statement.order_by(LedgerRow.sequence).limit(limit))
        return [_entry(row) for row in rows]

    async def verify(self) -> LedgerHeadRow:
        """Walk the whole chain in this transaction's snapshot and return its head; raises ChainBroken."""
        sequence, last = 0, GENESIS
        async for entry in self._walk():
            sequence += 1
            if entry.sequence != sequence:
                raise ChainBroken(sequence, f"missing; {entry.sequence} comes next")
            if entry.prev_hash != last:
                raise ChainBroken(sequence, "does not follow from the entry before it")
            if entry.hash != chain_hash(entry):
                raise ChainBroken(sequence, "its content is not what was hashed")
            last = entry.hash
        head = (await self._session.scalars(select(LedgerHeadRow))).one()
        if (head.sequence, head.hash) != (sequence, last):
            raise ChainBroken(
                max(sequence, head.sequence), f"the head says {head.sequence}, the entries end at {sequence}"
            )
        return head

    async def _walk(self) -> AsyncIterator[LedgerEntry]:
        after = -1
        while entries := await self.after(after, PAGE):
            for entry in entries:
                yield entry
            after = entries[-1].sequence


def _follow(draft: LedgerDraft, sequence: int, prev_hash: str) -> LedgerEntry:
    facts = msgspec.structs.asdict(draft)
    event = event_id(draft.kind, draft.request_id)
    entry = LedgerEntry(**facts, sequence=sequence, event_id=event, prev_hash=prev_hash)
    return msgspec.structs.replace(entry, hash=chain_hash(entry))


COLUMNS = tuple(getattr(LedgerRow, name) for name in LedgerEntry.__struct_fields__)


def _entry(row: Row[Any]) -> LedgerEntry:
    return LedgerEntry(**row._mapping)
