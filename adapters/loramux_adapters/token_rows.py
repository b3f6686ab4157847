"""An adapter's matrices with a row for each token, in the pool: read where they lie, a page's rows at a time."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch

from loramux_adapters.layout import Matrix, rows_per_page


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
        """Rows `index` int64`[n]`: `[n, width]`."""
        return self._by_page[self._pages[index // self._height], index % self._height]

    def blocks(self) -> Iterator[tuple[slice, torch.Tensor]]:
        """Which rows a page holds, and a view of them."""
        for start, page in zip(range(0, self.rows, self._height), self._numbers, strict=True):
            stop = min(start + self._height, self.rows)
            yield slice(start, stop), self._by_page[page, : stop - start]

    def times_rows(self, x: torch.Tensor) -> torch.Tensor:
        """`x` `[n, width]` times this matrix, transposed: `[n, rows]`."""
        products = [x @ block.T for _, block in self.blocks()]
        return products[0] if len(products) == 1 else torch.cat(products, dim=1)

    def times_columns(self, x: torch.Tensor) -> torch.Tensor:
        """`x` `[n, rows]` times this matrix: `[n, width]`."""
        rows, block = next(blocks := self.blocks())
        total = x[:, rows] @ block
        for rows, block in blocks:
            total += x[:, rows] @ block
        return total


@dataclass(frozen=True, slots=True)
class VocabularyPart:
    """What one resident adapter changes of the embedding or of the head; everything may be absent."""

    pair: tuple[PagedRows, PagedRows, float] | None = None
    """Of the embedding: A transposed `[tokens, rank]` and B transposed; of the head: A and B as they are; the scale."""
    rows: PagedRows | None = None
    """Of every token, or of `token_ids`."""
    token_ids: torch.Tensor | None = None
    """int64`[n]`, rising."""
    columns: PagedRows | None = None
    """Of the head: factor and shift of each logit, `[tokens, 2]`."""

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
            y.copy_(self.rows.gather(token_ids) * factor)
            return
        place = torch.searchsorted(self.token_ids, token_ids).clamp_(max=len(self.token_ids) - 1)
        found = (self.token_ids[place] == token_ids)[:, None]
        y.copy_(torch.where(found, self.rows.gather(place) * factor, y))

    def change_logits(self, y: torch.Tensor, x: torch.Tensor) -> None:
        """Change the base's logits `y` `[n, tokens]` of the hidden states `x` `[n, hidden_size]` in place."""
        if self.rows is not None:
            own = self.rows.times_rows(x)
            if self.token_ids is None:
                y.copy_(own)
            else:
                y[:, self.token_ids] = own
        if self.pair is not None:
            a, b, scale = self.pair
            y += b.times_rows(a.times_rows(x)) * scale
        if self.columns is not None:
            for tokens, block in self.columns.blocks():
                y[:, tokens] = torch.addcmul(block[:, 1], y[:, tokens], block[:, 0])
