"""PackedLinear against float64, in each of the forms that it may hold its weights in."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.nn import functional

from loramux_kernels import packed_linear
from loramux_kernels.native.loader import native_for
from loramux_kernels.packed_linear import (
    FORMATS,
    Coded,
    PackedLinear,
    Panels,
    Tiles,
    heads_linear,
    packed_linear_reference,
    rows_linear,
    rows_weight,
)
from loramux_kernels.quantized_weight import (
    EXPONENT_SCALES,
    QuantizedWeight,
    is_nibbles,
    pack_nibbles,
    quantize,
    unpack_nibbles,
)

TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 1e-2, torch.float16: 2e-3}


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
def test_packed_linear_of_ragged_shapes_equals_the_reference(dtype, rows, in_features, out_features, with_bias):
    weights, biases = weights_of(dtype, in_features, out_features, with_bias)
    linear = PackedLinear(weights, biases)
    assert (linear.in_features, linear.out_features) == (in_features, out_features)
    check(linear, torch.randn(rows, in_features).to(dtype), weights, biases)


@pytest.mark.usefixtures("native")
@pytest.mark.parametrize("form", FORMATS.values())
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_packed_linear_every_form_equals_the_reference(dtype, form):
    if not form.holds(torch.empty(4, 4, dtype=dtype)):
        pytest.skip("panels of bf16 need a processor that multiplies pairs; oneDNN packs bf16 alone, with AVX-512")
    weights, biases = weights_of(dtype, 64, (96, 32), with_bias=True)
    linear = PackedLinear(weights, biases, form=form)
    assert type(linear._formats[0]) is form
    check(linear, torch.randn(17, 64).to(dtype), weights, biases)


@pytest.mark.usefixtures("native")
def test_packed_linear_takes_rows_with_a_stride():
    weights, biases = weights_of(torch.bfloat16, 64, (32,), with_bias=False)
    linear = PackedLinear(weights, biases)
    wide = torch.full((5, 100), float("nan"), dtype=torch.bfloat16)
    wide[:, 7:71] = torch.randn(5, 64)
    assert torch.equal(linear(wide[:, 7:71]), linear(wide[:, 7:71].contiguous()))


@pytest.mark.usefixtures("native")
@pytest.mark.parametrize(
    ("form", "dtype"), [(Panels, torch.float32), (Panels, torch.bfloat16), (Tiles, torch.bfloat16)]
)
@pytest.mark.parametrize("threads", [1, 3])
def test_packed_linear_row_is_independent_of_its_neighbours(form, dtype, threads):
    """Bit for bit: decoding alone, decoding in company, and prefill."""
    width = 320 if form is Tiles else 300
    if not form.holds(torch.zeros(4, width, dtype=dtype)):
        pytest.skip("this processor multiplies no pairs, or no tiles, of bf16")
    torch.set_num_threads(threads)
    weights, biases = weights_of(dtype, width, (200, 72), with_bias=True)
    linear = PackedLinear(weights, biases, form=form)
    x = torch.randn(100, width).to(dtype)
    whole = linear(x)
    for rows in range(1, 60):  # blocks of every height, alone and in stretches
        start = rows % 40
        assert torch.equal(linear(x[start : start + rows]), whole[start : start + rows])


def sums_of_tiles(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """Return `x @ weight.T` by Intel's pseudo-code of TDPBF16PS: in 32 inputs, even and odd ones are summed apart.

    A product of two bf16 is exact in float32, so a sum that is rounded once is a product and a sum here.
    """
    x, weight = x.float(), weight.float()
    sums = torch.zeros(len(x), len(weight))
    for first in range(0, x.shape[1], 32):
        even, odd = torch.zeros_like(sums), torch.zeros_like(sums)
        for k in range(first, first + 32, 2):
            even += x[:, k, None] * weight[None, :, k]
            odd += x[:, k + 1, None] * weight[None, :, k + 1]
        sums += even + odd
    return sums


@pytest.mark.usefixtures("native")
@pytest.mark.parametrize("rows", [1, 2, 15, 16, 17, 33, 34, 100, 257])
def test_tiles_sum_to_the_bit_as_the_processors_manual_says(rows):
    weight, x = (torch.randn(70, 160) / 16).bfloat16(), torch.randn(rows, 160).bfloat16()
    if not Tiles.holds(weight):
        pytest.skip("this processor multiplies no tiles")
    assert torch.equal(Tiles([weight], None)(x), sums_of_tiles(x, weight).bfloat16())


@pytest.mark.usefixtures("native")
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("columns", [256, 200, 9])
def test_weights_that_half_precision_holds_take_half_the_bytes_and_give_the_same_result(columns, dtype):
    if native_for(torch.zeros(1, dtype=dtype)) is None:
        pytest.skip("no instructions for float16")
    held = torch.randn(columns, 300).to(dtype).float()
    needs_float32 = torch.full((32, 300), 0.1)
    narrow, wide = PackedLinear([held], [None]), PackedLinear([held, needs_float32], [None, None])
    assert narrow.num_bytes == 2 * 300 * -(-columns // 32) * 32
    assert wide.num_bytes == 4 * 300 * -(-(columns + 32) // 32) * 32
    x = torch.randn(100, 300)
    whole = wide(x)[:, :columns]
    for rows in range(1, 60):
        start = rows % 40
        assert torch.equal(narrow(x[start : start + rows]), whole[start : start + rows])


@pytest.mark.usefixtures("native")
@pytest.mark.parametrize("value", [float("nan"), float("inf"), -0.0, 1e-40])
def test_unusual_weights_stay_what_they_are(value):
    weight = torch.randn(40, 64).bfloat16().float()
    weight[3, 5] = value
    x = torch.eye(64)
    torch.testing.assert_close(
        PackedLinear([weight], [None])(x), functional.linear(x, weight), rtol=0, atol=0, equal_nan=True
    )


ROUNDING = {torch.float32: 1e-5, torch.bfloat16: 2**-8, torch.float16: 2**-10}


def coded(
    coding: str, out_features: int, in_features: int, group: int, has_offsets: bool, order=None
) -> QuantizedWeight:
    """A weight of random codes."""
    codes = torch.randint(0, 16 if is_nibbles(coding) else 256, (out_features, in_features))
    if coding == "fp8":
        codes[codes & 127 == 127] = 3  # not finite
    codes = codes.to(torch.uint8)
    groups = -(-in_features // group)
    scales = torch.rand(out_features, groups) * 0.05
    if coding in EXPONENT_SCALES:
        scales = torch.randint(117, 124, scales.shape).to(torch.uint8)
    offsets = torch.randint(-5, 5, scales.shape).float() if has_offsets else None
    held = pack_nibbles(codes) if is_nibbles(coding) else codes
    return QuantizedWeight(coding, held, scales, group, in_features, offsets, order)


@pytest.mark.usefixtures("native")
@settings(max_examples=150, deadline=None)
@given(
    coding=st.sampled_from(["int8", "int4", "nf4", "fp4", "mxfp4", "nvfp4", "fp8"]),
    dtype=st.sampled_from(list(ROUNDING)),
    rows=st.integers(0, 40),
    in_features=st.integers(1, 700),
    out_features=st.lists(st.integers(1, 130), min_size=1, max_size=3).map(tuple),
    group=st.sampled_from([1, 8, 32, 48, 128, 256, 512, 700]),
    has_offsets=st.booleans(),
    with_bias=st.booleans(),
    is_ordered=st.booleans(),
    is_native=st.booleans(),
)
def test_coded_linear_equals_its_dequantized_weight(
    coding, dtype, rows, in_features, out_features, group, has_offsets, with_bias, is_ordered, is_native
):
    order = torch.randperm(in_features) if is_ordered else None
    weights = [coded(coding, out, in_features, group, has_offsets, order) for out in out_features]
    biases = [torch.randn(out).to(dtype) if with_bias and i != 1 else None for i, out in enumerate(out_features)]
    with pytest.MonkeyPatch.context() as patch:
        if not is_native:
            patch.setattr(packed_linear, "native_library", lambda: None)
        linear = PackedLinear(weights, biases)
    x = (torch.randn(rows, in_features) * torch.logspace(-2, 2, in_features)).to(dtype)
    multiplied = [linear.as_multiplied(weight).double() for weight in weights]
    wanted = packed_linear_reference(x.double(), multiplied, [None if b is None else b.double() for b in biases])
    y = linear(x)
    assert y.dtype == dtype
    # The activation has 16 bits of its largest element if codes are integers; offsets cancel in float32.
    step = x.double().abs().amax(-1, keepdim=True) / 32767 if rows else 0.0
    sizes = torch.cat([multiplied_by_parts(weight) for weight in weights])
    off = 1.01 * step / 2 * sizes.sum(-1) + 1e-5 * (x.double().abs() @ sizes.T)
    assert ((y.double() - wanted).abs() <= off + ROUNDING[dtype] * wanted.abs() + 1e-5).all()


def multiplied_by_parts(weight: QuantizedWeight) -> torch.Tensor:
    """The sizes of what is added up: values and offsets, times scales."""
    group = torch.arange(weight.in_features) // weight.group
    offsets = 0 if weight.offsets is None else weight.offsets[:, group].abs()
    sizes = ((weight.values().abs() + offsets) * weight.factors()[:, group]).double()
    return sizes if weight.order is None else torch.empty_like(sizes).index_copy_(1, weight.order, sizes)


@settings(max_examples=80, deadline=None)
@given(
    coding=st.sampled_from(["int8", "int4", "nf4", "fp4", "mxfp4", "nvfp4", "fp8"]),
    in_features=st.sampled_from([64, 96, 104, 200]),
    group=st.sampled_from([8, 16, 24, 32, 64, 500]),
    unit=st.sampled_from([8, 16, 24, 32]),
    has_offsets=st.booleans(),
    data=st.data(),
)
def test_share_of_a_coded_weight_has_the_same_values(coding, in_features, group, unit, has_offsets, data):
    """Shares of rows in any pieces, and of columns in pieces of `unit`, by which groups are cut."""
    weight = coded(coding, 21, in_features, group, has_offsets)
    units = data.draw(st.sets(st.integers(0, -(-in_features // unit) - 1), min_size=1))
    columns = [range(unit * u, min(unit * u + unit, in_features)) for u in sorted(units)]
    rows = [range(0, 3), range(7, 8), range(15, 21)]
    share = weight.taken(rows, columns)
    wanted = weight.dequantize()[[i for part in rows for i in part]][:, [i for part in columns for i in part]]
    assert torch.equal(share.dequantize(), wanted)


def test_share_that_would_cut_groups_into_crumbs_is_refused():
    weight = coded("int4", 8, 64, 32, True)
    with pytest.raises(ValueError, match="groups of 32 inputs would be cut to 4, fewer than 8"):
        weight.taken(None, [range(0, 20)])


def every_mxfp4() -> tuple[QuantizedWeight, torch.Tensor]:
    """A weight with a row for each scale and all bytes in each row, and its values by the definition, in float32."""
    codes, scales = torch.arange(256).to(torch.uint8).repeat(255, 1), torch.arange(255)[:, None].expand(255, 16)
    sizes = torch.tensor([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0], dtype=torch.float64)
    numbers = torch.arange(256)
    pairs = torch.stack((numbers & 15, numbers >> 4), 1).flatten()
    values = torch.where(pairs < 8, 1.0, -1.0).double() * sizes[pairs % 8]
    wanted = (values * 2.0 ** (torch.arange(255).double()[:, None] - 127)).float()
    return QuantizedWeight("mxfp4", codes, scales.to(torch.uint8), 32, 512), wanted


def test_mxfp4_every_byte_with_every_scale_is_the_number_of_its_definition():
    """To the bit: signed zeros, numbers without an exponent (scales 0 and 1), those beyond float32 (from 253 on)."""
    weight, wanted = every_mxfp4()
    assert torch.equal(weight.dequantize().view(torch.int32), wanted.view(torch.int32))
    assert wanted[0, 2].item() == 2.0**-128
    exact = weight.taken([range(253)], None).dequantize()
    assert torch.equal(exact.bfloat16().float(), exact)


@pytest.mark.usefixtures("native")
def test_mxfp4_every_byte_with_every_scale_is_multiplied_as_the_number_of_its_definition():
    weight, wanted = every_mxfp4()
    linear = PackedLinear([weight], [None])
    assert linear.num_bytes == 256 * (256 + 16), "columns are padded to whole panels; a scale takes a byte"
    torch.testing.assert_close(linear(torch.eye(512)), wanted.T, rtol=1e-6, atol=2.0**-148)


def test_coded_linear_holds_no_more_than_codes_and_scales():
    weight = torch.randn(256, 1024)
    assert PackedLinear([weight], [None], "int8").num_bytes <= 0.26 * weight.nbytes
    assert PackedLinear([weight], [None], "nf4").num_bytes <= 0.141 * weight.nbytes  # 4 bits, and 32 for 64 weights


def test_members_of_different_forms_are_multiplied_side_by_side():
    plain, codes = torch.randn(40, 64), quantize(torch.randn(24, 64), "int8")
    biases = [None, torch.randn(24), None]
    linear = PackedLinear([plain, codes, plain], biases)
    x = torch.randn(5, 64)
    wanted = packed_linear_reference(x, [plain, codes.dequantize(), plain], biases)
    torch.testing.assert_close(linear(x), wanted, rtol=1e-3, atol=1e-3)
    assert linear.out_features == (40, 24, 40)


def test_nibbles_come_back():
    codes = torch.randint(0, 16, (7, 33)).to(torch.uint8)
    assert torch.equal(unpack_nibbles(pack_nibbles(codes), 33), codes)


def test_int8_weights_are_off_by_half_a_step_of_their_row_at_most():
    weight = torch.randn(64, 300) * torch.logspace(-4, 4, 64)[:, None]
    weight[3] = 0
    steps = weight.abs().amax(1, keepdim=True) / 127
    assert ((quantize(weight, "int8").dequantize() - weight).abs() <= 0.501 * steps).all()


@pytest.mark.usefixtures("native")
@pytest.mark.parametrize("coding", ["int8", "int4", "nf4", "mxfp4", "nvfp4", "fp8"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_coded_row_is_independent_of_its_neighbours_and_keeps_what_is_not_finite(dtype, coding):
    linear = PackedLinear([coded(coding, out, 300, 32, True) for out in (200, 72)], [None, None])
    assert isinstance(linear._formats[0], Coded)
    x = torch.randn(100, 300).to(dtype)
    x[50, 7], x[51, 299] = float("nan"), float("inf")
    whole = linear(x)
    assert whole[50].isnan().all()
    assert not whole[51].isfinite().any()
    assert whole[:50].isfinite().all()
    for start, stop in [(0, 1), (5, 7), (3, 9), (10, 22), (1, 14), (52, 73)]:
        assert torch.equal(linear(x[start:stop]), whole[start:stop])


@pytest.mark.usefixtures("native")
@settings(max_examples=60, deadline=None)
@given(
    dtype=st.sampled_from(list(TOLERANCE)),
    rows=st.integers(0, 40),
    in_features=st.integers(1, 150),
    out_features=st.integers(1, 70),
    with_bias=st.booleans(),
)
def test_rows_linear_equals_float64_and_a_row_does_not_depend_on_the_others(
    dtype, rows, in_features, out_features, with_bias
):
    (weight,), (bias,) = weights_of(dtype, in_features, (out_features,), with_bias)
    x = torch.randn(rows, in_features).to(dtype)
    y = rows_linear(x[None], weight, bias)[0]
    expected = x.double() @ weight.double().T + (0 if bias is None else bias.double())
    torch.testing.assert_close(y.double(), expected, rtol=TOLERANCE[dtype], atol=TOLERANCE[dtype])
    for row in range(rows):
        assert torch.equal(rows_linear(x[row : row + 1], weight, bias)[0], y[row])


@pytest.mark.usefixtures("native")
@settings(max_examples=60, deadline=None)
@given(
    dtype=st.sampled_from([torch.bfloat16, torch.float16]),
    rows=st.integers(0, 40),
    in_features=st.integers(30, 150),
    out_features=st.integers(1, 70),
)
def test_rows_that_half_precision_holds_are_read_in_it_and_change_nothing(dtype, rows, in_features, out_features):
    weight = torch.randn(out_features, in_features).to(dtype).float()
    x = torch.randn(rows, in_features)
    narrow = rows_weight(weight)
    assert narrow.dtype == (torch.float32 if native_for(weight.to(dtype)) is None else dtype)
    assert torch.equal(rows_linear(x, narrow, None), rows_linear(x, weight, None))
    weight[0, 0] = 0.1
    assert rows_weight(weight) is weight


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize(("heads", "columns", "width"), [(1, 5, 7), (4, 48, 33), (16, 512, 128)])
def test_heads_linear_multiplies_each_head_and_no_row_depends_on_another(dtype, heads, columns, width) -> None:
    x = torch.randn(heads, 13, width + 3).to(dtype)[..., :width].transpose(0, 1)
    weight = torch.randn(heads, columns, width).to(dtype)
    y = heads_linear(x, weight)
    wanted = torch.einsum("thw,hcw->thc", x.double(), weight.double())
    tolerance = {torch.float32: 1e-5, torch.bfloat16: 1e-2, torch.float16: 2e-3}[dtype]
    torch.testing.assert_close(y.double(), wanted, rtol=tolerance, atol=tolerance * wanted.abs().max().item())
    if native_for(x) is not None:
        assert torch.equal(heads_linear(x[5:6], weight), y[5:6])
    narrow = weight.to(torch.bfloat16)
    wide = heads_linear(x.float(), narrow)
    torch.testing.assert_close(wide, heads_linear(x.float(), narrow.float()), rtol=1e-5, atol=1e-5 * wide.abs().max())
