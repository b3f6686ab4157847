"""The served bases, and how a request to one is read: model and format found, prompts tokenized, everything checked."""

from __future__ import annotations

import asyncio
import hashlib
from contextlib import ExitStack
from dataclasses import dataclass
from functools import cached_property, partial
from importlib.metadata import version
from typing import NamedTuple

from loramux.catalog.registry.resolver import ModelResolver, ResolvedModel
from loramux.common.bundle import NO_BUNDLE, Bundle
from loramux.common.identity import Principal
from loramux.engine.messages import Constraint, ImageInput, ModelFacts
from loramux.fleet.group import EngineGroup
from loramux.fleet.member import EngineStatus, UnknownEngine
from loramux.serving.checks import (
    as_answered_by,
    check_allowed_tokens,
    check_cut_length,
    check_logprobs,
    check_numbers,
    check_prompt_logprobs,
    check_text_length,
    check_token_ids,
    count_repeated_bytes,
    resolve_max_tokens,
)
from loramux.serving.errors import EngineDown
from loramux.serving.formats import Format, Formats, GrammarTrials
from loramux.serving.images import ImageFormat, ImageReader, check_images, shortened_images
from loramux.serving.messages import Conversation, GenerationRequest, Prompt, PromptText, PromptToken, TextPair
from loramux.serving.output import prompt_tokens
from loramux.serving.tokenizer import StopAutomaton, Tokenizer

TOKENS_A_TURN = 512
"""Number of tokens of short prompts that are made on the event loop before other requests get their turn."""


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

    def ensure_serves(self) -> None:
        """Raise EngineDown if every engine of the base has ended."""
        if self.engines.has_ended:
            raise EngineDown

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
    repeated_bytes: int
    """Bytes of the prompts in all choices of the answer."""


class RequestReader:
    """Reads requests to the bases that are served now."""

    def __init__(
        self, bases: ServedBases, resolver: ModelResolver, formats: Formats, images: ImageReader | None
    ) -> None:
        self.bases = bases
        self._resolver = resolver
        self._formats = formats
        self._images = images

    async def read(self, principal: Principal, asked: GenerationRequest, id: str, resources: ExitStack) -> ReadRequest:
        """Find the model, apply its defaults, and tokenize and check everything. Raises as the resolver does,
        InvalidRequest, NotAllowed and EngineDown.

        `resources` gets what the request holds until its end.
        """
        model = await self._resolver.resolve(principal, asked.model, asked.user or id)
        base = self._base_of(model)
        base.ensure_serves()
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
        num_tokens = sum(len(prompt.token_ids) for prompt in prompts)
        check_prompt_logprobs(asked, num_tokens)
        texts = []
        for prompt in prompts if asked.echo else ():
            texts.append(await format.tokenizer.spell(prompt.token_ids, principal.tenant))
            await asyncio.sleep(0)  # a short prompt is spelled on the event loop, in about 1 ms
        repeated = count_repeated_bytes(asked, num_tokens, sum(len(one.text) for one in texts))
        base.ensure_serves()
        return ReadRequest(asked, model, base, format, prompts, stop, constraint, texts, repeated)

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
        token_ids, tail, images, second = await self.encode(reading, prompt, longest)
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

    async def encode(self, reading: Reading, prompt: Prompt, longest: int) -> EncodedPrompt:
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

    async def format_of(self, principal: Principal, model: str) -> tuple[ServedBase, Format]:
        """Return the base and the format of a model; an empty name is the first base. Raises as the resolver does, and
        EngineDown.
        """
        resolved = await self._resolver.resolve(principal, model or next(iter(self.bases)))
        base = self._base_of(resolved)
        return base, await self._formats.of(base.name, base.format, resolved.revision, principal.tenant)

    def _base_of(self, model: ResolvedModel) -> ServedBase:
        """Return the base that serves a model. Raises EngineDown if it was unloaded while the model was resolved."""
        base = self.bases.get(model.base_model)
        if base is None:
            raise EngineDown
        return base
