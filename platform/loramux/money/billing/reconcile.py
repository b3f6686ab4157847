"""The verification of the ledger: its checkpoints outside the database, its reconciliation, and its state for
operators.

A reconciliation compares the engines' counts with the ledger, separately for each set of weights, over settled
requests. It compares prompt tokens, prompt tokens found in a cache, and output tokens, billed and waived together. The
settlement's transaction also writes the engine's count, so a crash loses both numbers or neither. The two numbers have
different sources: the steps that ran, and the texts and events that the serving layer received. Requests that were
interrupted, or whose engine died, are in neither count: their use is unknown and is not charged.

A hash chain proves that entries follow from each other. The chain does not prove that they are the original entries:
with write access to the database, an old entry can be changed and every later hash can be computed again. So three more
conditions are checked. The last hash of every closed period must be unchanged. Every frozen invoice must still have its
digest, and follow from the ledger and the prices. Every checkpoint must agree.

A checkpoint is the number and the hash of the last entry at some moment, signed with a key that the database does not
hold. A checkpoint is stored in the object storage, under a name that contains all its data, and sent to the operator's
webhooks. A checkpoint is never overwritten, so a rewritten ledger contradicts every checkpoint of a later entry.
"""

from __future__ import annotations

import asyncio
import hmac
import logging
import re
from collections.abc import Sequence
from typing import Protocol

import msgspec
from sqlalchemy.ext.asyncio import AsyncSession

from loramux.common.jobs import SERVER, run_blocking
from loramux.common.units import TokenCounts
from loramux.data.entities import ParkedEvent
from loramux.data.records.billing import InvoiceRow, PeriodRepository, PeriodRow
from loramux.data.records.database import Database
from loramux.data.records.errors import ChainBroken
from loramux.data.records.ledger import EngineCountRepository, LedgerRepository
from loramux.data.records.sinks import SinkProgress, newest_parked, sink_progress
from loramux.data.records.usage import DailyUsageRepository, QuantityRepository
from loramux.data.storage.errors import StorageUnavailable
from loramux.data.storage.objects import Objects
from loramux.money.billing.catalog import subscriptions_of
from loramux.money.billing.errors import LedgerAltered, ReconciliationRuns
from loramux.money.billing.invoices import Bill, Invoice, Terms, bill, digest, invoice_lines, read_invoice
from loramux.money.billing.periods import Period, closed_period

FOLDER = "ledger-checkpoints"
_name = re.compile(r"(\d{20})\.([0-9a-f]{64})\.(\d{20})\.([0-9a-f]{64})")

SHOWN_PARKED = 20

logger = logging.getLogger(__name__)


class Checkpoint(msgspec.Struct, frozen=True, kw_only=True):
    """The ledger's last entry at one moment."""

    sequence: int
    hash: str
    created_at: int
    """Microseconds since the epoch."""
    signature: str

    @property
    def name(self) -> str:
        """The object's name: so a listing of the folder is enough to read every checkpoint."""
        return f"{self.sequence:020}.{self.hash}.{self.created_at:020}.{self.signature}"


class CheckpointListener(Protocol):
    """A system that receives every new checkpoint."""

    async def receive_checkpoint(self, checkpoint: Checkpoint, now: int) -> None:
        """Deliver a checkpoint; failures are logged and do not raise."""


class Checkpoints:
    """The checkpoints of one ledger in one object storage."""

    def __init__(
        self, database: Database, objects: Objects, pepper: bytes, listeners: Sequence[CheckpointListener] = ()
    ) -> None:
        """`pepper` is the server's secret, from which the signing key is derived."""
        self._database = database
        self._objects = objects
        self._key = hmac.digest(pepper, b"ledger checkpoints", "sha256")
        self._listeners = listeners

    async def write(self) -> Checkpoint | None:
        """Store a checkpoint of the current head and return it. Return None if the newest checkpoint is of the same
        entry, or after a failure.

        If the storage does not answer, the failure is logged, and the next checkpoint covers the same entries. If the
        ledger contradicts the newest checkpoint, no new checkpoint is stored, because it must not hide a change. This
        is logged as an error, and `reconcile` reports it.
        """
        try:
            return await self._write()
        except StorageUnavailable as error:
            logger.warning("no checkpoint of the ledger was written; it is tried again: %s", error)
            return None

    async def _write(self) -> Checkpoint | None:
        known = await self.all()
        newest = max(known, key=lambda one: one.sequence, default=None)
        async with self._database.read() as session:
            head = await LedgerRepository(session).head()
            there = None if newest is None else await PeriodRepository(session).hash_at(newest.sequence)
        if newest is not None and (there != newest.hash or head.sequence < newest.sequence):
            logger.error("the ledger contradicts its checkpoint %d; run: loramux usage reconcile", newest.sequence)
            return None
        if head.sequence == (0 if newest is None else newest.sequence):
            return None
        checkpoint = self._sign(head.sequence, head.hash, self._database.now())
        content = msgspec.json.encode(checkpoint)
        await run_blocking(SERVER, self._objects.put, f"{FOLDER}/{checkpoint.name}", content)
        for listener in self._listeners:
            await listener.receive_checkpoint(checkpoint, self._database.now())
        return checkpoint

    async def all(self) -> list[Checkpoint]:
        """List every checkpoint, oldest first; checkpoints with a wrong signature are left out."""
        return [one for one in await self._listed() if self._is_signed(one)]

    async def contradictions(self) -> tuple[int, list[str]]:
        """Compare all checkpoints with the ledger; return the number of checkpoints with a valid signature, and one
        sentence for each conflict.
        """
        known, problems = await self._listed(), []
        async with self._database.read() as session:
            hashes = await PeriodRepository(session).hashes_at([one.sequence for one in known])
        for one in known:
            if one.sequence not in hashes:
                problems.append(f"entry {one.sequence}, which has a checkpoint, is not in the ledger any more")
            elif hashes[one.sequence] != one.hash:
                problems.append(f"entry {one.sequence} or one before it is not what its checkpoint says")
        # A checkpoint signed with another pepper is compared but not counted, because it proves nothing.
        return sum(map(self._is_signed, known)), problems

    async def _listed(self) -> list[Checkpoint]:
        names = await run_blocking(SERVER, self._objects.names, FOLDER)
        matches = (_name.fullmatch(name.rpartition("/")[2]) for name in names)
        return [
            Checkpoint(sequence=int(match[1]), hash=match[2], created_at=int(match[3]), signature=match[4])
            for match in matches
            if match is not None
        ]

    def _sign(self, sequence: int, hash: str, created_at: int) -> Checkpoint:
        text = f"{sequence}:{hash}:{created_at}".encode()
        signature = hmac.digest(self._key, text, "sha256").hex()
        return Checkpoint(sequence=sequence, hash=hash, created_at=created_at, signature=signature)

    def _is_signed(self, one: Checkpoint) -> bool:
        expected = self._sign(one.sequence, one.hash, one.created_at).signature
        return hmac.compare_digest(expected, one.signature)


class LedgerComparison(msgspec.Struct, frozen=True, kw_only=True):
    """The engines' and the ledger's counts for one set of weights."""

    base_model: str
    adapter_digest: str
    """Digest of the adapter, or the series of a training adapter; empty for the base model itself."""
    engine: TokenCounts
    ledger: TokenCounts
    drift: int
    """Difference of both counts in tokens; 0 if they agree."""


class Reconciliation(msgspec.Struct, frozen=True, kw_only=True):
    """Numbers of verified items, and both token counts."""

    entries: int
    """Number of entries in the chain, whose hashes were all computed again."""
    periods: int
    invoices: int
    checkpoints: int
    """Checkpoints outside the database. Number of checkpoints outside the database. If it is 0, a rewritten open month
    cannot be detected.
    """
    drift_tokens: int
    weights: tuple[LedgerComparison, ...]


async def reconcile(database: Database, checkpoints: Checkpoints | None = None) -> Reconciliation:
    """Verify the chain, daily sums, closed periods, invoices and checkpoints, and compare both counts in one snapshot.

    Raises ChainBroken, or LedgerAltered with all differences.
    """
    async with database.read() as session:
        head = await LedgerRepository(session).verify()
        periods = await PeriodRepository(session).all()
        invoices = await PeriodRepository(session).invoices()
        problems = [*await _period_problems(session, periods), *await _invoice_problems(session, periods, invoices)]
        problems += await DailyUsageRepository(session).problems()
        counts = EngineCountRepository(session)
        engines, ledger = await counts.engines(), await counts.ledger()
    num_checkpoints = 0
    if checkpoints is not None:
        num_checkpoints, contradictions = await checkpoints.contradictions()
        problems += contradictions
    if problems:
        raise LedgerAltered(problems)
    weights = tuple(
        LedgerComparison(
            base_model=key[0],
            adapter_digest=key[1],
            engine=(engine := engines.get(key, TokenCounts())),
            ledger=(billed := ledger.get(key, TokenCounts())),
            drift=engine.drift(billed),
        )
        for key in sorted(engines.keys() | ledger.keys())
    )
    return Reconciliation(
        entries=head.sequence,
        periods=len(periods),
        invoices=len(invoices),
        checkpoints=num_checkpoints,
        drift_tokens=sum(one.drift for one in weights),
        weights=weights,
    )


async def _period_problems(session: AsyncSession, periods: Sequence[PeriodRow]) -> list[str]:
    """Check that periods follow each other without a gap, and that their last hashes are unchanged since they were
    closed.
    """
    problems, after = [], 0
    for row in periods:
        if row.first_sequence != after + 1:
            problems.append(f"period {row.id} begins with entry {row.first_sequence}, and {after + 1} comes next")
        if row.digest != await PeriodRepository(session).hash_at(row.last_sequence):
            problems.append(f"the entries of {row.id}, a closed month, are not what it was closed with")
        after = row.last_sequence
    return problems


async def _invoice_problems(
    session: AsyncSession, periods: Sequence[PeriodRow], invoices: Sequence[InvoiceRow]
) -> list[str]:
    """Check that frozen invoices have their digests, belong to their periods and follow from the ledger."""
    closed = {row.id: row for row in periods}
    problems = []
    for row in invoices:
        if row.digest != digest(row.document):
            problems.append(f"the document of invoice {row.id} is not what was frozen")
            continue
        kept, period = read_invoice(row.document), closed[row.period_id]
        span = kept.first_sequence, kept.last_sequence, kept.ledger_digest
        if span != (period.first_sequence, period.last_sequence, period.digest):
            problems.append(f"invoice {row.id} is of other entries than its month {row.period_id}")
        elif not _agree(kept, await _bill_again(session, row, closed_period(period), kept.terms), row):
            problems.append(f"invoice {row.id} does not follow from the ledger and the prices")
    return problems


async def _bill_again(session: AsyncSession, row: InvoiceRow, period: Period, terms: Terms) -> Bill:
    quantities = await QuantityRepository(session, row.tenant_id).daily(period.span)
    subscriptions = await subscriptions_of(session, row.tenant_id)
    return await run_blocking(SERVER, bill, period, subscriptions, quantities, terms)


def _agree(kept: Invoice, again: Bill, row: InvoiceRow) -> bool:
    """Compare the fields that decide the amounts; descriptions may differ between releases."""
    frozen, computed = (
        [(one.meter, one.price_id, one.quantity, one.amount) for one in lines]
        for lines in (kept.lines, invoice_lines(again))
    )
    totals = again.total == row.total and again.amount(row.total) == kept.total
    return frozen == computed and totals and again.currency.code == row.currency == kept.currency


class ReconciliationOutcome(msgspec.Struct, frozen=True, kw_only=True):
    """The outcome of a reconciliation by this server."""

    at: int
    """Microseconds since the epoch."""
    entries: int
    """Verified entries; 0 if the chain is broken."""
    drift_tokens: int
    problems: list[str]
    """Problems found; empty if every entry, period, invoice and checkpoint agrees."""


class LedgerState(msgspec.Struct, frozen=True, kw_only=True):
    """The ledger at one moment."""

    sequence: int
    """Sequence number of the last entry."""
    hash: str
    checkpoint: Checkpoint | None
    """The newest checkpoint outside the database."""
    sinks: Sequence[SinkProgress]
    parked: Sequence[ParkedEvent]
    """The latest parked events."""
    reconciliation: ReconciliationOutcome | None
    """This server's last reconciliation."""


class LedgerProof:
    """An operator's checks of the ledger's integrity."""

    def __init__(self, database: Database, checkpoints: Checkpoints) -> None:
        self._database = database
        self._checkpoints = checkpoints
        self._last: ReconciliationOutcome | None = None
        self._running = asyncio.Lock()

    async def state(self) -> LedgerState:
        """Return the chain's head, its newest checkpoint, and the progress of the sinks."""
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
