"""Packing: every rank row has its own place, no tile straddles a page, nothing is padded to a maximum."""

from __future__ import annotations

import itertools
from collections import defaultdict

import pytest
from hypothesis import given
from hypothesis import strategies as st

from loramux_adapters.errors import AdapterRejected
from loramux_adapters.weights import ALIGNMENT, Block, Matrix, MatrixKind, lay_out, rows_per_page
from loramux_kernels.tables import RANK_TILE

matrices = st.lists(
    st.tuples(
        st.sampled_from(MatrixKind), st.integers(1, 700), st.sampled_from([1, 2, 8, 24, 96, 130, 200]), st.booleans()
    ),
    min_size=1,
    max_size=12,
).map(
    lambda drawn: [
        Matrix(str(i), kind, rows, width, fills_pages=fills) for i, (kind, rows, width, fills) in enumerate(drawn)
    ]
)


def pairs(rank: int, width: int, count: int) -> list[Matrix]:
    return [Matrix(str(i), kind, rank, width) for i in range(count) for kind in (MatrixKind.A, MatrixKind.B)]


@given(matrices, st.integers(RANK_TILE * 200, 20_000), st.sampled_from([2, 4]))
def test_layout_blocks_cover_every_matrix_once_without_overlap(wanted: list[Matrix], page: int, itemsize: int) -> None:
    layout = lay_out(wanted, page, itemsize)
    rows: defaultdict[Matrix, list[int]] = defaultdict(list)
    taken: defaultdict[int, list[tuple[int, int]]] = defaultdict(list)
    for block in layout.blocks:
        check_place(block, page, itemsize)
        taken[block.page].append((block.offset, block.offset + block.size))
        rows[block.matrix].extend(range(block.start, block.start + block.rows))
    for spans in taken.values():
        assert all(end <= start for (_, end), (start, _) in itertools.pairwise(sorted(spans)))
    assert rows == {matrix: list(range(matrix.rows)) for matrix in wanted}
    assert sorted(taken) == list(range(layout.num_pages))
    assert layout.num_bytes == itemsize * sum(matrix.rows * matrix.width for matrix in wanted)


def check_place(block: Block, page: int, itemsize: int) -> None:
    assert block.offset * itemsize % ALIGNMENT == 0
    assert block.offset + block.size <= page
    if block.matrix.fills_pages:
        assert block.offset == 0
        assert block.start % rows_per_page(block.matrix.width, page) == 0
    else:
        assert block.start == block.tile * RANK_TILE
        assert block.rows <= RANK_TILE


def test_layout_small_rank_takes_a_small_share() -> None:
    small, large = (lay_out(pairs(rank, 512, 64), 64 * 1024, 2) for rank in (8, 64))
    assert large.num_bytes == 8 * small.num_bytes
    assert 7 <= large.num_pages / small.num_pages <= 9


def test_layout_small_blocks_fill_open_pages() -> None:
    tokens = Matrix("embedding", MatrixKind.ROWS, 5, 512, fills_pages=True)
    assert lay_out([*pairs(8, 512, 3), tokens], 64 * 1024, 2).num_pages == 1


@pytest.mark.parametrize(
    "matrix", [Matrix("m", MatrixKind.A, 16, 512), Matrix("m", MatrixKind.ROWS, 1, 8192, fills_pages=True)]
)
def test_layout_block_larger_than_a_page_names_the_way_out(matrix: Matrix) -> None:
    with pytest.raises(AdapterRejected, match=r"engine\.block_size") as caught:
        lay_out([matrix], RANK_TILE * 512 - 1, 2)
    assert caught.value.code == "page_too_small"
