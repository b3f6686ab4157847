"""A request's mutable run: its tokens so far, how much of them is in the KV cache, and the pages that hold it."""

from __future__ import annotations

import math
from dataclasses import dataclass, field

from loramux.engine.fairness import Flow
from loramux.engine.load import Load
from loramux.engine.request import Request

BASE_SLOT = -1
"""The slot of a sequence that no adapter serves."""


@dataclass(eq=False, slots=True)
class Sequence:
    """One running or waiting request. Identity, not equality: two sequences are never the same."""

    request: Request
    arrival: float
    flow: Flow = field(default_factory=Flow)
    """Whom its service is charged to."""
    token_ids: list[int] = field(init=False)
    """Prompt and output."""
    max_len: int = field(init=False)
    """Tokens it may grow to."""
    likely_len: int = field(init=False)
    """Tokens it is expected to grow to; memory is planned by it."""
    num_computed: int = 0
    """Leading tokens whose KV is in `pages`."""
    num_charged: int = 0
    """Leading prompt tokens whose computation was charged; computing them again is free."""
    due: float = 0.0
    """Units it should have taken in all when it ends, as was expected when it was admitted."""
    slot: int = BASE_SLOT
    """The bank slot of its adapter while it runs."""
    pages: list[int] = field(default_factory=list)
    """block_table: page i holds tokens [i * block_size, (i + 1) * block_size)."""
    num_preemptions: int = 0
    queued: Load = field(default_factory=Load)
    """What it was counted for when it was queued last."""
    must_start_by: float = math.inf
    """Seconds of the scheduler's clock; one that has not run by then is answered and not run."""

    def __post_init__(self) -> None:
        self.token_ids = list(self.request.prompt_token_ids)
        self.max_len = self.likely_len = len(self.token_ids) + self.request.sampling.max_tokens

    @property
    def id(self) -> str:
        """The request's id."""
        return self.request.id

    @property
    def digest(self) -> str | None:
        """The revision it runs under; None for the base model."""
        return self.request.adapter.digest if self.request.adapter else None

    @property
    def num_prompt_tokens(self) -> int:
        """Tokens the client sent."""
        return len(self.request.prompt_token_ids)

    @property
    def num_output_tokens(self) -> int:
        """Tokens generated so far."""
        return len(self.token_ids) - self.num_prompt_tokens

    @property
    def likely_left(self) -> int:
        """Tokens it is expected to generate yet. One that outlives its estimate may go on for half as long again."""
        held = len(self.token_ids)
        return max(self.likely_len - held, min(self.max_len - held, self.num_output_tokens // 2))

    @property
    def num_uncomputed(self) -> int:
        """Tokens that must go through the model before the next one can be sampled: 1 while decoding."""
        return len(self.token_ids) - self.num_computed

    @property
    def started(self) -> bool:
        """Whether any of it has been planned to run."""
        return bool(self.pages or self.num_preemptions)

    @property
    def units(self) -> int:
        """Service charged so far: a prompt token is one unit, a generated one two."""
        return self.num_charged + 2 * self.num_output_tokens

    def charge(self, end: int) -> int:
        """Units that computing the tokens before `end` costs, and take them as charged.

        Computing a prompt token for the first time is one, reaching the last token (so that one is generated) two.
        """
        prompt = min(end, len(self.request.prompt_token_ids))
        fresh = max(0, prompt - self.num_charged)
        self.num_charged += fresh
        return fresh + 2 * (end == len(self.token_ids))

    def forget_kv(self) -> list[int]:
        """Drop the KV (preemption, end) and return the pages that held it."""
        pages, self.pages, self.num_computed = self.pages, [], 0
        return pages
