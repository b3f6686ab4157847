"""A request as the gateway takes it, parsed and in range, and its answer: no HTTP, no tensors.

GenerationRequest -> CompletionService.begin() -> Answer: a Generation, or a Replay of one that was kept
Answer -> Delta, Delta, ... -> the Deltas with the finish reasons, after the usage has been recorded
"""

from __future__ import annotations

import builtins
from collections.abc import AsyncIterator, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, Protocol

import msgspec

from loramux.common.bundle import ProblemType
from loramux.common.units import TokenCounts
from loramux.constraints.formats import AnswerFormat
from loramux.constraints.tools import ToolUse
from loramux.data.entities import IdempotencyClaim, ServiceTier
from loramux.engine.messages import Pooling, SamplingParams
from loramux.money.limits.definitions import RateLimitStatus
from loramux.money.usage.idempotency import StoredAnswer
from loramux.serving.calls import CallDelta


@dataclass(frozen=True, slots=True)
class Message:
    """One turn of a conversation."""

    role: str
    content: str
    fields: Mapping[str, Any] = field(default_factory=dict)
    """What the chat template finds in it besides: the calls of tools, the call that it answers, a thought."""
    size: int = 0
    """Characters of `fields`."""


FinishReason = Literal["stop", "length", "abort"]
"""`abort`: a fault of its length or its adapter ended the choice after the request's first token."""
Conversation = tuple[Message, ...]


@dataclass(frozen=True, slots=True)
class TextPair:
    """Two texts that a classifier reads as one, with what its tokenizer puts around and between them."""

    first: str
    second: str

    def __len__(self) -> int:
        return len(self.first) + len(self.second)


Prompt = Conversation | str | list[int] | TextPair
"""A conversation for the chat template, a text to continue, token ids as they are, or two texts."""


@dataclass(frozen=True, slots=True)
class AskedFormat:
    """The format that a request asks for."""

    format: AnswerFormat
    field: str
    """The field of the request that holds it."""


ChatEnding = Literal["generation_prompt", "message", "open_message"]
"""Where a conversation's prompt ends: where the assistant's answer begins, behind the last message, or within the last
message, which the answer continues."""


@dataclass(frozen=True, slots=True)
class Truncation:
    """How a prompt is shortened."""

    most: int | None
    """Tokens that are kept; None: as many as leave room for the answer."""
    keeps_end: bool = True

    def shorten(self, token_ids: list[int], room: int) -> list[int]:
        """Return what is kept of a prompt, at most `room` tokens where no number was given."""
        most = room if self.most is None else self.most
        if len(token_ids) <= most:
            return token_ids
        return token_ids[len(token_ids) - most :] if self.keeps_end else token_ids[:most]


@dataclass(frozen=True, slots=True, kw_only=True)
class ChatOptions:
    """What a conversation's request says besides its messages."""

    template: Mapping[str, Any] = field(default_factory=dict)
    """Variables for the chat template: the tools, and the caller's own."""
    size: int = 0
    """Characters of `template`."""
    tools: ToolUse | None = None
    """The tools that the answer may call; None: none, whatever the template was told."""
    effort: str | None = None
    """How much the model should think: none, minimal, low, medium, high, xhigh or max."""
    ending: ChatEnding = "generation_prompt"
    add_special_tokens: bool = False
    """Put the tokenizer's special tokens around what the template gives."""


AskedPooling = Pooling | Literal["own"]
"""`own`: as the model was trained."""


@dataclass(frozen=True, slots=True, kw_only=True)
class GenerationRequest:
    """One API request: every prompt is answered `n` times."""

    kind: str
    """The prefix of its id, with its separator: `chatcmpl-`, `cmpl-`, `resp_` or `msg_`."""
    model: str
    is_streamed: bool
    """The caller reads tokens as they come; else it reads the answer whole, or nothing of it."""
    prompts: tuple[Prompt, ...]
    sampling: SamplingParams
    """Its max_tokens is set per prompt and its seed per choice."""
    left_out: frozenset[str] = frozenset()
    """Sampling parameters that the caller left out; the model's recommendation for them applies, where it has one."""
    max_tokens: int | None = None
    """None: all that the context still holds after a conversation, DEFAULT_MAX_TOKENS after a text. 0: none, and the
    answer is the repeated prompt."""
    lowers_max_tokens: bool = False
    """More `max_tokens` than the context holds are lowered to what it holds; else such a request is refused."""
    pooling: AskedPooling | None = None
    """The result is a vector for each prompt, pooled from its hidden states; None: answers are generated."""
    dimensions: int | None = None
    """Leading numbers of each vector that are wanted; None: all."""
    pairs: tuple[TextPair, ...] = ()
    """The prompts for a model that scores two texts together, in place of `prompts`."""
    n: int = 1
    stop: tuple[str, ...] = ()
    claim: IdempotencyClaim | None = None
    """The idempotency key that it came with."""
    chat: ChatOptions = field(default_factory=ChatOptions)
    format: AskedFormat | None = None
    """The format that every answer has; None: any text."""
    deadline_ms: int | None = None
    """Milliseconds within which the request's first token must come, or the whole request is refused."""
    user: str | None = None
    """The caller's name for its end user, on the bill too. One user gets one revision of an alias that has several."""
    truncation: Truncation | None = None
    """How a prompt is shortened; None: one that is too long is refused."""
    add_special_tokens: bool = True
    """Put the tokenizer's special tokens around a text."""
    echo: bool = False
    """The answer repeats the prompt, a text or token ids."""
    tags: str = ""
    """The caller's labels on the bill, as `canonical_tags` writes them."""
    service_tier: ServiceTier = "default"
    """How urgent it is, and at which price; `batch` only for lines of batches."""


class Token(msgspec.Struct, frozen=True):
    """A vocabulary entry as text, and its exact bytes (which need not be UTF-8 on their own)."""

    text: str
    bytes: builtins.bytes
    id: int = -1
    """-1 in answers that a release before kept."""


class TokenLogprob(msgspec.Struct, frozen=True, kw_only=True):
    """One generated token with the natural logarithm of its probability, and those of the likeliest ones."""

    token: Token
    logprob: float
    top: tuple[tuple[Token, float], ...]
    offset: int
    """The beginning of the token's text, in characters of what its choice wrote."""
    is_text: bool = True
    """The token belongs to the answer's text, and not to a thought, a call or a marker."""


class PromptTokenLogprob(msgspec.Struct, frozen=True, kw_only=True, array_like=True):
    """A prompt's token in its place, with the likeliest ones there."""

    token: Token
    logprob: float
    rank: int
    """1: the likeliest of all."""
    top: tuple[tuple[Token, float], ...]


class Delta(msgspec.Struct, frozen=True, kw_only=True):
    """The news of one choice."""

    index: int
    text: str = ""
    thought: str = ""
    """The reasoning before the text."""
    calls: tuple[CallDelta, ...] = ()
    """Calls of tools, behind the text."""
    thought_tokens: int = 0
    """Tokens by which the thought has grown; negative on the delta that takes it back."""
    token_ids: tuple[int, ...] = ()
    logprobs: tuple[TokenLogprob, ...] = ()
    finish_reason: FinishReason | None = None
    """Set on the choice's last delta, which comes after the usage has been recorded."""
    prompt_logprobs: tuple[PromptTokenLogprob, ...] = ()
    """Of the prompt's tokens behind its first, where they are wanted; on the first delta of a prompt's first choice."""
    stop_string: str | None = None
    """The stop string that ends the choice, on the delta with its last token."""
    pooled: bytes = b""
    """A prompt's vector, or a classifier's numbers for it, as float32s, in place of an answer."""
    unshown_logprobs: tuple[TokenLogprob, ...] = ()
    """On the last delta: those of the tokens at the end that have no text in the answer, such as a stop string's. With
    `logprobs` they are as many as `token_ids`, where log probabilities are wanted."""
    is_unended_thought: bool = False
    """The text repeats the thoughts of earlier deltas, which were none: the model has ended its answer without an end
    of the thought that the prompt had opened. A whole answer has no thought then."""


class Classes(msgspec.Struct, frozen=True):
    """The classes of a classifier, and how its numbers become their probabilities."""

    labels: tuple[str, ...] = ()
    """Empty: they have no names."""
    problem: ProblemType | None = None
    """None: each input has one class; of a single label the number is a probability by itself."""


class PromptText(msgspec.Struct, frozen=True):
    """A prompt as a text, for an answer that repeats it."""

    text: str
    tokens: list[Token]
    offsets: list[int]
    """The beginning of each token's text, in characters."""


class Timing(msgspec.Struct, frozen=True):
    """How long an answer took. Waiting in the engine's queue is apart: it says nothing of the model."""

    queue_seconds: float
    first_token_seconds: float
    """From the end of the wait to the first token."""
    seconds: float
    """From the end of the wait to the answer's end."""


class Answer(Protocol):
    """The reader's side of a request: a Generation, or a Replay of one."""

    id: str
    model: str
    base_model: str
    """The base's name, whatever `model` names."""
    created: int
    """Unix seconds."""
    prompt_token_ids: list[list[int]]
    prompt_texts: list[PromptText]
    """The prompts as texts, where the request asks for an echo; else empty."""
    classes: Classes
    """Of a classifier; else empty."""
    rate_limits: RateLimitStatus
    """The caller's limits by the minute and what is left of them."""
    service_tier: str
    replayed: bool

    @property
    def usage(self) -> TokenCounts:
        """The tokens that are charged; a prompt counts once, however many answers it gets."""

    @property
    def timing(self) -> Timing | None:
        """How long it took, once it has ended; None: no token came, or it is not known any more."""

    async def started(self) -> None:
        """Wait for the first delta or the end; raises the error that the request failed with."""

    def __aiter__(self) -> AsyncIterator[Delta]: ...

    def abandon(self) -> None:
        """Stop the request: its reader has left. Does nothing at the end."""


class KeptDelta(Delta, frozen=True, kw_only=True, array_like=True):
    """A delta without the names of its fields: an answer has one a token. New fields go to its end."""


class KeptAnswer(msgspec.Struct, frozen=True):
    """An answer as the records keep it for an idempotency key; the field names are stored data."""

    model: str
    created: int
    prompt_token_ids: list[list[int]]
    deltas: list[Delta]
    """One a choice, whole: of answers that a release before `stream` kept."""
    usage: dict[str, int]
    service_tier: str = "default"
    stream: list[KeptDelta] = []
    """The deltas as they came, so that a stream is repeated to the byte."""
    prompt_texts: list[PromptText] = []
    timing: Timing | None = None
    classes: Classes = Classes()


class Replay:
    """An answer from the records, which costs nothing and takes nothing of any limit."""

    replayed = True

    def __init__(self, answered: StoredAnswer, base_model: str) -> None:
        kept = msgspec.msgpack.decode(answered.answer, type=KeptAnswer)
        self.id = answered.request_id
        self.model = kept.model
        self.base_model = base_model
        self.created = kept.created
        self.prompt_token_ids = kept.prompt_token_ids
        self.prompt_texts = kept.prompt_texts
        self.classes = kept.classes
        self.usage = TokenCounts(
            prompt=kept.usage["prompt_tokens"],
            cached=kept.usage["cached_tokens"],
            output=kept.usage["completion_tokens"],
        )
        self.rate_limits = RateLimitStatus()
        self.service_tier = kept.service_tier
        self.timing = kept.timing
        self._deltas: Sequence[Delta] = kept.stream or _divided(kept.deltas)

    async def started(self) -> None:
        """Return at once."""

    async def __aiter__(self) -> AsyncIterator[Delta]:
        for delta in self._deltas:
            yield delta

    def abandon(self) -> None:
        """Do nothing: nothing runs."""


def _divided(wholes: Sequence[Delta]) -> list[Delta]:
    ends = [Delta(index=whole.index, finish_reason=whole.finish_reason) for whole in wholes]
    return [msgspec.structs.replace(whole, finish_reason=None) for whole in wholes] + ends


def encode_answer(answer: Answer, deltas: Iterable[Delta]) -> bytes:
    """Encode an answer, of all its deltas, for the records."""
    usage = answer.usage
    kept = KeptAnswer(
        model=answer.model,
        created=answer.created,
        prompt_token_ids=answer.prompt_token_ids,
        deltas=[],
        usage={
            "prompt_tokens": usage.prompt,
            "cached_tokens": usage.cached,
            "completion_tokens": usage.output,
        },
        service_tier=answer.service_tier,
        stream=[KeptDelta(**msgspec.structs.asdict(delta)) for delta in deltas],
        prompt_texts=answer.prompt_texts,
        timing=answer.timing,
        classes=answer.classes,
    )
    return msgspec.msgpack.encode(kept)
