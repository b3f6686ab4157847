"""What was asked of the engine: frozen, plain, and the same on both sides of the mailbox."""

from __future__ import annotations

import enum
from typing import NamedTuple

import msgspec


class ServiceClass(enum.StrEnum):
    """Scheduling class of a request; classes divide the engine by weight and never starve each other."""

    INTERACTIVE = "interactive"
    STANDARD = "standard"
    BATCH = "batch"


class SamplingParams(msgspec.Struct, frozen=True, kw_only=True):
    """How the next token is chosen and when generation ends. Token ids only: stop *strings* are the gateway's.

    The order is the usual one: penalties and logit_bias on the logits, then temperature, top_k, top_p, min_p.
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
    logprobs: int | None = None
    """None: none. 0: the chosen token's. n > 0: also those of the n most likely tokens."""

    @property
    def greedy(self) -> bool:
        """Whether the choice is the arg max."""
        return self.temperature == 0.0


class AdapterRef(msgspec.Struct, frozen=True):
    """One immutable revision: its content digest, and the local folder that holds its verified PEFT files."""

    digest: str
    path: str


class KvIdentity(NamedTuple):
    """Whose KV it is: what is computed under one identity is never read under another."""

    tenant: str
    digest: str | None
    """The revision's content, never its name, so that a name that moves on leaves no stale KV; None: the base."""
    scope: str


class Request(msgspec.Struct, frozen=True, kw_only=True):
    """One generation. `tenant` and `adapter` are set by the server and never read from a client's body."""

    id: str
    tenant: str
    prompt_token_ids: list[int]
    sampling: SamplingParams
    adapter: AdapterRef | None = None
    """None: the base model."""
    service_class: ServiceClass = ServiceClass.STANDARD
    weight: float = 1.0
    """The tenant's share within its class."""
    deadline_ms: int | None = None
    """Its first token must come within so many milliseconds, or it is refused. None: as the policy says."""
    cache_scope: str = ""
    """Who shares the base's KV inside the tenant: those of the same scope (a project's id, or nothing). What an adapter
    computes is shared by all of its tenant. The server sets it."""

    @property
    def kv_identity(self) -> KvIdentity:
        """Under which KV that its model computed may be reused."""
        return KvIdentity(self.tenant, self.adapter.digest, "") if self.adapter else self.base_kv_identity

    @property
    def base_kv_identity(self) -> KvIdentity:
        """Under which KV that the base computed for it may be reused."""
        return KvIdentity(self.tenant, None, self.cache_scope)
