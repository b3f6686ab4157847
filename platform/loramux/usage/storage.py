"""The storage meter: every revision's bytes, for every second that it was there, as one entry a day."""

from __future__ import annotations

from loramux.records import Database
from loramux.records.ledger import LedgerDraft, LedgerRepository
from loramux.records.revisions import StoredRevision, StoredRevisionRepository

STORAGE = "storage"
DAY = 86_400_000_000
SECOND = 1_000_000
"""Microseconds."""
SETTLING = 600 * SECOND
"""How long after its end a day is counted: by then, what was begun in it is in the database."""
BATCH = 500


class StorageMeter:
    """Brings the ledger up to the last day that is over; as often as one likes, by as many servers as one likes."""

    def __init__(self, database: Database) -> None:
        self._database = database

    async def accrue(self) -> int:
        """Write what is missing; the number of entries."""
        written = 0
        while batch := await self._accrue_batch():
            written += batch
        return written

    async def _accrue_batch(self) -> int:
        async with self._database.begin() as session:
            ledger = LedgerRepository(session)
            head = await ledger.lock()
            now = self._database.now()
            stored = await StoredRevisionRepository(session).due((now - SETTLING) // DAY * DAY, BATCH)
            drafts = [_draft(revision, now) for revision in stored]
            await ledger.append(head, [draft for draft in drafts if draft.adapter_byte_seconds])
            await StoredRevisionRepository(session).counted(
                {revision.id: min(_day_after(revision), revision.until) for revision in stored}
            )
            return len(stored)


def _day_after(revision: StoredRevision) -> int:
    return (revision.counted_until // DAY + 1) * DAY


def _draft(revision: StoredRevision, now: int) -> LedgerDraft:
    """The entry for the next day of `revision` that is not counted yet."""
    start, end = revision.counted_until, min(_day_after(revision), revision.until)
    day = start // DAY
    return LedgerDraft(
        kind=STORAGE,
        tenant_id=revision.tenant_id,
        key_id="",
        request_id=f"{revision.id}:{start}",
        model=revision.model,
        adapter_digest=revision.digest,
        base_model="",
        input_tokens=0,
        cached_tokens=0,
        output_tokens=0,
        adapter_byte_seconds=revision.size_bytes * (end // SECOND - start // SECOND),
        finish_reason=None,
        status="stored",
        created_at=now,
        occurred_at=day * DAY,
    )
