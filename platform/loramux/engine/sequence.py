"""A request's mutable run: its tokens so far, how much of them is in the KV cache, and the pages that hold it."""

from __future__ import annotations

from dataclasses import dataclass, field

from loramux.engine.request import Request


@dataclass(eq=False, slots=True)
class Sequence:
    """One running or waiting request. Identity, not equality: two sequences are never the same."""

    request: Request
    arrival: float
    token_ids: list[int] = field(init=False)
    """Prompt and output."""
    num_computed: int = 0
    """Leading tokens whose KV is in `pages`."""
    pages: list[int] = field(default_factory=list)
    """block_table: page i holds tokens [i * block_size, (i + 1) * block_size)."""
    num_preemptions: int = 0

    def __post_init__(self) -> None:
        self.token_ids = list(self.request.prompt_token_ids)

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
    def max_tokens_left(self) -> int:
        """The most tokens it may still generate."""
        return self.request.sampling.max_tokens - self.num_output_tokens

    @property
    def num_uncomputed(self) -> int:
        """Tokens that must go through the model before the next one can be sampled: 1 while decoding."""
        return len(self.token_ids) - self.num_computed

    def forget_kv(self) -> list[int]:
        """Drop the KV (preemption, end) and return the pages that held it."""
        pages, self.pages, self.num_computed = self.pages, [], 0
        return pages
