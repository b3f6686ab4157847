"""Semantics: y[s[k]:s[k+1], slice i] = y[...] * factor(slot[k], sites[i]) + shift(slot[k], sites[i]), columnwise."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from loramux_kernels.cuda.group_table import BLOCK_WIDTH, group_table
from loramux_kernels.cuda.launch import Launch
from loramux_kernels.tables import LoraGroup, Segments

BLOCK_COLUMNS = 1024

_BLOCK = tl.constexpr(BLOCK_WIDTH)


def rescale(y: torch.Tensor, pool: torch.Tensor, offsets: torch.Tensor, group: LoraGroup, segments: Segments) -> None:
    """Scale and shift every adapter's rows, in place: arguments as for the public operator, on a GPU."""
    if segments.rows:
        prepare_rescale(y, pool, offsets, group, segments).run()


def prepare_rescale(
    y: torch.Tensor, pool: torch.Tensor, offsets: torch.Tensor, group: LoraGroup, segments: Segments
) -> Launch:
    """The launch that changes `y`: a program for each row and block of columns, most of which find nothing to do."""
    assert y.stride(1) == 1, "rows of y are contiguous"
    blocks = group_table(group, BLOCK_COLUMNS, y.device).blocks
    arguments = {
        "y": y,
        "pool": pool,
        "offsets": offsets,
        "row_slots": segments.row_slots(y.device),
        "blocks": blocks,
        "y_stride": y.stride(0),
        "table_sites": offsets.shape[1],
        "BLOCK_COLUMNS": BLOCK_COLUMNS,
    }
    return Launch(_rescale, (segments.rows, len(blocks)), arguments, num_warps=4, num_stages=1)


@triton.jit
def _rescale(
    y: tl.tensor, pool: tl.tensor, offsets: tl.tensor, row_slots: tl.tensor, blocks: tl.tensor, y_stride: tl.tensor,
    table_sites: tl.tensor, BLOCK_COLUMNS: tl.constexpr,
) -> None:  # fmt: skip
    """One row by one block of columns a program."""
    row = tl.program_id(0).to(tl.int64)
    block = blocks + tl.program_id(1) * _BLOCK
    slot = tl.load(row_slots + row)
    start = tl.load(offsets + slot * table_sites + tl.load(block + 1), mask=slot >= 0, other=-1)
    if start >= 0:
        width = tl.load(block + 3)
        column = tl.load(block + 2) * BLOCK_COLUMNS + tl.arange(0, BLOCK_COLUMNS)
        has_column = column < width
        out = y + row * y_stride + tl.load(block + 4) + column
        factor = tl.load(pool + start + column, mask=has_column, other=0.0).to(tl.float32)
        shift = tl.load(pool + start + width + column, mask=has_column, other=0.0).to(tl.float32)
        value = tl.load(out, mask=has_column, other=0.0).to(tl.float32)
        tl.store(out, (value * factor + shift).to(y.dtype.element_ty), mask=has_column)
