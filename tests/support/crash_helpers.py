"""Work that is killed at a moment of the test's choice."""

from __future__ import annotations

import asyncio
import os
import signal
import types
from collections.abc import Awaitable, Callable, Generator
from typing import Any


@types.coroutine
def dying(work: Awaitable[Any], lives: int) -> Generator[Any, Any, Any]:
    """Await `work`, and die (kill -9) when it has waited or been woken `lives` times."""
    steps, sent = work.__await__(), None
    while True:
        try:
            waiting = steps.send(sent)
        except StopIteration as end:
            return end.value
        lives = _one_less(lives)
        sent = yield waiting
        lives = _one_less(lives)


def _one_less(lives: int) -> int:
    if lives == 0:
        os.kill(os.getpid(), signal.SIGKILL)
    return lives - 1


def survives(work: Callable[[], Awaitable[Any]], lives: int) -> bool:
    """Return True if `work`, in a separate process, ends before it has used up its lives."""
    child = os.fork()
    if child == 0:
        try:
            asyncio.run(_all_of(work, lives))
        except BaseException:
            import traceback

            traceback.print_exc()
            os._exit(1)
        os._exit(0)
    _, status = os.waitpid(child, 0)
    assert status in (0, signal.SIGKILL), "the work itself fails"
    return status == 0


async def _all_of(work: Callable[[], Awaitable[Any]], lives: int) -> None:
    await dying(work(), lives)
