"""Operators between the linears of a decoder layer. Each is one pass over few rows.

Semantics:

    rms_norm        y = norm(x) = x / sqrt(mean(x^2) + eps) * weight, by row; with a delta, x += factor * delta first
    gated           y = activation(gate) * up, elementwise: the middle of a gated feed-forward network (Shazeer, 2020)
    rope_write_kv   q = turn(norm(q)) in place; key[page, :, offset] = turn(norm(k)); value[page, :, offset] = v

A framework uses several operators for each of these. With few rows, starting an operator takes most of its time. So
each of them also computes the `PendingExpand` of its input, if that can be joined: one launch less on a GPU.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from dataclasses import replace
from typing import Literal

import torch
from torch.nn import functional

from loramux_kernels.cuda.launch import run_all
from loramux_kernels.device import runs_triton
from loramux_kernels.native.abi import ACTIVATIONS, DTYPES, MAX_HEAD_DIM, NormAbi, RmsNormAbi, RopeAbi
from loramux_kernels.native.loader import native_for
from loramux_kernels.paged_attention import write_kv_reference
from loramux_kernels.tables import KvLayer, Norm, OwnWeights, PendingExpand, Rotation


def rms_norm(
    x: torch.Tensor,
    norm: Norm,
    delta: torch.Tensor | None = None,
    factor: float = 1.0,
    own: OwnWeights | None = None,
    expand: PendingExpand | None = None,
) -> torch.Tensor:
    """Normalise the rows of `x` `[T, width]` into a new tensor (Zhang and Sennrich, 2019).

    With `delta`, of x's shape, the residual stream `x` is first changed in place. Last dimensions are contiguous. Sums
    are float32; `factor * delta` and the new x are rounded to x's dtype, as separate operators would. `own` holds the
    weights of rows whose adapters have their own norm weights. `expand` is that of `delta`, or of `x` without a delta;
    then there are no own weights.
    """
    if expand is not None:
        from loramux_kernels.cuda import joined_expand

        assert own is None, "a step of pairs on linears alone"
        y = x.new_empty(x.shape)
        joined_expand.prepare_rms_norm(None if delta is None else x, norm, factor, expand, y).run()
        return y
    if runs_triton(x):
        from loramux_kernels.cuda import layer_operators as triton

        return triton.rms_norm(x, norm, delta, factor, own)
    return _with_own(_normalise, x, norm, delta, factor, own)


def _with_own(
    normalise: Callable[[torch.Tensor, Norm, torch.Tensor | None, float], torch.Tensor],
    x: torch.Tensor,
    norm: Norm,
    delta: torch.Tensor | None,
    factor: float,
    own: OwnWeights | None,
) -> torch.Tensor:
    y = normalise(x, norm, delta, factor)
    for weight, rows in own.spans(x.shape[1]) if own is not None else ():
        y[rows] = normalise(x[rows], replace(norm, weight=weight), None, 1.0)
    return y


def _normalise(x: torch.Tensor, norm: Norm, delta: torch.Tensor | None, factor: float) -> torch.Tensor:
    if (native := native_for(x)) is not None:
        return _normalise_natively(native, x, norm, delta, factor)
    return _normalise_in_torch(x, norm, delta, factor)


def _normalise_natively(
    native: ctypes.CDLL, x: torch.Tensor, norm: Norm, delta: torch.Tensor | None, factor: float
) -> torch.Tensor:
    rows, width = x.shape
    y = x.new_empty(rows, width)
    call = RmsNormAbi(
        x.data_ptr(), None if delta is None else delta.data_ptr(), y.data_ptr(),
        x.stride(0), 0 if delta is None else delta.stride(0), rows, width, norm.abi, factor,
    )  # fmt: skip
    native.loramux_rms_norm(DTYPES[x.dtype], call, torch.get_num_threads())
    return y


def rms_norm_reference(
    x: torch.Tensor,
    norm: Norm,
    delta: torch.Tensor | None = None,
    factor: float = 1.0,
    own: OwnWeights | None = None,
) -> torch.Tensor:
    """Compute `rms_norm` in torch, on any device and in any floating dtype."""
    return _with_own(_normalise_in_torch, x, norm, delta, factor, own)


def _normalise_in_torch(x: torch.Tensor, norm: Norm, delta: torch.Tensor | None, factor: float) -> torch.Tensor:
    if delta is not None:
        x += delta * factor
    values = x.float()
    values = values * torch.rsqrt(values.square().mean(-1, keepdim=True) + norm.eps)
    if norm.rounds_first:
        values = values.to(x.dtype).float()
    return (values * norm.weight).to(x.dtype)


Activation = Literal["silu", "gelu_tanh"]


def gated(
    gate: torch.Tensor, up: torch.Tensor, activation: Activation, expand: PendingExpand | None = None
) -> torch.Tensor:
    """Multiply the activated `gate` `[T, width]` with `up` `[T, width]`; last dimensions contiguous, any row strides.

    The activation is computed in float32 and rounded to the inputs' dtype, as a separate operator would. With `expand`,
    gate and up are the halves of its `y`.
    """
    if expand is not None:
        from loramux_kernels.cuda import joined_expand

        y = gate.new_empty(gate.shape)
        joined_expand.prepare_gated(gate, up, activation, expand, y).run()
        return y
    if runs_triton(gate):
        from loramux_kernels.cuda import layer_operators as triton

        return triton.gated(gate, up, activation)
    if (native := native_for(gate)) is None:
        return gated_reference(gate, up, activation)
    rows, width = gate.shape
    y = gate.new_empty(rows, width)
    native.loramux_gated(
        DTYPES[gate.dtype],
        ACTIVATIONS[activation],
        *(gate.data_ptr(), gate.stride(0)),
        *(up.data_ptr(), up.stride(0)),
        *(rows, width),
        *(y.data_ptr(), width),
        torch.get_num_threads(),
    )
    return y


def gated_reference(gate: torch.Tensor, up: torch.Tensor, activation: Activation) -> torch.Tensor:
    """Compute `gated` in torch, on any device and in any floating dtype."""
    values = gate.float()
    active = functional.silu(values) if activation == "silu" else functional.gelu(values, approximate="tanh")
    return active.to(gate.dtype) * up


def rope_write_kv(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    rotation: Rotation | None,
    layer: KvLayer,
    slot_mapping: torch.Tensor,
    query_norm: Norm | None = None,
    key_norm: Norm | None = None,
    expand: PendingExpand | None = None,
) -> None:
    """Turn queries in place by their positions (RoPE, Su et al., 2021); store turned keys, and values, in pages.

    `query` `[T, Hq, Dk]`, `key` `[T, Hkv, Dk]`, `value` `[T, Hkv, Dv]`, last dimensions contiguous; `slot_mapping` as
    for `write_kv`. `query_norm` and `key_norm` normalise each head first. Without a rotation, no head turns. With
    `expand`, queries, keys and values are slices of its `y`.
    """
    if expand is not None:
        from loramux_kernels.cuda import joined_expand

        run_all(
            joined_expand.prepare_rope(query, key, value, rotation, layer, slot_mapping, query_norm, key_norm, expand)
        )
    elif runs_triton(query):
        from loramux_kernels.cuda import layer_operators as triton

        triton.rope_write_kv(query, key, value, rotation, layer, slot_mapping, query_norm, key_norm)
    elif (native := native_for(query)) is not None and query.shape[2] <= MAX_HEAD_DIM:
        _turn_natively(native, query, key, value, rotation, layer, slot_mapping, (query_norm, key_norm))
    else:
        rope_write_kv_reference(query, key, value, rotation, layer, slot_mapping, query_norm, key_norm)


def _turn_natively(
    native: ctypes.CDLL,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    rotation: Rotation | None,
    layer: KvLayer,
    slot_mapping: torch.Tensor,
    norms: tuple[Norm | None, Norm | None],
) -> None:
    call = RopeAbi(
        query.data_ptr(), key.data_ptr(), value.data_ptr(),
        None if rotation is None else rotation.cos.data_ptr(),
        None if rotation is None else rotation.sin.data_ptr(),
        slot_mapping.data_ptr(),
        *query.stride()[:2], *key.stride()[:2], *value.stride()[:2],
        query.shape[0], query.shape[1], 0 if rotation is None else rotation.cos.shape[1],
        rotation is not None and rotation.cos.dtype == torch.float32,
        *(NormAbi() if norm is None else norm.abi for norm in norms),
    )  # fmt: skip
    native.loramux_rope(DTYPES[query.dtype], call, layer.abi, torch.get_num_threads())


def rope_write_kv_reference(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    rotation: Rotation | None,
    layer: KvLayer,
    slot_mapping: torch.Tensor,
    query_norm: Norm | None = None,
    key_norm: Norm | None = None,
) -> None:
    """Compute `rope_write_kv` in torch, on any device and in any floating dtype."""
    query.copy_(_turned(query, rotation, query_norm))
    write_kv_reference(_turned(key, rotation, key_norm), value, layer, slot_mapping)


def _turned(heads: torch.Tensor, rotation: Rotation | None, norm: Norm | None) -> torch.Tensor:
    if norm is not None:
        heads = rms_norm_reference(heads, norm)
    if rotation is None:
        return heads
    cos, sin = rotation.cos.float()[:, None], rotation.sin.float()[:, None]
    turning, rest = heads[..., : cos.shape[-1]].float(), heads[..., cos.shape[-1] :]
    first, second = turning.chunk(2, dim=-1)
    turned = turning * cos + torch.cat((-second, first), dim=-1) * sin
    return torch.cat((turned.to(heads.dtype), rest), dim=-1)
