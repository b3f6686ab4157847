"""The real records on SQLite, with time and faults in every statement."""

from __future__ import annotations

import asyncio
import random
import secrets
import shutil
import sqlite3
import uuid
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest import mock

import aiosqlite.core

from loramux.accounts.tenants.tenants import Tenants
from loramux.common.identity import Principal
from loramux.data.records import schema
from loramux.data.records.database import BUSY_SECONDS, Database
from simulation.loop import Queue, Thread, current_loop, sleep
from simulation.plan import TENANTS, Plan

PEPPER = b"p" * 32
LOCK_POLL_SECONDS = 0.001
EPOCH = 1_800_000_000_000_000
"""Time of the wall clock at the beginning of a simulation, in microseconds."""


@dataclass(frozen=True)
class Template:
    """A migrated database with tenants and their keys, made once and copied for every seed."""

    file: Path
    principals: tuple[Principal, ...]


def make_template(folder: Path) -> Template:
    file = folder / "template.sqlite3"
    url = f"sqlite:///{file}"
    schema.migrate(url)

    async def fill() -> tuple[Principal, ...]:
        database = Database(url)
        tenants = Tenants(database, PEPPER)
        principals = []
        for number in range(TENANTS):
            await tenants.create(f"tenant{number}")
            _, secret = await tenants.create_key(f"tenant{number}")
            principals.append(await tenants.authenticator.authenticate(secret))
        await database.close()
        return tuple(principals)

    with seeded_names(random.Random(0)):  # routing depends on tenants' ids
        principals = asyncio.run(fill())
    with sqlite3.connect(file) as connection:
        connection.execute("PRAGMA wal_checkpoint(TRUNCATE)")
    return Template(file, principals)


class Faults:
    """Times of slow and failing statements, and the time of the wall clock."""

    def __init__(self, plan: Plan, rng: random.Random) -> None:
        self._plan = plan
        self._rng = rng

    def wall_clock(self) -> int:
        now = current_loop().time()
        jumped = sum(by for at, by in self._plan.clock_jumps if at <= now)
        return EPOCH + int((now + jumped) * 1_000_000)

    def statement(self) -> None:
        """Take the time of one statement; raises sqlite3.OperationalError in an outage."""
        sleep(self._rng.uniform(0, self._plan.database_seconds))
        now = current_loop().time()
        for start, end in self._plan.database_stalls:
            if start <= now < end:
                sleep(end - now)
        now = current_loop().time()
        if any(start <= now < end for start, end in self._plan.database_outages):
            raise sqlite3.OperationalError("disk I/O error")


class _StatementQueue(Queue[Any]):
    """A connection's queue of functions: running one takes time, or fails."""

    faults: Faults

    def get(self, block: bool = True, timeout: float | None = None) -> Any:
        future, function = super().get(block, timeout)
        return future, lambda: self._run(function)

    def _run(self, function: Callable[[], Any]) -> Any:
        name = getattr(getattr(function, "func", None), "__name__", "")
        if name in ("execute", "commit"):
            self.faults.statement()
        waits_until = current_loop().time() + BUSY_SECONDS
        while True:
            try:
                result = function()
            except sqlite3.OperationalError as error:
                if "locked" not in str(error) or current_loop().time() >= waits_until:
                    raise
                sleep(LOCK_POLL_SECONDS)
            else:
                break
        if isinstance(result, sqlite3.Connection):
            result.execute("PRAGMA busy_timeout = 0")  # another connection's lock is waited for in virtual time
        return result


@contextmanager
def simulated_database(template: Template, folder: Path, faults: Faults) -> Iterator[Database]:
    """A copy of the template, whose connections' threads are simulated."""
    file = folder / "records.sqlite3"
    shutil.copy(template.file, file)
    queue = type("StatementQueue", (_StatementQueue,), {"faults": faults})
    with mock.patch.multiple(aiosqlite.core, Thread=Thread, SimpleQueue=queue):
        yield Database(f"sqlite:///{file}", clock=faults.wall_clock)


@contextmanager
def seeded_names(rng: random.Random) -> Iterator[None]:
    """Ids and seeds that are drawn at random come from the simulation's generator."""
    with (
        mock.patch.object(uuid, "uuid4", side_effect=lambda: uuid.UUID(int=rng.getrandbits(128), version=4)),
        mock.patch.object(secrets, "token_hex", lambda n=16: rng.randbytes(n).hex()),
        mock.patch.object(secrets, "token_bytes", lambda n=16: rng.randbytes(n)),
        mock.patch.object(secrets, "randbits", rng.getrandbits),
    ):
        yield
