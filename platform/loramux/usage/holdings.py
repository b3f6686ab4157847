"""The meters of bytes by time: stored revisions, and pinned ones, for every second, as one entry a day each."""

from __future__ import annotations

from typing import Literal

from loramux.records import Database
from loramux.records.holdings import PINNED, STORED, Holding, HoldingRepository
from loramux.records.ledger import LedgerDraft, LedgerRepository

Kind = Literal["storage", "residency"]
HOLDINGS = {"storage": STORED, "residency": PINNED}
STATUS = {"storage": "stored", "residency": "pinned"}
DAY = 86_400_000_000
SECOND = 1_000_000
"""Microseconds."""
SETTLING = 600 * SECOND
"""How long after its end a day is counted: by then, what was begun in it is in the database."""
BATCH = 500


class HoldingMeter:
    """Brings the ledger up to the last day that is over; as often as one likes, by as many servers as one likes."""

    def __init__(self, database: Database, kind: Kind) -> None:
        self._database = database
        self._kind = kind

    async def accrue(self) -> int:
        """Write what is missing; the number of entries."""
        written = 0
        while batch := await self._accrue_batch():
            written += batch
        return written

    async def _accrue_batch(self) -> int:
        async with self._database.begin() as session:
            ledger, holdings = LedgerRepository(session), HoldingRepository(session, HOLDINGS[self._kind])
            head = await ledger.lock()
            now = self._database.now()
            due = await holdings.due((now - SETTLING) // DAY * DAY, BATCH)
            await ledger.append(head, [_draft(self._kind, one, now) for one in due if _byte_seconds(one)])
            await holdings.counted({one.id: _end(one) for one in due})
            return len(due)


def _end(holding: Holding) -> int:
    """Of the next day of it that is not counted yet."""
    return min((holding.counted_until // DAY + 1) * DAY, holding.until)


def _byte_seconds(holding: Holding) -> int:
    return holding.size_bytes * (_end(holding) // SECOND - holding.counted_until // SECOND)


def _draft(kind: Kind, holding: Holding, now: int) -> LedgerDraft:
    """The entry for that day."""
    start = holding.counted_until
    return LedgerDraft(
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
