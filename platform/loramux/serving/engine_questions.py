"""Questions of uploads' checks to the serving engines: a few short prompts, with an adapter that is not served yet.

They are the platform's own work: no row is opened for them, so they are not billed and no limit counts them. They are
of class batch and of one tenant of their own, so that all checks together have at most one tenant's share of that
class. The adapter has a digest of its own there, and is retired afterwards. An engine that dies is survived as by any
request (`fleet.group`); what is not answered in time is not waited for.
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
    """The engine has ended a request with a fault."""

    def __init__(self, fault: EngineFault) -> None:
        super().__init__(fault.message)
        self.fault = fault


class EngineQuestions:
    """The questions of one server. `ask` is called on threads, everything else on the event loop."""

    def __init__(self, seconds: float) -> None:
        """`seconds`: the time for the answers to one upload's prompts."""
        self._seconds = seconds
        self._loop = asyncio.get_running_loop()
        self._running: set[asyncio.Task[tuple[EngineAnswer, ...] | Unanswered]] = set()
        self._is_stopped = False

    def ask(
        self, engines: EngineGroup, folder: Path, prompts: Sequence[list[int]]
    ) -> tuple[EngineAnswer, ...] | Unanswered:
        """Return the answers with the adapter in `folder`, and last the base's own to the first prompt."""
        return asyncio.run_coroutine_threadsafe(self._ask(engines, folder, prompts), self._loop).result()

    def stop(self) -> None:
        """End the questions under way, and answer no more."""
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
    """Have one prompt answered. Raises _Unserved or EngineDied."""
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
        engines.cancel(id)  # its last event, with the engine's count, is still heard
        raise
    if len(answer.tokens) != OUTPUT_TOKENS:
        raise _Unserved(EngineFault("internal_error", "the engine ended an answer early"))
    return answer


def _unanswered(fault: EngineFault) -> Unanswered:
    """Refuse an adapter whose own numbers are at fault; whatever else keeps an engine from answering passes."""
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
