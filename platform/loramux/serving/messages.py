"""A request of the serving layer, parsed and in range, and its answer: no HTTP, no tensors.

GenerationRequest -> CompletionService.begin() -> Answer: a Generation, or a Replay of one that was kept
Answer -> Delta, Delta, ... -> the Deltas with the finish reasons, after the usage has been recorded
"""

from __future__ import annotations

import builtins
from collections.abc import AsyncIterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple, Protocol

import msgspec

from loramux.common.bundle import ProblemType
from loramux.common.units import TokenCounts
from loramux.constraints.formats import AnswerFormat
from loramux.constraints.tools import ToolUse
from loramux.data.entities import IdempotencyClaim, ServiceTier
from loramux.engine.messages import Pooling, SamplingParams
from loramux.money.limits.definitions import RateLimitStatus
from loramux.serving.calls import CallDelta


@dataclass(frozen=True, slots=True)
class ImageSource:
    """An image of a request that has not been read yet."""

    kind: Literal["data", "url", "file"]
    value: str = field(repr=False)
    """Bytes of the image's file as base64, an address, or the id of a file."""
    where: str
    """Field of the request that holds the image; errors name it."""
    type: str
    """Type of the part that holds the image, in the words of the caller's API."""
    is_small: bool = False
    """True if the caller asks for few tokens (`detail: "low"`)."""


class PlacedImage(NamedTuple):
    """An image, and the number of characters of its turn's text that come before it."""

    offset: int
    source: ImageSource


@dataclass(frozen=True, slots=True)
class Message:
    """One turn of a conversation."""

    role: str
    content: str
    fields: Mapping[str, Any] = field(default_factory=dict)
    """Other variables of the turn in the chat template: the calls of tools, the call that the turn answers, a thought.
    """
    size: int = 0
    """Length of `fields`, in characters."""
    images: tuple[PlacedImage, ...] = ()
    """Images between the characters of `content`, in their order."""


FinishReason = Literal["stop", "length", "abort"]
"""Reason of the end of a choice. `abort`: after the request's first token, a fault of the choice's length or adapter
ended it.
"""
Conversation = tuple[Message, ...]


@dataclass(frozen=True, slots=True)
class TextPair:
    """Two texts that a classifier reads as one; its tokenizer puts special tokens around and between them."""

    first: str
    second: str

    def __len__(self) -> int:
        return len(self.first) + len(self.second)


Prompt = Conversation | str | list[int] | TextPair
"""A conversation for the chat template, a text to continue, token ids, or two texts."""


@dataclass(frozen=True, slots=True)
class AskedFormat:
    """Format that a request asks for."""

    format: AnswerFormat
    field: str
    """The field of the request that holds the format."""


ChatEnding = Literal["generation_prompt", "message", "open_message"]
"""End of a conversation's prompt: at the beginning of the assistant's answer, after the last message, or within the
last message, which the answer continues.
"""


@dataclass(frozen=True, slots=True)
class Truncation:
    """Shortening of a prompt."""

    most: int | None
    """Number of tokens that are kept; None: the number of tokens that leaves room for the answer."""
    keeps_end: bool = True

    def shorten(self, token_ids: list[int], room: int, edges: tuple[int, int] = (0, 0)) -> list[int]:
        """Return the tokens of a prompt that are kept; if `most` is None, at most `room` tokens.

        `edges` are the numbers of special tokens around the text that are kept at the end that is cut.
        """
        kept = self.kept(len(token_ids), room)
        first, last = (min(edge, kept.stop - kept.start) for edge in edges)
        if kept.start:
            return token_ids[:first] + token_ids[kept.start + first :]
        if kept.stop < len(token_ids):
            return token_ids[: kept.stop - last] + token_ids[len(token_ids) - last :]
        return token_ids

    def kept(self, num_tokens: int, room: int) -> slice:
        """Return the place of the tokens that are kept in a prompt of `num_tokens`."""
        most = min(num_tokens, room if self.most is None else self.most)
        return slice(num_tokens - most, num_tokens) if self.keeps_end else slice(0, most)


@dataclass(frozen=True, slots=True, kw_only=True)
class ChatOptions:
    """Options of a conversation's request in addition to its messages."""

    template: Mapping[str, Any] = field(default_factory=dict)
    """Variables for the chat template: the tools, and the caller's own."""
    size: int = 0
    """Length of `template`, in characters."""
    tools: ToolUse | None = None
    """Tools that the answer may call; None: no tools, even if the template lists some."""
    effort: str | None = None
    """Amount of thinking of the model: none, minimal, low, medium, high, xhigh or max."""
    ending: ChatEnding = "generation_prompt"
    add_special_tokens: bool = False
    """Put the tokenizer's special tokens around the text of the template."""
    image_texts: tuple[str, str] | None = None
    """The text that the template has for an image, and the text that replaces it; None: it is not replaced."""


AskedPooling = Pooling | Literal["own", "classes", "trained"]
"""Pooling of a prompt. `own`: the pooling of the vectors of the model's training. `classes`: classes of the text, or of
each token, as the model was trained. `trained`: whatever the model was trained for.
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class GenerationRequest:
    """One API request: every prompt is answered `n` times."""

    kind: str
    """Prefix of the request's id, with the separator: `chatcmpl-`, `cmpl-`, `resp_` or `msg_`."""
    model: str
    is_streamed: bool
    """True if the caller reads tokens when they are generated. Otherwise it gets the whole answer or no part of it."""
    repeats_logprobs: bool = False
    """True if a stream sends log probabilities later than it reads them: all once more at its end, or those of a
    repeated prompt with its first token.
    """
    prompts: tuple[Prompt, ...]
    sampling: SamplingParams
    """Sampling parameters; max_tokens is set per prompt, and the seed per choice."""
    left_out: frozenset[str] = frozenset()
    """Sampling parameters that the caller left out. If the model recommends values, they apply to these."""
    max_tokens: int | None = None
    """Maximum number of tokens of an answer, lowered after a conversation to the rest of the context. None: that rest
    after a conversation, DEFAULT_MAX_TOKENS after a text. 0: no tokens; the answer is the repeated prompt.
    """
    pooling: AskedPooling | None = None
    """Pooling of the hidden states into numbers for each prompt; None: answers are generated."""
    dimensions: int | None = None
    """Number of leading numbers of each vector that are returned; None: all numbers."""
    pairs: tuple[TextPair, ...] = ()
    """Prompts for a model that scores two texts together, instead of `prompts`."""
    n: int = 1
    stop: tuple[str, ...] = ()
    claim: IdempotencyClaim | None = None
    """Idempotency key of the request."""
    chat: ChatOptions = field(default_factory=ChatOptions)
    format: AskedFormat | None = None
    """Format of every answer; None: any text."""
    deadline_ms: int | None = None
    """Milliseconds within which the request's first token must come; otherwise the whole request is refused."""
    user: str | None = None
    """The caller's name for its end user, also on the bill. If an alias has several revisions, one user always gets the
    same revision.
    """
    truncation: Truncation | None = None
    """Shortening of a prompt; None: a prompt that is too long is refused."""
    add_special_tokens: bool = True
    """Put the tokenizer's special tokens around a text."""
    echo: bool = False
    """Repeat the prompt, a text or token ids, in the answer."""
    repeats_token_ids: bool = False
    """Repeat a prompt's token ids in each of its choices."""
    tags: str = ""
    """The caller's labels on the bill, as `canonical_tags` writes them."""
    service_tier: ServiceTier = "default"
    """Urgency and price of the request; `batch` only for lines of batches."""


class Token(msgspec.Struct, frozen=True, gc=False):
    """A vocabulary entry as text, and its exact bytes, which may be incomplete UTF-8.

    The garbage collector leaves out tokens and log probabilities (`gc=False`), because they are in no cycle: a tenant's
    answers have up to millions, and a full collection would walk all of them on the event loop.
    """

    text: str
    bytes: builtins.bytes
    id: int = -1
    """Token id; -1 in answers that an earlier release kept."""


class TokenLogprob(msgspec.Struct, frozen=True, kw_only=True, gc=False):
    """One generated token with the natural logarithm of its probability, and with the most likely tokens."""

    token: Token
    logprob: float
    top: tuple[tuple[Token, float], ...]
    offset: int
    """Beginning of the token's text, in characters from the beginning of its choice."""
    is_text: bool = True
    """True if the token belongs to the answer's text, not to a thought, a call or a marker."""


class PromptTokenLogprob(msgspec.Struct, frozen=True, kw_only=True, array_like=True, gc=False):
    """A token of the prompt with its log probability, and the likeliest tokens at its position."""

    token: Token
    logprob: float
    rank: int
    """Rank of the token at its position; 1 is the most likely token."""
    top: tuple[tuple[Token, float], ...]


class PromptToken(msgspec.Struct, frozen=True, array_like=True):
    """A token of a prompt of which each token is classified."""

    token: Token
    start: int | None = None
    """Beginning of the token in the prompt's text, in characters. None: the token is a special token around the text,
    or the prompt is no text.
    """
    end: int | None = None


class Delta(msgspec.Struct, frozen=True, kw_only=True):
    """New parts of one choice."""

    index: int
    text: str = ""
    thought: str = ""
    """Reasoning before the text."""
    calls: tuple[CallDelta, ...] = ()
    """Calls of tools, after the text."""
    thought_tokens: int = 0
    """Number of tokens by which the thought has grown; negative on the delta that takes the thought back."""
    token_ids: tuple[int, ...] = ()
    logprobs: tuple[TokenLogprob, ...] = ()
    finish_reason: FinishReason | None = None
    """Set on the choice's last delta, which comes after the usage has been recorded."""
    prompt_logprobs: tuple[PromptTokenLogprob, ...] = ()
    """Log probabilities of consecutive tokens of the prompt, from its second token on, if they were requested. They
    come in separate deltas before the choice's first token; answers that earlier releases kept have them on the
    first delta.
    """
    stop_string: str | None = None
    """Stop string that ends the choice, on the delta with its last token."""
    pooled: bytes = b""
    """Vector of a prompt, or a classifier's numbers for it, as float32s, instead of an answer."""
    unshown_logprobs: tuple[TokenLogprob, ...] = ()
    """Log probabilities of the tokens at the end that have no text in the answer, such as a stop string's; on the last
    delta. If log probabilities were requested, these and `logprobs` together have the same number as `token_ids`.
    """
    is_unended_thought: bool = False
    """True if the text repeats the thoughts of earlier deltas, because these were not thoughts. This happens if the
    prompt had opened a thought, and the model ends its answer without ending the thought. In this case a whole answer
    has no thought.
    """
    tokens: tuple[PromptToken, ...] = ()
    """Consecutive tokens of the prompt, each of which has a row of numbers in `pooled`."""


class Classes(msgspec.Struct, frozen=True):
    """Classes of a classifier, and how its numbers become their probabilities."""

    labels: tuple[str, ...] = ()
    """Names of the classes; empty if the classes have no names."""
    problem: ProblemType | None = None
    """Kind of classification. None: each input has one class; if there is a single label, its number is a probability
    by itself.
    """
    count: int = 0
    """Number of classes; 0: the model is no classifier."""


class PromptText(msgspec.Struct, frozen=True):
    """A prompt as a text, used by an answer that repeats it."""

    text: str
    tokens: list[Token]
    offsets: list[int]
    """Beginning of each token's text, in characters."""


class Timing(msgspec.Struct, frozen=True):
    """Times of an answer. The wait in the engine's queue is not included, because it does not depend on the model."""

    queue_seconds: float
    first_token_seconds: float
    """Seconds from the end of the wait to the first token."""
    seconds: float
    """Seconds from the end of the wait to the answer's end."""


class Answer(Protocol):
    """The reader's side of a request: a Generation, or a Replay of one."""

    id: str
    model: str
    base_model: str
    """Name of the base, even if `model` names something else."""
    created: int
    """Time of the start, in Unix seconds."""
    prompt_token_ids: list[list[int]]
    prompt_texts: list[PromptText]
    """Prompts as texts if the request asks for an echo; otherwise empty."""
    classes: Classes
    """Classes of a classifier; otherwise empty."""
    rate_limits: RateLimitStatus
    """The caller's limits per minute, and their remaining amounts."""
    service_tier: str
    replayed: bool

    @property
    def usage(self) -> TokenCounts:
        """Tokens that are charged; a prompt counts once, even if it gets several answers."""

    @property
    def timing(self) -> Timing | None:
        """Times of the answer, after its end; None without a token, or if the times are no longer known."""

    async def started(self) -> None:
        """Wait for the first delta or the end. Raises the error with which the request failed."""

    async def read(self, least: int = 1) -> Sequence[Delta]:
        """Wait for `least` deltas or the end, and return those that have come since the last call, as many as
        `take_readable` takes. Other requests get their turn before the next ones. Returns none after the end.

        Raises the error with which the answer ended, once its deltas have been read.
        """

    def __aiter__(self) -> AsyncIterator[Delta]: ...

    def abandon(self) -> None:
        """Stop the request because its reader has left. After the end the call gives the answer's memory back, so every
        reader ends with it.
        """
