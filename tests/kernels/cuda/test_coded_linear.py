"""coded_linear as a Triton kernel, against the dequantized weight in float64."""

from __future__ import annotations

import pytest
import torch

from loramux_kernels.cuda.coded_linear import FEW_ROWS, grouped_coded_linear
from loramux_kernels.mixture import grouped_linear_reference
from loramux_kernels.packed_linear import PackedLinear
from loramux_kernels.quantized_weight import (
    EXPONENT_SCALES,
    QuantizedWeight,
    is_nibbles,
    joined,
    pack_nibbles,
    table_of,
)

TOLERANCE = {torch.float32: 1e-5, torch.float16: 3e-3}


@pytest.mark.parametrize("dtype", list(TOLERANCE))
@pytest.mark.parametrize("coding", ["int8", "int4", "nf4", "fp4", "mxfp4", "nvfp4", "fp8"])
def test_coded_linear_of_ragged_shapes_equals_the_dequantized_weight(device, coding: str, dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    for rows, width, out_features, group, has_offsets, is_ordered in (
        (1, 64, (40,), 32, True, False),
        (17, 150, (24, 33), 150, False, True),
        (40, 96, (70,), 16, True, True),
        (3, 200, (40,), 64, True, False),
    ):
        order = torch.randperm(width, device=device) if is_ordered else None
        weights = [
            random_weight(coding, out, width, group, has_offsets, order, torch.device(device)) for out in out_features
        ]
        bias = torch.randn(out_features[0], device=device, dtype=dtype)
        linear = PackedLinear(weights, [bias, *[None] * (len(weights) - 1)])
        x = torch.randn(rows, width, device=device).to(dtype)
        wanted = torch.cat([x.double() @ weight.dequantize().double().T for weight in weights], -1)
        wanted[:, : len(bias)] += bias
        y = linear(x)
        assert y.dtype == dtype
        torch.testing.assert_close(y.double(), wanted, rtol=TOLERANCE[dtype], atol=TOLERANCE[dtype])


@pytest.mark.parametrize("dtype", list(TOLERANCE))
@pytest.mark.parametrize("coding", ["int8", "nf4", "mxfp4"])
@pytest.mark.parametrize("tokens", [5, 120], ids=["few rows", "many rows"])
def test_grouped_coded_linear_equals_the_dequantized_weights(device, coding, dtype, tokens: int) -> None:
    """Ragged widths, an expert without a row, and rows that only pad, with biases and without."""
    torch.manual_seed(0)
    width, columns, counts = 150, 70, (tokens - tokens // 3, 0, tokens // 3 - 1)
    starts = torch.tensor((0, *counts), device=device).cumsum(0)
    live = int(starts[-1])
    assert (tokens <= FEW_ROWS * len(counts)) is (tokens == 5)
    group, place = 150 if coding == "int8" else 50, torch.device(device)
    weights = [random_weight(coding, columns, width, group, coding == "nf4", None, place) for _ in counts]
    x = torch.randn(tokens, width, device=device).to(dtype)
    x[live:] = float("nan")
    whole = joined(weights)
    exact = whole.dequantize().unflatten(0, (len(counts), columns))
    for bias in (None, torch.randn(len(counts), columns, device=device).to(dtype)):
        y = grouped_coded_linear(x, whole, table_of(whole), bias, starts)
        own = None if bias is None else bias.double()
        wanted = grouped_linear_reference(x.double(), exact.double(), own, starts)
        assert y.dtype == dtype
        torch.testing.assert_close(y[:live].double(), wanted[:live], rtol=TOLERANCE[dtype], atol=TOLERANCE[dtype])


def test_mxfp4_every_byte_is_multiplied_exactly_with_the_least_and_the_largest_scales(device) -> None:
    scales = torch.tensor([0, 1, 2, 3, 126, 127, 128, 251, 252], device=device)
    codes = torch.arange(256, device=device).to(torch.uint8).repeat(len(scales), 1)
    weight = QuantizedWeight("mxfp4", codes, scales.to(torch.uint8)[:, None].repeat(1, 16), 32, 512)
    linear = PackedLinear([weight], [None])
    assert torch.equal(linear(torch.eye(512, device=device)), weight.dequantize().T)


def random_weight(coding, out, width, group, has_offsets, order, device) -> QuantizedWeight:
    is_four_bits = is_nibbles(coding)
    codes = torch.randint(0, 16 if is_four_bits else 256, (out, width), device=device)
    if coding == "fp8":
        codes[codes & 127 == 127] = 3  # not finite
    codes = codes.to(torch.uint8)
    largest = {"int8": 128, "int4": 8, "fp8": 448}.get(coding, 1) * width**0.5
    scales = (torch.rand(out, -(-width // group), device=device) + 0.5) / largest
    if coding in EXPONENT_SCALES:
        scales = torch.randint(119, 123, scales.shape, device=device).to(torch.uint8)
    offsets = torch.randint(-3, 3, scales.shape, device=device).float() if has_offsets else None
    return QuantizedWeight(coding, pack_nibbles(codes) if is_four_bits else codes, scales, group, width, offsets, order)
