"""The properties of the base's linears and matrices that the load of an adapter needs.

`QuantizedLinear` holds a linear's weight as codes after it was read from the checkpoint and until it is packed, and
`QuantizedExperts` that of one linear of every expert.
`BaseWeights` describes the packed base: row lengths for DoRA, biases, and matrices to compare an adapter's copies with.
`fit_to_base` fits an adapter to them.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Protocol

import torch
from torch import nn
from torch.nn import functional

from loramux_adapters.components import PREFIX, BaseCopy
from loramux_adapters.errors import AdapterRejected
from loramux_adapters.weights import AdapterWeights, LoraWeights, factor_only
from loramux_kernels.packed_linear import Weight
from loramux_kernels.quantized_weight import QuantizedWeight

COMPARED_ROWS = 4096
"""Rows of a copy that are compared at a time: so memory never holds a second whole matrix."""


class QuantizedLinear(nn.Module):
    """A linear of the base, before packing, whose weight is stored as codes in the checkpoint."""

    def __init__(self, in_features: int, out_features: int, bias: bool, dtype: torch.dtype) -> None:
        super().__init__()
        self.in_features = in_features
        self.out_features = out_features
        self.bias = nn.Parameter(torch.empty(out_features, dtype=dtype), requires_grad=False) if bias else None
        self._quantized: QuantizedWeight | None = None

    def hold(self, weight: QuantizedWeight) -> None:
        """Take the weight, which moves between devices with the module from here on."""
        self._quantized = weight
        for name in ("codes", "scales", "offsets", "order"):
            self.register_buffer(name, getattr(weight, name), persistent=False)

    def release(self) -> None:
        """Free the weight, which has been packed."""
        self._quantized = None
        for name in ("codes", "scales", "offsets", "order"):
            delattr(self, name)

    @property
    def quantized(self) -> QuantizedWeight:
        """The weight."""
        assert self._quantized is not None, "read from the checkpoint"
        return self._quantized.with_tensors(dict(self.named_buffers()))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Map `[..., in_features]` to `[..., out_features]`; used to probe a model before it is packed."""
        return functional.linear(x, self.quantized.dequantize().to(x.dtype), self.bias)


class QuantizedExperts(QuantizedLinear):
    """One linear of every expert of a mixture, before packing, in the place of transformers' stacked weights.

    Its weight has the outputs of all experts one after the other: `[num_experts * out_features of one, in_features]`.
    """

    ndim = 3
    """Dimensions of the stacked weights, by which a mixture is known (`base.mixtures`)."""
    _is_hf_initialized = True
    """transformers' own mark, without which it fills stacked weights with random numbers."""

    def __init__(self, num_experts: int, in_features: int, out_features: int, dtype: torch.dtype) -> None:
        """`out_features` is that of one expert."""
        super().__init__(in_features, num_experts * out_features, bias=False, dtype=dtype)
        self._num_experts = num_experts

    def __len__(self) -> int:
        return self._num_experts


def weight_of(linear: nn.Linear | QuantizedLinear) -> Weight:
    """Return a linear's weight `[out_features, in_features]` in its current form."""
    return linear.quantized if isinstance(linear, QuantizedLinear) else linear.weight.data


class FittedLinear(Protocol):
    """A linear of the base to which adapters are fitted. Its weights may be spread over several ranks."""

    @property
    def bias(self) -> torch.Tensor | None:
        """`[out_features]`"""

    def merged_squares(self, pair: LoraWeights) -> torch.Tensor:
        """Return float64`[out_features]` on the linear's device: the squared lengths of the rows of W + scale * B @ A.
        W are the weights of the product, after quantization."""


class BaseMatrix(Protocol):
    """A matrix of the base with a row for each token; its rows may be spread over several ranks."""

    def __len__(self) -> int: ...

    def holds(self, start: int, rows: torch.Tensor) -> bool:
        """Are `rows`, which are on the CPU, its rows from `start` on?"""


@dataclass(frozen=True, slots=True)
class BaseLinear:
    """A linear of the base, whose weights W may be packed."""

    multiply: Callable[[torch.Tensor], torch.Tensor]
    """Map x `[n, in_features]` to `x @ W.T + bias`."""
    bias: torch.Tensor | None
    """`[out_features]`"""
    lengths: torch.Tensor
    """float32`[out_features]`: lengths of the rows of W."""

    def merged_squares(self, pair: LoraWeights) -> torch.Tensor:
        """Compute the squared lengths; see FittedLinear.

        For each row w of W and b of B, `|w + s b A|^2 = |w|^2 + 2 s b (A w) + s^2 b (A A^T) b`: the base itself
        multiplies W with A, so neither W nor a matrix of W's size is needed. Every term is a sum over the inputs. If
        each rank has a share of the inputs, the sum of the ranks' results is the whole result.
        """
        device = self.lengths.device
        with _aside(device):
            bias = 0.0 if self.bias is None else self.bias.double()
            a, b = pair.a.to(device), pair.b.to(device, torch.float64)
            across = (b * (self.multiply(a).double() - bias).T).sum(1)
            own = ((b @ (a.double() @ a.double().T)) * b).sum(1)
            return self.lengths.double() ** 2 + 2 * pair.scale * across + pair.scale**2 * own


@dataclass(frozen=True, slots=True)
class LocalMatrix:
    """A matrix that this process holds whole."""

    rows: torch.Tensor
    """`[tokens, hidden_size]`"""

    def __len__(self) -> int:
        return len(self.rows)

    def holds(self, start: int, rows: torch.Tensor) -> bool:
        """Compare `rows` with the matrix's values, or with these rounded to bfloat16, in which most trainers load a
        base and copy its matrices."""
        own = self.rows[start : start + len(rows)].to("cpu")
        return torch.equal(rows, own) or torch.equal(rows, own.to(torch.bfloat16).to(rows.dtype))


@dataclass(frozen=True, slots=True)
class BaseWeights:
    """The base's linears (with the head) and its matrices with a row for each token, by module name."""

    linears: Mapping[str, FittedLinear]
    matrices: Mapping[str, BaseMatrix]
    packed_bytes: int = 0
    """Bytes of the weights that were packed: linears and experts, without the output head, and those of a head for
    multi-token prediction."""


def base_linear(
    linear: nn.Linear | QuantizedLinear,
    multiply: Callable[[torch.Tensor], torch.Tensor],
    columns: slice,
    weight: torch.Tensor | None = None,
) -> BaseLinear:
    """Describe `linear`, whose outputs are `columns` of the result of `multiply`.

    `weight` is the matrix of the product, if a quantized format has changed it.
    """
    if weight is None:
        assert isinstance(linear, nn.Linear), "a quantized weight is given"
        weight = linear.weight.data
    lengths = torch.linalg.vector_norm(weight, dim=1, dtype=torch.float32)
    bias = None if linear.bias is None else linear.bias.data
    return BaseLinear(lambda x: multiply(x)[:, columns], bias, lengths)


@torch.inference_mode()
def fit_to_base(weights: AdapterWeights, base: BaseWeights) -> AdapterWeights:
    """Fit `weights` to `base`: magnitudes and biases become columns, copies of the base are compared and dropped.

    Raises AdapterRejected: `base_differs` for a copy that is not this base's or a bias that the base does not have,
    `weights_overflow`.
    """
    for part in weights.plan.copies:
        if part.module in weights.copies:
            _check_copy(part, weights.copies[part.module], base.matrices[part.module])
    columns = dict(weights.columns)
    for module, magnitude in weights.magnitudes.items():
        columns[module] = dora_columns(magnitude, weights.modules[module], base.linears[module], module)
    for module, bias in weights.biases.items():
        columns[module] = _with_bias(columns.get(module), bias, base.linears[module], module)
    return replace(weights, columns=columns, magnitudes={}, biases={}, copies={})


def dora_columns(magnitude: torch.Tensor, pair: LoraWeights, linear: FittedLinear, module: str) -> torch.Tensor:
    """Return DoRA's columns `[2, out_features]`: factors, and shifts that leave the bias unscaled.

    A factor is `magnitude / |row of W + scale * B @ A|`, as in PEFT (peft/tuners/lora/dora.py).
    """
    squares = linear.merged_squares(pair)
    with _aside(squares.device):
        bias = 0.0 if linear.bias is None else linear.bias.double()
        lengths = squares.clamp(min=torch.finfo(torch.float32).tiny).sqrt()
        factors = magnitude.to(squares.device).double() / lengths
        columns = torch.stack((factors, bias * (1 - factors))).to("cpu", magnitude.dtype)
    if not torch.isfinite(columns).all():
        raise AdapterRejected(
            "weights_overflow",
            f"{module}.lora_magnitude_vector",
            f"DoRA's factors of {module} are beyond what {magnitude.dtype} can express, in which this server runs.",
        )
    return columns


@contextmanager
def _aside(device: torch.device) -> Iterator[None]:
    """Run on a separate stream on a GPU, so no step waits for the computation, and wait for its end. After that, any
    stream may read the result.

    This is safe because the base's weights never change.
    """
    if device.type != "cuda":
        yield
        return
    stream = _stream_aside(device)
    with torch.cuda.stream(stream):
        yield
    stream.synchronize()


@functools.cache
def _stream_aside(device: torch.device) -> torch.cuda.Stream:
    """Return the only stream for such work, because cuBLAS keeps a workspace of 32 MiB for every stream that it has
    seen.
    """
    return torch.cuda.Stream(device)


def _with_bias(columns: torch.Tensor | None, bias: torch.Tensor, linear: FittedLinear, module: str) -> torch.Tensor:
    """Return `columns` `[2, out_features]` (None: none yet) with shifts that replace the base's bias by `bias`."""
    if linear.bias is None:
        raise AdapterRejected(
            "base_differs",
            f"{module}.bias",
            f"The adapter brings a trained bias of {module}, which has none in this base: it was trained on another.",
        )
    if columns is None:
        columns = factor_only(torch.ones_like(bias))
    change = bias.double() - linear.bias.to("cpu", torch.float64)
    return torch.stack((columns[0], (columns[1].double() + change).to(bias.dtype)))


def _check_copy(part: BaseCopy, copy: torch.Tensor, own: BaseMatrix) -> None:
    rows = min(len(copy), len(own))  # a resized copy begins with the base's rows
    starts = range(0, rows, COMPARED_ROWS)
    if not all(own.holds(start, copy[start : min(start + COMPARED_ROWS, rows)]) for start in starts):
        raise AdapterRejected(
            "base_differs",
            part.key.removeprefix(PREFIX),
            f"The adapter brings a {part.module} of its own, and it is not this base's: the base was changed in "
            "training, or is another one. Save the adapter with save_embedding_layers=False if the base was not "
            "changed; otherwise train it whole (modules_to_save).",
        )
