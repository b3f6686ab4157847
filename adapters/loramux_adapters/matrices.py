"""The matrices that a plan puts into the pool, and in which form each of them lies there."""

from __future__ import annotations

from collections.abc import Iterator

from loramux_adapters.base import VocabularyShape
from loramux_adapters.layout import Kind, Matrix
from loramux_adapters.parts import AdapterPlan, LoraPair, VectorKind, VectorPart


def matrices_of(plan: AdapterPlan, vocabulary: VocabularyShape | None) -> Iterator[Matrix]:
    """Of linears: rank rows and pairs of vectors. Of embedding and head: what can be read token by token."""
    head = vocabulary.head if vocabulary else None
    embedding = vocabulary.embedding if vocabulary else None
    for pair in plan.pairs:
        if pair.module == embedding:
            yield from _embedding_pair(pair)
        elif pair.module == head:
            yield from _head_pair(pair)
        else:
            yield Matrix(pair.module, Kind.A, pair.rank, pair.in_features)
            yield Matrix(pair.module, Kind.B, pair.rank, pair.out_features, transposed=True)
    for vector in plan.vectors:
        yield _vector(vector, of_head=vector.module == head)
    for part in plan.rows:
        yield Matrix(part.module, Kind.ROWS, part.num_rows, part.width, fills_pages=True)


def _embedding_pair(pair: LoraPair) -> Iterator[Matrix]:
    yield Matrix(pair.module, Kind.A, pair.in_features, pair.rank, transposed=True, fills_pages=True)
    yield Matrix(pair.module, Kind.B, pair.rank, pair.out_features, transposed=True, fills_pages=True)


def _head_pair(pair: LoraPair) -> Iterator[Matrix]:
    yield Matrix(pair.module, Kind.A, pair.rank, pair.in_features, fills_pages=True)
    yield Matrix(pair.module, Kind.B, pair.out_features, pair.rank, fills_pages=True)


def _vector(vector: VectorPart, of_head: bool) -> Matrix:
    kind = Kind.INPUTS if vector.kind is VectorKind.INPUT else Kind.COLUMNS
    if of_head:
        return Matrix(vector.module, kind, vector.size, 2, transposed=True, fills_pages=True)
    return Matrix(vector.module, kind, 2, vector.size)
