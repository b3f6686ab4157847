"""Linear attention over a step's packed rows: a short convolution, the gated delta rule, and a norm with a gate.

Semantics: t is a row of a sequence, h one of H heads, and x are the inputs (queries, keys, values) of all heads.

    x'       = silu(sum over j = 0 .. taps of kernel[:, taps - j] * x[t - j])
    q, k     = x' / |x'| by head, q times Dk ** -0.5; H / key heads heads of values share a head of queries and keys
    g, beta  = decay[h] * softplus(a[t, h] + shift[h]), sigmoid(b[t, h])
    out      = the gated delta rule (`gated_delta`) of q, k, v, g and beta, with the sequence's own state

    gated_norm(x, gate) = x / sqrt(mean(x^2) + eps) * weight * silu(gate), by head

A sequence's state is its matrices and the last `taps` inputs, in pages of the pool (`StateLayer`). A sequence's first
rows begin with zeros and read nothing from the pool. Matrices and products with them are float32.
"""

from __future__ import annotations

import torch
from torch.nn import functional

from loramux_kernels.device import runs_triton
from loramux_kernels.gated_delta import gated_delta_prompt, gated_delta_step
from loramux_kernels.tables import AttentionBatch, DeltaRows, DeltaWeights, StateLayer, StateShape


def linear_attention(rows: DeltaRows, weights: DeltaWeights, state: StateLayer, batch: AttentionBatch) -> torch.Tensor:
    """Return `[T, heads, Dv]` of the rows' dtype, and store the states after the step.

    Rows that are in no sequence of the batch (they pad a recorded step) are undefined, and change no state.
    """
    if runs_triton(rows.value):
        from loramux_kernels.cuda import linear_attention as triton

        return triton.linear_attention(rows, weights, state, batch)
    return linear_attention_reference(rows, weights, state, batch)


def linear_attention_reference(
    rows: DeltaRows, weights: DeltaWeights, state: StateLayer, batch: AttentionBatch
) -> torch.Tensor:
    """Compute `linear_attention` in torch, on any device and in any floating dtype."""
    shape, tables = state.shape, batch.state_tables
    assert tables is not None, "a step of a model with linear attention has the pages of its states"
    inputs = torch.cat([part.flatten(1) for part in (rows.query, rows.key, rows.value)], dim=-1)
    a, b = rows.a.flatten(1), rows.b.flatten(1)
    decay = weights.decay * functional.softplus(a.float() + weights.shift)
    beta = b.sigmoid().float()
    out = inputs.new_empty(len(inputs), shape.heads, shape.value_dim)
    if batch.decoding is not None:
        single, own = batch.decoding
        matrices, earlier = state.read(own)
        window = torch.cat((earlier, inputs[single, :, None]), dim=-1)
        parts = _heads(_convolve(window, weights.kernel)[..., 0], shape, rows.query.shape[1])
        found, matrices = gated_delta_step(*parts, decay[single], beta[single], matrices)
        out[single] = found.to(out.dtype)
        state.write(own, matrices, window[..., 1:])
    for i, (start, stop, context) in enumerate(batch.spans):
        if stop - start == 1 < context:
            continue
        span, own = slice(start, stop), tables[i : i + 1]
        matrices, earlier = _zeros(shape, tables.device) if stop - start == context else state.read(own)
        window = torch.cat((earlier, inputs[None, span].mT), dim=-1)
        parts = _heads(_convolve(window, weights.kernel)[0].T, shape, rows.query.shape[1])
        found, after = gated_delta_prompt(*parts, decay[span], beta[span], matrices[0])
        out[span] = found.to(out.dtype)
        state.write(own, after[None], window[..., -shape.taps :])
    return out


def _convolve(window: torch.Tensor, kernel: torch.Tensor) -> torch.Tensor:
    """Map inputs `[n, channels, taps + t]` to `[n, channels, t]`."""
    return functional.silu(functional.conv1d(window.to(kernel.dtype), kernel[:, None], groups=len(kernel)))


def _heads(mixed: torch.Tensor, shape: StateShape, key_heads: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Split rows `[n, channels]` into queries, keys and values of every head, float32; the first two of length one,
    queries scaled."""
    width = key_heads * shape.key_dim
    query, key, value = mixed.float().split([width, width, shape.heads * shape.value_dim], dim=-1)
    query, key = (part.unflatten(1, (-1, shape.key_dim)) for part in (query, key))
    query, key = (part * (part.square().sum(-1, keepdim=True) + 1e-6).rsqrt() for part in (query, key))
    repeats = shape.heads // key_heads
    query, key = (part.repeat_interleave(repeats, dim=1) for part in (query * shape.key_dim**-0.5, key))
    return query, key, value.unflatten(1, (-1, shape.value_dim))


def _zeros(shape: StateShape, device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    matrices = torch.zeros(1, shape.heads, shape.key_dim, shape.value_dim, device=device)
    return matrices, torch.zeros(1, shape.channels, shape.taps, device=device)


def gated_norm(x: torch.Tensor, gate: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """Normalise the heads of `x` `[T, heads, Dv]`, contiguous, and multiply with `weight` `[Dv]` and the activated
    gate.

    `gate` is `[T, key heads, R, Dv]`, last dimension contiguous. The normalised values and their product with the
    weight are rounded as separate operators would.
    """
    if runs_triton(x):
        from loramux_kernels.cuda import linear_attention as triton

        return triton.gated_norm(x, gate, weight, eps)
    return gated_norm_reference(x, gate, weight, eps)


def gated_norm_reference(x: torch.Tensor, gate: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """Compute `gated_norm` in torch, on any device and in any floating dtype."""
    values = x.float()
    values = values * torch.rsqrt(values.square().mean(-1, keepdim=True) + eps)
    return (weight * values.to(x.dtype) * functional.silu(gate.flatten(1, 2).float())).to(x.dtype)
