"""Keys and values in FP8: what is stored, by which scale, and attention over it; C++ against the references."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise

import pytest
import torch
from attention_cases import Shape, expected, make_case
from fp8_cache import decoded, fp8_layer, in_fp8
from hypothesis import given, settings
from hypothesis import strategies as st
from layer_cases import RopeCase, rope_cases

from loramux_kernels.e4m3 import LARGEST, decode, encode, scale_for
from loramux_kernels.layer_operators import rope_write_kv
from loramux_kernels.paged_attention import paged_attention, paged_attention_reference, write_kv
from loramux_kernels.paged_attention import write_kv_reference as reference
from loramux_kernels.tables import KvLayer

TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 2e-2, torch.float16: 3e-3}
DTYPES = list(TOLERANCE)
WRITERS = pytest.mark.parametrize("write", [write_kv, reference], ids=["native", "reference"])

pytestmark = pytest.mark.usefixtures("native")


def equal(got: torch.Tensor, wanted: torch.Tensor) -> bool:
    """Bit for bit, but for the sign of a NaN."""
    is_nan = (wanted & 0x7F) == 0x7F
    return torch.equal(torch.where(is_nan, got & 0x7F, got), torch.where(is_nan, wanted & 0x7F, wanted))


def assert_same(got: KvLayer, wanted: KvLayer) -> None:
    assert equal(got.key, wanted.key)
    assert equal(got.value, wanted.value)
    for mine, other in ((got.key_scale, wanted.key_scale), (got.value_scale, wanted.value_scale)):
        torch.testing.assert_close(mine, other, rtol=0, atol=0, equal_nan=True)


@WRITERS
def test_every_float_of_eight_bits_comes_back_as_it_is(write) -> None:
    codes = torch.arange(256, dtype=torch.uint8)
    values = codes.view(torch.float8_e4m3fn).float()
    layer = fp8_layer(1, 1, 2, 256, 256)
    rows = torch.stack((torch.full_like(values, 2.1), values))[:, None]  # the first row sets the scale: 1
    write(rows, rows, layer, torch.tensor([0, 1]))
    assert layer.key_scale.item() == 1
    assert equal(layer.key[0, 0, 1], codes)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("spread", [1e-4, 1.0, 300.0])
def test_native_codes_are_the_references(dtype: torch.dtype, spread: float) -> None:
    """Ties, numbers below the least normal one, and numbers too large among them."""
    torch.manual_seed(1)
    first, later = torch.randn(1, 2, 70), torch.randn(7, 2, 70) * spread
    later[0, 0, :20] = torch.arange(20) * 2.0**-10  # halves of the least step
    later[1, 0, :6] = torch.tensor([float("nan"), float("inf"), -float("inf"), 1e30, -1e-30, -0.0])
    rows = torch.cat((first, later)).to(dtype)
    got, wanted = (fp8_layer(2, 2, 8, 70, 70) for _ in range(2))
    slots = torch.arange(8) + 8
    write_kv(rows, rows, got, slots)
    reference(rows, rows, wanted, slots)
    assert_same(got, wanted)
    assert (got.key[0] == 0x7F).all(), "the other page is untouched"


@pytest.mark.parametrize(
    ("row", "scale"),
    [
        ([2.0, -1.0], 1.0),
        ([3.9, 0.0], 1.0),
        ([-4.0, 0.0], 2.0),
        ([3e38, 0.0], 2.0**126),
        ([2.0**-100, 0.0], 2.0**-101),
        ([2.0**-101, 0.0], 1.0),
        ([0.0, 0.0], 1.0),
        ([float("inf"), 1.0], 1.0),
        ([float("nan"), 1.0], 1.0),
    ],
)
@WRITERS
def test_the_first_row_sets_the_scale(write, row: list[float], scale: float) -> None:
    rows, layer = torch.tensor(row)[None, None], fp8_layer(1, 1, 4, 2, 2)
    assert scale_for(rows).item() == scale
    write(rows, rows, layer, torch.tensor([0]))
    assert layer.key_scale.item() == layer.value_scale.item() == scale


@WRITERS
def test_later_rows_keep_the_scale_and_are_cut_off_at_the_largest_number(write) -> None:
    layer = fp8_layer(1, 1, 4, 1, 1)
    rows = torch.tensor([1.0, 112.0, 1000.0, -1000.0])[:, None, None]
    write(rows, rows, layer, torch.arange(4))
    scale = layer.key_scale.item()
    assert scale == 0.5
    assert decoded(layer).key.flatten().tolist() == [1.0, 112.0, LARGEST * scale, -LARGEST * scale]


@settings(max_examples=40, deadline=None)
@given(
    seed=st.integers(0, 9), length=st.integers(1, 40), cuts=st.sets(st.integers(1, 39)), is_native=st.booleans(),
    block_size=st.sampled_from([1, 3, 16]),
)  # fmt: skip
def test_what_a_page_holds_does_not_depend_on_how_a_prompt_was_cut(seed, length, cuts, is_native, block_size) -> None:
    """Nor on the order of a step's rows: within a step they are shuffled."""
    generator = torch.Generator().manual_seed(seed)
    rows = torch.randn(length, 2, 9, generator=generator)
    whole, cut = (fp8_layer(40, 2, block_size, 9, 9) for _ in range(2))
    reference(rows, -rows, whole, torch.arange(length))
    edges = [0, *sorted(edge for edge in cuts if edge < length), length]
    for start, stop in pairwise(edges):
        order = start + torch.randperm(stop - start, generator=generator)
        (write_kv if is_native else reference)(rows[order], -rows[order], cut, order)
    assert_same(cut, whole)


def test_long_prompts_on_several_threads_are_the_references() -> None:
    rows = torch.randn(3000, 2, 64)
    got, wanted = (fp8_layer(200, 2, 16, 64, 64) for _ in range(2))
    slots = torch.randperm(3200)[:3000]
    slots = slots[slots >= 0]
    for layer in (got, wanted):  # every page has its first row, so that every scale is known
        layer.key_scale.fill_(1)
        layer.value_scale.fill_(1)
    write_kv(rows, rows, got, slots)
    reference(rows, rows, wanted, slots)
    assert_same(got, wanted)


@settings(max_examples=40, deadline=None)
@given(case=rope_cases(DTYPES))
def test_turned_keys_are_stored_as_write_kv_stores_them(case: RopeCase) -> None:
    pages, heads, block_size, key_dim = case.layer.key.shape
    got, wanted = (fp8_layer(pages, heads, block_size, key_dim, case.value.shape[2]) for _ in range(2))
    for layer in (got, wanted):
        layer.key_scale.fill_(0.5)
        layer.value_scale.fill_(0.5)
    plain = case.copy()
    rope_write_kv(*plain.arguments)
    rope_write_kv(*replace(case, layer=got).arguments)
    turned = plain.layer.key.transpose(1, 2).flatten(0, 1)[case.slot_mapping]
    write_kv(turned, case.value, wanted, case.slot_mapping)
    assert_same(got, wanted)
    assert torch.equal(case.query, plain.query)


sequence = st.tuples(st.integers(1, 70), st.integers(0, 300)).map(lambda t: (t[0], t[0] + t[1]))


@settings(max_examples=40, deadline=None)
@given(
    sequences=st.lists(sequence, min_size=1, max_size=3),
    dtype=st.sampled_from(DTYPES),
    kv_heads=st.integers(1, 2),
    groups=st.integers(1, 9),
    key_dim=st.integers(1, 140),
    value_dim=st.integers(1, 140),
    block_size=st.sampled_from([1, 3, 16, 64]),
    window=st.none() | st.integers(1, 100),
    softcap=st.none() | st.floats(0.5, 50.0),
    with_sinks=st.booleans(),
    attend=st.sampled_from([paged_attention, paged_attention_reference]),
)
def test_attention_over_fp8_pages_is_attention_over_what_they_hold(
    sequences, dtype, kv_heads, groups, key_dim, value_dim, block_size, window, softcap, with_sinks, attend
) -> None:
    shape = Shape(kv_heads * groups, kv_heads, key_dim, value_dim, block_size)
    case, scaling = in_fp8(make_case(sequences, dtype, shape)), key_dim**-0.5
    sinks = torch.linspace(-2, 2, kv_heads * groups) if with_sinks else None
    wanted = expected(case, scaling, window, softcap, sinks)
    options = {"sliding_window": window, "softcap": softcap, "sinks": sinks}
    output = attend(case.query, case.layer, case.batch, scaling, **options)
    assert output.dtype == dtype
    tolerance = TOLERANCE[dtype]
    torch.testing.assert_close(output.double(), wanted, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("size", [0.01, 1.0, 20.0])
def test_codes_are_off_by_a_sixteenth_at_most(size: float) -> None:
    """Three bits of mantissa; elements far below the first row's largest lose more, but no more than half a least step.
    A first token's values are often far smaller than all others."""
    first = torch.randn(1, 64)
    rows = torch.randn(1000, 64) * size
    scales = scale_for(first).expand(1000)
    error = (decode(encode(rows, scales), scales) - rows).abs()
    assert (error <= torch.maximum(rows.abs() / 16, scales[:, None] * 2.0**-10)).all()


def test_bytes_without_scales_are_no_layer() -> None:
    with pytest.raises(AssertionError, match="have scales"):
        KvLayer(*torch.zeros(2, 1, 1, 4, 8, dtype=torch.uint8))


@WRITERS
@pytest.mark.parametrize("is_fp8", [False, True], ids=["plain", "fp8"])
def test_values_in_their_keys_are_never_written(write, is_fp8: bool) -> None:
    """A page's scale is that of the whole key, whose last elements are the largest."""
    layer = fp8_layer(1, 1, 4, 9, 5, has_values_in_keys=True)
    if not is_fp8:
        key = torch.full((1, 1, 4, 9), float("nan"))
        layer = KvLayer(key, key[..., :5], has_values_in_keys=True)
    rows = torch.arange(18.0).view(2, 1, 9)
    write(rows, torch.full((2, 1, 5), 1e6), layer, torch.tensor([0, 1]))
    held = decoded(layer) if is_fp8 else layer
    torch.testing.assert_close(held.key[0, 0, :2], rows[:, 0], rtol=1 / 16, atol=0)
    assert torch.equal(held.value[0, 0, :2], held.key[0, 0, :2, :5])
    assert held.key[0, 0, 2:].isnan().all()


@pytest.mark.parametrize("dtype", DTYPES)
def test_attention_over_fp8_values_in_their_keys_is_attention_over_what_they_hold(dtype) -> None:
    shape = Shape(16, 1, 72, 64, has_values_in_keys=True)
    case = in_fp8(make_case([(1, 40), (30, 70)], dtype, shape))
    wanted = expected(case, 0.2, None, None, None)
    for attend in (paged_attention, paged_attention_reference):
        got = attend(case.query, case.layer, case.batch, 0.2)
        torch.testing.assert_close(got.double(), wanted, rtol=TOLERANCE[dtype], atol=TOLERANCE[dtype])
