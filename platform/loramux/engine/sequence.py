"""A request's mutable run: its tokens so far, how much of them is in the KV cache, and the pages that hold it."""

from __future__ import annotations

from dataclasses import dataclass, field

from loramux.engine.fairness import Flow
from loramux.engine.load import Load
from loramux.engine.prefix_tree import CachedPage
from loramux.engine.request import KvIdentity, Request

BASE_SLOT = -1
"""The slot of a sequence that no adapter serves."""


@dataclass(eq=False, slots=True)
class Sequence:
    """One running or waiting request. Identity, not equality: two sequences are never the same."""

    request: Request
    arrival: float
    flow: Flow = field(default_factory=Flow)
    """Whom its service is charged to."""
    id: str = field(init=False)
    """The request's id."""
    digest: str | None = field(init=False)
    """The revision it runs under; None for the base model."""
    num_prompt_tokens: int = field(init=False)
    """Tokens the client sent."""
    token_ids: list[int] = field(init=False)
    """Prompt and output."""
    max_len: int = field(init=False)
    """Tokens it may grow to."""
    likely_len: int = field(init=False)
    """Tokens it is expected to grow to; memory is planned by it."""
    num_computed: int = 0
    """Leading tokens whose KV is in `pages`."""
    num_seen: int = 0
    """Leading tokens that had been computed, or found in the cache, when it last began to run; computing them again is
    free."""
    units_at_start: int = 0
    """`units` when it last began to run."""
    num_cached: int = 0
    """Prompt tokens that it found in the cache before it had computed them itself."""
    due: float = 0.0
    """Units it should have taken in all when it ends, as was expected when it was admitted."""
    slot: int = BASE_SLOT
    """The bank slot of its adapter while it runs."""
    activation: int | None = None
    """Of an activated LoRA, the first token that the adapter serves: those before are the base's, with their KV. None:
    one model serves them all."""
    pages: list[int] = field(default_factory=list)
    """block_table: page i holds tokens [i * block_size, (i + 1) * block_size)."""
    trail: list[CachedPage] = field(default_factory=list)
    """The pages of the prefix cache that `pages` begins with; while it waits, those it could begin with."""
    places: list[int] = field(default_factory=list)
    """Where the host's memory holds its KV while it waits: place i the tokens that page i held."""
    num_saved: int = 0
    """Leading tokens whose KV is there."""
    num_preemptions: int = 0
    queued: Load = field(default_factory=Load)
    """What it was counted for when it was queued last."""
    foretold: float | None = None
    """Seconds to its first token, as was forecast when it came; None where it has no deadline."""
    began_at: float | None = None
    """When its first step was planned, in seconds of the scheduler's clock."""
    num_loads: int = 0
    """How often its adapter was loaded because it was the first to need it."""

    def __post_init__(self) -> None:
        self.id = self.request.id
        self.digest = self.request.adapter.digest if self.request.adapter else None
        self.token_ids = list(self.request.prompt_token_ids)
        self.num_prompt_tokens = len(self.token_ids)
        self.max_len = self.likely_len = len(self.token_ids) + self.request.sampling.max_tokens

    @property
    def num_output_tokens(self) -> int:
        """Tokens generated so far."""
        return len(self.token_ids) - self.num_prompt_tokens

    @property
    def likely_left(self) -> int:
        """Tokens it is expected to generate yet. One that outlives its estimate may go on for half as long again."""
        held = len(self.token_ids)
        left, beyond = self.likely_len - held, (held - self.num_prompt_tokens) // 2
        return left if left >= beyond else max(left, min(self.max_len - held, beyond))

    @property
    def num_uncomputed(self) -> int:
        """Tokens that must go through the model before the next one can be sampled: 1 while decoding."""
        return len(self.token_ids) - self.num_computed

    @property
    def num_next(self) -> int:
        """The first of them that one model serves, so that one chunk can hold them."""
        start, activation = self.num_computed, self.activation
        end = len(self.token_ids)
        return (end if activation is None or not start < activation < end else activation) - start

    @property
    def kv_identity(self) -> KvIdentity:
        """Under which others may find the KV of its first `num_shareable` tokens, and it theirs."""
        return self.request.kv_identity if self.activation is None else self.request.base_kv_identity

    @property
    def num_shareable(self) -> int:
        """Behind an invocation KV depends on where that stands: such KV is nobody else's."""
        return len(self.token_ids) if self.activation is None else min(self.activation, len(self.token_ids))

    @property
    def units(self) -> int:
        """Service that is behind it: a prompt token is one unit, whether computed or found, a generated one two."""
        return min(max(self.num_seen, self.num_computed), self.num_prompt_tokens) + 2 * self.num_output_tokens

    @property
    def has_gained(self) -> bool:
        """Whether it has got anywhere since it last began to run, beyond what it had lost."""
        return self.units > self.units_at_start

    def activate(self, invocation: tuple[int, ...]) -> None:
        """The adapter serves from the last occurrence of `invocation` in the prompt on; without one never (as PEFT)."""
        prompt, length = self.request.prompt_token_ids, len(invocation)
        starts = range(self.num_prompt_tokens - length, -1, -1)
        found = (start for start in starts if tuple(prompt[start : start + length]) == invocation)
        self.activation = next(found, self.max_len)

    def slot_at(self, position: int) -> int:
        """The slot that serves the token at `position` while it runs."""
        return self.slot if self.activation is None or position >= self.activation else BASE_SLOT

    def fresh_prompt(self, start: int, end: int) -> int:
        """How many of the tokens [start, end) are of the prompt, and are computed for the first time."""
        return max(0, min(end, self.num_prompt_tokens) - max(start, self.num_seen))

    def recomputed(self, start: int, end: int) -> int:
        """How many of the tokens [start, end) had been computed before, or found, and were lost since."""
        return max(0, min(end, self.num_seen) - start)

    def cost(self, start: int, end: int) -> int:
        """Units that computing the tokens [start, end) is charged.

        A prompt token computed for the first time is one, reaching the last token (so that one is generated) two.
        """
        fresh = self.fresh_prompt(start, end) if start < self.num_prompt_tokens else 0
        return fresh + 2 * (end == len(self.token_ids))

    def begin_behind(self, pages: list[int], block_size: int) -> None:
        """Start to run with KV that was found in the cache."""
        self.pages = pages
        self.num_computed = len(pages) * block_size
        self.num_cached += self.fresh_prompt(0, self.num_computed)
        self.num_seen = max(self.num_seen, self.num_computed)
        self.units_at_start = self.units

    def forget_kv(self) -> list[int]:
        """Drop the KV (preemption, end) and return the pages that held it."""
        self.num_seen = max(self.num_seen, self.num_computed)
        pages, self.pages, self.num_computed = self.pages, [], 0
        return pages
