"""paged_attention against a float64 softmax over contiguous keys; what was never written in the pool is NaN."""

from __future__ import annotations

import pytest
import torch
from attention_cases import Case, Shape, check_ranges, expected, make_case, with_images
from hypothesis import given, settings
from hypothesis import strategies as st

from loramux_kernels.native.loader import native_for
from loramux_kernels.paged_attention import paged_attention, paged_attention_reference, read_keys
from loramux_kernels.tables import AttentionBatch

pytestmark = pytest.mark.usefixtures("native")

TOLERANCE = {torch.float32: 2e-6, torch.bfloat16: 1e-2, torch.float16: 2e-3}


def check(
    case: Case,
    window: int | None = None,
    softcap: float | None = None,
    sinks: torch.Tensor | None = None,
    is_wide: bool = False,
):
    """`is_wide`: scores are sums of hundreds of products."""
    scaling = case.query.shape[2] ** -0.5
    options = {"sliding_window": window, "softcap": softcap, "sinks": sinks}
    wanted = expected(case, scaling, window, softcap, sinks)
    tolerance = TOLERANCE[case.query.dtype] * (3 if is_wide else 1)
    for function in (paged_attention, paged_attention_reference):
        output = function(case.query, case.layer, case.batch, scaling, **options)
        assert output.dtype == case.query.dtype
        torch.testing.assert_close(output.double(), wanted, rtol=tolerance, atol=tolerance)


sequence = st.tuples(st.integers(1, 40), st.integers(0, 150)).map(lambda t: (t[0], t[0] + t[1]))


@settings(max_examples=60, deadline=None)
@given(
    sequences=st.lists(sequence, min_size=1, max_size=4),
    dtype=st.sampled_from(list(TOLERANCE)),
    kv_heads=st.integers(1, 3),
    groups=st.integers(1, 9),
    key_dim=st.integers(1, 80),
    value_dim=st.integers(1, 80),
    block_size=st.sampled_from([1, 3, 16, 64, 256]),
    window=st.none() | st.integers(1, 100),
    softcap=st.none() | st.floats(0.5, 50.0),
    with_sinks=st.booleans(),
)
def test_attention_of_ragged_batches_equals_the_reference(
    sequences, dtype, kv_heads, groups, key_dim, value_dim, block_size, window, softcap, with_sinks
):
    shape = Shape(kv_heads * groups, kv_heads, key_dim, value_dim, block_size)
    sinks = torch.linspace(-2, 2, shape.query_heads) if with_sinks else None
    check(make_case(sequences, dtype, shape), window, softcap, sinks)


@pytest.mark.parametrize("dtype", list(TOLERANCE))
def test_attention_of_decode_with_prefill_equals_the_reference(dtype):
    check(make_case([(1, 1), (1, 129), (37, 37), (20, 90), (1, 64), (300, 300)], dtype, Shape(20, 4, 64, 64)))


@pytest.mark.parametrize("dtype", list(TOLERANCE))
def test_attention_takes_values_of_another_width_than_keys(dtype):
    check(make_case([(1, 70), (5, 9)], dtype, Shape(8, 2, key_dim=192, value_dim=128)))


@pytest.mark.parametrize("window", [1, 2, 63, 64, 65, 200])
def test_attention_sliding_window_equals_the_reference(window):
    check(make_case([(1, 200), (70, 190), (130, 130)], torch.float32), window=window)


@pytest.mark.parametrize("dtype", list(TOLERANCE))
@pytest.mark.parametrize("window", [None, 3, 50, 100])
def test_attention_of_images_both_ways_equals_the_reference(dtype, window):
    """Images over several chunks of context, over blocks of rows, begun in an earlier step, and next to each other."""
    case = make_case([(1, 129), (150, 150), (40, 90), (37, 37)], dtype, Shape(10, 2, 24, 40))
    check(with_images(case, [(1, 5, 90), (1, 90, 91), (1, 91, 150), (2, 30, 70), (3, 36, 37)]), window)


@pytest.mark.parametrize("window", [None, 50])
def test_attention_of_rows_outside_images_is_that_without_images_to_the_bit(window):
    case = make_case([(150, 150), (1, 70)], torch.bfloat16)
    plain, mixed = (
        paged_attention(one.query, one.layer, one.batch, 0.3, sliding_window=window)
        for one in (case, with_images(case, [(0, 60, 100)]))
    )
    is_image = (torch.arange(151) >= 60) & (torch.arange(151) < 99)
    assert torch.equal(plain[~is_image], mixed[~is_image])
    assert not torch.equal(plain[is_image], mixed[is_image])


def test_attention_soft_cap_and_sinks_equal_the_reference():
    check(make_case([(1, 80), (9, 20)], torch.float32), 30, 5.0, torch.tensor([-50.0, 0.0, 3.0, 60.0]))


def test_attention_takes_a_query_strided_as_transformers_leaves_it():
    case = make_case([(3, 3), (1, 40)], torch.bfloat16)
    strided = case.query.transpose(0, 1).contiguous().transpose(0, 1)
    assert not strided.is_contiguous()
    args = (case.layer, case.batch, 0.25)
    assert torch.equal(paged_attention(strided, *args), paged_attention(case.query, *args))


def test_attention_nan_in_the_context_reaches_the_output():
    """Otherwise the poison in these tests would prove nothing."""
    case = make_case([(1, 40)], torch.float32)
    case.layer.key[case.batch.block_table[0, 1]] = float("nan")
    assert paged_attention(case.query, case.layer, case.batch, 0.25).isnan().all()


@pytest.mark.parametrize("dtype", list(TOLERANCE))
@pytest.mark.parametrize("window", [None, 50])
def test_attention_row_is_independent_of_how_its_prompt_was_cut(dtype, window):
    """Bit for bit: one prefill of 150 rows, chunks of it, and one row at a time, alone or in company."""
    if native_for(torch.empty(0, dtype=dtype)) is None:
        pytest.skip("torch promises no such thing")
    shape = Shape(10, 2, 24, 40)
    whole = make_case([(150, 150), (1, 33)], dtype, shape)
    output = paged_attention(whole.query, whole.layer, whole.batch, 0.3, sliding_window=window)
    for start, stop in [(0, 7), (7, 64), (64, 65), (120, 150), (149, 150)]:
        chunk = AttentionBatch(
            cu_seqlens=torch.tensor([0, stop - start], dtype=torch.int32),
            context_lens=torch.tensor([stop], dtype=torch.int32),
            block_table=whole.batch.block_table[:1],
            slot_mapping=whole.batch.slot_mapping[start:stop],
        )
        part = paged_attention(whole.query[start:stop], whole.layer, chunk, 0.3, sliding_window=window)
        assert torch.equal(part, output[start:stop])


LATENT = [(16, 24, 16), (16, 576, 512), (20, 576, 512), (128, 40, 32)]
"""Query heads, and the dimensions of keys and of values in them."""


@pytest.mark.parametrize("dtype", list(TOLERANCE))
@pytest.mark.parametrize(("heads", "key_dim", "value_dim"), LATENT)
def test_attention_over_values_in_their_keys_equals_the_reference(dtype, heads, key_dim, value_dim):
    shape = Shape(heads, 1, key_dim, value_dim, has_values_in_keys=True)
    check(make_case([(1, 1), (1, 130), (70, 90)], dtype, shape), is_wide=key_dim > 500)


RANGED = [(1, 70), (5, 130), (40, 300), (1, 600)]


@pytest.mark.parametrize("dtype", list(TOLERANCE))
@pytest.mark.parametrize("attend", [paged_attention, paged_attention_reference], ids=["native", "reference"])
@pytest.mark.parametrize("is_latent", [False, True])
def test_attention_over_ranges_of_keys_joined_equals_the_reference(dtype, attend, is_latent):
    shape = Shape(16, 1, 40, 32, has_values_in_keys=True) if is_latent else Shape(block_size=5)
    check_ranges(make_case(RANGED, dtype, shape), attend, TOLERANCE[dtype])


@pytest.mark.parametrize(("first", "end"), [(0, 1), (63, 129), (64, 128), (70, 70), (199, 200), (0, 200)])
def test_keys_of_a_range_are_read_from_their_pages(first, end):
    case = make_case([(1, 30), (1, 200)], torch.float16, Shape(block_size=16))
    keys = read_keys(case.layer, case.batch.block_table[1], first, end)
    assert torch.equal(keys, case.keys[1][first:end].transpose(0, 1).float())
