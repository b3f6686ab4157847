"""Turn a GenerationRequest into a running Generation: resolve, tokenize, check, open the usage, submit."""

from __future__ import annotations

import asyncio
import hashlib
import math
import time
import uuid
from collections import Counter, deque
from collections.abc import Callable
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field
from functools import cached_property, partial
from http import HTTPStatus
from importlib.metadata import version
from typing import Any, NamedTuple, cast

import msgspec

from loramux.catalog.registry.resolver import ModelResolver, ResolvedModel
from loramux.catalog.validation.rendering import TemplateRenderer
from loramux.common.bundle import NO_BUNDLE, Bundle
from loramux.common.errors import LoramuxError
from loramux.common.identity import Principal
from loramux.common.units import TokenCounts
from loramux.data.records.errors import RecordsUnavailable
from loramux.data.records.requests import BACKGROUND, SHADOW, OpenedRequest, charged_tier, service_tier
from loramux.engine.messages import (
    AdapterRef,
    Constraint,
    ImageInput,
    ModelFacts,
    Pooling,
    Request,
    SamplingParams,
    ServiceClass,
)
from loramux.engine.metrics import SECONDS, Histogram
from loramux.fleet.group import EngineGroup
from loramux.fleet.member import EngineStatus, UnknownEngine
from loramux.money.limits.definitions import RateLimitStatus
from loramux.money.usage.errors import UnknownRequest
from loramux.money.usage.idempotency import StoredAnswer
from loramux.money.usage.service import UsageService
from loramux.money.usage.settlement import Settlement
from loramux.serving.checks import (
    as_answered_by,
    check_allowed_tokens,
    check_cut_length,
    check_depth,
    check_logprobs,
    check_numbers,
    check_prompt_logprobs,
    check_text_length,
    check_token_ids,
    ensure_storage_allowed,
    recorded_user,
    resolve_max_tokens,
    service_class_of,
)
from loramux.serving.errors import Draining, EngineDown
from loramux.serving.formats import Format, Formats, GrammarTrials
from loramux.serving.generation import Generation
from loramux.serving.images import ImageFormat, ImageReader, check_images, shortened_images
from loramux.serving.messages import (
    Answer,
    Conversation,
    GenerationRequest,
    Prompt,
    PromptText,
    PromptToken,
    Replay,
    TextPair,
)
from loramux.serving.output import Choice, OutputProcessor, PooledOutput, RepeatedPrompt, prompt_tokens
from loramux.serving.tokenizer import StopAutomaton, Tokenizer

TOKENS_A_TURN = 512
"""Number of tokens of short prompts that are made on the event loop before other requests get their turn."""
ENDS = ("completed", "cancelled", "failed", "refused", "replayed")
_SEEDS = 2**63
"""Modulus of seeds."""


@dataclass(slots=True)
class CompletionCounters:
    """Counters since the server's start, over all tenants."""

    requests: dict[str, int] = field(default_factory=lambda: dict.fromkeys(ENDS, 0))
    """Number of requests by their end."""
    tokens: TokenCounts = field(default_factory=TokenCounts)
    token_gaps: dict[tuple[str, str], Histogram] = field(default_factory=dict)
    """Seconds between one token and the next, by base model and service tier, of requests that have ended."""


class EncodedPrompt(NamedTuple):
    """Tokens of a prompt before it is checked."""

    token_ids: list[int]
    tail: str | None = None
    images: tuple[ImageInput, ...] = ()
    second_text_at: int | None = None
    """First token of the second text of a pair, if the model tells the texts apart."""


class TokenizedPrompt(NamedTuple):
    """Tokens of a prompt, and the maximum number of tokens of each of its answers."""

    token_ids: list[int]
    max_tokens: int
    tail: str | None = None
    """End of a conversation's text; None if the prompt is no conversation."""
    tokens: tuple[PromptToken, ...] = ()
    """The tokens with their places, if each of them is classified."""
    images: tuple[ImageInput, ...] = ()
    second_text_at: int | None = None
    """First token of the second text of a pair, if the model tells the texts apart."""


class TokenizedText(NamedTuple):
    """The tokens of a text or a conversation."""

    token_ids: list[int]
    context: int
    """Maximum number of tokens that the model takes."""
    tokenizer: Tokenizer

    @property
    def pieces(self) -> list[str]:
        """Tokens as the vocabulary writes them."""
        return self.tokenizer.pieces(self.token_ids)


@dataclass(frozen=True)
class ServedBase:
    """A base model, with the parts that requests need."""

    name: str
    """Name in requests."""
    engines: EngineGroup
    facts: ModelFacts
    tokenizer: Tokenizer
    trials: GrammarTrials
    former_names: tuple[str, ...] = ()
    share_cache: bool = False
    """True if the projects of a tenant share cached KV of the base model. Different tenants never do."""
    tool_parser: str | None = None
    """Notation of the model's calls of tools; None: the chat template's notation."""
    images: ImageFormat | None = None
    """The form of images in prompts; None: the base reads text only."""
    bundle: Bundle = NO_BUNDLE
    """The base's task, if it does not generate text, and its pooling."""

    @cached_property
    def format(self) -> Format:
        """The base's tokenizer, chat template and defaults."""
        return Format(self.tokenizer, self.bundle, self.tool_parser)

    @property
    def context(self) -> int:
        """Maximum number of tokens of a request, prompt and answer together."""
        return self.facts.context

    @cached_property
    def fingerprint(self) -> str:
        """A name of the backend that changes when the backend does."""
        facts = self.facts
        backend = f"{version('loramux')} {facts.dtype} {facts.kv_cache_dtype} {facts.vocab_size} {facts.max_model_len}"
        return "fp_" + hashlib.sha256(backend.encode()).hexdigest()[:12]


class ServedBases(dict[str, ServedBase]):
    """The served bases by name; the first is the default. The set changes while requests run, when bases are loaded or
    retired.
    """

    def of_record(self, recorded: str) -> ServedBase | None:
        """Return the base that serves adapters that were uploaded for the base `recorded`."""
        return next((base for base in self.values() if recorded in (base.name, *base.former_names)), None)

    def engines(self) -> list[EngineStatus]:
        """Describe the engines of every base."""
        return [status for base in self.values() for status in base.engines.statuses()]

    def order_engine(self, name: str, *, restart: bool, seconds: float) -> EngineStatus:
        """Begin to drain or restart the engine with that name. Raises UnknownEngine or EngineBusy."""
        for base in self.values():
            if name in base.engines.names:
                return base.engines.order(name, restart=restart, seconds=seconds)
        names = [engine for base in self.values() for engine in base.engines.names]
        raise UnknownEngine(f"there is no engine {name[:80]!r}; there are {', '.join(names)}", "engine")


class Reading(NamedTuple):
    """A request whose prompts are being tokenized."""

    principal: Principal
    asked: GenerationRequest
    base: ServedBase
    format: Format
    resources: ExitStack
    """Gets what the request holds until its end."""


class ReadRequest(NamedTuple):
    """A request that may be admitted: its model was found, defaults were applied, and prompts were tokenized and
    checked.
    """

    asked: GenerationRequest
    model: ResolvedModel
    base: ServedBase
    format: Format
    prompts: list[TokenizedPrompt]
    stop: StopAutomaton
    constraint: Constraint | None
    echoed: list[PromptText]
    """Texts of the prompts if the request has `echo`; otherwise empty."""


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
    ) -> None:
        """`bases` may change while the service runs."""
        self.bases = bases
        self.counters = CompletionCounters()
        self.draining = False
        """True if new requests are refused because the server is being stopped."""
        self._resolver = resolver
        self._usage = usage
        self._formats = Formats(renderer or TemplateRenderer())
        self._images = images
        self._running: set[Generation] = set()
        self._opening: Counter[str] = Counter()
        """Number of requests whose admission is awaited, by tenant. Lines of batches and shadows are not counted by
        tenant.
        """
        self._idle = asyncio.Event()
        """Set whenever a request ends and no other runs."""
        self._unsettled: deque[Settlement] = deque()
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
        """Number of requests whose end the database has not accepted yet."""
        return len(self._unsettled)

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
        self.ensure_accepting()
        service_class = service_class_of(principal, asked.service_tier)
        check_depth(asked)
        if asked.claim is not None:
            ensure_storage_allowed(principal, "Idempotency-Key")
        id = f"{asked.kind}{uuid.uuid4().hex}"
        with ExitStack() as resources:
            read = await self._read(principal, asked, id, resources)
            opened = self._opened(principal, read, id)
            outcome = await self._open(opened)
            if isinstance(outcome, StoredAnswer):
                return Replay(outcome, read.base.name)
            generation = Generation(
                opened,
                outcome,
                _choices(read, _template(principal, read, id, service_class)),
                read.base.engines,
                self._usage,
                is_streamed=asked.is_streamed,
                prompt_texts=read.echoed,
            )
            held = resources.pop_all()
            generation.task.add_done_callback(lambda _: held.close())
        self._watch(generation)
        choose = None if asked.pooling else self._choose_recorder
        if choose is not None and (recorder := choose(principal, asked, opened)) is not None:
            generation.keep_answer()
            generation.task.add_done_callback(lambda _: recorder(generation))
        return generation

    async def _read(self, principal: Principal, asked: GenerationRequest, id: str, resources: ExitStack) -> ReadRequest:
        """Find the model, apply its defaults, and tokenize and check everything. Raises the same errors as `begin`.

        `resources` gets what the request holds until its end.
        """
        model = await self._resolver.resolve(principal, asked.model, asked.user or id)
        base = self._base_of(model)
        self._ensure_serving(base)
        format = await self._formats.of(base.name, base.format, model.revision, principal.tenant)
        asked = format.apply_defaults(asked, base.facts.sampling_defaults)
        asked = as_answered_by(asked, format.bundle, base.facts)
        num_tokens = max(base.facts.vocab_size, format.num_tokens)
        for name in ("stop_token_ids", "logit_bias", "allowed_token_ids", "logprob_token_ids"):
            check_token_ids(name, getattr(asked.sampling, name), num_tokens)
        prompts = await self._tokenize_all(Reading(principal, asked, base, format, resources))
        stop = await base.tokenizer.run(partial(StopAutomaton, asked.stop), sum(map(len, asked.stop)), principal.tenant)
        constraint = await base.trials.constraint_of(principal.tenant, format, asked, prompts[0].tail)
        check_allowed_tokens(asked, constraint)
        check_numbers(asked, [len(prompt.token_ids) for prompt in prompts], format.bundle, base.facts.hidden_size)
        check_logprobs(asked, sum(prompt.max_tokens for prompt in prompts) * asked.n)
        check_prompt_logprobs(asked, sum(len(prompt.token_ids) for prompt in prompts))
        texts = [await format.tokenizer.spell(p.token_ids, principal.tenant) for p in prompts] if asked.echo else []
        self._ensure_serving(base)
        return ReadRequest(asked, model, base, format, prompts, stop, constraint, texts)

    async def _tokenize_all(self, reading: Reading) -> list[TokenizedPrompt]:
        """Tokenize every prompt. Many short prompts yield to other requests in between."""
        found, size = [], 0
        for prompt in reading.asked.prompts:
            found.append(await self._tokenize(reading, prompt))
            size += 1 + len(found[-1].token_ids)
            if size > TOKENS_A_TURN:
                size = 0
                await asyncio.sleep(0)
        return found

    async def _tokenize(self, reading: Reading, prompt: Prompt) -> TokenizedPrompt:
        asked, base, format = reading.asked, reading.base, reading.format
        if asked.truncation is None:
            check_text_length(prompt, format.tokenizer.longest_token, base.context)
            longest = base.context
        else:
            longest = check_cut_length(prompt, format.tokenizer.longest_token, base.context)
        token_ids, tail, images, second = await self._encode(reading, prompt, longest)
        if asked.truncation is not None:
            room = base.context - (0 if asked.pooling else asked.max_tokens or 1)
            images = shortened_images(images, len(token_ids), asked.truncation, room) if images else ()
            is_bare = base.facts.generates or isinstance(prompt, list)
            edges = (0, 0) if is_bare else format.tokenizer.special_edges(token_ids)
            kept = asked.truncation.shorten(token_ids, room, edges)
            if second is not None and asked.truncation.keeps_end:
                second = max(edges[0], second - (len(token_ids) - len(kept)))
            token_ids = kept
        max_tokens = resolve_max_tokens(asked, prompt, len(token_ids), base.context, format.bundle.max_tokens)
        if isinstance(prompt, list):
            check_token_ids("prompt", token_ids, max(base.facts.vocab_size, format.num_tokens))
        tokens: tuple[PromptToken, ...] = ()
        if asked.pooling == "token_classify":
            tokens = await prompt_tokens(format.tokenizer, asked, prompt, token_ids, reading.principal.tenant)
        return TokenizedPrompt(token_ids, max_tokens, tail, tokens, images, second)

    async def _encode(self, reading: Reading, prompt: Prompt, longest: int) -> EncodedPrompt:
        """Return a prompt's tokens and images. A prompt of more than `longest` tokens may be cut short."""
        asked, base, format, tenant = reading.asked, reading.base, reading.format, reading.principal.tenant
        if isinstance(prompt, tuple):
            return await self._encode_chat(reading, prompt, longest)
        special = asked.add_special_tokens
        second = None
        if isinstance(prompt, list):
            token_ids = prompt
        elif isinstance(prompt, TextPair):
            token_ids, second = await format.tokenizer.encode_pair(prompt, tenant, add_special_tokens=special)
        else:
            token_ids = await format.tokenizer.encode(prompt, longest, tenant, add_special_tokens=special)
        if base.images is not None:
            base.images.check_unplaced(token_ids, "prompt")
        return EncodedPrompt(token_ids, second_text_at=second)

    async def _encode_chat(self, reading: Reading, conversation: Conversation, longest: int) -> EncodedPrompt:
        base, format, principal = reading.base, reading.format, reading.principal
        options = format.chat_options(reading.asked)
        has_images = any(turn.images for turn in conversation)
        if has_images:
            options = check_images(reading.asked, conversation, options, base.images, base.name)
        token_ids, tail = await self._formats.encode_chat(format, conversation, options, longest, principal.tenant)
        if base.images is None or len(token_ids) > longest:
            return EncodedPrompt(token_ids, tail)
        if not has_images:
            base.images.check_unplaced(token_ids, "messages")
            return EncodedPrompt(token_ids, tail)
        assert self._images is not None, "a base with images has a reader of images"
        placed = self._images.place(principal, base.images, conversation, token_ids, reading.asked.n, reading.resources)
        token_ids, images = await placed
        return EncodedPrompt(token_ids, tail, images)

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
            if isinstance(error, RecordsUnavailable):  # the row may have been committed
                self._unsettled.append(Settlement(request_id=opened.id, ended_by="platform", finish_reason=None))
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
            self._unsettled.append(generation.unsettled)
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
            encoded = await self._encode(reading, asked.prompts[0], longest)
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
        """Return the base and the format of a model; an empty name is the first base."""
        self.ensure_accepting()
        await self._usage.ensure_rate(principal)
        resolved = await self._resolver.resolve(principal, model or next(iter(self.bases)))
        base = self._base_of(resolved)
        return base, await self._formats.of(base.name, base.format, resolved.revision, principal.tenant)

    def _base_of(self, model: ResolvedModel) -> ServedBase:
        """Return the base that serves a model. Raises EngineDown if it was unloaded while the model was resolved."""
        base = self.bases.get(model.base_model)
        if base is None:
            raise EngineDown
        return base

    async def ensure_model(self, principal: Principal, model: str) -> None:
        """Raise ModelNotFound or RevisionUnavailable unless this caller may use the model."""
        await self.resolve(principal, model)

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

    def _ensure_serving(self, base: ServedBase) -> None:
        """Raise Draining or EngineDown unless a request to `base` would be accepted now."""
        self.ensure_accepting()
        if base.engines.has_ended:
            raise EngineDown

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

    async def settle_late(self) -> None:
        """Settle the requests whose end the database did not accept. Raises RecordsUnavailable if the database still
        does not accept them.
        """
        while self._unsettled:
            settlement = self._unsettled.popleft()
            try:
                await self._usage.settle(settlement)
            except RecordsUnavailable:
                self._unsettled.appendleft(settlement)
                raise
            except UnknownRequest:  # the request's opening was not committed either
                continue


def _template(principal: Principal, read: ReadRequest, id: str, service_class: ServiceClass) -> Request:
    """Return the engine's request without the fields that differ between choices."""
    asked, revision, format = read.asked, read.model.revision, read.format
    return Request(
        id="",
        tenant=principal.tenant,
        prompt_token_ids=[],
        sampling=asked.sampling,
        pooling=cast(Pooling | None, asked.pooling),  # as_answered_by has chosen one
        adapter=AdapterRef(revision.engine_key, str(revision.directory)) if revision else None,
        deadline_ms=asked.deadline_ms,
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
