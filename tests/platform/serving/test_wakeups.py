"""Task wake-ups between the engine's events and the reader, counted on the event loop."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path

import pytest
from gateway_harness import Harness, in_harness

from loramux.common.units import TokenCounts
from loramux.engine.messages import EngineCount, Request, TokenEvent

NUM_TOKENS = 200


def feed(on_event: Callable[[TokenEvent], None], request: Request, number: int = 1) -> None:
    """Send one event in every iteration of the loop, as reports of single steps arrive."""
    last = number == NUM_TOKENS
    tokens = TokenCounts(prompt=len(request.prompt_token_ids), output=number)
    count = EngineCount(tokens=tokens) if last else None
    on_event(
        TokenEvent(request_id=request.id, token_id=65, finish_reason="length" if last else None, count=count),
    )
    if not last:
        loop = asyncio.get_running_loop()
        loop.call_soon(loop.call_soon, feed, on_event, request, number + 1)


def test_a_streamed_token_wakes_one_task(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    wakeups = []
    run = asyncio.Handle._run

    async def test(made: Harness) -> None:
        others = asyncio.all_tasks() - {asyncio.current_task()}

        def count(handle: asyncio.Handle) -> None:
            # The harness's periodic tasks wake more often on a busy machine; they are not the answer's.
            if isinstance(task := getattr(handle._callback, "__self__", None), asyncio.Task) and task not in others:
                wakeups.append(handle)
            run(handle)

        def submit(request: Request, on_event: Callable[[TokenEvent], None]) -> None:
            feed(on_event, request)

        made.engine.submit = submit
        generation = await made.begin(prompts=([1, 2],), max_tokens=NUM_TOKENS)
        monkeypatch.setattr(asyncio.Handle, "_run", count)
        deltas = [delta async for delta in generation]
        monkeypatch.undo()
        assert sum(len(delta.token_ids) for delta in deltas) == NUM_TOKENS
        assert 0.9 * NUM_TOKENS < len(wakeups) < 1.25 * NUM_TOKENS

    in_harness(test, tmp_path)
