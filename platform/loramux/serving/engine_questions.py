"""Get answers of the serving engines during an upload's checks: a few short prompts, with an adapter that is not served
yet.

These questions are the platform's own work: no row is opened for them, so they are not billed and do not count towards
limits. The questions have class batch and belong to one internal tenant, so that all checks together have at most one
tenant's share of that class. In the engine, the adapter has a separate digest, and is retired afterwards. If an engine
dies, the questions continue on another engine, like all requests (`fleet.group`). Answers that are not ready in time
are ignored.
"""

from __future__ import annotations

import asyncio
import uuid
from collections.abc import Sequence
from functools import partial
from pathlib import Path

from loramux.catalog.validation.jobs import EngineAnswer
from loramux.catalog.validation.validator import Unanswered
from loramux.common.errors import Rejection
from loramux.engine.client import EngineDied
from loramux.engine.messages import AdapterRef, EngineFault, Request, SamplingParams, ServiceClass, TokenEvent
from loramux.fleet.group import EngineGroup

TENANT = "upload-checks"
OUTPUT_TOKENS = 12
ADAPTER_NOT_FINITE = "adapter_not_finite"


class _Unserved(Exception):
    """The engine ended a request with a fault."""

    def __init__(self, fault: EngineFault) -> None:
        super().__init__(fault.message)
        self.fault = fault


class EngineQuestions:
    """The questions of one server. `ask` is called on threads, and everything else on the event loop."""

    def __init__(self, seconds: float) -> None:
        """`seconds` is the time limit for the answers to one upload's prompts."""
        self._seconds = seconds
        self._loop = asyncio.get_running_loop()
        self._running: set[asyncio.Task[tuple[EngineAnswer, ...] | Unanswered]] = set()
        self._is_stopped = False

    def ask(
        self, engines: EngineGroup, folder: Path, prompts: Sequence[list[int]]
    ) -> tuple[EngineAnswer, ...] | Unanswered:
        """Return the answers with the adapter in `folder`, followed by the base's own answer to the first prompt."""
        return asyncio.run_coroutine_threadsafe(self._ask(engines, folder, prompts), self._loop).result()

    def stop(self) -> None:
        """End the current questions, and answer no more."""
        self._is_stopped = True
        for task in self._running:
            task.cancel()

    async def _ask(
        self, engines: EngineGroup, folder: Path, prompts: Sequence[list[int]]
    ) -> tuple[EngineAnswer, ...] | Unanswered:
        if self._is_stopped:
            return Unanswered("the server is being stopped")
        task = asyncio.create_task(self._answers(engines, folder, prompts))
        self._running.add(task)
        try:
            return await task
        except asyncio.CancelledError:
            return Unanswered("the server is being stopped")
        finally:
            self._running.discard(task)

    async def _answers(
        self, engines: EngineGroup, folder: Path, prompts: Sequence[list[int]]
    ) -> tuple[EngineAnswer, ...] | Unanswered:
        adapter = AdapterRef(f"upload-check-{uuid.uuid4().hex}", str(folder))
        asked = [(prompt, adapter) for prompt in prompts] + [(prompts[0], None)]
        tasks = [asyncio.create_task(_answer(engines, *one)) for one in asked]
        try:
            async with asyncio.timeout(self._seconds):
                return tuple(await asyncio.gather(*tasks))
        except TimeoutError:
            return Unanswered(f"the engine had no time to answer within {self._seconds:g} s")
        except EngineDied:
            return Unanswered("no engine serves")
        except _Unserved as failed:
            return _unanswered(failed.fault)
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
            engines.retire(adapter.digest)


async def _answer(engines: EngineGroup, prompt: list[int], adapter: AdapterRef | None) -> EngineAnswer:
    """Return the answer to one prompt. Raises _Unserved or EngineDied."""
    id = f"upload-check-{uuid.uuid4().hex}"
    answer = EngineAnswer(prompt=prompt, tokens=[], logprobs=[])
    ended: asyncio.Future[None] = asyncio.get_running_loop().create_future()
    sampling = SamplingParams(max_tokens=OUTPUT_TOKENS, temperature=0.0, ignore_eos=True, logprobs=0)
    request = Request(
        id=id,
        tenant=TENANT,
        prompt_token_ids=prompt,
        sampling=sampling,
        adapter=adapter,
        service_class=ServiceClass.BATCH,
    )
    engines.submit(request, partial(_note, answer, ended))
    try:
        await ended
    except asyncio.CancelledError:
        engines.cancel(id)  # the request's last event, with the engine's count, is still received
        raise
    if len(answer.tokens) != OUTPUT_TOKENS:
        raise _Unserved(EngineFault("internal_error", "the engine ended an answer early"))
    return answer


def _unanswered(fault: EngineFault) -> Unanswered:
    """Refuse an adapter if its own numbers cause the fault. Any other reason for a missing answer is ignored."""
    if fault.code == ADAPTER_NOT_FINITE:
        message = f"The weights are finite, and what the serving engine computes with them is not: {fault.message}"
        return Unanswered(message, Rejection(code="outputs_not_finite", field=None, message=message))
    return Unanswered(f"the engine did not answer: {fault.message}")


def _note(answer: EngineAnswer, ended: asyncio.Future[None], event: TokenEvent) -> None:
    if event.token_id is not None and event.logprob is not None:
        answer.tokens.append(event.token_id)
        answer.logprobs.append(event.logprob)
    if event.finish_reason is None or ended.done():
        return
    if event.fault is None:
        ended.set_result(None)
    else:
        ended.set_exception(_Unserved(event.fault))
