"""How an adapter's matrices are cut into rank tiles and packed into pages, at true ranks and nothing padded."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from loramux_adapters.errors import AdapterRejected
from loramux_kernels import RANK_TILE

ALIGNMENT = 64
"""Bytes; a cache line, and what vector loads like."""


@dataclass(frozen=True, slots=True)
class SiteShape:
    """What an adapter holds for one linear: A `[rank, in_features]` and B `[out_features, rank]`."""

    site: int
    rank: int
    in_features: int
    out_features: int


@dataclass(frozen=True, slots=True)
class Tile:
    """Rank rows `[start, start + rows)` of A, or of B transposed, at `offset` elements into the `page`-th page."""

    site: int
    transposed_b: bool
    start: int
    rows: int
    width: int
    page: int
    offset: int

    @property
    def index(self) -> int:
        """Which tile of its matrix it is."""
        return self.start // RANK_TILE


@dataclass(frozen=True, slots=True)
class AdapterLayout:
    """Every tile of an adapter, and how many pages they fill."""

    tiles: tuple[Tile, ...]
    num_pages: int
    num_bytes: int
    """Bytes of weights, without what alignment and page ends leave unused."""


@dataclass(slots=True)
class _OpenPage:
    number: int
    used: int = 0


def lay_out(shapes: Sequence[SiteShape], page_elements: int, itemsize: int) -> AdapterLayout:
    """Pack the tiles of `shapes` first-fit, largest first, so that none straddles a page.

    Raises AdapterRejected (`page_too_small`) when one tile is larger than a page.
    """
    step = max(1, ALIGNMENT // itemsize)
    wanted = sorted(_cut(shapes), key=lambda tile: -tile[3] * tile[4])
    tiles: list[Tile] = []
    pages: list[_OpenPage] = []
    for site, transposed_b, start, rows, width in wanted:
        size = rows * width
        if size > page_elements:
            raise AdapterRejected(
                "page_too_small",
                None,
                f"{rows} rank rows of {width} elements do not fit a page of {page_elements} elements; "
                f"ask the operator for a larger engine.block_size.",
            )
        page = next((p for p in pages if p.used + size <= page_elements), None)
        if page is None:
            pages.append(page := _OpenPage(len(pages)))
        tiles.append(Tile(site, transposed_b, start, rows, width, page.number, page.used))
        page.used += -(-size // step) * step
    num_bytes = sum(tile.rows * tile.width for tile in tiles) * itemsize
    return AdapterLayout(tuple(tiles), len(pages), num_bytes)


def _cut(shapes: Sequence[SiteShape]) -> list[tuple[int, bool, int, int, int]]:
    return [
        (shape.site, transposed_b, start, min(RANK_TILE, shape.rank - start), width)
        for shape in shapes
        for transposed_b, width in ((False, shape.in_features), (True, shape.out_features))
        for start in range(0, shape.rank, RANK_TILE)
    ]
