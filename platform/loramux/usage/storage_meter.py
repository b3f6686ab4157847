"""Meters of bytes times seconds: stored revisions and pinned ones, as one ledger entry a day for each."""

from __future__ import annotations

from typing import Literal

from loramux.records import Database
from loramux.records.ledger import EntryContent, LedgerRepository
from loramux.records.storage_meter import PINNED, STORED, StorageMeterRepository, UnbilledSpan
from loramux.units import DAY, SECOND

Kind = Literal["storage", "residency"]
HOLDINGS = {"storage": STORED, "residency": PINNED}
STATUS = {"storage": "stored", "residency": "pinned"}
GRACE = 600 * SECOND
"""Microseconds between a day's end and its entries: by then, every row that began on that day is committed."""
BATCH = 500


class StorageMeter:
    """Brings the ledger up to the last day that is over. Idempotent, and safe on several servers at once."""

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
            ledger, holdings = LedgerRepository(session), StorageMeterRepository(session, HOLDINGS[self._kind])
            head = await ledger.lock()
            now = self._database.now()
            due = await holdings.due((now - GRACE) // DAY * DAY, BATCH)
            await ledger.append(head, [_content(self._kind, one, now) for one in due if _byte_seconds(one)])
            await holdings.counted({one.id: _end(one) for one in due})
            return len(due)


def _end(holding: UnbilledSpan) -> int:
    """The end of its first day that is not billed yet."""
    return min((holding.counted_until // DAY + 1) * DAY, holding.until)


def _byte_seconds(holding: UnbilledSpan) -> int:
    return holding.size_bytes * (_end(holding) // SECOND - holding.counted_until // SECOND)


def _content(kind: Kind, holding: UnbilledSpan, now: int) -> EntryContent:
    start = holding.counted_until
    return EntryContent(
        kind=kind,
        tenant_id=holding.tenant_id,
        key_id="",
        request_id=f"{holding.id}:{start}",
        model=holding.model,
        adapter_digest=holding.digest,
        base_model="",
        input_tokens=0,
        cached_tokens=0,
        output_tokens=0,
        finish_reason=None,
        status=STATUS[kind],
        created_at=now,
        occurred_at=start // DAY * DAY,
        adapter_byte_seconds=_byte_seconds(holding) if kind == "storage" else 0,
        adapter_resident_byte_seconds=_byte_seconds(holding) if kind == "residency" else 0,
    )
