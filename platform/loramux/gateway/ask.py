"""What a client asked for, parsed and in range, and what it is told back: no HTTP, no tensors."""

from __future__ import annotations

import builtins
from dataclasses import dataclass
from typing import Literal

from loramux.engine.request import SamplingParams
from loramux.usage import Claim


@dataclass(frozen=True, slots=True)
class Message:
    """One turn of a conversation."""

    role: str
    content: str


FinishReason = Literal["stop", "length"]
Conversation = tuple[Message, ...]
Prompt = Conversation | str | list[int]
"""A conversation for the chat template, a text to continue, or token ids as they are."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Ask:
    """One API request: every prompt is answered `n` times."""

    kind: str
    """What its id begins with: `chatcmpl` or `cmpl`."""
    model: str
    prompts: tuple[Prompt, ...]
    sampling: SamplingParams
    """Its max_tokens and seed are settled per prompt and per choice."""
    max_tokens: int | None = None
    """None: whatever the context still holds after a conversation, DEFAULT_MAX_TOKENS after a text."""
    n: int = 1
    stop: tuple[str, ...] = ()
    claim: Claim | None = None
    """The idempotency key that it came with."""
    deadline_ms: int | None = None
    """Every choice's first token must come within so many milliseconds, or the request is refused."""
    user: str | None = None
    """The caller's own name for who is served: always the same revision of an alias that has several."""
    tags: str = ""
    """What the caller wants to find on the bill, as `loramux.gateway.tags` writes it."""


@dataclass(frozen=True, slots=True)
class Token:
    """A vocabulary entry as people see it, and its exact bytes (which need not be UTF-8 on their own)."""

    text: str
    bytes: builtins.bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenLogprob:
    """One generated token with the natural logarithm of its probability, and those of the likeliest ones."""

    token: Token
    logprob: float
    top: tuple[tuple[Token, float], ...]
    offset: int
    """Where the token's text begins, in characters of its choice's text."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Delta:
    """What is new of one choice."""

    index: int
    text: str = ""
    token_ids: tuple[int, ...] = ()
    logprobs: tuple[TokenLogprob, ...] = ()
    finish_reason: FinishReason | None = None
    """On the choice's last delta, which comes after the usage has been recorded."""


@dataclass(frozen=True, slots=True)
class TokenUsage:
    """What the request is charged; a prompt counts once, however many answers it gets."""

    prompt_tokens: int
    cached_tokens: int
    completion_tokens: int

    @property
    def total_tokens(self) -> int:
        """Prompt and completion."""
        return self.prompt_tokens + self.completion_tokens
