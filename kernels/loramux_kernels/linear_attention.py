"""Layers whose states have a fixed size, over a step's packed rows: a short convolution, a recurrence (linear attention
by the gated delta rule, or Mamba 2), and a norm with a gate.

Semantics: t is a row of a sequence, h one of H heads, and x are the inputs (queries, keys, values) of all heads.

    x'       = silu(bias + sum over j = 0 .. taps of kernel[:, taps - j] * x[t - j])
    step     = softplus(a[t, h] + shift[h])

    gated delta rule (`gated_delta`), H / key heads heads of values share a head of queries and keys:
    q, k     = x' / |x'| by head, q times Dk ** -0.5
    g, beta  = decay[h] * step, delta_factor * sigmoid(b[t, h])

    Mamba 2 (`mamba2`), likewise:
    q, k     = x'
    beta     = step, within the limits if t is a row of the prompt
    g        = decay[h] * beta

    out      = the recurrence of q, k, v, g and beta with the sequence's own state, plus skip[h] * v

    short convolution: out = bias + sum over j = 0 .. taps of kernel[:, taps - j] * x[t - j]

    gated_norm(x, gate)             = x / sqrt(mean(x^2) + eps) * weight * silu(gate), by head
    gated_norm(x, gate, gate first) = y / sqrt(mean(y^2) + eps) * weight, with y = x * silu(gate)

A sequence's state is its matrices and the last `taps` inputs, in pages of the pool (`StateLayer`). A sequence's first
rows begin with zeros and read nothing from the pool. Matrices and products with them are float32. A sequence's drafts
(`AttentionBatch.draft_lens`) are computed after its other rows, and the state before them is the one that is stored: a
state that has seen a refused token could not go back.
"""

from __future__ import annotations

import ctypes
from collections.abc import Iterator

import torch
from torch.nn import functional

from loramux_kernels.device import runs_triton
from loramux_kernels.gated_delta import gated_delta_prompt, gated_delta_step
from loramux_kernels.mamba2 import mamba2_prompt, mamba2_step
from loramux_kernels.native.abi import DTYPES, MAX_TAPS, StateStepAbi
from loramux_kernels.native.loader import native_for
from loramux_kernels.tables import AttentionBatch, StateLayer, StateRows, StateShape, StateWeights


def linear_attention(rows: StateRows, weights: StateWeights, state: StateLayer, batch: AttentionBatch) -> torch.Tensor:
    """Return `[T, heads, Dv]` of the rows' dtype, and store the states after the step, or before its drafts.

    Rows that are in no sequence of the batch (they pad a recorded step) are undefined, and change no state.
    """
    if runs_triton(rows.value):
        from loramux_kernels.cuda import linear_attention as triton

        return triton.linear_attention(rows, weights, state, batch)
    out = rows.value.new_empty(len(rows.value), state.shape.heads, state.shape.value_dim)
    native = native_for(rows.value) if state.shape.taps <= MAX_TAPS else None
    if native is not None and batch.decoding is not None:
        assert batch.state_tables is not None, "sequences that decode have them"
        step = (rows, weights, out, batch.decoding_prompts)
        _step_natively(native, *step, state, *batch.decoding)
    if native is None or len(batch.decoding[0] if batch.decoding else ()) < len(batch.spans):
        _compute(rows, weights, state, batch, out, drafts=native is None, decodes=native is None)
    if native is not None and batch.draft_lens is not None:
        _draft_natively(native, rows, weights, state, batch, out)
    return out


def _draft_natively(
    native: ctypes.CDLL,
    rows: StateRows,
    weights: StateWeights,
    state: StateLayer,
    batch: AttentionBatch,
    out: torch.Tensor,
) -> None:
    """Compute the drafts of all sequences, the first of each together, then the second, on a copy of their states."""
    assert batch.state_tables is not None, "sequences with drafts have them"
    (_, drafted), *_ = batch.drafts
    copied = state.copy_of(batch.state_tables[drafted])
    for single, sequences in batch.drafts:
        tables = torch.searchsorted(drafted, sequences)[:, None].int()
        prompts = torch.zeros(len(single), dtype=torch.int64)
        _step_natively(native, rows, weights, out, prompts, copied, single, tables)


def linear_attention_reference(
    rows: StateRows, weights: StateWeights, state: StateLayer, batch: AttentionBatch
) -> torch.Tensor:
    """Compute `linear_attention` in torch, on any device and in any floating dtype."""
    out = rows.value.new_empty(len(rows.value), state.shape.heads, state.shape.value_dim)
    _compute(rows, weights, state, batch, out, decodes=True)
    return out


def _compute(
    rows: StateRows,
    weights: StateWeights,
    state: StateLayer,
    batch: AttentionBatch,
    out: torch.Tensor,
    *,
    decodes: bool,
    drafts: bool = True,
) -> None:
    """Fill the rows of `out` and store the states; without `decodes`, only those of sequences that do not decode, and
    without `drafts` not the rows of drafts."""
    shape = state.shape
    inputs = torch.cat([part.flatten(1) for part in (rows.query, rows.key, rows.value)], dim=-1)
    decay, beta = _rates(rows, weights, batch)
    is_delta, key_heads = rows.b is not None, rows.query.shape[1]
    of_step, of_prompt = (gated_delta_step, gated_delta_prompt) if is_delta else (mamba2_step, mamba2_prompt)
    for own_rows, own_tables, matrices, window, is_stored in _windows(
        inputs, state, batch, decodes=decodes, drafts=drafts
    ):
        mixed = functional.silu(_convolve(window, weights.kernel, weights.bias))
        if isinstance(own_rows, slice):
            values = _split(mixed[0].T, shape, key_heads, normalises=is_delta)
            found, after = of_prompt(*values, decay[own_rows], beta[own_rows], matrices[0])
            after = after[None]
        else:
            values = _split(mixed[..., 0], shape, key_heads, normalises=is_delta)
            found, after = of_step(*values, decay[own_rows], beta[own_rows], matrices)
        if weights.skip is not None:
            found = found + weights.skip[:, None] * values[2]
        out[own_rows] = found.to(out.dtype)
        if is_stored:
            state.write(own_tables, after, window[..., -shape.taps :])


def _step_natively(
    native: ctypes.CDLL,
    rows: StateRows,
    weights: StateWeights,
    out: torch.Tensor,
    prompts: torch.Tensor,
    state: StateLayer,
    single: torch.Tensor,
    own: torch.Tensor,
) -> None:
    """Compute one row of each of n sequences, in place in their pages: the rows `single` with the tables `own`.

    `prompts` int64[n] is 1 for a row of a prompt.
    """
    shape = state.shape
    kernel, bias, shift = weights.in_float32
    parts = (rows.query, rows.key, rows.value, rows.a, *(() if rows.b is None else (rows.b,)))
    assert all(part.stride(-1) == 1 for part in parts), "each head's vector is contiguous"
    assert rows.value.stride(2) == shape.value_dim, "the heads that share a key head are next to each other"
    single = single.contiguous()

    def address(tensor: torch.Tensor | None) -> int | None:
        return None if tensor is None else tensor.data_ptr()

    call = StateStepAbi(
        *(address(part) for part in (rows.query, rows.key, rows.value, rows.a, rows.b, shift, kernel, bias)),
        *(address(part) for part in (weights.decay, weights.skip, state.units, own, single, prompts, out)),
        *(stride for part in (rows.query, rows.key, rows.value, rows.a) for stride in part.stride()[:2]),
        *((0, 0) if rows.b is None else rows.b.stride()[:2]),
        *(own.stride(0), state.units.stride(0), state.units.shape[1], state.units.shape[2], state.first),
        *(len(single), rows.query.shape[1], shape.heads, shape.key_dim, shape.value_dim),
        *(shape.channels, shape.taps, rows.b is not None),
        *(weights.delta_factor, *weights.limits),
    )
    native.loramux_state_step(DTYPES[out.dtype], call, torch.get_num_threads())


def short_convolution(
    x: torch.Tensor, kernel: torch.Tensor, bias: torch.Tensor | None, state: StateLayer, batch: AttentionBatch
) -> torch.Tensor:
    """Return `[T, channels]` of the dtype of `x`, and store the inputs after the step.

    `x` `[T, channels]`, last dimension contiguous; `kernel` `[channels, taps + 1]`, contiguous; `bias` `[channels]`.
    The state has no matrices. Rows that are in no sequence of the batch are undefined, and change no state.
    """
    if runs_triton(x):
        from loramux_kernels.cuda import short_convolution as triton

        return triton.short_convolution(x, kernel, bias, state, batch)
    return short_convolution_reference(x, kernel, bias, state, batch)


def short_convolution_reference(
    x: torch.Tensor, kernel: torch.Tensor, bias: torch.Tensor | None, state: StateLayer, batch: AttentionBatch
) -> torch.Tensor:
    """Compute `short_convolution` in torch, on any device and in any floating dtype."""
    out = torch.empty_like(x)
    for rows, tables, matrices, window, is_stored in _windows(x, state, batch):
        found = _convolve(window, kernel, bias).to(x.dtype)
        out[rows] = found[0].T if isinstance(rows, slice) else found[..., 0]
        if is_stored:
            state.write(tables, matrices, window[..., -state.shape.taps :])
    return out


Window = tuple[torch.Tensor | slice, torch.Tensor, torch.Tensor, torch.Tensor, bool]


def _windows(
    inputs: torch.Tensor, state: StateLayer, batch: AttentionBatch, *, decodes: bool = True, drafts: bool = True
) -> Iterator[Window]:
    """Yield rows, state tables, matrices, the convolution's inputs `[n, channels, taps + t]`, and whether the states
    after these rows are to be stored, of all sequences that decode one row together (rows are a tensor), if `decodes`,
    then of each other sequence (a slice), and, if `drafts`, of the drafts of each sequence. `inputs` is
    `[T, channels]`.

    The drafts of a sequence begin with the states that the caller has stored after its other rows.
    """
    shape, tables = state.shape, batch.state_tables
    assert tables is not None, "a step of a model whose layers keep states has the pages of its states"
    if decodes and batch.decoding is not None:
        single, own = batch.decoding
        matrices, earlier = state.read(own)
        yield single, own, matrices, torch.cat((earlier, inputs[single, :, None]), dim=-1), True
    for i, ((start, stop, context), (_, end, _)) in enumerate(zip(batch.stored_spans, batch.spans, strict=True)):
        own = tables[i : i + 1]
        if not stop - start == 1 < context:
            matrices, earlier = _zeros(shape, tables.device) if stop - start == context else state.read(own)
            yield slice(start, stop), own, matrices, torch.cat((earlier, inputs[None, start:stop].mT), dim=-1), True
        if drafts and stop < end:
            matrices, earlier = state.read(own)
            yield slice(stop, end), own, matrices, torch.cat((earlier, inputs[None, stop:end].mT), dim=-1), False


def _rates(rows: StateRows, weights: StateWeights, batch: AttentionBatch) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the decays g and the step sizes beta of every row and head, float32`[T, heads]` each."""
    step = functional.softplus(rows.a.flatten(1).float() + weights.shift)
    if rows.b is not None:
        return weights.decay * step, rows.b.flatten(1).sigmoid().float() * weights.delta_factor
    if weights.is_limited:
        for (start, *_), end in zip(batch.spans, batch.prompt_ends, strict=True):
            step[start : max(start, end)].clamp_(*weights.limits)
    return weights.decay * step, step


def _convolve(window: torch.Tensor, kernel: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    """Map inputs `[n, channels, taps + t]` to `[n, channels, t]`."""
    return functional.conv1d(window.to(kernel.dtype), kernel[:, None], bias, groups=len(kernel))


def _split(
    mixed: torch.Tensor, shape: StateShape, key_heads: int, *, normalises: bool
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Split rows `[n, channels]` into queries, keys `[n, key heads, Dk]` and values `[n, heads, Dv]`, float32.

    With `normalises`, the first two are of length one, the queries scaled, and both are repeated for every head.
    """
    width = key_heads * shape.key_dim
    query, key, value = mixed.float().split([width, width, shape.heads * shape.value_dim], dim=-1)
    query, key = (part.unflatten(1, (-1, shape.key_dim)) for part in (query, key))
    if normalises:
        query, key = (part * (part.square().sum(-1, keepdim=True) + 1e-6).rsqrt() for part in (query, key))
        repeats = shape.heads // key_heads
        query, key = (part.repeat_interleave(repeats, dim=1) for part in (query * shape.key_dim**-0.5, key))
    return query, key, value.unflatten(1, (-1, shape.value_dim))


def _zeros(shape: StateShape, device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    matrices = torch.zeros(1, shape.heads, shape.key_dim, shape.value_dim, device=device)
    return matrices, torch.zeros(1, shape.channels, shape.taps, device=device)


def gated_norm(
    x: torch.Tensor, gate: torch.Tensor, weight: torch.Tensor, eps: float, *, gates_first: bool = False
) -> torch.Tensor:
    """Normalise the heads of `x` `[T, heads, Dv]`, contiguous, multiply with the weight, and with the activated gate
    after or before the norm.

    `gate` is `[T, key heads, R, Dv]`, last dimension contiguous. `weight` is `[Dv]`, or `[heads, Dv]`, contiguous. The
    normalised values and their product with the weight are rounded as separate operators would.
    """
    if runs_triton(x):
        from loramux_kernels.cuda import linear_attention as triton

        return triton.gated_norm(x, gate, weight, eps, gates_first=gates_first)
    return gated_norm_reference(x, gate, weight, eps, gates_first=gates_first)


def gated_norm_reference(
    x: torch.Tensor, gate: torch.Tensor, weight: torch.Tensor, eps: float, *, gates_first: bool = False
) -> torch.Tensor:
    """Compute `gated_norm` in torch, on any device and in any floating dtype."""
    factor = functional.silu(gate.flatten(1, 2).float())
    values = x.float() * factor if gates_first else x.float()
    values = values * torch.rsqrt(values.square().mean(-1, keepdim=True) + eps)
    normed = weight * values.to(x.dtype)
    return (normed if gates_first else normed * factor).to(x.dtype)
