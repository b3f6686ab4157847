"""An engine that answers without a model: each request is continued by a script, token by token."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, field

import msgspec

from loramux.engine import EngineDied
from loramux.engine.messages import EngineCount, EngineFault, EngineStats, ModelFacts, TokenEvent, TopLogprob
from loramux.engine.request import AdapterRef, Request

EOS = 256
FACTS = ModelFacts(
    max_model_len=256, vocab_size=260, eos_token_ids=(EOS,), dtype="float32", pages_total=64, block_size=16
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
    facts: ModelFacts = FACTS
    requests: list[Request] = field(default_factory=list)
    cancelled: list[str] = field(default_factory=list)
    retired: list[str] = field(default_factory=list)
    pinned: list[tuple[str, str]] = field(default_factory=list)
    refuses_pins: EngineFault | None = None
    died: asyncio.Event = field(default_factory=asyncio.Event)
    overrun: int = 0
    """Tokens that still come after a cancellation."""
    left: dict[str, asyncio.Event] = field(default_factory=dict)
    told: dict[str, int] = field(default_factory=dict)
    running: int = 0
    started: bool = False

    async def start(self) -> ModelFacts:
        self.started = True
        return self.facts

    async def stream(self, request: Request) -> AsyncIterator[TokenEvent]:
        self._demand_alive()
        request = msgspec.msgpack.decode(msgspec.msgpack.encode(request), type=Request)  # as the mailbox does
        self.requests.append(request)
        self.running += 1
        self.left[request.id] = asyncio.Event()
        finished, late = False, 0
        try:
            for event in self._events(request):
                await self._pause(request.id)
                self._demand_alive()
                if request.id in self.cancelled:
                    late += 1
                if late > self.overrun:
                    event = TokenEvent(request_id=request.id, finish_reason="cancelled")  # noqa: PLW2901
                event = self._counted(request, event)  # noqa: PLW2901
                finished = event.finish_reason is not None
                yield event
                if finished:
                    return
        finally:
            self.running -= 1
            if not finished:
                self.cancel(request.id)

    def cancel(self, request_id: str) -> None:
        if request_id not in self.cancelled:
            self.cancelled.append(request_id)
            self.left[request_id].set()

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

    def stats(self) -> EngineStats:
        return EngineStats(steps=len(self.requests), running=self.running, pages_total=64, pages_free=64)

    @property
    def unclaimed_tokens(self) -> int:
        return 0

    @property
    def alive(self) -> bool:
        return self.started and not self.died.is_set()

    async def stop(self) -> None:
        self.started = False

    async def _pause(self, request_id: str) -> None:
        waiting = {asyncio.ensure_future(event.wait()) for event in (self.died, self.left[request_id])}
        await asyncio.wait(waiting, timeout=self.pause, return_when=asyncio.FIRST_COMPLETED)
        for one in waiting:
            one.cancel()

    def _events(self, request: Request) -> list[TokenEvent]:
        said = self.script(request)[: request.sampling.max_tokens]
        return [self._event(request, one, last=number == len(said)) for number, one in enumerate(said, start=1)]

    def _counted(self, request: Request, event: TokenEvent) -> TokenEvent:
        told = self.told.get(request.id, 0) + (event.token_id is not None)
        self.told[request.id] = told
        if event.finish_reason is None:
            return event
        count = EngineCount(prompt_tokens=len(request.prompt_token_ids), output_tokens=told) if told else EngineCount()
        return msgspec.structs.replace(event, count=count)

    def _demand_alive(self) -> None:
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
