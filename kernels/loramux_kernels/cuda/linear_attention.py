"""Linear attention and Mamba 2 as Triton kernels: a step's packed rows, with each sequence's state in pages of the
pool.

Semantics: those of `linear_attention` and `gated_norm` in the public module. Launches, over work lists of `StateTiles`:

    convolve   queries, keys and values after the convolution, decays and step sizes; for single rows and for chunks
    step       single rows: S = e^g S + k d^T; out = S^T q, with d = beta (v - e^g S^T k), for Mamba 2 d = beta v
    solve      chunks: scores, and for the gated delta rule
               corrected = (1 + A)^-1 diag(beta), A[i, j] = beta_i (k_i . k_j) e^(G_i - G_j) below the diagonal
    scan       prompts, chunk after chunk: D = corrected (V - e^G K S), for Mamba 2 D = diag(beta) V;
               out = e^G Q S + scores D; S = e^G_last S + (e^(G_last - G) K)^T D

G is the sum of g since the chunk's start, scores[i, j] = (q_i . k_j) e^(G_i - G_j) up to the diagonal. This is the
chunked form of Gated DeltaNet (Yang et al., 2025) with the UT transform (Joffrain et al., 2006). Nothing in `solve`
depends on the state, so all chunks are solved at the same time; only `scan` goes through a sequence in order.

The inverse of a unit triangular matrix doubles the blocks along its diagonal: if X holds the inverses of the blocks of
n rows, and L the part of A between two neighbours, then X - X L X holds the inverses of the blocks of 2n rows. A power
series would cancel terms of 10^8 and more for a prompt that repeats one token.

The drafts of a sequence are in other chunks than its earlier rows. `solve` and `scan` store the state between
them, and `scan` goes on from it.

The convolution's inputs are stored by `step` and `solve`: programs of `convolve` still read the earlier ones. Chunks
have 32 rows and the state is transposed, so every product has at most 32 rows. Hopper's wgmma, which could read
registers too late (`work_lists.TileShape.expand_rows`), is then not used.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
import triton
import triton.language as tl

from loramux_kernels.cuda.launch import Launch, resident_programs, run_all
from loramux_kernels.cuda.work_lists import STATE_CHUNK, STATE_ITEM_WIDTH, WorkList, plan_states
from loramux_kernels.tables import AttentionBatch, StateLayer, StateRows, StateWeights

VALUE_COLUMNS = 16
"""Columns of a head's matrix that a program takes: more would not fit into registers."""

CONVOLVED_ROWS = 8
"""Rows of a chunk that are convolved together."""

SMALL_PROGRAMS = 8
"""Programs of `convolve` and `step` on a multiprocessor: their loads must overlap."""

CONVOLVE_PROGRAMS = 3
"""Programs of `convolve` that the registers suffice for in any case, if each convolves several rows at a time."""

CHUNK_PROGRAMS = 2
"""Programs of `solve` and `scan` on a multiprocessor."""

_ITEM = tl.constexpr(STATE_ITEM_WIDTH)
_CHUNK = tl.constexpr(STATE_CHUNK)
_NEVER = tl.constexpr(float("-inf"))


def linear_attention(rows: StateRows, weights: StateWeights, state: StateLayer, batch: AttentionBatch) -> torch.Tensor:
    """Compute a layer's linear attention in two launches for single rows and three for chunks. Arguments as for the
    public operator, on a GPU."""
    shape = state.shape
    out = rows.value.new_empty(len(rows.value), shape.heads, shape.value_dim)
    if len(out):
        run_all(prepare_linear_attention(rows, weights, state, batch, out))
    return out


def prepare_linear_attention(
    rows: StateRows, weights: StateWeights, state: StateLayer, batch: AttentionBatch, out: torch.Tensor
) -> list[Launch]:
    """Return the launches that fill `out` `[T, heads, Dv]` and change the pool."""
    shape, tiles = state.shape, plan_states(batch)
    count, key_heads = rows.query.shape[:2]
    assert batch.state_tables is not None, "a step of a model whose layers keep states has the pages of its states"
    parts = (rows.query, rows.key, rows.value, rows.a, *(() if rows.b is None else (rows.b,)))
    assert all(part.stride(-1) == 1 for part in parts), "each head's vector is contiguous"
    assert rows.value.stride(2) == shape.value_dim, "the heads that share a key head are next to each other"
    assert weights.kernel.is_contiguous(), "taps are next to each other"
    assert batch.state_tables.stride(1) == state.units.stride(2) == 1, "tables and units are contiguous"
    new = partial(out.new_empty, dtype=torch.float32)
    shared: dict[str, Any] = {
        "query": rows.query,
        "key": rows.key,
        "value": rows.value,
        "normed": new((count, 2 * key_heads, shape.key_dim)),
        "mixed": out.new_empty(count, shape.heads, shape.value_dim),
        "decay": new((count, shape.heads)),
        "beta": new((count, shape.heads)),
        "states": state.units,
        "tables": batch.state_tables,
        "unit": state.first,
        "query_row": rows.query.stride(0),
        "query_head": rows.query.stride(1),
        "key_row": rows.key.stride(0),
        "key_head": rows.key.stride(1),
        "value_row": rows.value.stride(0),
        "value_group": rows.value.stride(1),
        "table_row": batch.state_tables.stride(0),
        "page_stride": state.units.stride(0),
        "KEY_HEADS": key_heads,
        "HEADS": shape.heads,
        "KEY_DIM": shape.key_dim,
        "VALUE_DIM": shape.value_dim,
        "TAPS": shape.taps,
        "PER_PAGE": state.units.shape[1],
        "UNIT": state.units.shape[2],
        "BLOCK_KEY": max(16, triton.next_power_of_2(shape.key_dim)),
        "BLOCK_VALUE": triton.next_power_of_2(shape.value_dim),
        "IS_DELTA": rows.b is not None,
    }
    launches = [
        _convolve_launch(tiles.singles, 1, rows, weights, shared),
        _step_launch(tiles.singles, weights, shared, out),
    ]
    if tiles.chunks is not None and tiles.prompts is not None:
        # The gated delta rule needs two results of `solve`, Mamba 2 one.
        between = new((1 if rows.b is None else 2, count, shape.heads, STATE_CHUNK))
        launches += [
            _convolve_launch(tiles.chunks, CONVOLVED_ROWS, rows, weights, shared),
            _solve_launch(tiles.chunks, shared, between),
            _scan_launch(tiles.prompts, weights, shared, between, out),
        ]
    return launches


def _convolve_launch(
    items: WorkList, height: int, rows: StateRows, weights: StateWeights, shared: dict[str, Any]
) -> Launch:
    arguments = shared | {
        "b": rows.b,
        "a": rows.a,
        "b_row": 0 if rows.b is None else rows.b.stride(0),
        "b_group": 0 if rows.b is None else rows.b.stride(1),
        "a_row": rows.a.stride(0),
        "a_group": rows.a.stride(1),
        "kernel": weights.kernel,
        "bias": weights.bias,
        "delta_factor": weights.delta_factor,
        "least": weights.limits[0],
        "most": weights.limits[1],
        "IS_LIMITED": weights.is_limited,
        "factors": weights.decay,
        "shifts": weights.shift,
        "work": items.work,
        "BLOCK_ROWS": height,
    }
    grid = (resident_programs(items.work.device, SMALL_PROGRAMS),)
    if height == 1:
        return Launch(_convolve_heads, grid, arguments, num_warps=1, num_stages=1)
    return Launch(_convolve_heads, grid, arguments, num_warps=4, num_stages=1, programs=CONVOLVE_PROGRAMS)


def _step_launch(items: WorkList, weights: StateWeights, shared: dict[str, Any], out: torch.Tensor) -> Launch:
    arguments = shared | {"out": out, "work": items.work, "skip": weights.skip, "COLUMNS": VALUE_COLUMNS}
    grid = (resident_programs(out.device, SMALL_PROGRAMS),)
    return Launch(_step_rows, grid, arguments, num_warps=4, num_stages=1)


def _solve_launch(items: WorkList, shared: dict[str, Any], between: torch.Tensor) -> Launch:
    arguments = shared | {"corrected": between[0], "scores": between[-1], "work": items.work}
    del arguments["mixed"]
    arguments["PRECISION"] = _precision(shared["query"].dtype)
    grid = (resident_programs(between.device, CHUNK_PROGRAMS),)
    return Launch(_solve_chunks, grid, arguments, num_warps=8, num_stages=1)


def _scan_launch(
    items: WorkList, weights: StateWeights, shared: dict[str, Any], between: torch.Tensor, out: torch.Tensor
) -> Launch:
    is_exact = out.dtype == torch.float32
    arguments = {name: shared[name] for name in _SCANNED} | {
        "corrected": between[0],
        "scores": between[-1],
        "skip": weights.skip,
        "out": out,
        "work": items.work,
        # Without tensor cores, operands take registers of each thread that reads them.
        "COLUMNS": VALUE_COLUMNS // 2 if is_exact else VALUE_COLUMNS,
        "PRECISION": "ieee" if is_exact else "tf32",
    }
    grid = (resident_programs(out.device, CHUNK_PROGRAMS),)
    if is_exact:
        return Launch(_scan_prompts, grid, arguments, num_warps=8, num_stages=1)
    return Launch(_scan_prompts, grid, arguments, num_warps=4, num_stages=1, programs=CHUNK_PROGRAMS)


def _precision(dtype: torch.dtype) -> str:
    """Return how tensor cores multiply float32: TF32 has more bits than half precision, three products as many as
    float32."""
    return "tf32x3" if dtype == torch.float32 else "tf32"


@triton.jit
def _inputs(
    source: tl.tensor, stride: tl.tensor, states: tl.tensor, table: tl.tensor, page_stride: tl.tensor,
    unit: tl.tensor, row: tl.tensor, first: tl.tensor, stop: tl.tensor, begins: tl.tensor, channel: tl.tensor,
    d: tl.tensor,
    DIM: tl.constexpr, TAPS: tl.constexpr, PER_PAGE: tl.constexpr, UNIT: tl.constexpr,
) -> tl.tensor:  # fmt: skip
    """Return the convolution's inputs of rows `[R, 1]` and channels `[1, D]`, from `channel` on, of one sequence.

    Rows before `first`, of which there are at most TAPS, are in the state, whose inputs begin at `unit`; they are zero
    before the sequence's beginning.
    """
    inside = d < DIM
    here = inside & (row >= first) & (row < stop)
    x = tl.load(source + row * stride + d, mask=here, other=0.0).to(tl.float32)
    if begins == 0:
        element = (channel + d) * TAPS + (TAPS + row - first).to(tl.int32)
        is_kept = inside & (row < first)
        number = unit + element // UNIT
        page = tl.load(table + number // PER_PAGE, mask=is_kept, other=0).to(tl.int64)
        place = page * page_stride + (number % PER_PAGE) * UNIT + element % UNIT
        x += tl.load(states + place, mask=is_kept, other=0.0)
    return x


@triton.jit
def keep_inputs(
    source: tl.tensor, stride: tl.tensor, states: tl.tensor, table: tl.tensor, page_stride: tl.tensor,
    unit: tl.tensor, first: tl.tensor, stop: tl.tensor, begins: tl.tensor, channel: tl.tensor, d: tl.tensor,
    DIM: tl.constexpr, TAPS: tl.constexpr, PER_PAGE: tl.constexpr, UNIT: tl.constexpr,
) -> None:  # fmt: skip
    """Store the last TAPS inputs before `stop`. An earlier input is read before its place is overwritten."""
    for tap in tl.static_range(TAPS):
        row = tl.zeros((1, 1), tl.int64) + stop - TAPS + tap
        x = _inputs(
            source, stride, states, table, page_stride, unit, row, first, stop, begins, channel, d,
            DIM, TAPS, PER_PAGE, UNIT,
        )  # fmt: skip
        tl.debug_barrier()
        element = (channel + d) * TAPS + tap
        number = unit + element // UNIT
        page = tl.load(table + number // PER_PAGE, mask=d < DIM, other=0).to(tl.int64)
        place = page * page_stride + (number % PER_PAGE) * UNIT + element % UNIT
        tl.store(states + place, x, mask=d < DIM)


@triton.jit
def _keep_heads(
    query: tl.tensor, key: tl.tensor, value: tl.tensor, states: tl.tensor, table: tl.tensor, page_stride: tl.tensor,
    unit: tl.tensor, query_row: tl.tensor, query_head: tl.tensor, key_row: tl.tensor, key_head: tl.tensor,
    value_row: tl.tensor, value_group: tl.tensor, head: tl.tensor, part: tl.tensor, first: tl.tensor,
    stop: tl.tensor, begins: tl.tensor,
    KEY_HEADS: tl.constexpr, HEADS: tl.constexpr, KEY_DIM: tl.constexpr, VALUE_DIM: tl.constexpr,
    TAPS: tl.constexpr, PER_PAGE: tl.constexpr, UNIT: tl.constexpr, BLOCK_KEY: tl.constexpr,
    BLOCK_VALUE: tl.constexpr,
) -> None:  # fmt: skip
    """Store the last inputs of a head: of its queries if `part` is 0, of its keys if it is 1, of its values if it is 2.

    The heads of values that share a key head store its queries and keys once. One part at a time, because the addresses
    of all three would take too many registers.
    """
    repeats: tl.constexpr = HEADS // KEY_HEADS
    group = head // repeats
    d = tl.arange(0, BLOCK_KEY)[None, :]
    e = tl.arange(0, BLOCK_VALUE)[None, :]
    inputs = unit + HEADS
    if part == 2:
        keep_inputs(
            value + group * value_group + (head % repeats) * VALUE_DIM, value_row, states, table, page_stride, inputs,
            first, stop, begins, 2 * KEY_HEADS * KEY_DIM + head * VALUE_DIM, e, VALUE_DIM, TAPS, PER_PAGE, UNIT,
        )  # fmt: skip
    elif head % repeats == 0:
        if part == 0:
            keep_inputs(
                query + group * query_head, query_row, states, table, page_stride, inputs, first, stop, begins,
                group * KEY_DIM, d, KEY_DIM, TAPS, PER_PAGE, UNIT,
            )  # fmt: skip
        else:
            keep_inputs(
                key + group * key_head, key_row, states, table, page_stride, inputs, first, stop, begins,
                (KEY_HEADS + group) * KEY_DIM, d, KEY_DIM, TAPS, PER_PAGE, UNIT,
            )  # fmt: skip


@triton.jit
def convolved(
    source: tl.tensor, stride: tl.tensor, kernel: tl.tensor, bias: tl.tensor, states: tl.tensor, table: tl.tensor,
    page_stride: tl.tensor, unit: tl.tensor, row: tl.tensor, first: tl.tensor, stop: tl.tensor, begins: tl.tensor,
    channel: tl.tensor, d: tl.tensor,
    DIM: tl.constexpr, TAPS: tl.constexpr, PER_PAGE: tl.constexpr, UNIT: tl.constexpr,
    ACTIVATES: tl.constexpr = True,
) -> tl.tensor:  # fmt: skip
    """Return `[R, D]`, rounded twice to the inputs' dtype, as the reference's two operators round."""
    dtype: tl.constexpr = source.dtype.element_ty
    total = tl.zeros((row.shape[0], d.shape[1]), tl.float32)
    for tap in tl.static_range(TAPS + 1):
        x = _inputs(
            source, stride, states, table, page_stride, unit, row - TAPS + tap, first, stop, begins, channel, d,
            DIM, TAPS, PER_PAGE, UNIT,
        )  # fmt: skip
        total += x * tl.load(kernel + (channel + d) * (TAPS + 1) + tap, mask=d < DIM, other=0.0).to(tl.float32)
    if bias is not None:
        total += tl.load(bias + channel + d, mask=d < DIM, other=0.0).to(tl.float32)
    total = total.to(dtype).to(tl.float32)
    if ACTIVATES:
        total = (total / (1.0 + tl.exp(-total))).to(dtype).to(tl.float32)
    return total


@triton.jit(do_not_specialize=["unit"])
def _convolve_heads(
    query: tl.tensor, key: tl.tensor, value: tl.tensor, b: tl.tensor, a: tl.tensor, kernel: tl.tensor,
    bias: tl.tensor, factors: tl.tensor, shifts: tl.tensor, normed: tl.tensor, mixed: tl.tensor, decay: tl.tensor,
    beta: tl.tensor, states: tl.tensor, tables: tl.tensor, work: tl.tensor, unit: tl.tensor, query_row: tl.tensor,
    query_head: tl.tensor, key_row: tl.tensor, key_head: tl.tensor, value_row: tl.tensor, value_group: tl.tensor,
    b_row: tl.tensor, b_group: tl.tensor, a_row: tl.tensor, a_group: tl.tensor, table_row: tl.tensor,
    page_stride: tl.tensor, delta_factor: tl.tensor, least: tl.tensor, most: tl.tensor,
    KEY_HEADS: tl.constexpr, HEADS: tl.constexpr, KEY_DIM: tl.constexpr, VALUE_DIM: tl.constexpr,
    TAPS: tl.constexpr, PER_PAGE: tl.constexpr, UNIT: tl.constexpr, BLOCK_KEY: tl.constexpr,
    BLOCK_VALUE: tl.constexpr, BLOCK_ROWS: tl.constexpr, IS_DELTA: tl.constexpr, IS_LIMITED: tl.constexpr,
) -> None:  # fmt: skip
    """Compute a head of queries, keys or values of an item's rows; with values, their decays and step sizes."""
    repeats: tl.constexpr = HEADS // KEY_HEADS
    parts: tl.constexpr = 2 * KEY_HEADS + HEADS
    inputs = unit + HEADS
    d = tl.arange(0, BLOCK_KEY)[None, :]
    e = tl.arange(0, BLOCK_VALUE)[None, :]
    for task in range(tl.program_id(0), tl.load(work) * parts, tl.num_programs(0)):
        part = task % parts
        item = work + (task // parts + 1) * _ITEM
        table = tables + tl.load(item).to(tl.int64) * table_row
        stop = tl.load(item + 2).to(tl.int64)
        first = tl.load(item + 3).to(tl.int64)
        begins = tl.load(item + 4)
        for start in range(tl.load(item + 1), tl.load(item + 2), BLOCK_ROWS):
            row = start + tl.arange(0, BLOCK_ROWS).to(tl.int64)[:, None]
            if part < 2 * KEY_HEADS:
                # Two calls: the pointers' alignment would be lost if they were merged.
                if part < KEY_HEADS:
                    x = convolved(
                        query + part * query_head, query_row, kernel, bias, states, table, page_stride, inputs, row,
                        first, stop, begins, part * KEY_DIM, d, KEY_DIM, TAPS, PER_PAGE, UNIT,
                    )  # fmt: skip
                else:
                    x = convolved(
                        key + (part - KEY_HEADS) * key_head, key_row, kernel, bias, states, table, page_stride,
                        inputs, row, first, stop, begins, part * KEY_DIM, d, KEY_DIM, TAPS, PER_PAGE, UNIT,
                    )  # fmt: skip
                if IS_DELTA:
                    scale = tl.where(part < KEY_HEADS, KEY_DIM**-0.5, 1.0)
                    x *= scale / tl.sqrt(tl.sum(x * x, axis=1) + 1e-6)[:, None]
                tl.store(normed + (row * 2 * KEY_HEADS + part) * KEY_DIM + d, x, mask=(row < stop) & (d < KEY_DIM))
            else:
                head = part - 2 * KEY_HEADS
                group = head // repeats
                member = head % repeats
                v = convolved(  # another name than that of the other branch, whose width may differ
                    value + group * value_group + member * VALUE_DIM, value_row, kernel, bias, states, table,
                    page_stride, inputs, row, first, stop, begins, 2 * KEY_HEADS * KEY_DIM + head * VALUE_DIM, e,
                    VALUE_DIM, TAPS, PER_PAGE, UNIT,
                )  # fmt: skip
                to = mixed + (row * HEADS + head) * VALUE_DIM + e
                tl.store(to, v.to(mixed.dtype.element_ty), mask=(row < stop) & (e < VALUE_DIM))
                exists = row < stop
                of_a = tl.load(a + row * a_row + group * a_group + member, mask=exists, other=0.0).to(tl.float32)
                of_a += tl.load(shifts + head).to(tl.float32)
                # softplus: log(1 + e^x), which is x for large x
                grown = tl.where(of_a > 20.0, of_a, tl.log(1.0 + tl.exp(tl.minimum(of_a, 20.0))))
                if IS_LIMITED:
                    limited = tl.minimum(tl.maximum(grown, least), most)
                    grown = tl.where(row < tl.load(item + 6), limited, grown)
                size = grown
                if IS_DELTA:
                    of_b = tl.load(b + row * b_row + group * b_group + member, mask=exists, other=0.0).to(tl.float32)
                    size = (1.0 / (1.0 + tl.exp(-of_b))).to(b.dtype.element_ty).to(tl.float32) * delta_factor
                tl.store(beta + row * HEADS + head, size, mask=exists)
                tl.store(decay + row * HEADS + head, tl.load(factors + head) * grown, mask=exists)


@triton.jit(do_not_specialize=["unit"])
def _step_rows(
    query: tl.tensor, key: tl.tensor, value: tl.tensor, normed: tl.tensor, mixed: tl.tensor, decay: tl.tensor,
    beta: tl.tensor, skip: tl.tensor, states: tl.tensor, tables: tl.tensor, out: tl.tensor, work: tl.tensor,
    unit: tl.tensor, query_row: tl.tensor, query_head: tl.tensor, key_row: tl.tensor, key_head: tl.tensor,
    value_row: tl.tensor, value_group: tl.tensor, table_row: tl.tensor, page_stride: tl.tensor,
    KEY_HEADS: tl.constexpr, HEADS: tl.constexpr, KEY_DIM: tl.constexpr, VALUE_DIM: tl.constexpr,
    TAPS: tl.constexpr, PER_PAGE: tl.constexpr, UNIT: tl.constexpr, BLOCK_KEY: tl.constexpr,
    BLOCK_VALUE: tl.constexpr, COLUMNS: tl.constexpr, IS_DELTA: tl.constexpr,
) -> None:  # fmt: skip
    """Compute some columns of a head's matrix after a sequence's only row, and the row's result."""
    repeats: tl.constexpr = HEADS // KEY_HEADS
    blocks: tl.constexpr = (VALUE_DIM + COLUMNS - 1) // COLUMNS
    d = tl.arange(0, BLOCK_KEY)
    for task in range(tl.program_id(0), tl.load(work) * HEADS * blocks, tl.num_programs(0)):
        block = task % blocks
        head = task // blocks % HEADS
        item = work + (task // (blocks * HEADS) + 1) * _ITEM
        table = tables + tl.load(item).to(tl.int64) * table_row
        row = tl.load(item + 1).to(tl.int64)
        begins = tl.load(item + 4)
        e = block * COLUMNS + tl.arange(0, COLUMNS)
        inside = (d < KEY_DIM)[:, None] & (e < VALUE_DIM)[None, :]
        number = unit + head
        page = tl.load(table + number // PER_PAGE).to(tl.int64)
        matrix = states + page * page_stride + (number % PER_PAGE) * UNIT + d[:, None] * VALUE_DIM + e[None, :]
        s = tl.load(matrix, mask=inside & (d < KEY_DIM * (1 - begins))[:, None], other=0.0)
        q = tl.load(normed + (row * 2 * KEY_HEADS + head // repeats) * KEY_DIM + d, mask=d < KEY_DIM, other=0.0)
        k_row = normed + (row * 2 * KEY_HEADS + KEY_HEADS + head // repeats) * KEY_DIM
        k = tl.load(k_row + d, mask=d < KEY_DIM, other=0.0)
        v = tl.load(mixed + (row * HEADS + head) * VALUE_DIM + e, mask=e < VALUE_DIM, other=0.0).to(tl.float32)
        s *= tl.exp(tl.load(decay + row * HEADS + head))
        change = v
        if IS_DELTA:
            change -= tl.sum(s * k[:, None], axis=0)
        s += k[:, None] * (change * tl.load(beta + row * HEADS + head))[None, :]
        result = tl.sum(s * q[:, None], axis=0)
        if skip is not None:
            result += tl.load(skip + head) * v
        tl.store(matrix, s, mask=inside)
        to = out + (row * HEADS + head) * VALUE_DIM + e
        tl.store(to, result.to(out.dtype.element_ty), mask=e < VALUE_DIM)
        if block == 0:
            for part in range(3):
                _keep_heads(
                    query, key, value, states, table, page_stride, unit, query_row, query_head, key_row, key_head,
                    value_row, value_group, head, part, row, row + 1, begins,
                    KEY_HEADS, HEADS, KEY_DIM, VALUE_DIM, TAPS, PER_PAGE, UNIT, BLOCK_KEY, BLOCK_VALUE,
                )  # fmt: skip


@triton.jit(do_not_specialize=["unit"])
def _solve_chunks(
    query: tl.tensor, key: tl.tensor, value: tl.tensor, normed: tl.tensor, decay: tl.tensor, beta: tl.tensor,
    states: tl.tensor, tables: tl.tensor, corrected: tl.tensor, scores: tl.tensor, work: tl.tensor, unit: tl.tensor,
    query_row: tl.tensor, query_head: tl.tensor, key_row: tl.tensor, key_head: tl.tensor, value_row: tl.tensor,
    value_group: tl.tensor, table_row: tl.tensor, page_stride: tl.tensor,
    KEY_HEADS: tl.constexpr, HEADS: tl.constexpr, KEY_DIM: tl.constexpr, VALUE_DIM: tl.constexpr,
    TAPS: tl.constexpr, PER_PAGE: tl.constexpr, UNIT: tl.constexpr, BLOCK_KEY: tl.constexpr,
    BLOCK_VALUE: tl.constexpr, IS_DELTA: tl.constexpr, PRECISION: tl.constexpr,
) -> None:  # fmt: skip
    """Compute `scores` of a chunk and a head, and `corrected` for the gated delta rule; the last chunk before drafts
    stores the inputs."""
    repeats: tl.constexpr = HEADS // KEY_HEADS
    i = tl.arange(0, _CHUNK)[:, None]
    j = tl.arange(0, _CHUNK)[None, :]
    for task in range(tl.program_id(0), tl.load(work) * HEADS, tl.num_programs(0)):
        head = task % HEADS
        item = work + (task // HEADS + 1) * _ITEM
        # Offsets from the first row have 32 bits: with places of all rows in 64 bits, registers would not suffice.
        first = tl.load(item + 1)
        row = tl.arange(0, _CHUNK)
        exists = row < tl.load(item + 2) - first
        of_head = first.to(tl.int64) * HEADS + head
        reach = tl.cumsum(tl.load(decay + of_head + row * HEADS, mask=exists, other=0.0), axis=0)
        size = tl.load(beta + of_head + row * HEADS, mask=exists, other=0.0)
        q_rows = normed + (first.to(tl.int64) * 2 * KEY_HEADS + head // repeats) * KEY_DIM
        q_rows += row[:, None] * (2 * KEY_HEADS * KEY_DIM)
        found = tl.zeros((_CHUNK, _CHUNK), tl.float32)
        system = tl.zeros((_CHUNK, _CHUNK), tl.float32)
        for start in tl.range(
            0, KEY_DIM, 16, loop_unroll_factor=1
        ):  # whole vectors as operands would not fit into registers
            d = start + tl.arange(0, 16)[None, :]
            inside = exists[:, None] & (d < KEY_DIM)
            q = tl.load(q_rows + d, mask=inside, other=0.0)
            k = tl.load(q_rows + KEY_HEADS * KEY_DIM + d, mask=inside, other=0.0)
            found = tl.dot(q, tl.trans(k), found, input_precision=PRECISION)
            if IS_DELTA:
                system = tl.dot(k, tl.trans(k), system, input_precision=PRECISION)
        # Later tokens are masked before exp, because exp would overflow for them.
        weight = tl.exp(tl.where(i >= j, reach[:, None] - reach[None, :], _NEVER))
        to = i * (HEADS * _CHUNK) + j
        tl.store(scores + of_head * _CHUNK + to, found * weight, mask=exists[:, None])
        if IS_DELTA:
            system *= weight * size[:, None]
            system = tl.where(i > j, system, 0.0)
            # blocks of 2 rows, then of 4, ...
            inverse = tl.where(i == j, 1.0, tl.where(i // 2 == j // 2, -system, 0.0))
            for level in tl.range(1, 5, loop_unroll_factor=1):
                is_between = (i >> (level + 1) == j >> (level + 1)) & (i >> level > j >> level)
                part = tl.where(is_between, system, 0.0)
                step = tl.dot(part, inverse, input_precision="tf32x3")
                # Added to in place: a separate product would take more registers than a thread has.
                inverse = tl.dot(-inverse, step, inverse, input_precision="tf32x3")
            # the columns' step sizes: a row of them, from the diagonal
            sizes = tl.sum(tl.where(i == j, size[:, None], 0.0), axis=0)[None, :]
            tl.store(corrected + of_head * _CHUNK + to, inverse * sizes, mask=exists[:, None])
    # A separate loop: in the other one, addresses of inputs would take registers from the products.
    for task in range(tl.program_id(0), tl.load(work) * HEADS * 3, tl.num_programs(0)):
        part = task % 3
        head = task // 3 % HEADS
        item = work + (task // 3 // HEADS + 1) * _ITEM
        if tl.load(item + 5) != 0:
            _keep_heads(
                query, key, value, states, tables + tl.load(item).to(tl.int64) * table_row, page_stride, unit,
                query_row, query_head, key_row, key_head, value_row, value_group, head, part,
                tl.load(item + 3).to(tl.int64), tl.load(item + 2).to(tl.int64), tl.load(item + 4),
                KEY_HEADS, HEADS, KEY_DIM, VALUE_DIM, TAPS, PER_PAGE, UNIT, BLOCK_KEY, BLOCK_VALUE,
            )  # fmt: skip


_SCANNED = (
    *("normed", "mixed", "decay", "states", "tables", "unit", "table_row", "page_stride", "KEY_HEADS", "HEADS"),
    *("KEY_DIM", "VALUE_DIM", "PER_PAGE", "UNIT", "BLOCK_KEY", "IS_DELTA", "beta"),
)
"""Parameters of `_scan_prompts` that other launches have too."""


@triton.jit(do_not_specialize=["unit"])
def _scan_prompts(
    normed: tl.tensor, mixed: tl.tensor, decay: tl.tensor, beta: tl.tensor, skip: tl.tensor, states: tl.tensor,
    tables: tl.tensor, corrected: tl.tensor, scores: tl.tensor, out: tl.tensor, work: tl.tensor, unit: tl.tensor,
    table_row: tl.tensor, page_stride: tl.tensor,
    KEY_HEADS: tl.constexpr, HEADS: tl.constexpr, KEY_DIM: tl.constexpr, VALUE_DIM: tl.constexpr,
    PER_PAGE: tl.constexpr, UNIT: tl.constexpr, BLOCK_KEY: tl.constexpr, COLUMNS: tl.constexpr,
    IS_DELTA: tl.constexpr, PRECISION: tl.constexpr,
) -> None:  # fmt: skip
    """Go through a prompt's chunks, and those of drafts after them, with some columns of a head's matrix, which is held
    transposed. The matrix before the drafts is stored."""
    repeats: tl.constexpr = HEADS // KEY_HEADS
    blocks: tl.constexpr = (VALUE_DIM + COLUMNS - 1) // COLUMNS
    d = tl.arange(0, BLOCK_KEY)[None, :]
    j = tl.arange(0, _CHUNK)[None, :]
    for task in range(tl.program_id(0), tl.load(work) * HEADS * blocks, tl.num_programs(0)):
        head = task // blocks % HEADS
        item = work + (task // (blocks * HEADS) + 1) * _ITEM
        e = task % blocks * COLUMNS + tl.arange(0, COLUMNS)
        number = unit + head
        page = tl.load(tables + tl.load(item).to(tl.int64) * table_row + number // PER_PAGE).to(tl.int64)
        matrix = states + page * page_stride + (number % PER_PAGE) * UNIT + d * VALUE_DIM + e[:, None]
        is_matrix = (d < KEY_DIM) & (e < VALUE_DIM)[:, None]
        s = tl.load(matrix, mask=is_matrix & (d < KEY_DIM * (1 - tl.load(item + 4))), other=0.0)
        first = tl.load(item + 1)
        stop = tl.load(item + 2)
        stored = tl.load(item + 7)
        before = tl.cdiv(stored - first, _CHUNK)
        for number in range(0, before + tl.cdiv(stop - stored, _CHUNK)):
            is_draft = number >= before
            start = tl.where(is_draft, stored + (number - before) * _CHUNK, first + number * _CHUNK)
            row = start + tl.arange(0, _CHUNK).to(tl.int64)
            exists = row < tl.where(is_draft, stop, stored)
            inside = exists[:, None] & (d < KEY_DIM)
            is_value = exists[:, None] & (e < VALUE_DIM)[None, :]
            steps = tl.load(decay + row * HEADS + head, mask=exists, other=0.0)
            reach = tl.cumsum(steps, axis=0)
            whole = tl.sum(steps)
            q_rows = normed + (row * 2 * KEY_HEADS + head // repeats)[:, None] * KEY_DIM + d
            if IS_DELTA:
                k = tl.load(q_rows + KEY_HEADS * KEY_DIM, mask=inside, other=0.0)
            place = (row * HEADS + head)[:, None]
            v = tl.load(mixed + place * VALUE_DIM + e[None, :], mask=is_value, other=0.0).to(tl.float32)
            weights = tl.load(scores + place * _CHUNK + j, mask=exists[:, None], other=0.0)
            left = tl.exp(reach)[:, None]
            if IS_DELTA:
                wanted = v - left * tl.dot(k, tl.trans(s), input_precision=PRECISION)
                solved = tl.load(corrected + place * _CHUNK + j, mask=exists[:, None], other=0.0)
                change = tl.dot(solved, wanted, input_precision=PRECISION)
            else:
                change = v * tl.load(beta + row * HEADS + head, mask=exists, other=0.0)[:, None]
            q = tl.load(q_rows, mask=inside, other=0.0)
            result = left * tl.dot(q, tl.trans(s), input_precision=PRECISION)
            result += tl.dot(weights, change, input_precision=PRECISION)
            if skip is not None:
                result += tl.load(skip + head) * v
            to = out + place * VALUE_DIM + e[None, :]
            tl.store(to, result.to(out.dtype.element_ty), mask=is_value)
            # Loaded again: kept, they would not fit into registers next to the queries.
            k = tl.load(q_rows + KEY_HEADS * KEY_DIM, mask=inside, other=0.0) * tl.exp(whole - reach)[:, None]
            s = s * tl.exp(whole) + tl.dot(tl.trans(change), k, input_precision=PRECISION)
            if number == before - 1:
                tl.store(matrix, s, mask=is_matrix)


def gated_norm(
    x: torch.Tensor, gate: torch.Tensor, weight: torch.Tensor, eps: float, *, gates_first: bool = False
) -> torch.Tensor:
    """Normalise heads and multiply with the gate, in one launch. Arguments as for the public operator, on a GPU."""
    y = x.new_empty(x.shape)
    if len(x):
        prepare_gated_norm(x, gate, weight, eps, y, gates_first=gates_first).run()
    return y


def prepare_gated_norm(
    x: torch.Tensor, gate: torch.Tensor, weight: torch.Tensor, eps: float, y: torch.Tensor, *, gates_first: bool = False
) -> Launch:
    """Return the launch that fills `y`: a program for each row."""
    repeats, value_dim = gate.shape[2:]
    assert gate.stride(3) == 1, "each head's vector is contiguous"
    assert gate.stride(2) == value_dim, "the heads that share a key head are next to each other"
    assert x.is_contiguous(), "heads are next to each other"
    assert weight.is_contiguous(), "and so are their weights"
    block = triton.next_power_of_2(x.shape[1]) * triton.next_power_of_2(value_dim)
    arguments = {
        "x": x,
        "gate": gate,
        "weight": weight,
        "y": y,
        "eps": eps,
        "gate_row": gate.stride(0),
        "gate_group": gate.stride(1),
        "weight_head": 0 if weight.ndim == 1 else value_dim,
        "GATES_FIRST": gates_first,
        "HEADS": x.shape[1],
        "REPEATS": repeats,
        "VALUE_DIM": value_dim,
        "BLOCK_HEADS": triton.next_power_of_2(x.shape[1]),
        "BLOCK_VALUE": triton.next_power_of_2(value_dim),
    }
    return Launch(_gated_norm, (len(x),), arguments, num_warps=min(8, max(1, block // 512)), num_stages=1)


@triton.jit
def _gated_norm(
    x: tl.tensor, gate: tl.tensor, weight: tl.tensor, y: tl.tensor, eps: tl.tensor, gate_row: tl.tensor,
    gate_group: tl.tensor, weight_head: tl.tensor,
    HEADS: tl.constexpr, REPEATS: tl.constexpr, VALUE_DIM: tl.constexpr, BLOCK_HEADS: tl.constexpr,
    BLOCK_VALUE: tl.constexpr, GATES_FIRST: tl.constexpr,
) -> None:  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    head = tl.arange(0, BLOCK_HEADS)[:, None]
    e = tl.arange(0, BLOCK_VALUE)[None, :]
    inside = (head < HEADS) & (e < VALUE_DIM)
    place = (row * HEADS + head) * VALUE_DIM + e
    source = gate + row * gate_row + head // REPEATS * gate_group + head % REPEATS * VALUE_DIM + e
    z = tl.load(source, mask=inside, other=0.0).to(tl.float32)
    factor = z / (1.0 + tl.exp(-z))
    values = tl.load(x + place, mask=inside, other=0.0).to(tl.float32)
    if GATES_FIRST:
        values *= factor
    values *= 1.0 / tl.sqrt(tl.sum(values * values, axis=1) / VALUE_DIM + eps)[:, None]
    weights = tl.load(weight + head * weight_head + e, mask=inside, other=0.0)
    values = values.to(y.dtype.element_ty).to(tl.float32) * weights.to(tl.float32)
    values = values.to(weights.dtype).to(tl.float32)
    if not GATES_FIRST:
        values *= factor
    tl.store(y + place, values.to(y.dtype.element_ty), mask=inside)
