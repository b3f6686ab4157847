"""How an adapter's matrices are cut into blocks of rows and packed into pages, at true ranks and nothing padded."""

from __future__ import annotations

import enum
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from loramux_adapters.errors import AdapterRejected
from loramux_kernels import RANK_TILE

ALIGNMENT = 64
"""Bytes; a cache line, and what vector loads like."""


class Kind(enum.Enum):
    """Which of a module's matrices it is."""

    A = "A of a pair"
    B = "B of a pair"
    COLUMNS = "a factor and a shift for each output"
    INPUTS = "a factor and a shift for each input"
    ROWS = "rows of the embedding or the head that take the place of the base's"


@dataclass(frozen=True, slots=True)
class Matrix:
    """One matrix of an adapter as it lies in the pool, `[rows, width]`."""

    module: str
    kind: Kind
    rows: int
    width: int
    transposed: bool = False
    """Against AdapterWeights' tensor."""
    fills_pages: bool = False
    """Its blocks are as many rows as a page holds and begin a page, so that a row is found by its page: for what the
    embedding and the head need. Others are cut into rank tiles, which lie anywhere."""


@dataclass(frozen=True, slots=True)
class Block:
    """Rows `[start, start + rows)` of a matrix, at `offset` elements into the `page`-th page."""

    matrix: Matrix
    start: int
    rows: int
    page: int
    offset: int

    @property
    def size(self) -> int:
        """Elements."""
        return self.rows * self.matrix.width

    @property
    def tile(self) -> int:
        """Which rank tile of its matrix it is."""
        return self.start // RANK_TILE


@dataclass(frozen=True, slots=True)
class AdapterLayout:
    """Every block of an adapter, a matrix's in their order, and how many pages they fill."""

    blocks: tuple[Block, ...]
    num_pages: int
    num_bytes: int
    """Bytes of weights, without what alignment and page ends leave unused."""


@dataclass(slots=True)
class _OpenPage:
    number: int
    used: int = 0


def rows_per_page(width: int, page_elements: int) -> int:
    """Rows of a block of a matrix that fills pages."""
    return page_elements // width


def lay_out(matrices: Sequence[Matrix], page_elements: int, itemsize: int) -> AdapterLayout:
    """Pack `matrices`: what fills pages first, then first-fit, largest first, so that no block straddles a page.

    Raises AdapterRejected (`page_too_small`) when one block is larger than a page.
    """
    step = max(1, ALIGNMENT // itemsize)
    wanted = [cut for matrix in matrices for cut in _cut(matrix, page_elements)]
    wanted.sort(key=lambda cut: (not cut[0].fills_pages, -cut[2] * cut[0].width, cut[1]))
    blocks: list[Block] = []
    pages: list[_OpenPage] = []
    for matrix, start, rows in wanted:
        size = rows * matrix.width
        fits = (p for p in pages if not matrix.fills_pages and p.used + size <= page_elements)
        page = next(fits, None)
        if page is None:
            pages.append(page := _OpenPage(len(pages)))
        blocks.append(Block(matrix, start, rows, page.number, page.used))
        page.used += -(-size // step) * step
    num_bytes = sum(block.size for block in blocks) * itemsize
    return AdapterLayout(tuple(blocks), len(pages), num_bytes)


def _cut(matrix: Matrix, page_elements: int) -> Iterator[tuple[Matrix, int, int]]:
    """(matrix, first row, rows) of each block."""
    height = rows_per_page(matrix.width, page_elements) if matrix.fills_pages else RANK_TILE
    if min(max(height, 1), matrix.rows) * matrix.width > page_elements:
        raise AdapterRejected(
            "page_too_small",
            None,
            f"{min(max(height, 1), matrix.rows)} rows of {matrix.width} elements, of {matrix.module}, do not fit a "
            f"page of {page_elements} elements; ask the operator for a larger engine.block_size.",
        )
    for start in range(0, matrix.rows, height):
        yield matrix, start, min(height, matrix.rows - start)
