"""Quantized weights: codes of a few bits, and scales for groups of codes. This form covers all formats of checkpoints.

    w[o, order[k]] = scales[o, g] * (value(codes[o, k]) - offsets[o, g])        g = k // group

`value` depends on the coding: the integer itself, an entry of a table of sixteen numbers (bitsandbytes' NF4 and FP4,
E2M1 of MXFP4 and NVFP4), or a float of eight bits. GPTQ, AWQ, compressed-tensors and bitsandbytes differ only in the
storage of these values; `loramux.engine.execution.quantized_checkpoint` reads them. Sources: NF4 and the double
quantization of its scales are from QLoRA (Dettmers et al., 2023), E4M3 from FP8 formats for deep learning (Micikevicius
et al., 2022), MXFP4 from the OCP Microscaling Formats (MX) specification 1.0 (2023).
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Literal

import torch
from torch.nn import functional

Coding = Literal["int8", "int4", "nf4", "fp4", "mxfp4", "nvfp4", "fp8"]
"""Meaning of a code. int8: signed byte. int4: code - 8. nf4, fp4, mxfp4, nvfp4: entry of TABLES. fp8: E4M3 without
infinities."""

Quantization = Literal["none", "int8", "nf4", "nf4-double"]
"""Method by which weights that a checkpoint holds unquantized are quantized when they are loaded."""

E2M1 = tuple(sign * value for sign in (1, -1) for value in (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0))
"""Floats of a sign, two bits of exponent and one of mantissa, by their codes."""

TABLES: dict[str, tuple[float, ...]] = {
    # Quantiles of the normal distribution, scaled to [-1, 1], with an exact zero (QLoRA, appendix E).
    "nf4": (
        *(-1.0, -0.6961928009986877, -0.5250730514526367, -0.39491748809814453, -0.28444138169288635),
        *(-0.18477343022823334, -0.09105003625154495, 0.0, 0.07958029955625534, 0.16093020141124725),
        *(0.24611230194568634, 0.33791524171829224, 0.44070982933044434, 0.5626170039176941, 0.7229568362236023, 1.0),
    ),
    # bitsandbytes' float of four bits: sign, two bits of exponent, one of mantissa; divided by its largest number, 12.
    "fp4": tuple(sign * value / 12 for sign in (1, -1) for value in (0.0, 0.0625, 8.0, 12.0, 4.0, 6.0, 2.0, 3.0)),
    "mxfp4": E2M1,
    "nvfp4": E2M1,
}
"""Values of the sixteen codes."""

EXPONENT_SCALES = frozenset(("mxfp4",))
"""Codings whose scales are powers of two, held as their exponents (E8M0): a byte s stands for 2^(s - 127); 255, which
stands for NaN, is never held."""

BLOCK = 64
"""Neighbours that share a scale in nf4; blocks continue over the end of a row."""

MIN_GROUP = 8
"""Shortest group that is multiplied as codes: with a scale for fewer neighbours, the weight would be no smaller than in
half precision."""

NESTED_BLOCK = 256
"""Scales that share a scale in double quantization."""


@dataclass(frozen=True, slots=True)
class QuantizedWeight:
    """A weight `[out_features, in_features]` as codes; the module explains the form. To move it between devices, move
    its tensors.
    """

    coding: Coding
    codes: torch.Tensor
    """uint8`[out_features, in_features]`; codes of four bits take half as many bytes, rounded up, the lower bits
    first."""
    scales: torch.Tensor
    """float32`[out_features, groups]`; uint8 if the coding has EXPONENT_SCALES."""
    group: int
    """Elements that share a scale; the last group of a row may be shorter."""
    in_features: int
    offsets: torch.Tensor | None = None
    """float32`[out_features, groups]`; None: zeros."""
    order: torch.Tensor | None = None
    """int64`[in_features]`: the input that each column of the codes multiplies; None: the same order."""

    @property
    def shape(self) -> tuple[int, int]:
        """`(out_features, in_features)`"""
        return len(self.codes), self.in_features

    @property
    def nbytes(self) -> int:
        """Bytes of all tensors."""
        held = (self.codes, self.scales, self.offsets, self.order)
        return sum(tensor.nbytes for tensor in held if tensor is not None)

    def with_tensors(self, tensors: Mapping[str, torch.Tensor]) -> QuantizedWeight:
        """Return the same weight with other `tensors`, by name, such as copies on another device."""
        return replace(
            self,
            codes=tensors["codes"],
            scales=tensors["scales"],
            offsets=tensors.get("offsets"),
            order=tensors.get("order"),
        )

    def dequantize(self) -> torch.Tensor:
        """Return the weight in float32, by its definition, which is the reference of every kernel."""
        values = self.values()
        group = torch.arange(self.in_features, device=values.device) // self.group
        if self.offsets is not None:
            values = values - self.offsets[:, group]
        values = values * self.factors()[:, group]
        if self.order is None:
            return values
        return torch.empty_like(values).index_copy_(1, self.order, values)

    def factors(self) -> torch.Tensor:
        """Return the scales as float32`[out_features, groups]`."""
        is_exponent = self.coding in EXPONENT_SCALES
        return self.scales.view(torch.float8_e8m0fnu).float() if is_exponent else self.scales

    def values(self) -> torch.Tensor:
        """Return the values of the codes: float32`[out_features, in_features]`."""
        if self.coding == "int8":
            return self.codes.view(torch.int8).float()
        if self.coding == "fp8":
            return self.codes.view(torch.float8_e4m3fn).float()
        codes = unpack_nibbles(self.codes, self.in_features)
        if self.coding == "int4":
            return codes.float() - 8
        return torch.tensor(TABLES[self.coding], device=codes.device)[codes.long()]

    def taken(self, outputs: Sequence[range] | None, inputs: Sequence[range] | None) -> QuantizedWeight:
        """Return the rows `outputs` and the columns `inputs` (None: all), with exactly the same values.

        Raises ValueError if the columns would leave fewer than MIN_GROUP neighbours to a scale.
        """
        weight = self if outputs is None else self._rows(outputs)
        return weight if inputs is None else weight._columns(inputs)

    def _rows(self, rows: Sequence[range]) -> QuantizedWeight:
        def take(tensor: torch.Tensor) -> torch.Tensor:
            return torch.cat([tensor[part.start : part.stop] for part in rows])

        offsets = None if self.offsets is None else take(self.offsets)
        return replace(self, codes=take(self.codes), scales=take(self.scales), offsets=offsets)

    def _columns(self, columns: Sequence[range]) -> QuantizedWeight:
        if self.order is not None:
            raise ValueError(f"its groups of {self.group} inputs are not neighbours (desc_act)")
        group, width = self.group, sum(map(len, columns))
        edges = [edge for part in columns for edge in (part.start, part.stop) if edge < self.in_features]
        if group < self.in_features:
            group = math.gcd(group, *edges)
        if group < min(self.group, MIN_GROUP):
            raise ValueError(f"groups of {self.group} inputs would be cut to {group}, fewer than {MIN_GROUP}")
        whole = self.regrouped(group) if group < self.group else self

        def take(tensor: torch.Tensor, of: int) -> torch.Tensor:
            return torch.cat([tensor[:, part.start // of : -(-part.stop // of)] for part in columns], dim=1)

        if self.group >= self.in_features:  # one scale per row, which applies to every part of the row
            scales, offsets, group = self.scales, self.offsets, width
        else:
            scales = take(whole.scales, group)
            offsets = None if whole.offsets is None else take(whole.offsets, group)
        if is_nibbles(self.coding):
            codes = pack_nibbles(take(unpack_nibbles(self.codes, self.in_features), 1))
        else:
            codes = take(self.codes, 1)
        return replace(self, codes=codes, scales=scales, offsets=offsets, group=group, in_features=width)

    def regrouped(self, group: int) -> QuantizedWeight:
        """Return the same weight with groups of `group`, a divisor of the present group."""
        times = self.group // group
        assert self.group == times * group, f"{group} does not divide {self.group}"
        groups = -(-self.in_features // group)
        offsets = None if self.offsets is None else self.offsets.repeat_interleave(times, 1)[:, :groups]
        return replace(self, scales=self.scales.repeat_interleave(times, 1)[:, :groups], offsets=offsets, group=group)


def joined(weights: Sequence[QuantizedWeight]) -> QuantizedWeight:
    """Return weights of the same form as one weight, their outputs one after the other."""
    if len(weights) == 1:
        return weights[0]
    offsets = [weight.offsets for weight in weights if weight.offsets is not None]
    return replace(
        weights[0],
        codes=torch.cat([weight.codes for weight in weights]),
        scales=torch.cat([weight.scales for weight in weights]),
        offsets=torch.cat(offsets) if offsets else None,
    )


def table_of(weight: QuantizedWeight) -> torch.Tensor:
    """Return the values of the codes, float32`[16]`, on their device; a zero if the coding has no table."""
    return torch.tensor(TABLES.get(weight.coding, (0.0,)), device=weight.codes.device)


def is_nibbles(coding: Coding) -> bool:
    """Return whether a byte holds two codes of `coding`."""
    return coding in ("int4", *TABLES)


def pack_nibbles(codes: torch.Tensor) -> torch.Tensor:
    """Pack uint8`[n, m]` codes of four bits, two into a byte, the first into the lower bits; 8 pads an odd number."""
    pairs = functional.pad(codes, (0, codes.shape[1] % 2), value=8).view(len(codes), -1, 2)
    return pairs[..., 0] | pairs[..., 1] << 4


def unpack_nibbles(packed: torch.Tensor, width: int) -> torch.Tensor:
    """Return the codes that `pack_nibbles` packed: uint8`[n, width]`."""
    return torch.stack((packed & 15, packed >> 4), dim=-1).flatten(1)[:, :width]


def quantize(weight: torch.Tensor, quantization: Quantization) -> QuantizedWeight:
    """Quantize `weight` `[out_features, in_features]` by `quantization`, which must not be none."""
    if quantization == "int8":
        return _to_int8(weight)
    return to_nf4(weight, is_double=quantization == "nf4-double")


def _to_int8(weight: torch.Tensor) -> QuantizedWeight:
    """Quantize to integers with one scale for each output: scale = max |w| / 127, rounded to nearest.

    An element is off by at most half its row's scale.
    """
    values = weight.float()
    scales = values.abs().amax(dim=1, keepdim=True) / 127
    # The scale of a row of zeros is 0, and must not divide.
    steps = values / scales.clamp(min=torch.finfo(torch.float32).tiny)
    codes = steps.round().clamp(-127, 127).to(torch.int8).view(torch.uint8)
    return QuantizedWeight("int8", codes, scales, weight.shape[1], weight.shape[1])


def to_nf4(weight: torch.Tensor, is_double: bool) -> QuantizedWeight:
    """Quantize as bitsandbytes does for QLoRA: the nearest entry of TABLES, times the largest of 64 neighbours.

    With `is_double`, the scales are quantized too (`bnb_4bit_use_double_quant`).
    """
    values = functional.pad(weight.float().flatten(), (0, -weight.numel() % BLOCK)).view(-1, BLOCK)
    largest = values.abs().amax(1)
    steps = values / largest.clamp(min=torch.finfo(torch.float32).tiny)[:, None]
    codes = _nearest(steps, torch.tensor(TABLES["nf4"], device=weight.device))
    if is_double:
        largest = _quantized_twice(largest)
    rows = codes.flatten()[: weight.numel()].view(weight.shape).to(torch.uint8)
    return blocks_of_rows("nf4", pack_nibbles(rows), largest, BLOCK, weight.shape[1])


def blocks_of_rows(
    coding: Coding, codes: torch.Tensor, scales: torch.Tensor, block: int, in_features: int
) -> QuantizedWeight:
    """Return the weight whose `scales` `[blocks]` cover `block` neighbours each, counted over the ends of rows.

    `codes` are in rows already.
    """
    group = block if in_features % block == 0 else _largest_divisor(in_features, block)
    starts = torch.arange(0, len(codes) * in_features, group, device=codes.device)
    return QuantizedWeight(coding, codes, scales[starts // block].view(len(codes), -1), group, in_features)


def _largest_divisor(width: int, block: int) -> int:
    """Return the longest run that never crosses the end of a row of `width` or of a block."""
    # Euclid's algorithm: the run is the greatest common divisor.
    while width % block:
        width, block = block, width % block
    return block


def _nearest(values: torch.Tensor, table: torch.Tensor) -> torch.Tensor:
    """Return the indices of the entries of `table`, in rising order, that are nearest to `values`."""
    return torch.bucketize(values, (table[1:] + table[:-1]) / 2)


def _quantized_twice(scales: torch.Tensor) -> torch.Tensor:
    """Return `scales` `[n]` after quantization to eight bits: their mean, and the differences of 256 neighbours from
    it."""
    mean = scales.mean()
    padded = functional.pad(scales - mean, (0, -len(scales) % NESTED_BLOCK)).view(-1, NESTED_BLOCK)
    largest = padded.abs().amax(1, keepdim=True)
    table = dynamic_map().to(scales.device)
    steps = padded / largest.clamp(min=torch.finfo(torch.float32).tiny)
    return (table[_nearest(steps, table)] * largest).flatten()[: len(scales)] + mean


def dynamic_map() -> torch.Tensor:
    """Return bitsandbytes' 256 numbers of eight bits as float32, with more of them near zero (Dettmers, 2015)."""
    values = [0.0, 1.0]
    for exponent in range(7):
        edges = torch.linspace(0.1, 1, 2**exponent + 1)
        middles = ((edges[:-1] + edges[1:]) / 2 * 10.0 ** (exponent - 6)).tolist()
        values += [*middles, *(-value for value in middles)]
    return torch.tensor(sorted(values))
