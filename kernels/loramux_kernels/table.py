"""What is resident and who reads it: the tables that every segmented LoRA operator is called with."""

from __future__ import annotations

from array import array
from dataclasses import dataclass, field
from functools import cached_property
from itertools import pairwise

import torch

from loramux_kernels.native.abi import LoraTableAbi

RANK_TILE = 16
"""Rank rows of one tile; a tile lies contiguously in the pool and never straddles a page."""


@dataclass(frozen=True, eq=False)
class LoraTable:
    """Where the resident adapters lie in the pool: a row per slot (resident revision), a column per site (linear).

    Tile j of (slot, site) holds rank rows [16j, min(16j + 16, rank)): rows of A have length in_features; B is stored
    transposed, its rows have length out_features. Offsets count elements of the pool, from its start.
    """

    a_offsets: torch.Tensor
    """int64[num_slots, num_sites, max_tiles]"""
    b_offsets: torch.Tensor
    """int64[num_slots, num_sites, max_tiles]"""
    ranks: torch.Tensor
    """int32[num_slots, num_sites]; 0 where the adapter leaves the site alone"""
    scales: torch.Tensor
    """float32[num_slots, num_sites]"""

    @cached_property
    def abi(self) -> LoraTableAbi:
        """The tensors' addresses, for the C++ operators."""
        tensors = (self.a_offsets, self.b_offsets, self.ranks, self.scales)
        assert all(tensor.is_contiguous() for tensor in tensors), "rows are found by arithmetic"
        return LoraTableAbi(*(tensor.data_ptr() for tensor in tensors), *self.a_offsets.shape[1:])


@dataclass(frozen=True)
class Segments:
    """Rows of one step, contiguous by revision; the base model's rows come last and belong to no segment."""

    cu_seqlens: tuple[int, ...]
    """[S + 1], from 0; rows from cu_seqlens[-1] on are the base model's."""
    slots: tuple[int, ...]
    """[S]"""
    _found: dict[str, int] = field(default_factory=dict, init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        assert len(self.cu_seqlens) == len(self.slots) + 1, "one slot for each run of rows"
        assert self.cu_seqlens[0] == 0, "the first segment starts at row 0"

    @property
    def rows(self) -> int:
        """Rows that belong to an adapter."""
        return self.cu_seqlens[-1]

    @cached_property
    def spans(self) -> tuple[tuple[int, int, int], ...]:
        """(slot, first row, one past the last row) of each segment."""
        return tuple((slot, a, b) for slot, (a, b) in zip(self.slots, pairwise(self.cu_seqlens), strict=True))

    @cached_property
    def packed(self) -> array[int]:
        """S, cu_seqlens and slots as the C++ operators read them."""
        return array("q", (len(self.slots), *self.cu_seqlens, *self.slots))

    def max_rank(self, table: LoraTable) -> int:
        """The largest rank that these slots hold on any site; looked up once, for a step serves one table."""
        if "max_rank" not in self._found:
            self._found["max_rank"] = int(table.ranks[list(self.slots)].max()) if self.slots else 0
        return self._found["max_rank"]


@dataclass(frozen=True)
class LoraGroup:
    """Linears that read the same input (q, k, v; gate, up): one shrink for all, one expand into their slices."""

    sites: tuple[int, ...]
    """Columns of the table."""
    out_features: tuple[int, ...]
    """Widths of the slices of the joined output, in the same order."""

    @cached_property
    def out_starts(self) -> tuple[int, ...]:
        """[len(sites) + 1]: the first column of each slice, and the width of all."""
        starts = [0]
        for width in self.out_features:
            starts.append(starts[-1] + width)
        return tuple(starts)

    @cached_property
    def packed(self) -> array[int]:
        """The number of sites, the sites and out_starts as the C++ operators read them."""
        return array("q", (len(self.sites), *self.sites, *self.out_starts))


def read_rank_rows(pool: torch.Tensor, offsets: torch.Tensor, rank: int, width: int) -> torch.Tensor:
    """The rank rows `[rank, width]` of one (slot, site) in float32, copied out of their tiles.

    `offsets` is the row `[max_tiles]` of `a_offsets` or `b_offsets`.
    """
    tiles = []
    for tile, offset in enumerate(offsets[: -(-rank // RANK_TILE)].tolist()):
        rows = min(RANK_TILE, rank - tile * RANK_TILE)
        tiles.append(pool[offset : offset + rows * width].view(rows, width))
    return torch.cat(tiles).float()
