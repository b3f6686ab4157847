"""Statements about the ledger: append under the lock of its head, and prove that nothing was altered."""

from __future__ import annotations

import hashlib
import json
from collections.abc import AsyncIterator, Collection, Sequence

import msgspec
from sqlalchemy import insert, select, update
from sqlalchemy.ext.asyncio import AsyncSession

from loramux.records.errors import ChainBroken
from loramux.records.identity import TenantId
from loramux.records.models import LedgerHeadRow, LedgerRow

GENESIS = "0" * 64
"""The hash before the first entry."""

PAGE = 1000


class LedgerDraft(msgspec.Struct, frozen=True, kw_only=True):
    """A line of the bill before it has its place in the chain. Quantities are whole tokens."""

    kind: str
    """`usage`, or `interrupted` for a request whose server died: recorded, and never billed."""
    tenant_id: TenantId
    key_id: str
    request_id: str
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


class LedgerEntry(LedgerDraft, frozen=True, kw_only=True):
    """A line of the bill: `hash` covers every other field, so that no line changes unseen."""

    sequence: int
    event_id: str
    """The same for the same event, whoever writes it and however often."""
    prev_hash: str
    hash: str


def event_id(draft: LedgerDraft) -> str:
    """The draft's event, by kind and request."""
    return "evt_" + hashlib.sha256(f"{draft.kind}:{draft.request_id}".encode()).hexdigest()[:32]


def chain_hash(entry: LedgerEntry) -> str:
    """SHA-256 over all fields but `hash` as JSON: keys sorted, no spaces, ASCII."""
    facts = msgspec.structs.asdict(entry)
    del facts["hash"]
    canonical = json.dumps(facts, sort_keys=True, separators=(",", ":"), ensure_ascii=True)
    return hashlib.sha256(canonical.encode()).hexdigest()


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
            await self._session.execute(insert(LedgerRow), [msgspec.structs.asdict(entry) for entry in entries])
            await self._session.execute(update(LedgerHeadRow).values(sequence=sequence, hash=last))
        return entries

    async def of_requests(self, kind: str, request_ids: Collection[str]) -> dict[str, LedgerEntry]:
        """The entries of one kind that these requests already have, by request id."""
        statement = select(LedgerRow).where(LedgerRow.kind == kind, LedgerRow.request_id.in_(request_ids))
        return {row.request_id: _entry(row) for row in await self._session.scalars(statement)}

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
        while rows := (
            await self._session.scalars(
                select(LedgerRow).where(LedgerRow.sequence > after).order_by(LedgerRow.sequence).limit(PAGE)
            )
        ).all():
            for row in rows:
                yield _entry(row)
            after = rows[-1].sequence
            self._session.expunge_all()


def _follow(draft: LedgerDraft, sequence: int, prev_hash: str) -> LedgerEntry:
    facts = msgspec.structs.asdict(draft)
    entry = LedgerEntry(**facts, sequence=sequence, event_id=event_id(draft), prev_hash=prev_hash, hash="")
    return msgspec.structs.replace(entry, hash=chain_hash(entry))


def _entry(row: LedgerRow) -> LedgerEntry:
    return LedgerEntry(**{name: getattr(row, name) for name in LedgerEntry.__struct_fields__})
