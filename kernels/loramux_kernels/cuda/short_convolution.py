"""Short convolutions whose last inputs are states in pages of the pool, as a Triton kernel.

Semantics: those of `short_convolution` in the public module `linear_attention`. One launch for sequences of one row and
one for the others. A program computes some channels of a whole sequence and then stores their last inputs, which no
other program reads.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from loramux_kernels.cuda.launch import Launch, resident_programs, run_all
from loramux_kernels.cuda.linear_attention import SMALL_PROGRAMS, convolved, keep_inputs
from loramux_kernels.cuda.work_lists import STATE_ITEM_WIDTH, WorkList, plan_states
from loramux_kernels.tables import AttentionBatch, StateLayer

CHANNELS = 128
"""Channels of a program."""

ROWS = 8
"""Rows of a prompt that are convolved together."""

_ITEM = tl.constexpr(STATE_ITEM_WIDTH)


def short_convolution(
    x: torch.Tensor, kernel: torch.Tensor, bias: torch.Tensor | None, state: StateLayer, batch: AttentionBatch
) -> torch.Tensor:
    """Convolve the rows of each sequence. Arguments as for the public operator, on a GPU."""
    out = torch.empty_like(x)
    if len(out):
        run_all(prepare_short_convolution(x, kernel, bias, state, batch, out))
    return out


def prepare_short_convolution(
    x: torch.Tensor,
    kernel: torch.Tensor,
    bias: torch.Tensor | None,
    state: StateLayer,
    batch: AttentionBatch,
    out: torch.Tensor,
) -> list[Launch]:
    """Return the launches that fill `out` `[T, channels]` and change the pool."""
    assert batch.state_tables is not None, "a step of a model whose layers keep states has the pages of its states"
    assert x.stride(1) == out.stride(1) == 1, "a row's channels are contiguous"
    assert kernel.is_contiguous(), "taps are next to each other"
    assert batch.state_tables.stride(1) == state.units.stride(2) == 1, "tables and units are contiguous"
    tiles = plan_states(batch)
    arguments = {
        "x": x,
        "kernel": kernel,
        "bias": bias,
        "out": out,
        "states": state.units,
        "tables": batch.state_tables,
        "unit": state.first,
        "x_row": x.stride(0),
        "out_row": out.stride(0),
        "table_row": batch.state_tables.stride(0),
        "page_stride": state.units.stride(0),
        "CHANNELS": x.shape[1],
        "TAPS": state.shape.taps,
        "PER_PAGE": state.units.shape[1],
        "UNIT": state.units.shape[2],
        "BLOCK_CHANNELS": min(CHANNELS, triton.next_power_of_2(x.shape[1])),
    }
    grid = (resident_programs(x.device, SMALL_PROGRAMS),)

    def launch(items: WorkList, rows: int) -> Launch:
        own = arguments | {"work": items.work, "BLOCK_ROWS": rows}
        return Launch(_convolve_channels, grid, own, num_warps=1 if rows == 1 else 4, num_stages=1)

    return [launch(tiles.singles, 1), *([] if tiles.prompts is None else [launch(tiles.prompts, ROWS)])]


@triton.jit(do_not_specialize=["unit"])
def _convolve_channels(
    x: tl.tensor, kernel: tl.tensor, bias: tl.tensor, out: tl.tensor, states: tl.tensor, tables: tl.tensor,
    work: tl.tensor, unit: tl.tensor, x_row: tl.tensor, out_row: tl.tensor, table_row: tl.tensor,
    page_stride: tl.tensor,
    CHANNELS: tl.constexpr, TAPS: tl.constexpr, PER_PAGE: tl.constexpr, UNIT: tl.constexpr,
    BLOCK_CHANNELS: tl.constexpr, BLOCK_ROWS: tl.constexpr,
) -> None:  # fmt: skip
    """Convolve some channels of a sequence's rows, and store the last inputs before its drafts."""
    blocks: tl.constexpr = (CHANNELS + BLOCK_CHANNELS - 1) // BLOCK_CHANNELS
    for task in range(tl.program_id(0), tl.load(work) * blocks, tl.num_programs(0)):
        d = task % blocks * BLOCK_CHANNELS + tl.arange(0, BLOCK_CHANNELS)[None, :]
        item = work + (task // blocks + 1) * _ITEM
        table = tables + tl.load(item).to(tl.int64) * table_row
        first = tl.load(item + 1).to(tl.int64)
        stop = tl.load(item + 2).to(tl.int64)
        stored = tl.load(item + 7).to(tl.int64)
        begins = tl.load(item + 4)
        for start in range(tl.load(item + 1), tl.load(item + 2), BLOCK_ROWS):
            row = start + tl.arange(0, BLOCK_ROWS).to(tl.int64)[:, None]
            y = convolved(
                x, x_row, kernel, bias, states, table, page_stride, unit, row, first, stop, begins, 0, d,
                CHANNELS, TAPS, PER_PAGE, UNIT, False,
            )  # fmt: skip
            tl.store(out + row * out_row + d, y.to(out.dtype.element_ty), mask=(row < stop) & (d < CHANNELS))
        keep_inputs(
            x, x_row, states, table, page_stride, unit, first, stored, begins, 0, d, CHANNELS, TAPS, PER_PAGE, UNIT
        )
