"""An engine that answers without a model: each request is continued by a script, token by token."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, field

import msgspec

from loramux.engine import EngineDied
from loramux.engine.messages import EngineFault, EngineStats, ModelFacts, TokenEvent, TopLogprob
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
    died: asyncio.Event = field(default_factory=asyncio.Event)
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
        event = None
        try:
            said = self.script(request)[: request.sampling.max_tokens]
            for number, said_now in enumerate(said, start=1):
                await self._pause()
                self._demand_alive()
                event = self._event(request, said_now, last=number == len(said))
                yield event
                if event.finish_reason is not None:
                    return
        finally:
            self.running -= 1
            if event is None or event.finish_reason is None:
                self.cancelled.append(request.id)

    def retire(self, digest: str) -> None:
        self.retired.append(digest)

    async def pin(self, ref: AdapterRef, owner: str = "") -> EngineFault | None:
        self.pinned.append((ref.digest, owner))
        return None

    def unpin(self, digest: str, owner: str = "") -> None:
        self.pinned.remove((digest, owner))

    def stats(self) -> EngineStats:
        return EngineStats(steps=len(self.requests), running=self.running, pages_total=64, pages_free=64)

    @property
    def alive(self) -> bool:
        return self.started and not self.died.is_set()

    async def stop(self) -> None:
        self.started = False

    async def _pause(self) -> None:
        waiting = asyncio.ensure_future(self.died.wait())
        await asyncio.wait({waiting}, timeout=self.pause)
        waiting.cancel()

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
