"""Requests to the engine: frozen, plain, and the same on both sides of the channel."""

from __future__ import annotations

import enum
from typing import Literal, NamedTuple

import msgspec

MIN_REPETITION_PENALTY, MAX_REPETITION_PENALTY = 0.01, 100.0


class ServiceClass(enum.StrEnum):
    """Scheduling class of a request; classes divide the engine by weight and never starve each other."""

    INTERACTIVE = "interactive"
    STANDARD = "standard"
    BATCH = "batch"


class SamplingParams(msgspec.Struct, frozen=True, kw_only=True):
    """Parameters of choosing tokens and of ending. Token ids only: stop *strings* are the gateway's.

    The order is the usual one: penalties, logit_bias and allowed_token_ids on the logits, then temperature, top_k,
    top_p, min_p. Log probabilities are the model's, before all of them.
    """

    max_tokens: int
    temperature: float = 1.0
    """0 chooses the most likely token (greedy)."""
    top_p: float = 1.0
    top_k: int = 0
    """0 keeps every token."""
    min_p: float = 0.0
    seed: int | None = None
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: dict[int, float] = {}
    stop_token_ids: tuple[int, ...] = ()
    """Ends generation; the stop token itself is counted and reported, and its text is never shown."""
    min_tokens: int = 0
    ignore_eos: bool = False
    allowed_token_ids: tuple[int, ...] = ()
    """The only tokens to choose from; empty: all. Not with a constraint."""
    logprobs: int | None = None
    """None: none. 0: the chosen token's. n > 0: also those of the n most likely tokens."""
    logprob_token_ids: tuple[int, ...] = ()
    """With `logprobs`: the tokens whose log probabilities are reported in place of the most likely ones'."""
    prompt_logprobs: int | None = None
    """The same for the prompt's tokens behind its first. The prompt is then computed whole, and nothing of it is taken
    from the prefix cache."""

    @property
    def greedy(self) -> bool:
        """Is the choice the arg max?"""
        return self.temperature == 0.0


class Constraint(msgspec.Struct, frozen=True, kw_only=True):
    """The grammar that an answer follows from its first token to its end."""

    grammar: str
    """In llguidance's format, as `loramux.constraints` writes it."""
    field: str
    """The field of the request that asked for it; errors name it."""
    after: int | None = None
    """The token that ends a part in front which the grammar does not concern, such as a thought; the answer cannot end
    within it. None: the grammar begins with the answer."""
    opening: int | None = None
    """The token that begins that part, where the answer may begin with it or with the grammar; None: it is open."""


Pooling = Literal["last", "mean", "classify"]
"""How a prompt's hidden states become one vector: the last one, the mean of all, or the last one put through the
classification head of the request's adapter."""


class AdapterRef(msgspec.Struct, frozen=True):
    """One immutable revision: its content digest, and the local folder that holds its verified PEFT files."""

    digest: str
    path: str


class KvIdentity(NamedTuple):
    """The owner of KV: KV that is computed under one identity is never read under another."""

    tenant: str
    digest: str | None
    """The revision's content, never its name, so that a name that moves on leaves no stale KV; None: the base."""
    scope: str


class Request(msgspec.Struct, frozen=True, kw_only=True):
    """One generation. `tenant` and `adapter` are set by the server and never read from a client's body."""

    id: str
    tenant: str
    prompt_token_ids: list[int]
    output_token_ids: list[int] = []
    """The beginning of its answer, which another engine has generated: this one goes on behind it."""
    sampling: SamplingParams
    adapter: AdapterRef | None = None
    """None: the base model."""
    service_class: ServiceClass = ServiceClass.STANDARD
    weight: float = 1.0
    """The tenant's share within its class."""
    deadline_ms: int | None = None
    """Milliseconds within which its group's first token must come, or it is refused. None: as the policy says."""
    group_id: str = ""
    """Shared by the choices of one API request; their deadline is decided once, before the first of them begins. Empty:
    the request is a group of its own."""
    constraint: Constraint | None = None
    """None: any text."""
    pooling: Pooling | None = None
    """The prompt's hidden states are the result, pooled, and nothing is generated. None: an answer is generated."""
    group_started: bool = False
    """A choice of its group has begun, on another engine: its deadline is decided."""
    report_start: bool = False
    """Report before each step or load for it, until its first token, and after the step: events with `is_worked_on`."""
    num_tokens: int = 0
    """Tokens of its revision, where they are more than the model's: the revision's embedding has rows for them."""
    eos_token_ids: tuple[int, ...] = ()
    """Tokens that end the answer in place of the model's; empty: the model's."""
    cache_scope: str = ""
    """Requests of one tenant share the base's KV within a scope (a project's id, or nothing). KV of an adapter is
    shared by all of its tenant. The server sets it."""

    @property
    def max_output(self) -> int:
        """The most tokens that it generates."""
        return self.sampling.max_tokens if self.pooling is None else 0

    @property
    def kv_identity(self) -> KvIdentity:
        """Under which KV that its model computed may be reused."""
        return KvIdentity(self.tenant, self.adapter.digest, "") if self.adapter else self.base_kv_identity

    @property
    def base_kv_identity(self) -> KvIdentity:
        """Under which KV that the base computed for it may be reused."""
        return KvIdentity(self.tenant, None, self.cache_scope)
