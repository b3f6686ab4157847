"""What an adapter must know of the base's weights before it can be served: DoRA's lengths, and equal copies."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace

import torch
from torch import nn

from loramux_adapters.errors import AdapterRejected
from loramux_adapters.weights import AdapterWeights, LoraWeights

COMPARED_ROWS = 4096
"""Of a copy of the base's, at a time: neither memory holds a second one whole."""


@dataclass(frozen=True, slots=True)
class BaseLinear:
    """A linear of the base, whose weights W may be packed."""

    multiply: Callable[[torch.Tensor], torch.Tensor]
    """x `[n, in_features]` to `x @ W.T + bias`"""
    bias: torch.Tensor | None
    """`[out_features]`"""
    lengths: torch.Tensor
    """float32`[out_features]`: of the rows of W."""


@dataclass(frozen=True, slots=True)
class BaseWeights:
    """The base's linears, the head among them, and its matrices with a row for each token, by module."""

    linears: Mapping[str, BaseLinear]
    matrices: Mapping[str, torch.Tensor]


def base_linear(linear: nn.Linear, multiply: Callable[[torch.Tensor], torch.Tensor], columns: slice) -> BaseLinear:
    """What is kept of `linear`, whose outputs are `columns` of what `multiply` gives."""
    lengths = torch.linalg.vector_norm(linear.weight.data, dim=1, dtype=torch.float32)
    bias = None if linear.bias is None else linear.bias.data
    return BaseLinear(lambda x: multiply(x)[:, columns], bias, lengths)


@torch.inference_mode()
def fit_to_base(weights: AdapterWeights, base: BaseWeights) -> AdapterWeights:
    """`weights` ready to be installed over `base`: magnitudes made columns, copies of the base compared and dropped.

    Raises AdapterRejected: `base_differs` for a copy that is not this base's, `weights_overflow`.
    """
    for module, copy in weights.copies.items():
        _check_copy(module, copy, base.matrices[module])
    columns = {
        module: dora_columns(magnitude, weights.modules[module], base.linears[module], module)
        for module, magnitude in weights.magnitudes.items()
    }
    return replace(weights, columns={**weights.columns, **columns}, magnitudes={}, copies={})


def dora_columns(magnitude: torch.Tensor, pair: LoraWeights, linear: BaseLinear, module: str) -> torch.Tensor:
    """`[2, out_features]` in the dtype of `magnitude`: factors `magnitude / |rows of W + scale * B @ A|`, and shifts
    that leave the bias unscaled, as PEFT does (peft/tuners/lora/dora.py).

    With `|w + s b A|^2 = |w|^2 + 2 s b (A w) + s^2 b (A A^T) b` for each row w of W and b of B, the base itself
    multiplies W with A, and neither W nor a matrix of its size is needed.
    """
    device = linear.lengths.device
    with _aside(device):
        bias = 0.0 if linear.bias is None else linear.bias.double()
        factors = magnitude.to(device).double() / _merged_lengths(pair, linear, bias)
        columns = torch.stack((factors, bias * (1 - factors))).to("cpu", magnitude.dtype)
    if not torch.isfinite(columns).all():
        raise AdapterRejected(
            "weights_overflow",
            f"{module}.lora_magnitude_vector",
            f"DoRA's factors of {module} are beyond what {magnitude.dtype} can express, in which this server runs.",
        )
    return columns


def _merged_lengths(pair: LoraWeights, linear: BaseLinear, bias: torch.Tensor | float) -> torch.Tensor:
    """float64`[out_features]`: of the rows of W + scale * B @ A, never zero."""
    device = linear.lengths.device
    a, b = pair.a.to(device), pair.b.to(device, torch.float64)
    across = (b * (linear.multiply(a).double() - bias).T).sum(1)
    own = ((b @ (a.double() @ a.double().T)) * b).sum(1)
    squared = linear.lengths.double() ** 2 + 2 * pair.scale * across + pair.scale**2 * own
    return squared.clamp(min=torch.finfo(torch.float32).tiny).sqrt()


@contextmanager
def _aside(device: torch.device) -> Iterator[None]:
    """On a GPU: on a stream of its own, so that no step stands behind it. The weights never change."""
    if device.type != "cuda":
        yield
        return
    with torch.cuda.stream(torch.cuda.Stream(device)):
        yield


def _check_copy(module: str, copy: torch.Tensor, own: torch.Tensor) -> None:
    pieces = zip(copy.split(COMPARED_ROWS), own.split(COMPARED_ROWS), strict=True)
    if not all(torch.equal(theirs, ours.to("cpu")) for theirs, ours in pieces):
        raise AdapterRejected(
            "base_differs",
            f"{module}.base_layer.weight",
            f"The adapter brings a {module} of its own beside its LoRA on it, and it is not this base's: the base was "
            "changed in training, or is another one. Save the adapter with save_embedding_layers=False if the base "
            "was not changed; otherwise train it whole (modules_to_save).",
        )
