"""Semantics: y = norm(x) = x / sqrt(mean(x^2) + eps) * weight, row by row; with a delta, x += factor * delta first."""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from dataclasses import replace

import torch

from loramux_kernels.device import runs_triton
from loramux_kernels.native import native_for
from loramux_kernels.native.abi import DTYPES, RmsNormAbi
from loramux_kernels.tables import Norm, OwnWeights


def rms_norm(
    x: torch.Tensor,
    norm: Norm,
    delta: torch.Tensor | None = None,
    factor: float = 1.0,
    own: OwnWeights | None = None,
) -> torch.Tensor:
    """Normalise the rows of `x` `[T, width]` into a new tensor (Zhang and Sennrich, 2019).

    With `delta`, of x's shape, the residual stream `x` is changed in place before. Last dimensions are contiguous. Sums
    are float32; `factor * delta` and the new x are rounded to x's dtype, as by operators of their own. `own` are the
    weights of rows whose adapters bring one.
    """
    if runs_triton(x):
        from loramux_kernels.cuda import rms_norm as triton_rms_norm

        return triton_rms_norm.rms_norm(x, norm, delta, factor, own)
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
    """`rms_norm` in torch, on any device and in any floating dtype."""
    return _with_own(_normalise_in_torch, x, norm, delta, factor, own)


def _normalise_in_torch(x: torch.Tensor, norm: Norm, delta: torch.Tensor | None, factor: float) -> torch.Tensor:
    if delta is not None:
        x += delta * factor
    values = x.float()
    values = values * torch.rsqrt(values.square().mean(-1, keepdim=True) + norm.eps)
    if norm.rounds_first:
        values = values.to(x.dtype).float()
    return (values * norm.weight).to(x.dtype)
