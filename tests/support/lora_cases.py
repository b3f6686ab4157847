"""Random adapters in a poisoned pool, on ragged segments: what the segmented LoRA operators are tested with."""

from __future__ import annotations

from dataclasses import dataclass, fields, replace

import torch

from loramux_kernels.tables import RANK_TILE, HeadColumns, LoraGroup, LoraTable, Segments


@dataclass(frozen=True)
class Case:
    """Adapters with random weights in a poisoned pool, and the whole matrices they are cut from."""

    pool: torch.Tensor
    table: LoraTable
    group: LoraGroup
    segments: Segments
    a: dict[tuple[int, int], torch.Tensor]
    b: dict[tuple[int, int], torch.Tensor]
    x: torch.Tensor
    y: torch.Tensor

    def to(self, device: torch.device) -> Case:
        """The same case on `device`. `a` and `b` are not copied and stay where they are."""
        table = LoraTable(**{f.name: getattr(self.table, f.name).to(device) for f in fields(self.table)})
        moved = {name: getattr(self, name).to(device) for name in ("pool", "x", "y")}
        return replace(self, table=table, **moved)


def make_case(
    dtype: torch.dtype,
    ranks: list[list[int]],
    rows: list[int],
    in_features: int = 40,
    out_features: tuple[int, ...] = (48,),
    base_rows: int = 2,
    seed: int = 0,
    alignment: int = 1,
) -> Case:
    """`ranks[slot][site]`; segment k has rows[k] rows of slot k; tiles are scattered, and everything else is NaN.

    Tiles start at multiples of `alignment` elements.
    """
    generator = torch.Generator().manual_seed(seed)
    num_slots, num_sites = len(ranks), len(out_features)
    max_tiles = max(1, -(-max(r for row in ranks for r in row) // RANK_TILE))
    offsets = torch.full((2, num_slots, num_sites, max_tiles), -(10**12), dtype=torch.int64)
    tiles: list[tuple[int, torch.Tensor]] = []
    a, b, end = {}, {}, 0
    for slot in range(num_slots):
        for site, rank in enumerate(ranks[slot]):
            a[slot, site] = torch.randn(rank, in_features, generator=generator).to(dtype)
            b[slot, site] = torch.randn(rank, out_features[site], generator=generator).to(dtype)
            for which, matrix in ((0, a[slot, site]), (1, b[slot, site])):
                for tile in range(-(-rank // RANK_TILE)):
                    rows_of_tile = matrix[tile * RANK_TILE : (tile + 1) * RANK_TILE]
                    end += alignment * int(torch.randint(1, 50, (), generator=generator))
                    offsets[which, slot, site, tile] = end
                    tiles.append((end, rows_of_tile))
                    end += -(-rows_of_tile.numel() // alignment) * alignment
    pool = torch.full((end + 64,), float("nan"), dtype=dtype)
    for start, tile_rows in tiles:
        pool[start : start + tile_rows.numel()] = tile_rows.flatten()
    table = LoraTable(
        a_offsets=offsets[0].contiguous(),
        b_offsets=offsets[1].contiguous(),
        ranks=torch.tensor(ranks, dtype=torch.int32),
        scales=torch.rand(num_slots, num_sites, generator=generator) + 0.5,
    )
    cu_seqlens = [0]
    for count in rows:
        cu_seqlens.append(cu_seqlens[-1] + count)
    total = cu_seqlens[-1] + base_rows
    x = torch.full((total, in_features), float("nan"), dtype=dtype)
    x[: cu_seqlens[-1]] = torch.randn(cu_seqlens[-1], in_features, generator=generator).to(dtype)
    y = torch.randn(total, sum(out_features), generator=generator).to(dtype)
    group = LoraGroup(tuple(range(num_sites)), out_features)
    return Case(pool, table, group, Segments(tuple(cu_seqlens), tuple(range(len(rows)))), a, b, x, y)


def by_heads(case: Case, num_heads: int, first: int, width: int) -> list[tuple[LoraTable, LoraGroup]]:
    """Tables and groups of the heads of a case's only site: columns of B, of which head h has some, and the whole of A.

    A is multiplied by rows of x, or by v, as B is: the table of B's heads is transposed.
    """
    (out_features,) = case.group.out_features
    step, in_features = out_features // num_heads, case.x.shape[1]
    of_b = LoraGroup.of_heads(0, num_heads, HeadColumns(width, first, step, out_features))
    of_a = LoraGroup.of_heads(0, num_heads, HeadColumns(in_features, 0, 0, in_features))
    return [(case.table.transposed, of_b), (case.table, of_a)]


def head_inputs(case: Case, num_heads: int, width: int) -> tuple[torch.Tensor, torch.Tensor]:
    """x and y `[T, heads, width]`, as transformers leaves them: a head's rows are next to each other."""
    generator, rows = torch.Generator().manual_seed(9), len(case.x)
    x, y = torch.randn(2, num_heads, rows, width + 5, generator=generator).to(case.x)[..., :width].transpose(1, 2)
    return x, y
