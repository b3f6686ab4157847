"""Layers whose states have a fixed size, over a step's packed rows: a short convolution, a recurrence (linear attention
by the gated delta rule, or Mamba 2), and a norm with a gate.

Semantics: t is a row of a sequence, h one of H heads, and x are the inputs (queries, keys, values) of all heads.

    x'       = silu(bias + sum over j = 0 .. taps of kernel[:, taps - j] * x[t - j])
    step     = softplus(a[t, h] + shift[h])

    gated delta rule (`gated_delta`), H / key heads heads of values share a head of queries and keys:
    q, k     = x' / |x'| by head, q times Dk ** -0.5
    g, beta  = decay[h] * step, sigmoid(b[t, h])

    Mamba 2 (`mamba2`), likewise:
    q, k     = x'
    beta     = step, within the limits if t is a row of the prompt
    g        = decay[h] * beta

    out      = the recurrence of q, k, v, g and beta with the sequence's own state, plus skip[h] * v

    gated_norm(x, gate)             = x / sqrt(mean(x^2) + eps) * weight * silu(gate), by head
    gated_norm(x, gate, gate first) = y / sqrt(mean(y^2) + eps) * weight, with y = x * silu(gate)

A sequence's state is its matrices and the last `taps` inputs, in pages of the pool (`StateLayer`). A sequence's first
rows begin with zeros and read nothing from the pool. Matrices and products with them are float32.
"""

from __future__ import annotations

import torch
from torch.nn import functional

from loramux_kernels.device import runs_triton
from loramux_kernels.gated_delta import gated_delta_prompt, gated_delta_step
from loramux_kernels.mamba2 import mamba2_prompt, mamba2_step
from loramux_kernels.tables import AttentionBatch, StateLayer, StateRows, StateShape, StateWeights


def linear_attention(rows: StateRows, weights: StateWeights, state: StateLayer, batch: AttentionBatch) -> torch.Tensor:
    """Return `[T, heads, Dv]` of the rows' dtype, and store the states after the step.

    Rows that are in no sequence of the batch (they pad a recorded step) are undefined, and change no state.
    """
    if runs_triton(rows.value):
        from loramux_kernels.cuda import linear_attention as triton

        return triton.linear_attention(rows, weights, state, batch)
    return linear_attention_reference(rows, weights, state, batch)


def linear_attention_reference(
    rows: StateRows, weights: StateWeights, state: StateLayer, batch: AttentionBatch
) -> torch.Tensor:
    """Compute `linear_attention` in torch, on any device and in any floating dtype."""
    shape, tables = state.shape, batch.state_tables
    assert tables is not None, "a step of a model whose layers keep states has the pages of its states"
    inputs = torch.cat([part.flatten(1) for part in (rows.query, rows.key, rows.value)], dim=-1)
    decay, beta = _rates(rows, weights, batch)
    is_delta, key_heads = rows.b is not None, rows.query.shape[1]
    of_step, of_prompt = (gated_delta_step, gated_delta_prompt) if is_delta else (mamba2_step, mamba2_prompt)
    out = inputs.new_empty(len(inputs), shape.heads, shape.value_dim)
    if batch.decoding is not None:
        single, own = batch.decoding
        matrices, earlier = state.read(own)
        window = torch.cat((earlier, inputs[single, :, None]), dim=-1)
        values = _split(_convolve(window, weights)[..., 0], shape, key_heads, normalises=is_delta)
        found, matrices = of_step(*values, decay[single], beta[single], matrices)
        out[single] = _with_skip(found, values[2], weights).to(out.dtype)
        state.write(own, matrices, window[..., 1:])
    for i, (start, stop, context) in enumerate(batch.spans):
        if stop - start == 1 < context:
            continue
        span, own = slice(start, stop), tables[i : i + 1]
        matrices, earlier = _zeros(shape, tables.device) if stop - start == context else state.read(own)
        window = torch.cat((earlier, inputs[None, span].mT), dim=-1)
        values = _split(_convolve(window, weights)[0].T, shape, key_heads, normalises=is_delta)
        found, after = of_prompt(*values, decay[span], beta[span], matrices[0])
        out[span] = _with_skip(found, values[2], weights).to(out.dtype)
        state.write(own, after[None], window[..., -shape.taps :])
    return out


def _rates(rows: StateRows, weights: StateWeights, batch: AttentionBatch) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the decays g and the step sizes beta of every row and head, float32`[T, heads]` each."""
    step = functional.softplus(rows.a.flatten(1).float() + weights.shift)
    if rows.b is not None:
        return weights.decay * step, rows.b.flatten(1).sigmoid().float()
    if weights.is_limited:
        for (start, *_), end in zip(batch.spans, batch.prompt_ends, strict=True):
            step[start : max(start, end)].clamp_(*weights.limits)
    return weights.decay * step, step


def _convolve(window: torch.Tensor, weights: StateWeights) -> torch.Tensor:
    """Map inputs `[n, channels, taps + t]` to `[n, channels, t]`."""
    kernel = weights.kernel
    return functional.silu(
        functional.conv1d(window.to(kernel.dtype), kernel[:, None], weights.bias, groups=len(kernel))
    )


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


def _with_skip(out: torch.Tensor, value: torch.Tensor, weights: StateWeights) -> torch.Tensor:
    return out if weights.skip is None else out + weights.skip[:, None] * value


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
