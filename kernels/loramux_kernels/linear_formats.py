"""Formats in which a PackedLinear holds its weights: each a class that packs, multiplies, and says by what exactly.

A format whose weights are not the checkpoint's (a quantized one) is served only where it was asked for. LoRA reads the
unquantized activation and adds to the format's result, so that a format knows nothing of adapters.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from typing import Literal, Protocol

import torch
from torch.nn import functional

from loramux_kernels.device import zeros_in_large_pages
from loramux_kernels.native import multiplies_bf16_pairs, native_for
from loramux_kernels.native.abi import DTYPES
from loramux_kernels.processor import has_bf16_tiles

Quantization = Literal["none", "int8"]


class LinearFormat(Protocol):
    """Weights of several linears over one input, packed."""

    num_bytes: int
    """Bytes that a call reads."""

    def __init__(self, weights: Sequence[torch.Tensor], bias: torch.Tensor | None) -> None:
        """Pack `weights`, `[out_features, in_features]` each; `bias` `[sum(out_features)]`."""

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """`x` `[T, in_features]` to `[T, sum(out_features)]`, of x's dtype."""

    @staticmethod
    def as_multiplied(weight: torch.Tensor) -> torch.Tensor:
        """Return the matrix that is multiplied by in the place of `weight`: the reference of a quantized format."""


def choose_format(weight: torch.Tensor, quantization: Quantization) -> type[LinearFormat]:
    """Return the format for weights like `weight`: the fastest here of those that `quantization` allows."""
    if quantization == "int8":
        return Int8
    if weight.dtype == torch.bfloat16 and weight.device.type == "cpu":
        if has_bf16_tiles() or not multiplies_bf16_pairs() or weight.shape[1] % 2:
            return OneDnn if _one_dnn_packs(weight) else Plain
        return Panels
    if weight.dtype == torch.float32 and native_for(weight) is not None:
        return Panels
    return Plain


class Exact:
    """A format that multiplies by the checkpoint's own weights."""

    @staticmethod
    def as_multiplied(weight: torch.Tensor) -> torch.Tensor:
        """Return `weight`."""
        return weight


class Plain(Exact):
    """`functional.linear`."""

    def __init__(self, weights: Sequence[torch.Tensor], bias: torch.Tensor | None) -> None:
        self._weight = weights[0] if len(weights) == 1 else torch.cat(list(weights))
        self._bias = bias
        self.num_bytes = self._weight.nbytes

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """Multiply; see LinearFormat."""
        return functional.linear(x, self._weight, self._bias)


class Panels(Exact):
    """Our own packed panels: read at the memory's speed for few rows, at the processor's for many."""

    panel = 32

    def __init__(self, weights: Sequence[torch.Tensor], bias: torch.Tensor | None) -> None:
        native = native_for(weights[0])
        assert native is not None, "chosen only where the C++ operators are there"
        self._native: ctypes.CDLL = native
        self._columns = sum(weight.shape[0] for weight in weights)
        self._bias = bias
        self._packed = self._pack(weights)
        self.num_bytes = self._packed.nbytes

    def _pack(self, weights: Sequence[torch.Tensor]) -> torch.Tensor:
        width = weights[0].shape[1]
        packed = zeros_in_large_pages(-(-self._columns // self.panel) * self.panel * width, weights[0].dtype)
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
        """Multiply; see LinearFormat."""
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


class OneDnn(Exact):
    """Weights in the layout that oneDNN chooses, through operators that torch's own compiler emits."""

    def __init__(self, weights: Sequence[torch.Tensor], bias: torch.Tensor | None) -> None:
        weight = Plain(weights, None)._weight
        self.num_bytes = weight.nbytes
        self._packed = torch.ops.mkldnn._reorder_linear_weight(weight, 1)
        self._bias = bias

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """Multiply; see LinearFormat."""
        return torch.ops.mkldnn._linear_pointwise(x, self._packed, self._bias, "none", [], "")


def _one_dnn_packs(weight: torch.Tensor) -> bool:
    """Return whether these private operators of torch exist and are right for this dtype."""
    sample = torch.eye(32, dtype=weight.dtype)
    try:
        return torch.equal(OneDnn([sample], None)(sample), sample)
    except (AttributeError, RuntimeError, TypeError):
        return False


class Int8:
    """Eight-bit integers with one scale for each output: w = scale * q, scale = max |w| / 127, q rounded to nearest.

    A quarter of float32's bytes and half of bfloat16's. An element of w is off by at most half its row's scale. The
    C++ operator takes x with 16 bits of the largest of 256 neighbouring elements where the processor has VNNI, else as
    it is, and sums exactly or in float32.
    """

    panel = 32

    def __init__(self, weights: Sequence[torch.Tensor], bias: torch.Tensor | None) -> None:
        quantized = [_quantize(weight) for weight in weights]
        integers, self._scales = (torch.cat(parts) for parts in zip(*quantized, strict=True))
        self._columns, self._bias = len(integers), bias
        self._native = native_for(weights[0])
        self._integers = integers if self._native is None else self._packed(integers, self._native.loramux_int8_unit())
        self.num_bytes = self._integers.nbytes + self._scales.nbytes

    @staticmethod
    def as_multiplied(weight: torch.Tensor) -> torch.Tensor:
        """Return scale * q in float32."""
        integers, scales = _quantize(weight)
        return integers * scales[:, None]

    def _packed(self, integers: torch.Tensor, unit: int) -> torch.Tensor:
        """Return panels `[panels, in_features / unit, panel, unit]`, in large pages."""
        columns, width = integers.shape
        padded = functional.pad(integers, (0, -width % unit, 0, -columns % self.panel))
        panels = padded.view(-1, self.panel, padded.shape[1] // unit, unit).transpose(1, 2)
        packed = zeros_in_large_pages(padded.numel(), torch.int8).view(panels.shape)
        return packed.copy_(panels)

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """Multiply; see LinearFormat."""
        if self._native is None:
            y = (x.float() @ self._integers.float().T) * self._scales
            return (y if self._bias is None else y + self._bias).to(x.dtype)
        x = x if x.stride(1) == 1 else x.contiguous()
        y = x.new_empty(x.shape[0], self._columns)
        self._native.loramux_int8_linear(
            DTYPES[x.dtype],
            *(x.data_ptr(), x.stride(0), x.shape[0], x.shape[1]),
            *(self._integers.data_ptr(), self._scales.data_ptr()),
            None if self._bias is None else self._bias.data_ptr(),
            *(y.data_ptr(), self._columns, self._columns),
            torch.get_num_threads(),
        )
        return y


def _quantize(weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return int8`[out_features, in_features]` and float32`[out_features]` scales."""
    values = weight.float()
    scales = values.abs().amax(dim=1) / 127
    steps = values / scales.clamp(min=torch.finfo(torch.float32).tiny)[:, None]
    return steps.round().clamp(-127, 127).to(torch.int8), scales
