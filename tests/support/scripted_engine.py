"""An engine that answers without a model: each request is continued by a script, token by token."""

from __future__ import annotations

import asyncio
from array import array
from collections.abc import Callable
from dataclasses import dataclass, field

import msgspec

from loramux.common.units import TokenCounts
from loramux.engine.client import ENGINE_DIED, EngineDied, OnEvent
from loramux.engine.messages import (
    AdapterRef,
    EngineCount,
    EngineFault,
    EngineStats,
    LinearFacts,
    ModelFacts,
    PromptLogprob,
    PromptLogprobs,
    Request,
    RoutingFacts,
    StepLimits,
    TenantService,
    TokenEvent,
    TopLogprob,
)

EOS = 256
FACTS = ModelFacts(
    max_model_len=256,
    vocab_size=260,
    eos_token_ids=(EOS,),
    dtype="float32",
    pages_total=64,
    block_size=16,
    kv_cache_dtype="auto",
    weights="tiny",
    hidden_size=8,
    limits=StepLimits(64, 1024, 256),
    linears=LinearFacts(format="panels", gflops=400.0, bandwidth=20e9, floor_s=0.025),
)
Script = Callable[[Request], list[int | EngineFault]]


def echo(request: Request) -> list[int | EngineFault]:
    """Say the prompt again, then end."""
    return [*(token for token in request.prompt_token_ids if token < EOS), EOS]


@dataclass
class ScriptedEngine:
    """Says what `script` says, one token every `pause` seconds."""

    script: Script = echo
    pause: float = 0.0
    labels: int = 8
    """Number of labels of every classifier."""
    facts: ModelFacts = FACTS
    requests: list[Request] = field(default_factory=list)
    cancelled: list[str] = field(default_factory=list)
    retired: list[str] = field(default_factory=list)
    pinned: list[tuple[str, str]] = field(default_factory=list)
    lifted: list[TenantService] = field(default_factory=list)
    refuses_pins: EngineFault | None = None
    died: asyncio.Event = field(default_factory=asyncio.Event)
    stopped: asyncio.Event = field(default_factory=asyncio.Event)
    waits_s: float = 0.0
    load: tuple[float, float] | None = None
    """Load times of the adapter in every request's first event."""
    overrun: int = 0
    """Tokens that still come after a cancellation."""
    prefilled: int = 0
    """Prompt tokens that were computed of a request that is cancelled before its first token."""
    left: dict[str, asyncio.Event] = field(default_factory=dict)
    told: dict[str, int] = field(default_factory=dict)
    tasks: dict[str, asyncio.Task[None]] = field(default_factory=dict)
    running: int = 0
    started: bool = False

    async def start(self) -> ModelFacts:
        self.started = True
        self.stopped.clear()
        return self.facts

    def submit(self, request: Request, on_event: OnEvent) -> None:
        self._ensure_alive()
        request = msgspec.msgpack.decode(msgspec.msgpack.encode(request), type=Request)  # as it crosses to a worker
        self.requests.append(request)
        self.left.setdefault(request.id, asyncio.Event())
        self.running += 1
        self.tasks[request.id] = asyncio.create_task(self._deliver(request, on_event))

    def forget(self, request_id: str) -> None:
        self.cancel(request_id)
        if task := self.tasks.get(request_id):
            task.cancel()

    async def _deliver(self, request: Request, on_event: OnEvent) -> None:
        try:
            await self._play(request, on_event)
        except EngineDied as died:
            fault = EngineFault(ENGINE_DIED, str(died))
            on_event(TokenEvent(request_id=request.id, finish_reason="error", fault=fault))
        except Exception as error:
            fault = EngineFault("internal_error", f"the engine failed: {type(error).__name__}")
            on_event(TokenEvent(request_id=request.id, finish_reason="error", fault=fault, count=EngineCount()))
        finally:
            self.running -= 1
            del self.tasks[request.id]

    async def _play(self, request: Request, on_event: OnEvent) -> None:
        late = 0
        if request.report_start:
            on_event(TokenEvent(request_id=request.id, is_worked_on=True))
        for number, event in enumerate(self._events(request)):
            await self._pause(request.id)
            self._ensure_alive()
            late += request.id in self.cancelled
            if late > self.overrun:
                event = TokenEvent(request_id=request.id, finish_reason="cancelled")  # noqa: PLW2901
            event = self._counted(request, event)  # noqa: PLW2901
            on_event(event if number else msgspec.structs.replace(event, load=self.load))
            if event.finish_reason is not None:
                return

    def cancel(self, request_id: str) -> None:
        if request_id not in self.cancelled:
            self.cancelled.append(request_id)
            self.left.setdefault(request_id, asyncio.Event()).set()

    def retire(self, digest: str) -> None:
        if digest not in self.retired:
            self.retired.append(digest)

    async def pin(self, ref: AdapterRef, owner: str = "") -> EngineFault | None:
        if self.refuses_pins is None:
            self.pinned.append((ref.digest, owner))
        return self.refuses_pins

    def unpin(self, digest: str, owner: str = "") -> None:
        if (digest, owner) in self.pinned:
            self.pinned.remove((digest, owner))

    def on_service(self, services: list[TenantService]) -> None:
        """Replaced by the listener."""

    def lift(self, services: list[TenantService]) -> None:
        self.lifted += services

    stats_at = 0.0

    def stats(self) -> EngineStats:
        routing = RoutingFacts(wait_s=self.waits_s)
        return EngineStats(
            steps=len(self.requests), running=self.running, pages_total=64, pages_free=64, routing=routing
        )

    @property
    def unclaimed_tokens(self) -> int:
        return 0

    @property
    def alive(self) -> bool:
        return self.started and not self.died.is_set()

    @property
    def has_ended(self) -> bool:
        return not self.alive

    async def wait_end(self) -> str:
        ends = {asyncio.ensure_future(event.wait()) for event in (self.died, self.stopped)}
        await asyncio.wait(ends, return_when=asyncio.FIRST_COMPLETED)
        for one in ends:
            one.cancel()
        return "the script says so"

    async def stop(self) -> None:
        self.started = False
        self.stopped.set()

    async def _pause(self, request_id: str) -> None:
        waiting = {asyncio.ensure_future(event.wait()) for event in (self.died, self.left[request_id])}
        await asyncio.wait(waiting, timeout=self.pause, return_when=asyncio.FIRST_COMPLETED)
        for one in waiting:
            one.cancel()

    def _events(self, request: Request) -> list[TokenEvent]:
        if request.pooling is not None:
            return self._rows(request) if request.pooling == "token_classify" else [self._vector(request)]
        said = self.script(request)[: request.sampling.max_tokens - len(request.output_token_ids)]
        events = [self._event(request, one, last=number == len(said)) for number, one in enumerate(said, start=1)]
        return [*self._prompt_events(request), *events]

    def _vector(self, request: Request) -> TokenEvent:
        """Return the script's vector of a prompt: the mean of the ids, and further numbers up to the width."""
        said = self.script(request)
        if said and isinstance(said[0], EngineFault):
            return TokenEvent(request_id=request.id, finish_reason="error", fault=said[0])
        ids = request.prompt_token_ids
        width = self.labels if request.pooling == "classify" else self.facts.hidden_size
        vector = array("f", [sum(ids) / len(ids), *range(1, width)])
        return TokenEvent(request_id=request.id, finish_reason="stop", pooled=vector.tobytes())

    def _rows(self, request: Request) -> list[TokenEvent]:
        """Return a row for each token of a prompt, its id and further numbers, in parts. Rows come again as after a
        preemption.
        """
        ids = request.prompt_token_ids
        parts = [part for part in ((0, 3), (0, 5), (3, len(ids))) if part[1] < len(ids)] + [(0, len(ids))]
        return [
            TokenEvent(
                request_id=request.id,
                finish_reason="stop" if part is parts[-1] else None,
                pooled=array(
                    "f", [(id + n) % self.labels for id in ids[slice(*part)] for n in range(self.labels)]
                ).tobytes(),
                pooled_tokens=part,
            )
            for part in parts
        ]

    def _prompt_events(self, request: Request) -> list[TokenEvent]:
        """Two events with the prompt's log probabilities, -0.25 for each token, if they are requested."""
        asked = request.sampling.prompt_logprobs
        if asked is None:
            return []
        tokens = [
            PromptLogprob(-0.25, 1, [TopLogprob(token, -0.25), TopLogprob(token ^ 1, -1.25)][:asked])
            for token in request.prompt_token_ids[1:]
        ]
        parts = [PromptLogprobs(1, tokens[:2]), PromptLogprobs(3, tokens[2:])]
        return [TokenEvent(request_id=request.id, prompt_logprobs=part) for part in parts if part.tokens]

    def _counted(self, request: Request, event: TokenEvent) -> TokenEvent:
        told = self.told.get(request.id, 0) + (event.token_id is not None)
        self.told[request.id] = told
        if event.finish_reason is None:
            return event
        prompt = 0 if request.output_token_ids else len(request.prompt_token_ids)
        answered = told or event.pooled is not None
        tokens = TokenCounts(prompt=prompt if answered else min(prompt, self.prefilled), output=told)
        return msgspec.structs.replace(event, count=EngineCount(tokens=tokens))

    def _ensure_alive(self) -> None:
        if not self.alive:
            raise EngineDied("the script says so")

    def _event(self, request: Request, said: int | EngineFault, *, last: bool) -> TokenEvent:
        if isinstance(said, EngineFault):
            return TokenEvent(request_id=request.id, finish_reason="error", fault=said)
        stops = said == EOS or said in request.sampling.stop_token_ids
        wanted = request.sampling.logprobs
        top = [TopLogprob(said, -0.5), TopLogprob((said + 1) % EOS, -1.5)][:wanted] if wanted else None
        return TokenEvent(
            request_id=request.id,
            token_id=said,
            logprob=None if wanted is None else -0.5,
            top_logprobs=top,
            finish_reason="stop" if stops else "length" if last else None,
        )
