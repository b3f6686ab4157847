"""Semantics: out[tile] = sum_p exp(lse[p]) * partial[p] / sum_p exp(lse[p]), over the partial results p of a tile.

Joins what `paged_attention` computed for the pieces of one context, always in the same order.
"""

from __future__ import annotations

import triton
import triton.language as tl

from loramux_kernels.cuda.attention_plan import ITEM_WIDTH

_ITEM = tl.constexpr(ITEM_WIDTH)
_NEVER = tl.constexpr(float("-inf"))


@triton.jit
def merge_partials(
    output: tl.tensor, partial_output: tl.tensor, partial_lse: tl.tensor, work: tl.tensor, output_token: tl.tensor,
    KV_HEADS: tl.constexpr, GROUPS: tl.constexpr, VALUE_DIM: tl.constexpr, BLOCK_VALUE: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,
) -> None:  # fmt: skip
    """Join the partial results of one tile of query rows and one kv head an item, in order."""
    tile_row = tl.arange(0, BLOCK_ROWS) // GROUPS
    member = tl.arange(0, BLOCK_ROWS).to(tl.int64) % GROUPS
    e = tl.arange(0, BLOCK_VALUE)
    for task in range(tl.program_id(0), tl.load(work) * KV_HEADS, tl.num_programs(0)):
        head = task % KV_HEADS
        item = work + (task // KV_HEADS + 1) * _ITEM
        row = tl.load(item).to(tl.int64) + tile_row
        has_row = tile_row < tl.load(item + 1)
        inside = has_row[:, None] & (e < VALUE_DIM)[None, :]
        first = tl.load(item + 2)
        highest = tl.full((BLOCK_ROWS,), _NEVER, tl.float32)
        total = tl.zeros((BLOCK_ROWS,), tl.float32)
        sums = tl.zeros((BLOCK_ROWS, BLOCK_VALUE), tl.float32)
        for partial in range(first, first + tl.load(item + 3)):
            slot = (partial * KV_HEADS + head) * BLOCK_ROWS + tl.arange(0, BLOCK_ROWS).to(tl.int64)
            lse = tl.load(partial_lse + slot, mask=has_row, other=_NEVER)
            result = tl.load(partial_output + slot[:, None] * VALUE_DIM + e[None, :], mask=inside, other=0.0)
            new_highest = tl.maximum(highest, lse)
            shift = tl.where(new_highest == _NEVER, 0.0, new_highest)
            weight = tl.exp2(lse - shift)
            decay = tl.exp2(highest - shift)
            sums = sums * decay[:, None] + result * weight[:, None]
            total = total * decay + weight
            highest = new_highest
        result = sums / tl.where(total == 0.0, 1.0, total)[:, None]
        out = output + row[:, None] * output_token + (head * GROUPS + member)[:, None] * VALUE_DIM + e[None, :]
        tl.store(out, result.to(output.dtype.element_ty), mask=inside)
