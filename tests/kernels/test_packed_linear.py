"""PackedLinear against float64, in each of the forms that it may hold its weights in."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from loramux_kernels import PackedLinear, packed_linear, packed_linear_reference
from loramux_kernels.native import multiplies_bf16_pairs

TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 1e-2, torch.float16: 2e-3}
FORMS = ("_Panels", "_OneDnn", "_Plain")


def weights_of(dtype: torch.dtype, in_features: int, out_features: tuple[int, ...], with_bias: bool):
    weights = [(torch.randn(out, in_features) * in_features**-0.5).to(dtype) for out in out_features]
    biases = [torch.randn(out).to(dtype) if with_bias and i != 1 else None for i, out in enumerate(out_features)]
    return weights, biases


def check(linear: PackedLinear, x: torch.Tensor, weights, biases):
    columns = [
        x.double() @ w.double().T + (0 if b is None else b.double()) for w, b in zip(weights, biases, strict=True)
    ]
    expected = torch.cat(columns, -1)
    tolerance = TOLERANCE[x.dtype]
    for y in (linear(x), packed_linear_reference(x, weights, biases)):
        assert y.dtype == x.dtype
        torch.testing.assert_close(y.double(), expected, rtol=tolerance, atol=tolerance)


@pytest.mark.usefixtures("native")
@settings(max_examples=60, deadline=None)
@given(
    dtype=st.sampled_from(list(TOLERANCE)),
    rows=st.integers(0, 70),
    in_features=st.integers(1, 150),
    out_features=st.lists(st.integers(1, 130), min_size=1, max_size=3).map(tuple),
    with_bias=st.booleans(),
)
def test_ragged(dtype, rows, in_features, out_features, with_bias):
    weights, biases = weights_of(dtype, in_features, out_features, with_bias)
    linear = PackedLinear(weights, biases)
    assert (linear.in_features, linear.out_features) == (in_features, out_features)
    check(linear, torch.randn(rows, in_features).to(dtype), weights, biases)


@pytest.mark.usefixtures("native")
@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_every_form(dtype, form, monkeypatch):
    if form == "_OneDnn" and dtype != torch.bfloat16:
        pytest.skip("packed by oneDNN only in bfloat16")
    if form == "_Panels" and dtype == torch.bfloat16 and not multiplies_bf16_pairs():
        pytest.skip("panels of bf16 need a processor that multiplies pairs")
    monkeypatch.setattr(packed_linear, "_fastest", lambda _: getattr(packed_linear, form))
    weights, biases = weights_of(dtype, 64, (96, 32), with_bias=True)
    check(PackedLinear(weights, biases), torch.randn(17, 64).to(dtype), weights, biases)


@pytest.mark.usefixtures("native")
def test_rows_with_a_stride():
    weights, biases = weights_of(torch.bfloat16, 64, (32,), with_bias=False)
    linear = PackedLinear(weights, biases)
    wide = torch.full((5, 100), float("nan"), dtype=torch.bfloat16)
    wide[:, 7:71] = torch.randn(5, 64)
    assert torch.equal(linear(wide[:, 7:71]), linear(wide[:, 7:71].contiguous()))


@pytest.mark.usefixtures("native")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("threads", [1, 3])
def test_a_row_does_not_depend_on_its_neighbours(dtype, threads):
    """Bit for bit: decoding alone, decoding in company, and prefill."""
    if packed_linear._fastest([torch.zeros(2, 2, dtype=dtype)]) is not packed_linear._Panels:
        pytest.skip("this processor's bf16 linears are oneDNN's")
    torch.set_num_threads(threads)
    weights, biases = weights_of(dtype, 300, (200, 72), with_bias=True)
    linear = PackedLinear(weights, biases)
    x = torch.randn(100, 300).to(dtype)
    whole = linear(x)
    for start, stop in [(0, 1), (5, 7), (3, 9), (10, 22), (1, 14), (40, 73)]:
        assert torch.equal(linear(x[start:stop]), whole[start:stop])
