"""Turn a GenerationRequest into a running Generation: resolve, tokenize, check, open the usage, submit."""

from __future__ import annotations

import asyncio
import math
import time
import uuid
from collections import Counter
from collections.abc import Callable
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field
from http import HTTPStatus
from typing import Any, cast

import msgspec

from loramux.catalog.registry.resolver import ModelResolver, ResolvedModel
from loramux.catalog.validation.rendering import TemplateRenderer
from loramux.common.errors import LoramuxError
from loramux.common.identity import Principal
from loramux.common.jobs import HeldUnits, TenantSlots
from loramux.common.settings.serving import ClassDeadlines
from loramux.common.units import TokenCounts
from loramux.data.entities import ServiceTier
from loramux.data.records.errors import RecordsUnavailable
from loramux.data.records.requests import BACKGROUND, SHADOW, OpenedRequest, charged_tier, service_tier
from loramux.engine.messages import (
    AdapterRef,
    Pooling,
    Request,
    SamplingParams,
    ServiceClass,
)
from loramux.engine.metrics import SECONDS, Histogram
from loramux.money.limits.definitions import RateLimitStatus
from loramux.money.usage.idempotency import StoredAnswer
from loramux.money.usage.service import UsageService
from loramux.money.usage.settlement import unused
from loramux.serving.bases import Reading, ReadRequest, RequestReader, ServedBase, ServedBases, TokenizedText
from loramux.serving.checks import (
    check_depth,
    check_text_length,
    check_token_ids,
    ensure_storage_allowed,
    recorded_user,
    service_class_of,
)
from loramux.serving.errors import Draining, EngineDown, InvalidRequest, TooManyAnswers
from loramux.serving.formats import Format, Formats
from loramux.serving.generation import Generation
from loramux.serving.images import ImageReader
from loramux.serving.kept_answers import Replay
from loramux.serving.messages import (
    Answer,
    GenerationRequest,
)
from loramux.serving.output import Choice, OutputProcessor, PooledOutput, RepeatedPrompt
from loramux.serving.unread import AnswerMemory

ENDS = ("completed", "cancelled", "failed", "refused", "replayed")
_SEEDS = 2**63
"""Modulus of seeds."""
ANSWER_BYTES, ANSWER_BYTES_OF_TENANT = 768 << 20, 192 << 20
"""Maximum bytes of answers that are not sent yet, of all tenants and of one (`serving.unread` counts them)."""
REPLAY_BYTES = 10
"""Bytes of a decoded and written answer for each of its stored bytes."""


@dataclass(slots=True)
class CompletionCounters:
    """Counters since the server's start, over all tenants."""

    requests: dict[str, int] = field(default_factory=lambda: dict.fromkeys(ENDS, 0))
    """Number of requests by their end."""
    tokens: TokenCounts = field(default_factory=TokenCounts)
    token_gaps: dict[tuple[str, str], Histogram] = field(default_factory=dict)
    """Seconds between one token and the next, by base model and service tier, of requests that have ended."""


Recorder = Callable[[Generation], None]
ChooseRecorder = Callable[[Principal, GenerationRequest, OpenedRequest], Recorder | None]
"""A function that gets the request in its original and in its admitted form. It returns a recorder, which gets the
generation with the kept answer.
"""


class CompletionService:
    """Answers GenerationRequests from the engines of their bases, for every tenant."""

    def __init__(
        self,
        *,
        bases: ServedBases,
        resolver: ModelResolver,
        usage: UsageService,
        renderer: TemplateRenderer | None = None,
        images: ImageReader | None = None,
        deadlines: ClassDeadlines | None = None,
    ) -> None:
        """`bases` may change while the service runs. `deadlines` are those of requests without a deadline; None: they
        have none.
        """
        self.bases = bases
        self.counters = CompletionCounters()
        self.draining = False
        """True if new requests are refused because the server is being stopped."""
        self._resolver = resolver
        self._usage = usage
        self._formats = Formats(renderer or TemplateRenderer())
        self._images = images
        self._deadlines = deadlines or ClassDeadlines()
        self._reader = RequestReader(bases, resolver, self._formats, images)
        self._memory = TenantSlots(ANSWER_BYTES, ANSWER_BYTES_OF_TENANT)
        self._running: set[Generation] = set()
        self._opening: Counter[str] = Counter()
        """Number of requests whose admission is awaited, by tenant. Lines of batches and shadows are not counted by
        tenant.
        """
        self._idle = asyncio.Event()
        """Set whenever a request ends and no other runs."""
        self._begun_observers: list[Callable[[Generation], None]] = []
        self._ended_observers: list[Callable[[Generation], None]] = []
        self._refused_observers: list[Callable[[OpenedRequest], None]] = []
        self._choose_recorder: ChooseRecorder | None = None
        self._cut_off = False
        self._last_other_at = -math.inf
        """End of the last request that was neither a line of a batch nor a shadow."""

    @property
    def context(self) -> int:
        """Maximum number of tokens that a request to any base may have."""
        return max((base.context for base in self.bases.values()), default=0)

    @property
    def image_bytes(self) -> int:
        """Maximum bytes of the images of a request to any base; 0 if no base reads images."""
        takes_images = any(base.images is not None for base in self.bases.values())
        return self._images.max_request_bytes if self._images is not None and takes_images else 0

    @property
    def running(self) -> int:
        """Number of requests that run now."""
        return len(self._running) + self._opening.total()

    @property
    def unsettled(self) -> int:
        """Number of requests whose end the database has not accepted yet (`UsageService.unsettled` has the bound)."""
        return len(self._usage.unsettled)

    def class_deadline_ms(self, principal: Principal, service_tier: ServiceTier) -> int | None:
        """Return the deadline of the caller's requests that have no deadline themselves. Raises NotAllowed."""
        deadline_ms: int | None = getattr(self._deadlines, service_class_of(principal, service_tier))
        return deadline_ms

    def others_waiting(self) -> bool:
        """Return whether any request other than lines of batches and shadows waits for its first token."""
        opening = any(tenant for tenant in self._opening)
        return opening or any(one.is_waiting and not one.is_background for one in self._running)

    def others_running(self) -> bool:
        """Return whether any request other than lines of batches and shadows runs."""
        return any(not one.is_background for one in self._running)

    def quiet_seconds(self) -> float:
        """Return the seconds since the last request ended that was neither a line of a batch nor a shadow; 0 while such
        requests run.
        """
        if self.others_running():
            return 0.0
        return time.monotonic() - self._last_other_at

    async def begin(self, principal: Principal, asked: GenerationRequest) -> Answer:
        """Admit the request and start it.

        Raises ModelNotFound or RevisionUnavailable (registry), InvalidRequest, NotAllowed, Draining, EngineDown,
        LimitsError, RecordsUnavailable. Its idempotency key may raise IdempotencyMismatch or StillRunning.
        """
        now = asyncio.get_running_loop().time
        began = now()
        self.ensure_accepting()
        service_class = service_class_of(principal, asked.service_tier)
        check_depth(asked)
        if asked.claim is not None:
            ensure_storage_allowed(principal, "Idempotency-Key")
        id = f"{asked.kind}{uuid.uuid4().hex}"
        with ExitStack() as resources:
            read = await self._reader.read(principal, asked, id, resources)
            self.ensure_accepting()
            opened = self._opened(principal, read, id)
            outcome = await self._open(opened)
            memory = HeldUnits(self._memory, principal.tenant)
            if isinstance(outcome, StoredAnswer):
                if not memory.try_add(REPLAY_BYTES * len(outcome.answer)):
                    raise TooManyAnswers("Too many stored answers of yours are repeated at once. Please send fewer.")
                return Replay(outcome, read.base.name, memory)
            generation = Generation(
                opened,
                outcome,
                _choices(read, _template(principal, read, id, service_class, now() - began)),
                read.base.engines,
                self._usage,
                AnswerMemory(memory, asked, read.repeated_bytes),
                is_streamed=asked.is_streamed,
                prompt_texts=read.echoed,
            )
            held = resources.pop_all()
            generation.task.add_done_callback(lambda _: held.close())
        self._watch(generation)
        choose = self._choose_recorder
        if choose is not None and (recorder := choose(principal, asked, opened)) is not None:
            generation.keep_answer()
            generation.task.add_done_callback(lambda _: recorder(generation))
        return generation

    def _opened(self, principal: Principal, read: ReadRequest, id: str) -> OpenedRequest:
        """Return the facts of the request that its row in the database records."""
        asked, model, prompts = read.asked, read.model, read.prompts
        return OpenedRequest(
            id=id,
            tenant_id=principal.tenant,
            lineage=principal.lineage,
            key_id=principal.key_id,
            project_id=principal.project,
            model=model.billed_name,
            version=model.name,
            adapter_digest=model.revision.digest if model.revision else None,
            base_model=model.base_model,
            tier=charged_tier(principal.tier, asked.service_tier),
            tags=asked.tags,
            user_id=recorded_user(principal, asked.user),
            prompt_tokens=sum(len(prompt.token_ids) for prompt in prompts),
            max_tokens=0 if asked.pooling else sum(prompt.max_tokens for prompt in prompts) * asked.n,
            waiting=0 if asked.service_tier in BACKGROUND else self._num_waiting(principal.tenant),
            claim=asked.claim,
        )

    def _num_waiting(self, tenant: str) -> int:
        """Count the tenant's requests that wait for their first token, without lines of batches and shadows."""
        waiting = (one for one in self._running if one.tenant == tenant and not one.is_background)
        return self._opening[tenant] + sum(one.is_waiting for one in waiting)

    async def _open(self, opened: OpenedRequest) -> RateLimitStatus | StoredAnswer:
        """Await the admission. If the caller is cancelled during this time, usage settles its request."""
        tenant = "" if service_tier(opened.tier) in BACKGROUND else opened.tenant_id
        self._opening[tenant] += 1
        try:
            outcome = await self._usage.open(opened)
        except LoramuxError as error:
            if isinstance(error, RecordsUnavailable):
                self._usage.unsettled.append(unused(opened.id, "platform"))  # the row may have been committed
            is_refused = error.status < HTTPStatus.INTERNAL_SERVER_ERROR
            self.counters.requests["refused" if is_refused else "failed"] += 1
            for observer in self._refused_observers if is_refused else ():
                observer(opened)
            raise
        finally:
            self._opening[tenant] -= 1
            if not self._opening[tenant]:
                del self._opening[tenant]
            self._note_idle()
        if isinstance(outcome, StoredAnswer):
            self.counters.requests["replayed"] += 1
        return outcome

    def _watch(self, generation: Generation) -> None:
        self._running.add(generation)
        for observer in self._begun_observers:
            observer(generation)
        generation.task.add_done_callback(lambda _: self._count(generation))
        if self._cut_off or (self.draining and generation.service_tier == SHADOW):
            generation.abort(Draining())

    def _count(self, generation: Generation) -> None:
        self._running.discard(generation)
        if not generation.is_background:
            self._last_other_at = time.monotonic()
        self.counters.requests[generation.status] += 1
        self.counters.tokens += generation.usage
        gaps = self.counters.token_gaps.setdefault((generation.base_model, generation.service_tier), Histogram(SECONDS))
        gaps.add(generation.token_gaps)
        if generation.unsettled is not None:
            self._usage.unsettled.append(generation.unsettled)
        for observer in self._ended_observers:
            observer(generation)
        self._note_idle()

    def _note_idle(self) -> None:
        if not self.running:
            self._idle.set()

    async def tokenize(self, principal: Principal, asked: GenerationRequest) -> TokenizedText:
        """Return the tokens of the request's first prompt, which may be of any length. Raises the errors of `begin`
        before admission.
        """
        base, format = await self._format_of(principal, asked.model)
        asked = format.apply_defaults(asked, base.facts.sampling_defaults)
        check_text_length(asked.prompts[0], format.tokenizer.longest_token, base.context)
        longest = format.tokenizer.longest_token * base.context
        with ExitStack() as resources:
            reading = Reading(principal, asked, base, format, resources)
            encoded = await self._reader.encode(reading, asked.prompts[0], longest)
        return TokenizedText(encoded.token_ids, base.context, format.tokenizer)

    async def detokenize(self, principal: Principal, model: str, token_ids: list[int]) -> str:
        """Return the text of tokens, including special ones. Raises the same errors as `tokenize`."""
        base, format = await self._format_of(principal, model)
        check_token_ids("tokens", token_ids, max(base.facts.vocab_size, format.num_tokens))
        return await format.tokenizer.decode_all(token_ids, principal.tenant)

    async def describe_tokenizer(self, principal: Principal, model: str | None) -> dict[str, Any]:
        """Return the public facts of a tokenizer; `model` None is the first base. Raises the same errors as
        `tokenize`.
        """
        base, format = await self._format_of(principal, model or "")
        template = format.bundle.chat_template or format.tokenizer.chat_template
        return format.tokenizer.describe() | {"chat_template": template or None, "model_max_length": base.context}

    async def _format_of(self, principal: Principal, model: str) -> tuple[ServedBase, Format]:
        self.ensure_accepting()
        await self._usage.ensure_rate(principal)
        return await self._reader.format_of(principal, model)

    async def ensure_model(self, principal: Principal, model: str) -> None:
        """Raise ModelNotFound or RevisionUnavailable unless this caller may use the model."""
        await self.resolve(principal, model)

    async def ensure_generates(self, principal: Principal, model: str, field: str, purpose: str) -> None:
        """Raise InvalidRequest for `field`, with the `purpose`, if the model generates no text and its base is loaded.

        Raises as `resolve` does too.
        """
        resolved = await self.resolve(principal, model)
        if (base := self.bases.get(resolved.base_model)) is None:
            return
        format = await self._formats.of(base.name, base.format, resolved.revision, principal.tenant)
        if base.facts.generates and format.bundle.task is None:
            return
        task = f" (task type {format.bundle.task})" if format.bundle.task else ""
        raise InvalidRequest(
            f"'{model[:200]}' generates no text: it gives vectors or classes{task}. {purpose}",
            field=field,
            code="unsupported_task",
        )

    async def resolve(self, principal: Principal, model: str) -> ResolvedModel:
        """Return the present meaning of a model's name. Raises as `ModelResolver.resolve` does."""
        return await self._resolver.resolve(principal, model)

    def fingerprint_of(self, answer: Answer) -> str:
        """Return the name of the backend that an answer comes from."""
        return self.bases[answer.base_model].fingerprint

    def on_begun(self, observer: Callable[[Generation], None]) -> None:
        """Call `observer` with every generation that has begun, in the context of its request."""
        self._begun_observers.append(observer)

    def on_ended(self, observer: Callable[[Generation], None]) -> None:
        """Call `observer` with every generation that has ended, in the context of its request."""
        self._ended_observers.append(observer)

    def on_refused(self, observer: Callable[[OpenedRequest], None]) -> None:
        """Call `observer` with every request that was refused by its limits."""
        self._refused_observers.append(observer)

    def record_with(self, choose: ChooseRecorder | None) -> None:
        """Call `choose`, if any, for every admitted request. `choose` returns None or a function that gets the kept
        answer at the end.
        """
        self._choose_recorder = choose

    def ensure_accepting(self) -> None:
        """Raise Draining if the server is being stopped."""
        if self.draining:
            raise Draining

    def stop_accepting(self) -> None:
        """Refuse new requests from now on."""
        self.draining = True

    async def drain(self, seconds: float) -> None:
        """Refuse new requests; let running requests end, and abort requests that still run after `seconds`."""
        self.stop_accepting()
        for generation in tuple(self._running):
            if generation.service_tier == SHADOW:
                generation.abort(Draining())
        with suppress(TimeoutError):
            await asyncio.wait_for(self._until_idle(), seconds)
        self._cut_off = True
        for generation in tuple(self._running):
            generation.abort(Draining())
        await self._until_idle()

    async def drain_base(self, base: ServedBase, seconds: float) -> None:
        """Let the running requests of a base end, and abort requests that still run after `seconds`. The base gets no
        new requests.
        """
        running = [one.task for one in self._running if one.base_model == base.name]
        if running:
            await asyncio.wait(running, timeout=seconds)
        late = [one for one in self._running if one.base_model == base.name]
        for generation in late:
            generation.abort(EngineDown())
        await asyncio.gather(*(one.task for one in late), return_exceptions=True)
        self._formats.forget_base(base.name)

    async def _until_idle(self) -> None:
        while self.running:
            self._idle.clear()
            await self._idle.wait()


def _template(principal: Principal, read: ReadRequest, id: str, service_class: ServiceClass, seconds: float) -> Request:
    """Return the engine's request without the fields that differ between choices. `seconds`: the time since its
    arrival, which its deadline counts.
    """
    asked, revision, format = read.asked, read.model.revision, read.format
    deadline_ms = None if asked.deadline_ms is None else max(1, asked.deadline_ms - round(1000 * seconds))
    return Request(
        id="",
        tenant=principal.tenant,
        prompt_token_ids=[],
        sampling=asked.sampling,
        pooling=cast(Pooling | None, asked.pooling),  # as_answered_by has chosen one
        adapter=AdapterRef(revision.engine_key, str(revision.directory)) if revision else None,
        deadline_ms=deadline_ms,
        group_id=id,
        service_class=service_class,
        weight=float(principal.weight),
        cache_scope="" if read.base.share_cache else principal.project,
        constraint=read.constraint,
        num_tokens=format.num_tokens,
        eos_token_ids=format.bundle.eos_token_ids,
    )


def _choices(read: ReadRequest, template: Request) -> list[Choice]:
    """Build `n` choices per prompt, numbered continuously."""
    asked, format = read.asked, read.format
    min_tokens = asked.sampling.min_tokens
    choices = []
    for index in range(len(read.prompts) * asked.n):
        number, i = divmod(index, asked.n)
        token_ids, max_tokens, tail, tokens, images, second = read.prompts[number]
        sampling = _seeded(msgspec.structs.replace(asked.sampling, max_tokens=max_tokens), i)
        if i and not asked.is_streamed:  # an answer in one piece needs a prompt's scores once
            sampling = msgspec.structs.replace(sampling, prompt_logprobs=None)
        request = msgspec.structs.replace(
            template,
            id=f"{template.group_id}-{index}",
            prompt_token_ids=token_ids,
            images=images,
            sampling=sampling,
            second_text_at=second,
        )
        output: OutputProcessor | PooledOutput = PooledOutput(index, format.classes, tokens)
        if asked.pooling is None:
            reader = format.reader(asked, tail)
            kind = RepeatedPrompt if asked.max_tokens == 0 else OutputProcessor
            output = kind(index, format.tokenizer, token_ids, read.stop, min_tokens, reader)
        choices.append(Choice(number, request, output))
    return choices


def _seeded(sampling: SamplingParams, i: int) -> SamplingParams:
    """Give choice `i` of a request with a seed its own seed."""
    if sampling.seed is None:
        return sampling
    return msgspec.structs.replace(sampling, seed=(sampling.seed + i) % _SEEDS)
