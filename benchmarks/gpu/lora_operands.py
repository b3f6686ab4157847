"""One LoRA group's operands for a mix: adapters with random weights in a pool, in the forms that loramux and the other
systems use.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import groupby

import torch
from grid import Mix

from loramux_kernels.lora import lora_expand_reference, lora_shrink_reference
from loramux_kernels.tables import RANK_TILE, LoraGroup, LoraTable, Segments

ALIGNMENT = 64
SCALE = 0.5


@dataclass(frozen=True)
class LoraOperands:
    """Inputs of one shrink and one expand."""

    x: torch.Tensor
    y: torch.Tensor
    a: list[torch.Tensor]
    """A of each adapter, `[sites, rank, in_features]`."""
    b: list[torch.Tensor]
    """B of each adapter and site, transposed `[rank, out_features]`, site after site in one flat tensor."""
    pool: torch.Tensor
    table: LoraTable
    group: LoraGroup
    segments: Segments
    slots: list[int]
    """The adapter of each row."""

    @property
    def ranks(self) -> list[int]:
        """Rank of each adapter."""
        return [int(rank) for rank in self.table.ranks[:, 0]]


def make_operands(rows: int, mix: Mix, in_features: int, widths: tuple[int, ...], like: torch.Tensor) -> LoraOperands:
    """Return random operands, with the dtype and device of `like`. The mix must have adapters."""
    distinct, slots, sites = mix.distinct(rows), mix.slots(rows), len(widths)
    ranks = [mix.rank(adapter) for adapter in range(distinct)]
    a = [like.new_empty(sites, rank, in_features).normal_(0, in_features**-0.5) for rank in ranks]
    b = [like.new_empty(rank * sum(widths)).normal_(0, 0.05) for rank in ranks]
    offsets = torch.zeros(2, distinct, sites, -(-max(ranks) // RANK_TILE), dtype=torch.int64)
    parts: list[torch.Tensor] = []
    end = 0
    for adapter, rank in enumerate(ranks):
        for site in range(sites):
            down = a[adapter][site]
            up = b_of(b[adapter], rank, widths, site)
            for which, matrix in enumerate((down, up)):
                for tile, start in enumerate(range(0, rank, RANK_TILE)):
                    rows_of_tile = matrix[start : start + RANK_TILE].flatten()
                    offsets[which, adapter, site, tile] = end
                    padding = -len(rows_of_tile) % ALIGNMENT
                    parts += [rows_of_tile, like.new_zeros(padding)]
                    end += len(rows_of_tile) + padding
    table = LoraTable(
        a_offsets=offsets[0].to(like.device),
        b_offsets=offsets[1].to(like.device),
        ranks=torch.tensor(ranks, dtype=torch.int32, device=like.device)[:, None].repeat(1, sites),
        scales=torch.full((distinct, sites), SCALE, device=like.device),
    )
    runs = [(slot, len(list(run))) for slot, run in groupby(slots)]
    ends = torch.tensor([0] + [count for _, count in runs]).cumsum(0).tolist()
    return LoraOperands(
        x=like.new_empty(rows, in_features).normal_(),
        y=like.new_empty(rows, sum(widths)).normal_(),
        a=a,
        b=b,
        pool=torch.cat(parts),
        table=table,
        group=LoraGroup(tuple(range(sites)), widths),
        segments=Segments(tuple(ends), tuple(slot for slot, _ in runs)),
        slots=slots,
    )


def b_of(flat: torch.Tensor, rank: int, widths: tuple[int, ...], site: int) -> torch.Tensor:
    """B transposed `[rank, width]` of one site."""
    start = rank * sum(widths[:site])
    return flat[start : start + rank * widths[site]].view(rank, widths[site])


def reference(operands: LoraOperands) -> torch.Tensor:
    """y in float32, by the torch reference."""
    y = operands.y.to(torch.float32, copy=True)
    args = (operands.pool, operands.table, operands.group, operands.segments)
    lora_expand_reference(lora_shrink_reference(operands.x, *args), *args, y)
    return y


def relative_error(result: torch.Tensor, wanted: torch.Tensor) -> float:
    """|result - wanted| / |wanted|; NaN if either tensor contains NaN."""
    return float((result.float() - wanted.float()).norm() / wanted.float().norm())
