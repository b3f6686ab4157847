"""Semantics: y = x @ cat(weights).T + cat(biases): linears that read the same input, as one GEMM."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch.nn import functional


class PackedLinear:
    """Several linears over one input, their weights held once, in the form that multiplies fastest here."""

    def __init__(self, weights: Sequence[torch.Tensor], biases: Sequence[torch.Tensor | None]) -> None:
        self.in_features = weights[0].shape[1]
        self.out_features = tuple(weight.shape[0] for weight in weights)
        self.weight_bytes = sum(weight.numel() * weight.element_size() for weight in weights)
        self._weight = weights[0] if len(weights) == 1 else torch.cat(list(weights))
        self._bias = join_biases(weights, biases)

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """`x` `[T, in_features]` to `[T, sum(out_features)]`, the members' outputs side by side."""
        return functional.linear(x, self._weight, self._bias)


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
