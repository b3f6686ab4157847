"""Processor time of the parts of a request in the event loop of the server (`front.py --parts`).

The functions of PARTS are replaced by timed ones in the server's process. A part's time is that of the event loop's
thread in its functions, without the parts that they call. A coroutine counts only while it runs. The sums are in a file
that the benchmark maps too. The clock itself costs about 2 us a call, which is in the figures.
"""

from __future__ import annotations

import functools
import importlib
import inspect
import mmap
import threading
import time
from collections.abc import Awaitable, Callable, Generator
from pathlib import Path
from typing import Any

PARTS = {
    "http": "loramux_api.app:Application.__call__",
    "authentication": "loramux.accounts.tenants.authentication:Authenticator.authenticate",
    "body": "loramux_api.bodies:ApiRequest.body",
    "decoding": "loramux_api.bodies:StrictJSON.decode_bytes",
    "conversion": "loramux_api.controllers.chat:to_request",
    "answering": "loramux_api.answering:Inference.answer",
    "response": "loramux_api.answering:respond",
    "watch of the client": "loramux_api.answering:run_while_connected",
    "watch of the client, its task": "loramux_api.answering:_until_disconnected",
    "begin": "loramux.serving.service:CompletionService.begin",
    "resolving": "loramux.catalog.registry.resolver:ModelResolver.resolve",
    "checks": "loramux.serving.bases:RequestReader.read",
    "tokenizing": "loramux.serving.bases:RequestReader._tokenize_all",
    "group commit": "loramux.money.usage.group_commit:GroupCommit._write",
    "transaction": "loramux.money.usage.settlement:SettlementWriter._commit",
    "admission": "loramux.money.limits.admission:AdmissionBatch.read",
    "reservation": "loramux.money.limits.admission:AdmissionBatch.write",
    "open row": "loramux.money.usage.settlement:SettlementWriter._open",
    "lock of the ledger": "loramux.data.records.ledger:LedgerRepository.lock",
    "closed row": "loramux.data.records.requests:RequestRepository.close",
    "ledger": "loramux.money.usage.settlement:SettlementWriter._settle",
    "generation": "loramux.serving.generation:Generation._run",
    "submission": "loramux.serving.generation:Generation._submit",
    "events": "loramux.serving.generation:Generation._on_event",
    "end": "loramux.serving.service:CompletionService._count",
}


class Sums:
    """Nanoseconds of each part since the server's start, in a file that two processes map."""

    def __init__(self, file: Path) -> None:
        size = 8 * len(PARTS)
        if not file.exists():
            file.write_bytes(bytes(size))
        with file.open("r+b") as opened:
            self.cells = memoryview(mmap.mmap(opened.fileno(), size)).cast("q")

    def microseconds(self) -> dict[str, float]:
        """Return the sums."""
        return {part: self.cells[number] / 1000 for number, part in enumerate(PARTS)}


class Clock:
    """Gives the time of the event loop's thread to the part that runs, the innermost of those that have begun."""

    def __init__(self, sums: Sums) -> None:
        self._cells = sums.cells
        self._begun: list[int] = []
        self._since = 0

    def enter(self, part: int) -> None:
        """Let a part begin."""
        self._note()
        self._begun.append(part)

    def leave(self) -> None:
        """End the innermost part."""
        self._note()
        self._begun.pop()

    def _note(self) -> None:
        now = time.thread_time_ns()
        if self._begun:
            self._cells[self._begun[-1]] += now - self._since
        self._since = now


class Timed:
    """A coroutine whose steps count as a part."""

    def __init__(self, coroutine: Awaitable[Any], clock: Clock, part: int) -> None:
        self._steps: Generator[Any, Any, Any] = coroutine.__await__()
        self._clock, self._part = clock, part

    def __await__(self) -> Timed:
        return self

    def __iter__(self) -> Timed:
        return self

    def __next__(self) -> Any:
        return self._step(self._steps.send, None)

    def send(self, value: Any) -> Any:
        """Continue with a value."""
        return self._step(self._steps.send, value)

    def throw(self, *error: Any) -> Any:
        """Continue with an error."""
        return self._step(self._steps.throw, *error)

    def close(self) -> None:
        """End the coroutine."""
        self._steps.close()

    def _step(self, step: Callable[..., Any], *arguments: Any) -> Any:
        self._clock.enter(self._part)
        try:
            return step(*arguments)
        finally:
            self._clock.leave()


def install(file: Path) -> None:
    """Replace the functions of PARTS in this process, whose main thread is the event loop's."""
    clock = Clock(Sums(file))
    for number, place in enumerate(PARTS.values()):
        module, _, path = place.partition(":")
        *owners, name = path.split(".")
        owner = functools.reduce(getattr, owners, importlib.import_module(module))
        setattr(owner, name, _timed(getattr(owner, name), clock, number))


def _timed(function: Callable[..., Any], clock: Clock, part: int) -> Callable[..., Any]:
    if inspect.iscoroutinefunction(function):

        @functools.wraps(function)
        async def timed_coroutine(*arguments: Any, **named: Any) -> Any:
            return await Timed(function(*arguments, **named), clock, part)

        return timed_coroutine

    @functools.wraps(function)
    def timed(*arguments: Any, **named: Any) -> Any:
        if threading.current_thread() is not threading.main_thread():
            return function(*arguments, **named)
        clock.enter(part)
        try:
            return function(*arguments, **named)
        finally:
            clock.leave()

    return timed
