"""The ledger's proof as operators watch it: its head, its newest checkpoint, its sinks, and the last reconciliation."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

import msgspec

from loramux.billing.checkpoints import Checkpoint, Checkpoints
from loramux.billing.errors import LedgerAltered, ReconciliationRuns
from loramux.billing.reconcile import reconcile
from loramux.records import Database
from loramux.records.errors import ChainBroken
from loramux.records.ledger import LedgerRepository
from loramux.records.sinks import ParkedEvent, SinkProgress, newest_parked, sink_progress

SHOWN_PARKED = 20


class ReconciliationOutcome(msgspec.Struct, frozen=True, kw_only=True):
    """The outcome of a reconciliation by this server."""

    at: int
    """Microseconds since the epoch."""
    entries: int
    """Verified; 0 where the chain is broken."""
    drift_tokens: int
    problems: list[str]
    """Empty: every entry, period, invoice and checkpoint agrees."""


class LedgerState(msgspec.Struct, frozen=True, kw_only=True):
    """The ledger at one moment."""

    sequence: int
    """Of the last entry."""
    hash: str
    checkpoint: Checkpoint | None
    """The newest anchor outside the database."""
    sinks: Sequence[SinkProgress]
    parked: Sequence[ParkedEvent]
    """The latest."""
    reconciliation: ReconciliationOutcome | None
    """The last one by this server."""


class LedgerProof:
    """Questions about the ledger's integrity, for operators."""

    def __init__(self, database: Database, checkpoints: Checkpoints) -> None:
        self._database = database
        self._checkpoints = checkpoints
        self._last: ReconciliationOutcome | None = None
        self._running = asyncio.Lock()

    async def state(self) -> LedgerState:
        """Return the chain's head, its newest checkpoint, and how far the sinks are."""
        async with self._database.read() as session:
            head = await LedgerRepository(session).head()
            sinks = await sink_progress(session)
            parked = await newest_parked(session, SHOWN_PARKED)
        known = await self._checkpoints.all()
        return LedgerState(
            sequence=head.sequence,
            hash=head.hash,
            checkpoint=max(known, key=lambda one: one.sequence, default=None),
            sinks=sinks,
            parked=parked,
            reconciliation=self._last,
        )

    async def reconcile(self) -> ReconciliationOutcome:
        """Verify the whole ledger, one run at a time. Raises ReconciliationRuns."""
        if self._running.locked():
            raise ReconciliationRuns("a reconciliation is under way; its outcome appears at its end", None)
        async with self._running:
            entries = drift = 0
            problems: list[str] = []
            try:
                found = await reconcile(self._database, self._checkpoints)
                entries, drift = found.entries, found.drift_tokens
            except LedgerAltered as altered:
                problems = list(altered.problems)
            except ChainBroken as broken:
                problems = [str(broken)]
            self._last = ReconciliationOutcome(
                at=self._database.now(), entries=entries, drift_tokens=drift, problems=problems
            )
        return self._last
