"""The first launches of a step, as Triton kernels. Semantics as in `loramux_kernels.step_inputs`."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from loramux_kernels.cuda.launch import Launch

BLOCK = 1024


def prepare_write_pages(table: torch.Tensor, places: torch.Tensor, pages: torch.Tensor, number: torch.Tensor) -> Launch:
    """Return the launch of `write_pages`."""
    assert table.is_contiguous(), "a place is an element of the flattened table"
    arguments = {"table": table, "places": places, "pages": pages, "number": number, "BLOCK": BLOCK}
    return Launch(_write_pages, (triton.cdiv(len(places), BLOCK),), arguments, num_warps=4, num_stages=1)


def prepare_insert_tokens(
    input_ids: torch.Tensor, counts: torch.Tensor, sampled: torch.Tensor, pending: torch.Tensor, number: torch.Tensor
) -> Launch:
    """Return the launch of `insert_tokens`."""
    assert pending.stride(1) == 1, "rows of `pending` are contiguous"
    arguments = {
        "input_ids": input_ids,
        "counts": counts,
        "sampled": sampled,
        "pending": pending,
        "number": number,
        "pending_stride": pending.stride(0),
        "counts_stride": counts.stride(0),
        "BLOCK": BLOCK,
    }
    return Launch(_insert_tokens, (triton.cdiv(pending.shape[1], BLOCK),), arguments, num_warps=4, num_stages=1)


@triton.jit
def _write_pages(table: tl.tensor, places: tl.tensor, pages: tl.tensor, number: tl.tensor, BLOCK: tl.constexpr) -> None:
    index = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = index < tl.load(number)
    place = tl.load(places + index, mask=inside, other=0)
    tl.store(table + place, tl.load(pages + index, mask=inside, other=0), mask=inside)


@triton.jit
def _insert_tokens(
    input_ids: tl.tensor, counts: tl.tensor, sampled: tl.tensor, pending: tl.tensor, number: tl.tensor,
    pending_stride: tl.tensor, counts_stride: tl.tensor,
    BLOCK: tl.constexpr,
) -> None:  # fmt: skip
    index = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = index < tl.load(number)
    row = tl.load(pending + index, mask=inside, other=0)
    source = tl.load(pending + pending_stride + index, mask=inside, other=0)
    counter = tl.load(pending + 2 * pending_stride + index, mask=inside, other=-1)
    token = tl.load(sampled + source, mask=inside, other=0)
    tl.store(input_ids + row, tl.maximum(token, 0), mask=inside)
    # A sequence has one counter and one such token, so no two elements share a count.
    is_counted = inside & (counter >= 0) & (token >= 0)
    place = counts + counter * counts_stride + token
    tl.store(place, tl.load(place, mask=is_counted, other=0) + 1, mask=is_counted)
