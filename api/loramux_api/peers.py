"""The workers of one server, as each of them sees the others. With `server.workers = 1` there is no other.

worker ── Locate ────────> first process      where an engine listens, as a `Placement`
worker ── Others(one) ───> first process ── one ──> every other worker; the answers come back by its number
worker ── Ready, ... ────> first process      the state of this worker
worker ── BusyNote ──────> first process ── BusyNote ──> worker 0, which has the trainer
first process ── Stop ───> worker
"""

from __future__ import annotations

import asyncio
import itertools
import logging
import pickle
import socket
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Any, Literal

from loramux.common.logs import Level
from loramux.common.settings.file import Settings

logger = logging.getLogger(__name__)

PEER_SECONDS = 2.0
"""Seconds within which another worker answers; the answer of a worker that is too busy is left out."""


@dataclass(frozen=True)
class Locate:
    """The question where an engine listens."""

    engine: str
    settings: Settings


@dataclass(frozen=True)
class Others:
    """A question to every other worker."""

    question: Question


@dataclass(frozen=True)
class Ready:
    """The worker can answer requests. The answer comes when it may listen: no worker gets the connections of all."""


@dataclass(frozen=True)
class Serving:
    """The worker answers requests from now on."""


@dataclass(frozen=True)
class Failed:
    """The worker cannot start, or no base has an engine left."""

    reason: str
    has_lost_engines: bool = False


@dataclass(frozen=True)
class Stop:
    """The server is stopped; the second time: at once."""


@dataclass(frozen=True)
class BusyNote:
    """Note that a worker has begun to answer requests other than lines of batches and shadows, or that none runs."""

    worker: int
    is_busy: bool


@dataclass(frozen=True)
class MetricsQuery:
    """The question for all metric families, as a list of `prometheus_client` metrics."""


@dataclass(frozen=True)
class EngineQuery:
    """The question for the state of each engine, as a list of `EngineStatus`."""


@dataclass(frozen=True)
class EngineOrder:
    """An operator's order to drain or restart an engine."""

    engine: str
    restart: bool
    seconds: float


@dataclass(frozen=True)
class LevelOrder:
    """An operator's order to log this level and higher levels."""

    level: Level


Question = MetricsQuery | EngineQuery | EngineOrder | LevelOrder
Kind = Literal["ask", "answer", "failed"]
Answer = Callable[[Any], Awaitable[Any]]


class LinkClosed(ConnectionError):
    """The process at the other end has ended, or could not answer."""


class Link:
    """One end of a pair of sockets between two processes of a server, which trust each other: messages are pickles."""

    def __init__(self, end: socket.socket, answer: Answer) -> None:
        """`answer` is called with each message of the other end."""
        self._end = end
        self._answer = answer
        self._writer: asyncio.StreamWriter | None = None
        self._numbers = itertools.count()
        self._asked: dict[int, asyncio.Future[Any]] = {}
        self._answering: set[asyncio.Task[None]] = set()

    async def serve(self) -> None:
        """Carry messages until the other end is closed."""
        reader, self._writer = await asyncio.open_connection(sock=self._end)
        try:
            while True:
                size = int.from_bytes(await reader.readexactly(4))
                data = await reader.readexactly(size)
                kind, number, content = pickle.loads(data)  # noqa: S301  of a process of this server
                if kind == "ask":
                    task = asyncio.create_task(self._reply(number, content))
                    self._answering.add(task)
                    task.add_done_callback(self._answering.discard)
                elif (asked := self._asked.pop(number, None)) is not None and not asked.done():
                    if kind == "answer":
                        asked.set_result(content)
                    else:
                        asked.set_exception(LinkClosed("the other process could not answer"))
        except (asyncio.IncompleteReadError, ConnectionError):
            pass  # the other process has ended
        finally:
            self._writer.close()
            for asked in self._asked.values():
                if not asked.done():
                    asked.set_exception(LinkClosed("the other process has ended"))

    async def ask(self, question: Any) -> Any:
        """Return the other end's answer. Raises LinkClosed."""
        number = next(self._numbers)
        asked = self._asked[number] = asyncio.get_running_loop().create_future()
        try:
            self._send("ask", number, question)
            return await asked
        finally:
            self._asked.pop(number, None)

    def note(self, message: BusyNote) -> None:
        """Send a message whose answer does not matter. Raises LinkClosed."""
        self._send("ask", next(self._numbers), message)

    async def _reply(self, number: int, question: Any) -> None:
        kind: Kind = "answer"
        try:
            answer = await self._answer(question)
        except Exception:  # the other process must not wait for the answer
            logger.exception("a message of another process of this server failed")
            kind, answer = "failed", None
        try:
            self._send(kind, number, answer)
        except LinkClosed:
            return

    def _send(self, kind: Kind, number: int, content: Any) -> None:
        if self._writer is None or self._writer.is_closing():
            raise LinkClosed("the other process has ended")
        data = pickle.dumps((kind, number, content))
        self._writer.write(len(data).to_bytes(4) + data)


class Peers:
    """The other workers of this worker's server."""

    def __init__(self, number: int = 0, link: Link | None = None) -> None:
        """`link` leads to the first process; None: the server has one worker."""
        self.number = number
        self.has_others = link is not None
        self._link = link

    @property
    def is_first(self) -> bool:
        """True for the one worker that does what a server does once, such as the start of a trainer."""
        return self.number == 0

    async def ask(self, question: Question) -> dict[int, Any]:
        """Return the answers of the other workers, by their numbers."""
        if self._link is None:
            return {}
        try:
            answers: dict[int, Any] = await self._link.ask(Others(question))
        except LinkClosed:  # the server is ending
            return {}
        return answers
