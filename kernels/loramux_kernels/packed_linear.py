"""Packed linears: weights that read the same input, held as one matrix in the fastest format of this machine.

Semantics: y = x @ cat(weights).T + cat(biases).

A format (`Plain`, `Panels`, `Tiles`, `OneDnn`, `Coded`) is a class that packs weights and multiplies by them. The
format of a base's unquantized weights is measured (`format_choice`). Quantized weights stay codes (`quantized_weight`)
and are decoded during the product. LoRA reads the unquantized input and adds to the result, so a format does not depend
on adapters.
"""

from __future__ import annotations

import ctypes
import functools
import math
from collections.abc import Callable, Sequence
from typing import NamedTuple, Protocol, cast

import torch
from torch.nn import functional

from loramux_kernels.device import runs_triton, zeros_in_large_pages
from loramux_kernels.native.abi import CODINGS, DTYPES, CodedWeightsAbi, LayerLinearAbi
from loramux_kernels.native.loader import bf16_unit, has_tiles, native_for, native_library
from loramux_kernels.quantized_weight import (
    MIN_GROUP,
    TABLES,
    Quantization,
    QuantizedWeight,
    is_nibbles,
    joined,
    quantize,
    table_of,
)


class LinearFormat(Protocol):
    """Weights of several linears over one input, packed."""

    num_bytes: int
    """Bytes that a call reads."""

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """Return `[T, sum(out_features)]` of x's dtype for `x` `[T, in_features]`."""

    def abi(self) -> LayerLinearAbi | None:
        """Return the weights in the form that the C++ operators read, without a group; None if C++ cannot read this
        format.
        """


class Plain:
    """Weights of torch, multiplied by `functional.linear`."""

    is_read_by_layers = False
    """The C++ operators do not read this format, so layers run as modules."""

    def __init__(self, weights: Sequence[torch.Tensor], bias: torch.Tensor | None) -> None:
        """Join `weights`, `[out_features, in_features]` each; `bias` is `[sum(out_features)]`."""
        self._weight = weights[0] if len(weights) == 1 else torch.cat(list(weights))
        self._bias = bias
        self.num_bytes = self._weight.nbytes

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """Multiply; see LinearFormat."""
        return functional.linear(x, self._weight, self._bias)

    @staticmethod
    def holds(_: torch.Tensor) -> bool:
        """Return True: torch multiplies by any weight."""
        return True

    def abi(self) -> None:
        """Return None: the C++ operators do not read torch's weights."""


class Panels:
    """Our own packed panels: read at the memory's speed for few rows, multiplied at the processor's speed for many.

    Most checkpoints' float32 weights are exact in bfloat16 or float16. Such weights are packed in that dtype and
    widened during the product: this halves the bytes and gives the same result to the bit.
    """

    is_read_by_layers = True
    """One call of the C++ operators computes all layers."""
    _by_tiles = False
    panel = 32

    def __init__(self, weights: Sequence[torch.Tensor], bias: torch.Tensor | None) -> None:
        native = native_for(weights[0])
        assert native is not None, "chosen only where the C++ operators are there"
        self._native: ctypes.CDLL = native
        self._columns = sum(weight.shape[0] for weight in weights)
        self._width = weights[0].shape[1]
        self._bias = bias
        self._packed = self._pack(weights[0].dtype, narrowed(weights))
        self.num_bytes = self._packed.nbytes

    def _pack(self, dtype: torch.dtype, weights: Sequence[torch.Tensor]) -> torch.Tensor:
        """Pack `weights` for inputs of `dtype`."""
        width = weights[0].shape[1]
        packed = zeros_in_large_pages(-(-self._columns // self.panel) * self.panel * width, weights[0].dtype)
        column = 0
        for weight in weights:
            rows = weight if weight.stride(1) == 1 else weight.contiguous()
            self._native.loramux_linear_pack(
                *(DTYPES[dtype], DTYPES[rows.dtype]),
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
        self._operator(x.dtype)(
            *(x.data_ptr(), x.stride(0), x.shape[0], x.shape[1]),
            self._packed.data_ptr(),
            None if self._bias is None else self._bias.data_ptr(),
            *(y.data_ptr(), self._columns, self._columns),
            torch.get_num_threads(),
        )
        return y

    def _operator(self, dtype: torch.dtype) -> Callable[..., None]:
        """Return the C++ operator for inputs of `dtype`."""
        return functools.partial(self._native.loramux_linear, DTYPES[dtype], DTYPES[self._packed.dtype])

    @staticmethod
    def holds(weight: torch.Tensor) -> bool:
        """Return whether the C++ operators serve this dtype. bf16 needs the processor's products, and whole units."""
        if weight.dtype == torch.bfloat16:
            return weight.device.type == "cpu" and bf16_unit() > 0 and weight.shape[1] % bf16_unit() == 0
        return weight.dtype == torch.float32 and native_for(weight) is not None

    def abi(self) -> LayerLinearAbi:
        """Return the panels; see LinearFormat."""
        bias = None if self._bias is None else self._bias.data_ptr()
        dtype = DTYPES[self._packed.dtype]
        packed = self._packed.data_ptr()
        return LayerLinearAbi(packed, None, bias, None, dtype, self._by_tiles, 0, self._width, self._columns)


class Tiles(Panels):
    """The panels of bfloat16, multiplied by tiles of Intel's AMX. The sums have another order than those of `Panels`,
    for every number of rows.
    """

    _by_tiles = True
    depth = 32
    """Inputs that one product of tiles adds."""

    def _operator(self, dtype: torch.dtype) -> Callable[..., None]:
        """Return the C++ operator for inputs of `dtype`."""
        assert dtype == torch.bfloat16, "chosen for bfloat16 alone"
        return cast("Callable[..., None]", self._native.loramux_tile_linear)

    @staticmethod
    def holds(weight: torch.Tensor) -> bool:
        """Return whether this process may use tiles, and the weight is of bfloat16 and has whole tiles of inputs."""
        is_suitable = weight.dtype == torch.bfloat16 and weight.shape[1] % Tiles.depth == 0
        return is_suitable and native_for(weight) is not None and has_tiles()


def narrowed(weights: Sequence[torch.Tensor]) -> Sequence[torch.Tensor]:
    """Return float32 `weights` in bfloat16 or float16 if the values stay exact, otherwise unchanged."""
    if weights[0].dtype != torch.float32:
        return weights
    for dtype in (torch.bfloat16, torch.float16):
        narrow = [weight.to(dtype) for weight in weights]
        is_exact = all(torch.equal(short.float(), weight) for short, weight in zip(narrow, weights, strict=True))
        if is_exact and native_for(narrow[0]) is not None:
            return narrow
    return weights


class OneDnn:
    """Weights in a layout that oneDNN chooses, through operators that torch's own compiler emits."""

    is_read_by_layers = False

    def __init__(self, weights: Sequence[torch.Tensor], bias: torch.Tensor | None) -> None:
        weight = Plain(weights, None)._weight
        self.num_bytes = weight.nbytes
        self._packed = torch.ops.mkldnn._reorder_linear_weight(weight, 1)
        self._bias = bias

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """Multiply; see LinearFormat."""
        return torch.ops.mkldnn._linear_pointwise(x, self._packed, self._bias, "none", [], "")

    @staticmethod
    def holds(weight: torch.Tensor) -> bool:
        """Return whether torch's private operators exist, and are right for this dtype."""
        if weight.dtype != torch.bfloat16 or weight.device.type != "cpu":
            return False
        sample = torch.eye(32, dtype=weight.dtype)
        try:
            return torch.equal(OneDnn([sample], None)(sample), sample)
        except (AttributeError, RuntimeError, TypeError):
            return False

    def abi(self) -> None:
        """Return None: the C++ operators do not read oneDNN's layout."""


UnquantizedFormat = Plain | Panels | OneDnn

FORMATS: dict[str, type[UnquantizedFormat]] = {"tiles": Tiles, "panels": Panels, "onednn": OneDnn, "torch": Plain}
"""Formats of unquantized weights, by the names that `engine.linear_format` takes; those that C++ reads come first."""


def choose_format(weight: torch.Tensor) -> type[UnquantizedFormat]:
    """Return the first format that holds `weight`, without a measurement."""
    return FORMATS[formats_of(weight)[0]]


def formats_of(weight: torch.Tensor) -> list[str]:
    """Return the names of the formats that hold `weight`."""
    return [name for name, form in FORMATS.items() if form.holds(weight)]


class Packing(NamedTuple):
    """Form of a base's linears in memory."""

    quantization: Quantization = "none"
    """Method for weights that are not quantized yet."""
    form: type[UnquantizedFormat] | None = None
    """Format of unquantized weights. If it does not hold a weight, or is None, `choose_format` finds another."""


DEFAULT_PACKING = Packing()


class Coded:
    """Codes and their scales, decoded during the product: memory and reads are those of the codes.

    If the processor has VNNI and the codes are integers, the C++ operator quantizes x to 16 bits, relative to the
    largest of 256 neighbouring elements, and sums exactly. Otherwise it uses the unchanged x, and sums in float32.
    """

    panel = 32
    stretch = 256

    def __init__(self, weights: Sequence[QuantizedWeight], bias: torch.Tensor | None) -> None:
        whole = joined(weights)
        self._weight: QuantizedWeight | None = whole
        self._bias = None if bias is None else bias.float()
        self._order = weights[0].order
        self._columns = sum(weight.shape[0] for weight in weights)
        self.num_bytes = sum(weight.nbytes for weight in weights)
        self._native = None if runs_triton(whole.codes) or whole.codes.is_cuda else native_library()
        if self._native is not None and (group := self._native_group(whole)) is not None:
            unit = self._native.loramux_coded_unit(CODINGS[whole.coding])
            self._pack(whole.regrouped(group) if group != whole.group else whole, unit)
            self._weight = None  # held as panels
        if self._weight is not None:
            self._values = table_of(self._weight)

    def _native_group(self, weight: QuantizedWeight) -> int | None:
        """Return the group in which the C++ operator reads `weight`; None if the operator cannot read the weight."""
        if weight.group >= weight.in_features or weight.group % self.stretch == 0:
            return weight.group
        group = math.gcd(weight.group, self.stretch)
        return group if group >= MIN_GROUP else None

    def _pack(self, weight: QuantizedWeight, unit: int) -> None:
        """Make panels `[panels, in_features / unit, panel, unit]` of codes, and scales `[groups, columns]`."""
        codes, columns = weight.codes, -(-self._columns // self.panel) * self.panel
        unit = 1 if is_nibbles(weight.coding) else unit  # two codes in a byte are one unit
        padded = functional.pad(codes, (0, -codes.shape[1] % unit, 0, columns - len(codes)))
        panels = padded.view(-1, self.panel, padded.shape[1] // unit, unit).transpose(1, 2)
        self._packed = zeros_in_large_pages(padded.numel(), torch.uint8).view(panels.shape).copy_(panels)
        self._scales = _by_groups(weight.scales, columns)
        self._offsets = None if weight.offsets is None else _by_groups(weight.offsets * weight.factors(), columns)
        self._values = torch.tensor(TABLES.get(weight.coding, (0.0,)))
        width, group = weight.in_features, weight.group
        group = group if group < width else -(-width // self.stretch) * self.stretch
        self._coding = CODINGS[weight.coding]
        self._abi = CodedWeightsAbi(
            *(None if t is None else t.data_ptr() for t in (self._packed, self._scales, self._offsets, self._values)),
            *(width, group, columns),
        )
        held = (self._packed, self._scales, self._offsets, self._order)
        self.num_bytes = sum(tensor.nbytes for tensor in held if tensor is not None)

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """Multiply; see LinearFormat."""
        if self._weight is not None:
            return self._multiply_dequantized(x) if not runs_triton(x) else self._multiply_on_gpu(x)
        assert self._native is not None, "packed for it"
        if native_for(x) is None:
            # The compiled operators do not serve x's dtype on this processor.
            return self(x.float()).to(x.dtype)
        if self._order is not None:
            x = x[:, self._order]
        x = x if x.stride(1) == 1 else x.contiguous()
        y = x.new_empty(x.shape[0], self._columns)
        self._native.loramux_coded_linear(
            *(DTYPES[x.dtype], self._coding),
            *(x.data_ptr(), x.stride(0), x.shape[0]),
            self._abi,
            None if self._bias is None else self._bias.data_ptr(),
            *(y.data_ptr(), self._columns, self._columns),
            torch.get_num_threads(),
        )
        return y

    def abi(self) -> LayerLinearAbi | None:
        """Return the codes; None if they are not in panels, or are in a different order than the inputs."""
        if self._weight is not None or self._order is not None:
            return None
        bias = None if self._bias is None else self._bias.data_ptr()
        address = ctypes.addressof(self._abi)
        return LayerLinearAbi(None, address, bias, None, 0, 0, self._coding, self._abi.width, self._columns)

    def _multiply_on_gpu(self, x: torch.Tensor) -> torch.Tensor:
        # Imported only here, because it needs triton.
        from loramux_kernels.cuda.coded_linear import coded_linear

        assert self._weight is not None, "not packed"
        if self._order is not None:
            x = x[:, self._order]
        return coded_linear(x if x.stride(1) == 1 else x.contiguous(), self._weight, self._values, self._bias)

    def _multiply_dequantized(self, x: torch.Tensor) -> torch.Tensor:
        """Multiply by the weight, dequantized for this call, in float32."""
        assert self._weight is not None, "not packed"
        y = functional.linear(x.float(), self._weight.dequantize(), self._bias)
        return y.to(x.dtype)


def _by_groups(values: torch.Tensor, columns: int) -> torch.Tensor:
    """Return `[columns, groups]` values as `[groups, columns]`, padded with zeros at the end."""
    return functional.pad(values.T, (0, columns - len(values))).contiguous()


Weight = torch.Tensor | QuantizedWeight
"""A linear's weight `[out_features, in_features]`, unchanged or quantized."""


class PackedLinear:
    """Several linears over one input, with their weights held once, in the fastest format of this machine."""

    def __init__(
        self,
        weights: Sequence[Weight],
        biases: Sequence[torch.Tensor | None],
        quantization: Quantization = "none",
        form: type[UnquantizedFormat] | None = None,
    ) -> None:
        """`quantization` and `form` are those of a Packing."""
        self.in_features = weights[0].shape[1]
        self.out_features = tuple(weight.shape[0] for weight in weights)
        self._quantization: Quantization = quantization
        held = [_quantized(weight, quantization) for weight in weights]
        self._formats = [_pack(held[first:last], biases[first:last], form) for first, last in _alike(held)]

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """Return `[T, sum(out_features)]` for `x` `[T, in_features]`: the members' outputs next to each other."""
        if len(self._formats) == 1:
            return self._formats[0](x)
        return torch.cat([multiply(x) for multiply in self._formats], dim=-1)

    def abi(self) -> LayerLinearAbi | None:
        """Return the weights in the form that `loramux_layers` reads, without a group; None if it cannot read them."""
        return self._formats[0].abi() if len(self._formats) == 1 else None

    @property
    def num_bytes(self) -> int:
        """Bytes of weights that a call reads."""
        return sum(held.num_bytes for held in self._formats)

    def as_multiplied(self, weight: Weight) -> torch.Tensor:
        """Return the matrix that is multiplied by instead of one of the members' weights."""
        return as_multiplied(weight, self._quantization)


def as_multiplied(weight: Weight, quantization: Quantization) -> torch.Tensor:
    """Return the matrix by which a packed linear of this `quantization` multiplies instead of `weight`."""
    held = _quantized(weight, quantization)
    return held.dequantize() if isinstance(held, QuantizedWeight) else held


def _quantized(weight: Weight, quantization: Quantization) -> Weight:
    if isinstance(weight, QuantizedWeight) or quantization == "none":
        return weight
    return quantize(weight, quantization)


def packed_linear_reference(
    x: torch.Tensor, weights: Sequence[torch.Tensor], biases: Sequence[torch.Tensor | None]
) -> torch.Tensor:
    """Compute a PackedLinear of `weights` and `biases` one linear after the other."""
    outputs = [functional.linear(x, weight, bias) for weight, bias in zip(weights, biases, strict=True)]
    return torch.cat(outputs, dim=-1)


def rows_linear(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    """Return `x @ weight.T + bias`, reading the weight `[out_features, in_features]` without packing it.

    `x` is `[..., in_features]`. `weight` has the dtype of `x`, or any if x is float32. The function is for a weight
    that is also read by other modules, such as an embedding that is also the head. On a CPU the result of a row does
    not depend on the other rows, as in torch.
    """
    native = None if runs_triton(x) or not weight.is_contiguous() else native_for(x)
    if native is None or native_for(weight) is None or x.dtype not in (weight.dtype, torch.float32):
        return functional.linear(x, weight.to(x.dtype), bias)
    rows = x.reshape(-1, x.shape[-1])
    rows = rows if rows.stride(1) == 1 else rows.contiguous()
    y = x.new_empty(len(rows), len(weight))
    native.loramux_rows_linear(
        *(DTYPES[x.dtype], DTYPES[weight.dtype]),
        *(rows.data_ptr(), rows.stride(0), *rows.shape),
        weight.data_ptr(),
        None if bias is None else bias.data_ptr(),
        *(y.data_ptr(), len(weight), len(weight)),
        *(1, 0, 0),
        torch.get_num_threads(),
    )
    return y.view(*x.shape[:-1], len(weight))


def heads_linear(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """Return `x[:, h] @ weight[h].T` for each head h: `[T, heads, out_features]`.

    `x` is `[T, heads, in_features]`, its last dimension contiguous, with any other strides. `weight` is `[heads,
    out_features, in_features]` and contiguous; it has the dtype of `x`, or any if x is float32. On a CPU the result of
    a row does not depend on the other rows.
    """
    native = None if runs_triton(x) else native_for(x)
    if native is None or native_for(weight) is None:
        return torch.bmm(x.transpose(0, 1), weight.to(x.dtype).transpose(1, 2)).transpose(0, 1)
    heads, columns, width = weight.shape
    y = x.new_empty(len(x), heads, columns)
    native.loramux_rows_linear(
        *(DTYPES[x.dtype], DTYPES[weight.dtype]),
        *(x.data_ptr(), x.stride(0), len(x), width),
        *(weight.data_ptr(), None),
        *(y.data_ptr(), y.stride(0), columns),
        *(heads, x.stride(1), y.stride(1)),
        torch.get_num_threads(),
    )
    return y


def rows_weight(weight: torch.Tensor) -> torch.Tensor:
    """Return `weight` in the form that `rows_linear` reads fastest: in half precision if the values stay exact."""
    is_read_here = weight.is_contiguous() and native_for(weight) is not None
    return narrowed([weight])[0] if is_read_here else weight


def join_biases(weights: Sequence[Weight], biases: Sequence[torch.Tensor | None]) -> torch.Tensor | None:
    """Return one bias `[sum(out_features)]`, zero for members without a bias; None if all members are without bias."""
    given = next((bias for bias in biases if bias is not None), None)
    if given is None:
        return None
    pairs = zip(weights, biases, strict=True)
    return torch.cat([given.new_zeros(weight.shape[0]) if bias is None else bias for weight, bias in pairs])


def _pack(
    weights: Sequence[Weight], biases: Sequence[torch.Tensor | None], form: type[UnquantizedFormat] | None
) -> LinearFormat:
    bias = join_biases(weights, biases)
    quantized = [weight for weight in weights if isinstance(weight, QuantizedWeight)]
    if quantized:
        return Coded(quantized, bias)
    plain = [weight for weight in weights if isinstance(weight, torch.Tensor)]
    chosen = form if form is not None and form.holds(plain[0]) else choose_format(plain[0])
    return chosen(plain, bias)


def _alike(weights: Sequence[Weight]) -> list[tuple[int, int]]:
    """Return the runs of neighbouring weights that one format can hold together, each as (first, last + 1)."""
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
