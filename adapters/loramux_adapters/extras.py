"""Extras: everything that adapters bring beside pairs on linears. Most steps have none and pay nothing."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from loramux_adapters.layout import Matrix, rows_per_page
from loramux_kernels import Segments


class PagedRows:
    """A matrix `[rows, width]` whose i-th row stands in `pages[i // rows_per_page]`."""

    def __init__(self, pool: torch.Tensor, page_elements: int, pages: Sequence[int], matrix: Matrix) -> None:
        self.rows, self.width = matrix.rows, matrix.width
        self._height = rows_per_page(matrix.width, page_elements)
        used = pool.view(-1, page_elements)[:, : self._height * self.width]
        self._by_page = used.unflatten(1, (self._height, self.width))
        self._numbers = tuple(pages)
        self._pages = torch.tensor(pages, dtype=torch.int64, device=pool.device)

    def gather(self, index: torch.Tensor) -> torch.Tensor:
        """Return the rows `index` int64`[n]`: `[n, width]`."""
        return self._by_page[self._pages[index // self._height], index % self._height]

    def blocks(self) -> Iterator[tuple[slice, torch.Tensor]]:
        """Yield the rows of each page: their slice and a view of them."""
        for start, page in zip(range(0, self.rows, self._height), self._numbers, strict=True):
            stop = min(start + self._height, self.rows)
            yield slice(start, stop), self._by_page[page, : stop - start]

    def times_rows(self, x: torch.Tensor) -> torch.Tensor:
        """Return `x` `[n, width]` times this matrix, transposed: `[n, rows]`."""
        products = [x @ block.T for _, block in self.blocks()]
        return products[0] if len(products) == 1 else torch.cat(products, dim=1)

    def times_columns(self, x: torch.Tensor) -> torch.Tensor:
        """Return `x` `[n, rows]` times this matrix: `[n, width]`."""
        rows, block = next(blocks := self.blocks())
        total = x[:, rows] @ block
        for rows, block in blocks:
            total += x[:, rows] @ block
        return total


@dataclass(frozen=True, slots=True)
class VocabularyExtras:
    """One resident adapter's changes to the embedding or to the head; any may be absent."""

    pair: tuple[PagedRows, PagedRows, float] | None = None
    """A, B and scale. For the embedding both are transposed (A is `[tokens, rank]`); for the head they are as saved."""
    rows: PagedRows | None = None
    """Rows of every token, or of `token_ids`."""
    token_ids: torch.Tensor | None = None
    """int64`[n]`, ascending."""
    columns: PagedRows | None = None
    """Factor and shift of each logit of the head, `[tokens, 2]`."""

    def change_embeddings(self, y: torch.Tensor, token_ids: torch.Tensor, factor: torch.Tensor | float) -> None:
        """Change the base's embeddings `y` `[n, hidden_size]` of `token_ids` `[n]` in place.

        `factor` is what the base's embedding multiplies its rows by.
        """
        if self.pair is not None:
            a, b, scale = self.pair
            y += b.times_columns(a.gather(token_ids)) * scale * factor
        if self.rows is None:
            return
        if self.token_ids is None:
            # A caller's ids may be beyond a table that was cut; an index out of range would end the whole step.
            y.copy_(self.rows.gather(token_ids.clamp(max=self.rows.rows - 1)) * factor)
            return
        place = torch.searchsorted(self.token_ids, token_ids).clamp_(max=len(self.token_ids) - 1)
        found = (self.token_ids[place] == token_ids)[:, None]
        y.copy_(torch.where(found, self.rows.gather(place) * factor, y))

    def change_logits(self, y: torch.Tensor, x: torch.Tensor) -> None:
        """Change the base's logits `y` `[n, tokens]` of the hidden states `x` `[n, hidden_size]` in place."""
        if self.rows is not None:
            own = self.rows.times_rows(x)
            if self.token_ids is None:
                y[:, : own.shape[1]] = own
            else:
                y[:, self.token_ids] = own
        if self.pair is not None:
            a, b, scale = self.pair
            y += b.times_rows(a.times_rows(x)) * scale
        if self.columns is not None:
            for tokens, block in self.columns.blocks():
                y[:, tokens] = torch.addcmul(block[:, 1], y[:, tokens], block[:, 0])


Ints = NDArray[np.signedinteger[Any]]

ExtrasSpan = tuple[VocabularyExtras, int, int]
"""Changes, and the rows `[first, last)` that they apply to."""


@dataclass(frozen=True, slots=True)
class ResidentAdapter:
    """Facts of one resident adapter that a step needs."""

    num_bytes: int = 0
    """Bytes of weights that a step with rows of it reads."""
    max_rank: int = 0
    """The largest rank of its pairs on linears."""
    columns: bool = False
    """It scales or shifts a linear's outputs."""
    inputs: bool = False
    """It scales a linear's inputs."""
    num_tokens: int | None = None
    """Tokens that it knows, where that is another number than the base's."""
    norms: bool = False
    """It replaces weights of norms."""
    embedding: VocabularyExtras | None = None
    head: VocabularyExtras | None = None
    classifier: PagedRows | None = None
    """`[labels, hidden_size]`: maps the last hidden state of a prompt to its labels. Steps that generate ignore it."""

    @property
    def is_more_than_pairs(self) -> bool:
        """True if the adapter brings anything beside pairs on linears."""
        parts = (self.num_tokens, self.embedding, self.head)
        return self.columns or self.inputs or self.norms or any(part is not None for part in parts)


@dataclass(frozen=True, slots=True)
class StepExtras:
    """Extras of one step."""

    columns: Segments | None
    """The step's segments, if any of them scales or shifts outputs."""
    inputs: Segments | None
    """Likewise, inputs."""
    norms: Segments | None
    """Likewise, replaces weights of norms."""
    embedding: tuple[ExtrasSpan, ...]
    """Spans of the step's rows."""
    head: tuple[ExtrasSpan, ...]
    """Spans of the sampled rows."""
    tokens: tuple[tuple[int, int, int], ...] = ()
    """Numbers of tokens that are not the base's, and the sampled rows `[first, last)` that have them."""

    @property
    def most_tokens(self) -> int:
        """The largest of these numbers; 0 where all rows have the base's tokens."""
        return max((number for number, _, _ in self.tokens), default=0)

    def forbid_unknown(self, logits: torch.Tensor, num_tokens: int) -> None:
        """Set the logits `[n, most]` of tokens that a row does not have to -inf; the base has `num_tokens`."""
        if not self.tokens:
            return
        known = torch.full((len(logits), 1), num_tokens, device=logits.device)
        for number, first, last in self.tokens:
            known[first:last] = number
        tokens = torch.arange(logits.shape[1], device=logits.device)
        logits.masked_fill_(tokens >= known, float("-inf"))

    @classmethod
    def of_step(cls, held: Mapping[int, ResidentAdapter], segments: Segments, sampled_rows: Ints) -> StepExtras | None:
        """Collect the extras of `segments`; None if pairs are all. `sampled_rows` is int64`[n]`, ascending."""
        found = [held[slot] for slot in segments.slots if slot in held]
        if not any(one.is_more_than_pairs for one in found):
            return None
        embedding = ((held[slot].embedding, first, last) for slot, first, last in segments.spans)
        head = ((held[slot].head, *_among(sampled_rows, first, last)) for slot, first, last in segments.spans)
        numbers = ((held[slot].num_tokens, *_among(sampled_rows, first, last)) for slot, first, last in segments.spans)
        return cls(
            tokens=tuple((number, first, last) for number, first, last in numbers if number is not None),
            columns=segments if any(one.columns for one in found) else None,
            inputs=segments if any(one.inputs for one in found) else None,
            norms=segments if any(one.norms for one in found) else None,
            embedding=tuple(_present(embedding)),
            head=tuple(_present(head)),
        )


def _among(sampled_rows: Ints, first: int, last: int) -> tuple[int, int]:
    """Return the range of `sampled_rows` that lies in the rows `[first, last)`."""
    start, stop = np.searchsorted(sampled_rows, (first, last)).tolist()
    return start, stop


def _present(spans: Iterator[tuple[VocabularyExtras | None, int, int]]) -> Iterator[ExtrasSpan]:
    for part, first, last in spans:
        if part is not None and last > first:
            yield part, first, last
