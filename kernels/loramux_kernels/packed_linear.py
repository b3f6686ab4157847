"""Semantics: y = x @ cat(weights).T + cat(biases): linears that read the same input, as one GEMM."""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Sequence

import torch
from torch.nn import functional

from loramux_kernels.native import multiplies_bf16_pairs, native_for
from loramux_kernels.native.abi import DTYPES

Multiply = Callable[[torch.Tensor], torch.Tensor]


class PackedLinear:
    """Several linears over one input, their weights held once, in the form that multiplies fastest here."""

    def __init__(self, weights: Sequence[torch.Tensor], biases: Sequence[torch.Tensor | None]) -> None:
        self.in_features = weights[0].shape[1]
        self.out_features = tuple(weight.shape[0] for weight in weights)
        self._multiply = _fastest(weights)(weights, join_biases(weights, biases))

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """`x` `[T, in_features]` to `[T, sum(out_features)]`, the members' outputs side by side."""
        return self._multiply(x)


def packed_linear_reference(
    x: torch.Tensor, weights: Sequence[torch.Tensor], biases: Sequence[torch.Tensor | None]
) -> torch.Tensor:
    """What a PackedLinear of `weights` and `biases` answers, one linear after the other."""
    outputs = [functional.linear(x, weight, bias) for weight, bias in zip(weights, biases, strict=True)]
    return torch.cat(outputs, dim=-1)


def join_biases(weights: Sequence[torch.Tensor], biases: Sequence[torch.Tensor | None]) -> torch.Tensor | None:
    """One bias `[sum(out_features)]`, zero where a member has none; None when none has."""
    if all(bias is None for bias in biases):
        return None
    pairs = zip(weights, biases, strict=True)
    return torch.cat([weight.new_zeros(len(weight)) if bias is None else bias for weight, bias in pairs])


def _fastest(weights: Sequence[torch.Tensor]) -> Callable[[Sequence[torch.Tensor], torch.Tensor | None], Multiply]:
    weight = weights[0]
    if weight.dtype == torch.bfloat16 and weight.device.type == "cpu":
        if has_bf16_tiles() or not multiplies_bf16_pairs() or weight.shape[1] % 2:
            return _OneDnn if _one_dnn_packs(weight) else _Plain
        return _Panels
    if weight.dtype == torch.float32 and native_for(weight) is not None:
        return _Panels
    return _Plain


def has_bf16_tiles() -> bool:
    """Whether the processor multiplies bf16 matrices by tiles (AMX), which oneDNN knows how to use."""
    probe = getattr(torch.cpu, "_is_amx_tile_supported", None)
    return probe is not None and bool(probe())


class _Plain:
    """`functional.linear`."""

    def __init__(self, weights: Sequence[torch.Tensor], bias: torch.Tensor | None) -> None:
        self._weight = weights[0] if len(weights) == 1 else torch.cat(list(weights))
        self._bias = bias

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        return functional.linear(x, self._weight, self._bias)


class _Panels:
    """Our own packed panels: read at the memory's speed for few rows, at the processor's for many."""

    panel = 32

    def __init__(self, weights: Sequence[torch.Tensor], bias: torch.Tensor | None) -> None:
        native = native_for(weights[0])
        assert native is not None, "chosen only where the C++ operators are there"
        self._native: ctypes.CDLL = native
        self._columns = sum(weight.shape[0] for weight in weights)
        self._bias = bias
        self._packed = self._pack(weights)

    def _pack(self, weights: Sequence[torch.Tensor]) -> torch.Tensor:
        width = weights[0].shape[1]
        packed = weights[0].new_zeros(-(-self._columns // self.panel) * self.panel * width)
        column = 0
        for weight in weights:
            rows = weight if weight.stride(1) == 1 else weight.contiguous()
            self._native.loramux_linear_pack(
                DTYPES[rows.dtype],
                *(rows.data_ptr(), rows.stride(0), rows.shape[0], width),
                column,
                packed.data_ptr(),
                torch.get_num_threads(),
            )
            column += rows.shape[0]
        return packed

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        x = x if x.stride(1) == 1 else x.contiguous()
        y = x.new_empty(x.shape[0], self._columns)
        self._native.loramux_linear(
            DTYPES[x.dtype],
            *(x.data_ptr(), x.stride(0), x.shape[0], x.shape[1]),
            self._packed.data_ptr(),
            None if self._bias is None else self._bias.data_ptr(),
            *(y.data_ptr(), self._columns, self._columns),
            torch.get_num_threads(),
        )
        return y


class _OneDnn:
    """Weights in the layout that oneDNN chooses, through operators that torch's own compiler emits."""

    def __init__(self, weights: Sequence[torch.Tensor], bias: torch.Tensor | None) -> None:
        weight = _Plain(weights, None)._weight
        self._packed = torch.ops.mkldnn._reorder_linear_weight(weight, 1)
        self._bias = bias

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        return torch.ops.mkldnn._linear_pointwise(x, self._packed, self._bias, "none", [], "")


def _one_dnn_packs(weight: torch.Tensor) -> bool:
    """Whether these operators, which torch does not promise to keep, are there and right for this dtype."""
    sample = torch.eye(32, dtype=weight.dtype)
    try:
        return torch.equal(_OneDnn([sample], None)(sample), sample)
    except (AttributeError, RuntimeError, TypeError):
        return False
