"""A LoRA group's sites and slices as tables on the device, made once for each group."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache

import torch

from loramux_kernels.tables import LoraGroup

BLOCK_WIDTH = 8
"""Columns of a column block: index of the site in the group, site, number of the block within its slice, width of the
slice, first column of the slice in y; the rest is padding."""

VECTOR = 8
"""Elements that the kernels load at once; offsets of rank tiles are multiples of it."""


@dataclass(frozen=True, eq=False)
class GroupTable:
    """The tables that launches for one group read."""

    sites: torch.Tensor
    """int32[len(group.sites)]"""
    blocks: torch.Tensor
    """int32[number of column blocks, BLOCK_WIDTH]"""
    aligned: bool
    """True where every row of B starts where a vector load may."""


@cache
def group_table(group: LoraGroup, block_columns: int, device: torch.device) -> GroupTable:
    """The tables of `group` with its slices cut into blocks of `block_columns`.

    Made on a group's first launch: run one before capturing a CUDA graph.
    """
    blocks = [
        (index, site, block, width, start, 0, 0, 0)
        for index, (site, width, start) in enumerate(
            zip(group.sites, group.out_features, group.out_starts, strict=False)
        )
        for block in range(-(-width // block_columns))
    ]
    return GroupTable(
        sites=torch.tensor(group.sites, dtype=torch.int32, device=device),
        blocks=torch.tensor(blocks, dtype=torch.int32, device=device),
        aligned=all(width % VECTOR == 0 for width in group.out_features),
    )
