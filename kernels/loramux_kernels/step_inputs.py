"""The first launches of a step, which write pages that sequences got, and tokens that only the device knows.

Semantics:

    write_pages     table[places[i]] = pages[i]                         for i < number
    insert_tokens   input_ids[rows[j]] = max(sampled[sources[j]], 0)    for j < number
                    counts[counters[j], sampled[sources[j]]] += 1       if counters[j] >= 0 and the token is not below 0

The numbers are on the device, so that a CUDA graph can hold both operators. A sampled token below 0 is NO_TOKEN: its
request ends, and its input must be a valid id all the same.
"""

from __future__ import annotations

import torch

from loramux_kernels.device import runs_triton


def write_pages(table: torch.Tensor, places: torch.Tensor, pages: torch.Tensor, number: torch.Tensor) -> None:
    """Write `pages` int32[n] to the elements `places` int64[n] of the contiguous `table` int32; `number` int32[1]."""
    if runs_triton(table):
        from loramux_kernels.cuda import step_inputs as triton

        triton.prepare_write_pages(table, places, pages, number).run()
    else:
        write_pages_reference(table, places, pages, number)


def write_pages_reference(table: torch.Tensor, places: torch.Tensor, pages: torch.Tensor, number: torch.Tensor) -> None:
    """Compute `write_pages` in torch; the host waits for `number`."""
    count = int(number)
    table.view(-1).index_copy_(0, places[:count], pages[:count])


def insert_tokens(
    input_ids: torch.Tensor, counts: torch.Tensor, sampled: torch.Tensor, pending: torch.Tensor, number: torch.Tensor
) -> None:
    """Write tokens of the step before into this step's inputs, and count them for penalties.

    `input_ids` int64[T]; `counts` int32[sequences, width], see `Penalties`; `sampled` int64[S]; `pending` int64[3, n]:
    rows of `input_ids`, rows of `sampled`, and rows of `counts` or -1; `number` int32[1]. No row comes twice.
    """
    if runs_triton(input_ids):
        from loramux_kernels.cuda import step_inputs as triton

        triton.prepare_insert_tokens(input_ids, counts, sampled, pending, number).run()
    else:
        insert_tokens_reference(input_ids, counts, sampled, pending, number)


def insert_tokens_reference(
    input_ids: torch.Tensor, counts: torch.Tensor, sampled: torch.Tensor, pending: torch.Tensor, number: torch.Tensor
) -> None:
    """Compute `insert_tokens` in torch; the host waits for `number`."""
    rows, sources, counters = pending[:, : int(number)]
    tokens = sampled[sources]
    input_ids.index_copy_(0, rows, tokens.clamp(min=0))
    is_counted = (counters >= 0) & (tokens >= 0)
    counts[counters[is_counted], tokens[is_counted]] += 1
