"""Packing: every rank row has a place of its own, no tile straddles a page, nothing is padded to a maximum."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from loramux_adapters import AdapterRejected
from loramux_adapters.layout import ALIGNMENT, SiteShape, lay_out
from loramux_kernels import RANK_TILE

shapes = st.lists(
    st.tuples(st.integers(1, 70), st.sampled_from([8, 24, 96, 200]), st.sampled_from([8, 32, 96, 130])),
    min_size=1,
    max_size=12,
).map(lambda rows: [SiteShape(i, *row) for i, row in enumerate(rows)])


@given(shapes, st.integers(RANK_TILE * 200, 20_000), st.sampled_from([2, 4]))
def test_tiles_cover_every_matrix_once_without_overlap(sites: list[SiteShape], page: int, itemsize: int) -> None:
    layout = lay_out(sites, page, itemsize)
    rows: dict[tuple[int, bool], list[int]] = {}
    taken: dict[int, list[tuple[int, int]]] = {}
    for tile in layout.tiles:
        assert tile.start % RANK_TILE == 0
        assert tile.rows <= RANK_TILE
        assert tile.offset * itemsize % ALIGNMENT == 0
        assert tile.offset + tile.rows * tile.width <= page
        taken.setdefault(tile.page, []).append((tile.offset, tile.offset + tile.rows * tile.width))
        rows.setdefault((tile.site, tile.transposed_b), []).extend(range(tile.start, tile.start + tile.rows))
    for spans in taken.values():
        ordered = sorted(spans)
        assert all(end <= start for (_, end), (start, _) in itertools.pairwise(ordered))
    for site in sites:
        assert sorted(rows[site.site, False]) == sorted(rows[site.site, True]) == list(range(site.rank))
    assert sorted(taken) == list(range(layout.num_pages))
    assert layout.num_bytes == itemsize * sum(s.rank * (s.in_features + s.out_features) for s in sites)


def test_a_small_rank_takes_a_small_share() -> None:
    small, large = (lay_out([SiteShape(i, r, 512, 512) for i in range(64)], 64 * 1024, 2) for r in (8, 64))
    assert large.num_bytes == 8 * small.num_bytes
    assert 7 <= large.num_pages / small.num_pages <= 9


def test_a_tile_larger_than_a_page_names_the_way_out() -> None:
    with pytest.raises(AdapterRejected, match=r"engine\.block_size") as caught:
        lay_out([SiteShape(0, 16, 512, 8)], RANK_TILE * 512 - 1, 2)
    assert caught.value.code == "page_too_small"
