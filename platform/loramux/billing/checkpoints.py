"""Checkpoints anchor the ledger's chain outside the database.

A hash chain proves that entries follow from each other, not that they are the ones that were written: with write access
to the database an old entry can be changed and every later hash computed again. A checkpoint is the number and the hash
of the last entry at some moment, signed with a key that the database does not hold. It goes to the object storage,
under a name that contains all of it, and to the operator's webhooks. Nothing overwrites a checkpoint: a rewritten
ledger contradicts every checkpoint of a later entry.
"""

from __future__ import annotations

import asyncio
import hmac
import logging
import re
from collections.abc import Sequence
from typing import Protocol

import msgspec

from loramux.records import Database
from loramux.records.billing import PeriodRepository
from loramux.records.ledger import LedgerRepository
from loramux.storage import Objects, StorageUnavailable

logger = logging.getLogger(__name__)

FOLDER = "ledger-checkpoints"
_name = re.compile(r"(\d{20})\.([0-9a-f]{64})\.(\d{20})\.([0-9a-f]{64})")


class Checkpoint(msgspec.Struct, frozen=True, kw_only=True):
    """The ledger's last entry at one moment."""

    sequence: int
    hash: str
    created_at: int
    """Microseconds since the epoch."""
    signature: str

    @property
    def name(self) -> str:
        """The object's name: a listing of the folder is enough to read every checkpoint."""
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
        """`pepper`: the server's secret, from which the signing key is derived."""
        self._database = database
        self._objects = objects
        self._key = hmac.digest(pepper, b"ledger checkpoints", "sha256")
        self._listeners = listeners

    async def write(self) -> Checkpoint | None:
        """Store a checkpoint of the present head; None where the newest one is of the same entry, or on a failure.

        A storage that does not answer is logged: the next checkpoint covers this one. Nothing is stored over a ledger
        that contradicts the newest checkpoint, since an anchor must not cover an alteration up: that is logged as an
        error, and `reconcile` reports it.
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
        await asyncio.to_thread(self._objects.put, f"{FOLDER}/{checkpoint.name}", content)
        for listener in self._listeners:
            await listener.receive_checkpoint(checkpoint, self._database.now())
        return checkpoint

    async def all(self) -> list[Checkpoint]:
        """List every checkpoint, oldest first; those whose signature is wrong are left out."""
        return [one for one in await self._listed() if self._is_signed(one)]

    async def contradictions(self) -> tuple[int, list[str]]:
        """Compare all checkpoints with the ledger; return the number of signed ones, and a sentence a conflict."""
        known, problems = await self._listed(), []
        async with self._database.read() as session:
            hashes = await PeriodRepository(session).hashes_at([one.sequence for one in known])
        for one in known:
            if one.sequence not in hashes:
                problems.append(f"entry {one.sequence}, which has a checkpoint, is not in the ledger any more")
            elif hashes[one.sequence] != one.hash:
                problems.append(f"entry {one.sequence} or one before it is not what its checkpoint says")
        # One that another pepper has signed is compared and does not count: it proves nothing.
        return sum(map(self._is_signed, known)), problems

    async def _listed(self) -> list[Checkpoint]:
        names = await asyncio.to_thread(self._objects.names, FOLDER)
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
