"""Layout of an adapter in pages: matrices cut into blocks of rows and packed, at true ranks and without padding."""

from __future__ import annotations

import enum
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from loramux_adapters.base import VocabularyShape
from loramux_adapters.components import AdapterPlan, LinearVector, LoraPair, VectorKind
from loramux_adapters.errors import AdapterRejected
from loramux_kernels import RANK_TILE

ALIGNMENT = 64
"""Bytes: a cache line, and a multiple of every vector load."""


class MatrixKind(enum.Enum):
    """Role of a matrix in its module."""

    A = "A of a pair"
    B = "B of a pair"
    COLUMNS = "a factor and a shift for each output"
    INPUTS = "a factor and a shift for each input"
    NORM = "the weight of a norm"
    ROWS = "rows of the embedding or the head that take the place of the base's"
    CLASSIFIER = "a row for each label of a sequence classifier"


@dataclass(frozen=True, slots=True)
class Matrix:
    """One matrix of an adapter in the pool, `[rows, width]`."""

    module: str
    kind: MatrixKind
    rows: int
    width: int
    transposed: bool = False
    """Stored transposed, compared with AdapterWeights' tensor."""
    fills_pages: bool = False
    """Each block fills a page, so that a row is found by a division: for the embedding and the head, which are read by
    token. Other matrices are cut into rank tiles, which may lie anywhere."""


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
        """Elements of the block."""
        return self.rows * self.matrix.width

    @property
    def tile(self) -> int:
        """Index of its rank tile in the matrix."""
        return self.start // RANK_TILE


@dataclass(frozen=True, slots=True)
class AdapterLayout:
    """Every block of an adapter (a matrix's blocks in order) and the number of pages they fill."""

    blocks: tuple[Block, ...]
    num_pages: int
    num_bytes: int
    """Bytes of weights, without the bytes that alignment and page ends leave unused."""


@dataclass(slots=True)
class _OpenPage:
    number: int
    used: int = 0


def rows_per_page(width: int, page_elements: int) -> int:
    """Return the rows of a block of a matrix that fills pages."""
    return page_elements // width


def lay_out(matrices: Sequence[Matrix], page_elements: int, itemsize: int) -> AdapterLayout:
    """Pack `matrices`: those that fill pages first, then first-fit by size, so that no block straddles a page.

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
    """Yield (matrix, first row, rows) of each block."""
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


def matrices_of(plan: AdapterPlan, vocabulary: VocabularyShape | None) -> Iterator[Matrix]:
    """Yield the matrices of a plan: those of linears in rank tiles, those of embedding and head row by row."""
    head = vocabulary.head if vocabulary else None
    embedding = vocabulary.embedding if vocabulary else None
    for pair in plan.pairs:
        if pair.module == embedding:
            yield from _embedding_pair(pair)
        elif pair.module == head:
            yield from _head_pair(pair)
        else:
            yield Matrix(pair.module, MatrixKind.A, pair.rank, pair.in_features)
            yield Matrix(pair.module, MatrixKind.B, pair.rank, pair.out_features, transposed=True)
    # All vectors of a linear's outputs become one pair of columns.
    yield from dict.fromkeys(_vector(vector, of_head=vector.module == head) for vector in plan.vectors)
    for part in plan.rows:
        yield Matrix(part.module, MatrixKind.ROWS, part.served_rows, part.width, fills_pages=True)
    if (classifier := plan.classifier) is not None:
        yield Matrix(
            classifier.module, MatrixKind.CLASSIFIER, classifier.num_labels, classifier.width, fills_pages=True
        )


def _embedding_pair(pair: LoraPair) -> Iterator[Matrix]:
    yield Matrix(pair.module, MatrixKind.A, pair.in_features, pair.rank, transposed=True, fills_pages=True)
    yield Matrix(pair.module, MatrixKind.B, pair.rank, pair.out_features, transposed=True, fills_pages=True)


def _head_pair(pair: LoraPair) -> Iterator[Matrix]:
    yield Matrix(pair.module, MatrixKind.A, pair.rank, pair.in_features, fills_pages=True)
    yield Matrix(pair.module, MatrixKind.B, pair.out_features, pair.rank, fills_pages=True)


def _vector(vector: LinearVector, of_head: bool) -> Matrix:
    if vector.kind is VectorKind.NORM:
        return Matrix(vector.module, MatrixKind.NORM, 1, vector.size)
    kind = MatrixKind.INPUTS if vector.kind is VectorKind.INPUT else MatrixKind.COLUMNS
    if of_head:
        return Matrix(vector.module, kind, vector.size, 2, transposed=True, fills_pages=True)
    return Matrix(vector.module, kind, 2, vector.size)
