"""Semantics: y = x @ cat(weights).T + cat(biases): linears that read the same input, as one GEMM."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch.nn import functional

from loramux_kernels.linear_formats import Coded, LinearFormat, choose_format
from loramux_kernels.quantized_weight import Quantization, QuantizedWeight, quantize

Weight = torch.Tensor | QuantizedWeight
"""A linear's weight `[out_features, in_features]`, as it is or quantized."""


class PackedLinear:
    """Several linears over one input, their weights held once, in the form that multiplies fastest here."""

    def __init__(
        self, weights: Sequence[Weight], biases: Sequence[torch.Tensor | None], quantization: Quantization = "none"
    ) -> None:
        """`quantization`: how weights that are not quantized yet get so."""
        self.in_features = weights[0].shape[1]
        self.out_features = tuple(weight.shape[0] for weight in weights)
        self._quantization = quantization
        held = [self._quantized(weight) for weight in weights]
        self._formats = [_pack(held[first:last], biases[first:last]) for first, last in _alike(held)]

    def _quantized(self, weight: Weight) -> Weight:
        if isinstance(weight, QuantizedWeight) or self._quantization == "none":
            return weight
        return quantize(weight, self._quantization)

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """`x` `[T, in_features]` to `[T, sum(out_features)]`, the members' outputs side by side."""
        if len(self._formats) == 1:
            return self._formats[0](x)
        return torch.cat([multiply(x) for multiply in self._formats], dim=-1)

    @property
    def num_bytes(self) -> int:
        """Bytes of weights that a call reads."""
        return sum(held.num_bytes for held in self._formats)

    def as_multiplied(self, weight: Weight) -> torch.Tensor:
        """Return the matrix that is multiplied by in the place of one of the members' weights."""
        held = self._quantized(weight)
        return held.dequantize() if isinstance(held, QuantizedWeight) else held


def packed_linear_reference(
    x: torch.Tensor, weights: Sequence[torch.Tensor], biases: Sequence[torch.Tensor | None]
) -> torch.Tensor:
    """Return the result of a PackedLinear of `weights` and `biases`, one linear after the other."""
    outputs = [functional.linear(x, weight, bias) for weight, bias in zip(weights, biases, strict=True)]
    return torch.cat(outputs, dim=-1)


def join_biases(weights: Sequence[Weight], biases: Sequence[torch.Tensor | None]) -> torch.Tensor | None:
    """One bias `[sum(out_features)]`, zero where a member has none; None when none has."""
    given = next((bias for bias in biases if bias is not None), None)
    if given is None:
        return None
    pairs = zip(weights, biases, strict=True)
    return torch.cat([given.new_zeros(weight.shape[0]) if bias is None else bias for weight, bias in pairs])


def _pack(weights: Sequence[Weight], biases: Sequence[torch.Tensor | None]) -> LinearFormat:
    bias = join_biases(weights, biases)
    quantized = [weight for weight in weights if isinstance(weight, QuantizedWeight)]
    if quantized:
        return Coded(quantized, bias)
    plain = [weight for weight in weights if isinstance(weight, torch.Tensor)]
    return choose_format(plain[0])(plain, bias)


def _alike(weights: Sequence[Weight]) -> list[tuple[int, int]]:
    """Return the runs of neighbours that one format can hold together, first and behind the last."""
    starts = [i for i, weight in enumerate(weights) if i == 0 or not _are_alike(weights[i - 1], weight)]
    return list(zip(starts, [*starts[1:], len(weights)], strict=True))


def _are_alike(one: Weight, other: Weight) -> bool:
    if not isinstance(one, QuantizedWeight) or not isinstance(other, QuantizedWeight):
        return isinstance(one, torch.Tensor) and isinstance(other, torch.Tensor)
    if one.order is None or other.order is None:
        is_same_order = one.order is other.order
    else:
        is_same_order = torch.equal(one.order, other.order)
    is_same_form = (one.coding, one.group, one.offsets is None) == (other.coding, other.group, other.offsets is None)
    return is_same_order and is_same_form
