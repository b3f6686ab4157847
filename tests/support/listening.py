"""An engine on the channel, without a model: a worker that plays a script, with its listener and its sessions."""

from __future__ import annotations

import asyncio
import queue
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from typing import Any

from scripted_engine import FACTS

from loramux.common.units import TokenCounts
from loramux.engine.client import EngineClient
from loramux.engine.messages import (
    AdapterRef,
    Cancel,
    Command,
    EngineCount,
    EngineFault,
    EngineStats,
    Pin,
    Pinned,
    Ready,
    Request,
    SamplingParams,
    Shutdown,
    StepReport,
    Stopped,
    Submit,
    TenantService,
    TokenEvent,
)
from loramux.fleet.remote import EnginePlace, RemoteChannel
from loramux.fleet.serving import EngineListener
from loramux.fleet.sessions import FrontSessions, Then
from loramux.fleet.wire import KeyPair, new_pair

BASE = "tiny"


def asked(name: str, length: int = 10, **fields: Any) -> Request:
    sampling = SamplingParams(max_tokens=length)
    defaults: dict[str, Any] = {"id": name, "tenant": "t", "prompt_token_ids": [1, 2, 3], "sampling": sampling}
    return Request(**defaults | fields)


class LocalFiles:
    """Every adapter is here, but those whose path is `far`: they come when `arrive` is called."""

    def __init__(self) -> None:
        self.waiting: list[tuple[AdapterRef, Then]] = []

    def find(self, ref: AdapterRef) -> AdapterRef | None:
        return None if ref.path == "far" else ref

    def fetch(self, ref: AdapterRef, then: Then) -> None:
        self.waiting.append((ref, then))

    def arrive(self, fault: EngineFault | None = None) -> None:
        waiting, self.waiting = self.waiting, []
        for ref, then in waiting:
            then(fault or AdapterRef(ref.digest, "/here"))


@dataclass
class CountingWorker:
    """Continues each request with 0, 1, 2, ..., one token of each a step, if `is_open` lets it step."""

    send: Callable[[Any], None]
    inbox: queue.SimpleQueue[Command]
    commands: list[Command] = field(default_factory=list)
    running: dict[str, Request] = field(default_factory=dict)
    told: dict[str, int] = field(default_factory=dict)
    is_open: threading.Event = field(default_factory=threading.Event)
    padding: str = ""
    """Sent with each step, to fill a connection."""

    def run(self) -> None:
        self.send(Ready(FACTS))
        stopping = False
        while not (stopping and not self.running):
            with suppress(queue.Empty):
                while True:
                    stopping |= self._execute(self.inbox.get(timeout=0.001))
            if self.is_open.is_set() and self.running:
                events = [self._next(request) for request in list(self.running.values())]
                service = [TenantService(f"t{self.padding}", "standard", 1.0)]
                self.send(StepReport(events, EngineStats(running=len(events)), service=service))
        self.send(Stopped(None))

    def _execute(self, command: Command) -> bool:
        self.commands.append(command)
        match command:
            case Submit(request):
                assert request.id not in self.running
                self.running[request.id], self.told[request.id] = request, 0
            case Cancel(request_id) if request_id in self.running:
                self.send(StepReport([self._end(self.running[request_id], "cancelled")]))
            case Pin(ref, owner):
                self.send(StepReport([], pins=[Pinned(ref.digest, owner)]))
        return isinstance(command, Shutdown)

    def _next(self, request: Request) -> TokenEvent:
        token = len(request.output_token_ids) + self.told[request.id]
        self.told[request.id] += 1
        if token + 1 >= request.sampling.max_tokens:
            return self._end(request, "length", token)
        return TokenEvent(request_id=request.id, token_id=token)

    def _end(self, request: Request, reason: str, token: int | None = None) -> TokenEvent:
        del self.running[request.id]
        count = EngineCount(tokens=TokenCounts(output=self.told[request.id]))
        return TokenEvent(request_id=request.id, token_id=token, finish_reason=reason, count=count)


@dataclass
class Listening:
    """The engine's end."""

    address: str
    sessions: FrontSessions
    worker: CountingWorker
    files: LocalFiles
    engine_pair: KeyPair
    front_pair: KeyPair
    authorized: set[bytes]
    lease_s: float

    def channel(self, base: str = BASE, pair: KeyPair | None = None, engine_key: bytes | None = None) -> RemoteChannel:
        place = EnginePlace(self.address, engine_key or self.engine_pair.public)
        return RemoteChannel(lambda: place, base, pair or self.front_pair, self.lease_s)

    def client(self, **changes: Any) -> EngineClient:
        return EngineClient(self.channel(**changes), 600.0)


@contextmanager
def listening(
    lease_s: float = 60.0, *, is_open: bool = True, address: str = "tcp://127.0.0.1:0"
) -> Iterator[Listening]:
    engine_pair, front_pair = new_pair(), new_pair()
    authorized = {front_pair.public}
    listener = EngineListener(BASE, engine_pair, lambda key: key in authorized, lease_s)
    files = LocalFiles()
    inbox: queue.SimpleQueue[Command] = queue.SimpleQueue()
    sessions = FrontSessions(inbox.put, files, listener.wake)
    worker = CountingWorker(sessions.report, inbox)
    if is_open:
        worker.is_open.set()
    bound = listener.bind(address)
    listener.start(sessions)
    thread = threading.Thread(target=worker.run, daemon=True)
    thread.start()
    try:
        yield Listening(bound, sessions, worker, files, engine_pair, front_pair, authorized, lease_s)
    finally:
        worker.is_open.set()
        worker.inbox.put(Shutdown())
        thread.join(30)
        listener.close(5.0)


async def until(happened: Callable[[], object], seconds: float = 60.0) -> None:
    async with asyncio.timeout(seconds):
        while not happened():  # noqa: ASYNC110  what is waited for has no event
            await asyncio.sleep(0.005)


def until_true(happened: Callable[[], object], seconds: float = 60.0) -> None:
    end = time.monotonic() + seconds
    while not happened():
        assert time.monotonic() < end, "it did not happen"
        time.sleep(0.005)
