"""From an Ask to a running Generation: resolve the model, read the prompts, check the limits, submit."""

from __future__ import annotations

import asyncio
import hashlib
import time
import uuid
from collections.abc import Callable
from dataclasses import dataclass, field
from importlib.metadata import version
from itertools import product

import msgspec

from loramux.engine import EngineClient
from loramux.engine.distribution import SECONDS, Histogram
from loramux.engine.messages import ModelFacts
from loramux.engine.request import AdapterRef, Request, SamplingParams, ServiceClass
from loramux.gateway.answers import Answer, Replay
from loramux.gateway.ask import Ask, Prompt
from loramux.gateway.choice import Choice
from loramux.gateway.errors import Draining, EngineDown
from loramux.gateway.generation import Generation
from loramux.gateway.limits import check_text_length, check_token_ids, context_length, settle_max_tokens
from loramux.gateway.tokenizer import Tokenizer
from loramux.gateway.transcript import Transcript
from loramux.registry import Registry, ResolvedModel
from loramux.tenants import Principal
from loramux.usage import OpenedRequest, Usage

ENDS = ("completed", "cancelled", "failed", "refused", "replayed")
_SEEDS = 2**63
"""Seeds wrap round at this."""


@dataclass(slots=True)
class Counters:
    """Since the start, over all tenants."""

    requests: dict[str, int] = field(default_factory=lambda: dict.fromkeys(ENDS, 0))
    """By how they ended."""
    prompt_tokens: int = 0
    cached_tokens: int = 0
    completion_tokens: int = 0
    token_gaps: Histogram = field(default_factory=lambda: Histogram(SECONDS))
    """Seconds between one token and the next, of requests that have ended."""


@dataclass(frozen=True, slots=True)
class _Asked:
    """Who asks for what, and what became of it."""

    principal: Principal
    ask: Ask
    opened: OpenedRequest
    model: ResolvedModel


class CompletionService:
    """Answers Asks from one engine, for every tenant."""

    def __init__(
        self,
        *,
        engine: EngineClient,
        facts: ModelFacts,
        registry: Registry,
        usage: Usage,
        tokenizer: Tokenizer,
        share_base_cache: bool = False,
    ) -> None:
        """`share_base_cache`: a tenant's projects find each other's KV of the base model; tenants never do."""
        self.facts = facts
        self.context = context_length(facts)
        self.counters = Counters()
        backend = f"{version('loramux')} {facts.dtype} {facts.vocab_size} {facts.max_model_len}"
        self.fingerprint = "fp_" + hashlib.sha256(backend.encode()).hexdigest()[:12]
        """Changes when the backend does."""
        self._engine = engine
        self._registry = registry
        self._usage = usage
        self._tokenizer = tokenizer
        self._share_base_cache = share_base_cache
        self._running: set[Generation] = set()
        self._observers: list[Callable[[Generation], None]] = []
        self._draining = False

    @property
    def running(self) -> int:
        """Requests under way."""
        return len(self._running)

    @property
    def draining(self) -> bool:
        """Whether new requests are refused because the server is being stopped."""
        return self._draining

    @property
    def serving(self) -> bool:
        """Whether a request would be taken now."""
        return self._engine.alive and not self._draining

    async def begin(self, principal: Principal, ask: Ask) -> Answer:
        """Start the request.

        Raises ModelNotFound or RevisionUnavailable (registry), InvalidRequest, Draining, EngineDown, LimitsError, and
        where its idempotency key stands against it IdempotencyMismatch or StillRunning.
        """
        self.demand_serving()
        id = f"{ask.kind}-{uuid.uuid4().hex}"
        model = await self._registry.resolve(principal, ask.model, ask.user or id)
        prompts = [await self._read(prompt) for prompt in ask.prompts]
        check_token_ids(ask, prompts, self.facts.vocab_size)
        read = zip(ask.prompts, prompts, strict=True)
        budgets = [settle_max_tokens(ask, prompt, len(token_ids), self.context) for prompt, token_ids in read]
        self.demand_serving()
        opened = OpenedRequest(
            id=id,
            tenant=principal.tenant,
            key_id=principal.key_id,
            project_id=principal.project,
            model=model.name,
            adapter_digest=model.revision.digest if model.revision else None,
            base_model=model.base_model,
            tier=principal.tier,
            tags=ask.tags,
            prompt_tokens=sum(map(len, prompts)),
            max_tokens=sum(budgets) * ask.n,
            waiting=sum(one.tenant == principal.tenant and one.waiting for one in self._running),
            claim=ask.claim,
        )
        choices = [
            self._choice(_Asked(principal, ask, opened, model), (p, prompts[p], budgets[p]), i)
            for p, i in product(range(len(prompts)), range(ask.n))
        ]
        generation = self._watch(Generation(opened, int(time.time()), choices, self._engine, self._usage))
        answered = await generation.admitted()
        return generation if answered is None else Replay(answered)

    def on_ended(self, observer: Callable[[Generation], None]) -> None:
        """Call `observer` with every generation that has ended."""
        self._observers.append(observer)

    def demand_accepting(self) -> None:
        """Raise Draining when the server is being stopped."""
        if self._draining:
            raise Draining

    def demand_serving(self) -> None:
        """Raise Draining or EngineDown unless a request would be taken now."""
        self.demand_accepting()
        if not self._engine.alive:
            raise EngineDown

    def stop_accepting(self) -> None:
        """Refuse new requests from now on."""
        self._draining = True

    async def drain(self, seconds: float) -> None:
        """Refuse new requests; let the running ones end, and cut off what still runs after `seconds`."""
        self.stop_accepting()
        tasks = {generation.task for generation in self._running}
        if tasks:
            await asyncio.wait(tasks, timeout=seconds)
        for generation in tuple(self._running):
            generation.cut_off(Draining())
        if self._running:
            await asyncio.wait({generation.task for generation in self._running})

    async def _read(self, prompt: Prompt) -> list[int]:
        check_text_length(prompt, self._tokenizer.longest_token, self.context)
        if isinstance(prompt, str):
            return await self._tokenizer.encode(prompt)
        return prompt if isinstance(prompt, list) else await self._tokenizer.encode_chat(prompt)

    def _choice(self, asked: _Asked, prompt: tuple[int, list[int], int], i: int) -> Choice:
        number, token_ids, max_tokens = prompt
        ask, opened, principal = asked.ask, asked.opened, asked.principal
        index = number * ask.n + i
        revision = asked.model.revision
        request = Request(
            id=f"{opened.id}-{index}",
            tenant=opened.tenant,
            prompt_token_ids=token_ids,
            sampling=_seeded(msgspec.structs.replace(ask.sampling, max_tokens=max_tokens), i),
            adapter=AdapterRef(revision.digest, str(revision.directory)) if revision else None,
            deadline_ms=ask.deadline_ms,
            service_class=ServiceClass(principal.service_class),
            weight=float(principal.weight),
            cache_scope="" if self._share_base_cache else principal.project,
        )
        transcript = Transcript(index, self._tokenizer, token_ids, ask.stop, ask.sampling.min_tokens)
        return Choice(number, request, transcript)

    def _watch(self, generation: Generation) -> Generation:
        self._running.add(generation)
        generation.task.add_done_callback(lambda _: self._count(generation))
        return generation

    def _count(self, generation: Generation) -> None:
        self._running.discard(generation)
        self.counters.requests[generation.status] += 1
        used = generation.usage
        self.counters.prompt_tokens += used.prompt_tokens
        self.counters.cached_tokens += used.cached_tokens
        self.counters.completion_tokens += used.completion_tokens
        self.counters.token_gaps.add(generation.token_gaps)
        for observer in self._observers:
            observer(generation)


def _seeded(sampling: SamplingParams, i: int) -> SamplingParams:
    """Choice i of a seeded request has a seed of its own."""
    if sampling.seed is None:
        return sampling
    return msgspec.structs.replace(sampling, seed=(sampling.seed + i) % _SEEDS)
