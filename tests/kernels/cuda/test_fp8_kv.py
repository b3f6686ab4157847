"""FP8 pages as Triton kernels: what is stored is the reference's bit for bit, and attention reads what they hold."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise

import pytest
import torch
from attention_cases import Case, Shape, expected, make_case
from fp8_cache import decoded, fp8_layer, in_fp8
from hypothesis import given, settings
from hypothesis import strategies as st
from layer_cases import RopeCase, rope_cases

from loramux_kernels.cuda.layer_operators import rope_write_kv
from loramux_kernels.cuda.paged_attention import paged_attention, prepare_write_kv, write_kv
from loramux_kernels.e4m3 import scale_for
from loramux_kernels.packed_linear import PackedLinear
from loramux_kernels.paged_attention import write_kv_reference
from loramux_kernels.quantized_weight import QuantizedWeight
from loramux_kernels.tables import KvLayer, Norm, Rotation

TOLERANCE = {torch.float32: 1e-5, torch.float16: 3e-3}
DTYPES = list(TOLERANCE)


def on(layer: KvLayer, device: torch.device) -> KvLayer:
    return KvLayer(*(part.to(device) for part in (layer.key, layer.value, layer.key_scale, layer.value_scale)))


def assert_same(got: KvLayer, wanted: KvLayer) -> None:
    """Bit for bit, but for the sign of a NaN."""
    for mine, other in ((got.key, wanted.key), (got.value, wanted.value)):
        assert torch.equal(*(torch.where(codes & 0x7F == 0x7F, 0x7F, codes.int()) for codes in (mine.cpu(), other)))
    for mine, other in ((got.key_scale, wanted.key_scale), (got.value_scale, wanted.value_scale)):
        torch.testing.assert_close(mine.cpu(), other, rtol=0, atol=0, equal_nan=True)


def check_stored(key: torch.Tensor, value: torch.Tensor, slots: torch.Tensor, got: KvLayer, wanted: KvLayer) -> None:
    """Store on the device and by the reference, which knows no negative slots."""
    device = got.key.device
    write_kv(key.to(device), value.to(device), got, slots.to(device))
    stored = slots >= 0
    write_kv_reference(key[stored], value[stored], wanted, slots[stored])
    assert_same(got, wanted)


def test_write_kv_stores_every_float_of_eight_bits_as_it_is(device) -> None:
    codes = torch.arange(256, dtype=torch.uint8)
    values = codes.view(torch.float8_e4m3fn).float()
    rows = torch.stack((torch.full_like(values, 2.1), values))[:, None]  # the first row sets the scale: 1
    got, wanted = on(fp8_layer(1, 1, 2, 256, 256), device), fp8_layer(1, 1, 2, 256, 256)
    check_stored(rows, rows, torch.tensor([0, 1]), got, wanted)
    assert got.key_scale.item() == 1
    assert got.key[0, 0, 1, :127].tolist() == list(range(127))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("spread", [1e-4, 1.0, 300.0])
def test_write_kv_codes_and_scales_are_the_references(device, dtype: torch.dtype, spread: float) -> None:
    """Ties, numbers below the least normal one, numbers too large, and those that are not finite."""
    torch.manual_seed(1)
    first, later = torch.randn(1, 3, 70), torch.randn(7, 3, 70) * spread
    later[0, 0, :20] = torch.arange(20) * 2.0**-10  # halves of the least step
    later[1, 0] = 1.0 + torch.arange(70) * 2.0**-4  # halves of a step
    later[2, 0, :6] = torch.tensor([float("nan"), float("inf"), -float("inf"), 1e30, -1e-30, -0.0])
    rows = torch.cat((first, later)).to(dtype)
    got, wanted = on(fp8_layer(2, 3, 8, 70, 9), device), fp8_layer(2, 3, 8, 70, 9)
    check_stored(rows, -rows[..., :9], torch.arange(8) + 8, got, wanted)
    assert (got.key[0] == 0x7F).all(), "the other page is untouched"


def test_write_kv_first_rows_set_the_scales(device) -> None:
    inf, nan = float("inf"), float("nan")
    largest = [2.0, 3.9, -4.0, 3e38, 2.0**-100, 2.0**-101, 0.0, inf, nan, -nan]
    rows = torch.tensor([[[x, -0.0]] for x in largest])
    got, wanted = on(fp8_layer(10, 1, 4, 2, 2), device), fp8_layer(10, 1, 4, 2, 2)
    check_stored(rows, -rows, torch.arange(10) * 4, got, wanted)
    assert got.key_scale.flatten().tolist() == [1, 1, 2, 2.0**126, 2.0**-101, 1, 1, 1, 1, 1]
    assert torch.equal(got.key_scale.cpu(), scale_for(rows))


@pytest.mark.parametrize("block_size", [1, 3, 16])
def test_write_kv_does_not_depend_on_how_a_prompt_was_cut(device, block_size: int) -> None:
    """Nor on the order of a step's rows: within a step they are shuffled, with padding rows among them."""
    torch.manual_seed(2)
    length, edges = 40, [0, 5, 6, 31, 40]
    rows = torch.randn(length, 2, 9) * torch.logspace(-2, 2, length)[:, None, None]
    cut, whole = on(fp8_layer(40, 2, block_size, 9, 9), device), fp8_layer(40, 2, block_size, 9, 9)
    write_kv_reference(rows, -rows, whole, torch.arange(length))
    for start, stop in pairwise(edges):
        order = start + torch.randperm(stop - start)
        padding = torch.full((2, 2, 9), float("nan"))
        step = torch.cat((padding[:1], rows[order], padding[1:])).to(device)
        slots = torch.cat((torch.tensor([-1]), order, torch.tensor([-block_size]))).to(device)
        write_kv(step, -step, cut, slots)
    assert_same(cut, whole)


def test_write_kv_is_one_launch_without_fp8_and_two_with_it(device) -> None:
    rows, slots = torch.zeros(2, 1, 8, device=device), torch.arange(2, device=device)
    plain, fp8 = KvLayer(*torch.zeros(2, 1, 1, 4, 8, device=device)), on(fp8_layer(1, 1, 4, 8, 8), device)
    assert [launch.arguments["BEGINS"] for launch in prepare_write_kv(rows, rows, plain, slots)] == [None]
    assert [launch.arguments["BEGINS"] for launch in prepare_write_kv(rows, rows, fp8, slots)] == [True, False]


def rope_on(case: RopeCase, layer: KvLayer, slots: torch.Tensor, device: torch.device) -> torch.Tensor:
    """Turn and store on the device; return the queries."""
    query, key, value = (part.to(device).clone() for part in (case.query, case.key, case.value))
    rotation, norms = case.rotation, (case.query_norm, case.key_norm)
    if rotation is not None:
        rotation = Rotation(rotation.cos.to(device), rotation.sin.to(device))
    norms = [None if norm is None else Norm(norm.weight.to(device), norm.eps, norm.rounds_first) for norm in norms]
    rope_write_kv(query, key, value, rotation, layer, slots.to(device), *norms)
    return query


@settings(max_examples=12, deadline=None)
@given(case=rope_cases(DTYPES), padding=st.sets(st.integers(0, 6)))
def test_rope_stores_turned_keys_as_write_kv_does_and_turns_queries_once(device, case: RopeCase, padding) -> None:
    """Rows of padding have slots of -1 to -7, among them multiples of the block size: their queries turn as well."""
    pages, heads, block_size, key_dim = case.layer.key.shape
    got, wanted = (fp8_layer(pages, heads, block_size, key_dim, case.value.shape[2]) for _ in range(2))
    for layer in (got, wanted):  # of pages whose first row never comes
        layer.key_scale.fill_(0.5)
        layer.value_scale.fill_(0.5)
    got, plain = on(got, device), KvLayer(case.layer.key.to(device).clone(), case.layer.value.to(device).clone())
    turned_queries = rope_on(case, plain, case.slot_mapping, device)
    slots = case.slot_mapping.clone()
    for token in padding & set(range(len(slots))):
        slots[token] = -1 - token
    queries = rope_on(case, got, slots, device)
    assert torch.equal(queries, turned_queries)
    turned = plain.key.cpu().transpose(1, 2).flatten(0, 1)[case.slot_mapping]
    write_kv_reference(turned[slots >= 0], case.value[slots >= 0], wanted, slots[slots >= 0])
    assert_same(got, wanted)


def check(
    case: Case,
    device: torch.device,
    window: int | None = None,
    softcap: float | None = None,
    largest_sink: float | None = None,
) -> None:
    scaling = case.query.shape[2] ** -0.5
    sinks = None if largest_sink is None else torch.linspace(-2, largest_sink, case.query.shape[1])
    wanted = expected(case, scaling, window, softcap, sinks)
    there = case.to(device)
    options = {"sliding_window": window, "softcap": softcap, "sinks": None if sinks is None else sinks.to(device)}
    output = paged_attention(there.query, there.layer, there.batch, scaling, **options)
    assert output.dtype == case.query.dtype
    tolerance, size = TOLERANCE[case.query.dtype], torch.cat(case.values).abs().mean().item()
    torch.testing.assert_close(output.cpu().double(), wanted, rtol=tolerance, atol=tolerance * size)


sequence = st.tuples(st.integers(1, 70), st.integers(0, 200)).map(lambda t: (t[0], t[0] + t[1]))


@settings(max_examples=6, deadline=None)
@given(
    sequences=st.lists(sequence, min_size=1, max_size=2),
    dtype=st.sampled_from(DTYPES),
    kv_heads=st.integers(1, 2),
    groups=st.integers(1, 9),
    key_dim=st.integers(1, 80),
    value_dim=st.integers(1, 80),
    block_size=st.sampled_from([1, 3, 16, 64]),
    window=st.none() | st.integers(1, 100),
    softcap=st.none() | st.floats(0.5, 50.0),
    largest_sink=st.sampled_from([None, 2.0]),
)
def test_attention_over_fp8_pages_is_attention_over_what_they_hold(
    device, sequences, dtype, kv_heads, groups, key_dim, value_dim, block_size, window, softcap, largest_sink
) -> None:
    shape = Shape(kv_heads * groups, kv_heads, key_dim, value_dim, block_size)
    check(in_fp8(make_case(sequences, dtype, shape)), device, window, softcap, largest_sink)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("dims", [(64, 64), (80, 80), (128, 128), (192, 128), (256, 256)])
def test_attention_over_fp8_of_every_head_size(device, dtype, dims) -> None:
    """One sequence decodes while one is in prefill, four query heads on each kv head."""
    check(in_fp8(make_case([(1, 70), (33, 40)], dtype, Shape(4, 1, *dims))), device)


@pytest.mark.parametrize("features", [{}, {"window": 500, "softcap": 5.0, "largest_sink": 2.0}], ids=["plain", "all"])
def test_attention_over_fp8_long_contexts_are_cut_and_merged(device, features) -> None:
    check(in_fp8(make_case([(1, 900), (40, 300)], torch.float16, Shape(4, 1, 32, 16))), device, **features)


@pytest.mark.parametrize("largest_sink", [None, 5.0], ids=["plain", "sinks"])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("factor", [2e-4, 1.0, 1e4])
def test_attention_over_fp8_values_of_any_size(device, dtype, factor: float, largest_sink: float | None) -> None:
    """In float16 small values do not cost the weights their bits, large ones do not overflow, sinks or none."""
    case = make_case([(1, 80), (9, 20)], dtype)
    values = [(value.abs() + 1) * factor for value in case.values]
    check(in_fp8(replace(case, values=values)), device, largest_sink=largest_sink)


@pytest.mark.parametrize("dtype", DTYPES)
def test_attention_over_fp8_pages_of_different_scales(device, dtype) -> None:
    case = make_case([(1, 80), (9, 20)], dtype, Shape(block_size=4))
    uneven = [2.0 ** (torch.arange(len(key)) // 4 % 7 - 3)[:, None, None] for key in case.keys]
    keys = [(key * factor).to(dtype) for key, factor in zip(case.keys, uneven, strict=True)]
    values = [(value / factor).to(dtype) for value, factor in zip(case.values, uneven, strict=True)]
    check(in_fp8(replace(case, keys=keys, values=values)), device)


def test_attention_over_fp8_nan_in_the_context_reaches_the_output(device) -> None:
    case = in_fp8(make_case([(1, 40)], torch.float32)).to(device)
    case.layer.key[case.batch.block_table[0, 1]] = 0xFF
    assert paged_attention(case.query, case.layer, case.batch, 0.25).isnan().all()


def test_attention_over_fp8_gives_the_same_bits_when_repeated(device) -> None:
    case = in_fp8(make_case([(1, 300), (20, 40)], torch.float16)).to(device)
    args = (case.query, case.layer, case.batch, 0.125)
    assert torch.equal(paged_attention(*args), paged_attention(*args))


@pytest.mark.parametrize("dtype", DTYPES)
def test_coded_linear_decodes_every_float_of_eight_bits(device, dtype) -> None:
    codes = torch.arange(256, dtype=torch.uint8).view(4, 64)
    finite = torch.where(codes & 0x7F == 0x7F, 0, codes).to(device)
    weight = QuantizedWeight("fp8", finite, torch.ones(4, 1, device=device), 64, 64)
    y = PackedLinear([weight], [None])(torch.eye(64, device=device, dtype=dtype))
    assert torch.equal(y, finite.view(torch.float8_e4m3fn).to(dtype).T)
    weight.codes[3, 5] = 0x7F
    assert PackedLinear([weight], [None])(torch.ones(1, 64, device=device, dtype=dtype))[0, 3].isnan()


def test_what_pages_hold_is_close_to_what_was_stored(device) -> None:
    """Small elements are off by half a least step, which is a scale's share: one page here has the scale 2."""
    rows = torch.randn(32, 2, 64)
    rows[0, 0, 0] = 4.0
    layer = on(fp8_layer(2, 2, 16, 64, 64), device)
    write_kv(rows.to(device), rows.to(device), layer, torch.arange(32, device=device))
    held = decoded(layer).key.transpose(1, 2).flatten(0, 1).cpu()
    half_steps = layer.key_scale.max().item() * 2.0**-10
    torch.testing.assert_close(held, rows, rtol=2.0**-4, atol=half_steps)
