"""Semantics: y = x @ cat(weights).T + cat(biases): linears that read the same input, as one GEMM."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch.nn import functional

from loramux_kernels.linear_formats import LinearFormat, Quantization, choose_format


class PackedLinear:
    """Several linears over one input, their weights held once, in the form that multiplies fastest here."""

    def __init__(
        self,
        weights: Sequence[torch.Tensor],
        biases: Sequence[torch.Tensor | None],
        quantization: Quantization = "none",
    ) -> None:
        self.in_features = weights[0].shape[1]
        self.out_features = tuple(weight.shape[0] for weight in weights)
        self._format: LinearFormat = choose_format(weights[0], quantization)(weights, join_biases(weights, biases))

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """`x` `[T, in_features]` to `[T, sum(out_features)]`, the members' outputs side by side."""
        return self._format(x)

    @property
    def num_bytes(self) -> int:
        """Bytes of weights that a call reads."""
        return self._format.num_bytes

    def as_multiplied(self, weight: torch.Tensor) -> torch.Tensor:
        """Return the matrix that is multiplied by in the place of one of the members' weights."""
        return self._format.as_multiplied(weight)


def packed_linear_reference(
    x: torch.Tensor, weights: Sequence[torch.Tensor], biases: Sequence[torch.Tensor | None]
) -> torch.Tensor:
    """Return the result of a PackedLinear of `weights` and `biases`, one linear after the other."""
    outputs = [functional.linear(x, weight, bias) for weight, bias in zip(weights, biases, strict=True)]
    return torch.cat(outputs, dim=-1)


def join_biases(weights: Sequence[torch.Tensor], biases: Sequence[torch.Tensor | None]) -> torch.Tensor | None:
    """One bias `[sum(out_features)]`, zero where a member has none; None when none has."""
    if all(bias is None for bias in biases):
        return None
    pairs = zip(weights, biases, strict=True)
    return torch.cat([weight.new_zeros(len(weight)) if bias is None else bias for weight, bias in pairs])
