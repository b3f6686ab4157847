"""paged_attention as Triton kernels, against a float64 softmax over contiguous keys; unwritten pages are NaN."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
import torch
from attention_cases import Case, Shape, check_ranges, expected, make_case, with_images
from fp8_cache import in_fp8
from hypothesis import given, settings
from hypothesis import strategies as st
from interpreted import far_memory

from loramux_kernels.cuda.paged_attention import paged_attention, prepare_attention
from loramux_kernels.cuda.work_lists import (
    AttentionShape,
    attach_attention,
    plan_attention,
    refill_attention,
    reserve_attention,
)
from loramux_kernels.staged_memory import StagedMemory
from loramux_kernels.tables import AttentionBatch, KvLayer

DTYPES = [torch.float32, torch.float16] + [torch.bfloat16] * torch.cuda.is_available()  # the interpreter cannot bf16
TOLERANCE = {torch.float32: 1e-5, torch.float16: 2e-3, torch.bfloat16: 2e-2}


def check(
    case: Case, device: torch.device, window: int | None = None, softcap: float | None = None, with_sinks: bool = False
) -> None:
    scaling = case.query.shape[2] ** -0.5
    sinks = torch.linspace(-2, 2, case.query.shape[1]) if with_sinks else None
    wanted = expected(case, scaling, window, softcap, sinks)
    on = case.to(device)
    options = {"sliding_window": window, "softcap": softcap, "sinks": None if sinks is None else sinks.to(device)}
    output = paged_attention(on.query, on.layer, on.batch, scaling, **options)
    assert output.dtype == case.query.dtype
    tolerance = TOLERANCE[case.query.dtype]
    torch.testing.assert_close(output.cpu().double(), wanted, rtol=tolerance, atol=tolerance)


sequence = st.tuples(st.integers(1, 70), st.integers(0, 300)).map(lambda t: (t[0], t[0] + t[1]))


@settings(max_examples=8, deadline=None)
@given(
    sequences=st.lists(sequence, min_size=1, max_size=3),
    dtype=st.sampled_from(DTYPES),
    kv_heads=st.integers(1, 2),
    groups=st.integers(1, 9),
    key_dim=st.integers(1, 80),
    value_dim=st.integers(1, 80),
    block_size=st.sampled_from([1, 3, 16, 64]),
    window=st.none() | st.integers(1, 100),
    softcap=st.none() | st.floats(0.5, 50.0),
    with_sinks=st.booleans(),
)
def test_attention_of_ragged_batches_equals_the_reference(
    device, sequences, dtype, kv_heads, groups, key_dim, value_dim, block_size, window, softcap, with_sinks
):
    shape = Shape(kv_heads * groups, kv_heads, key_dim, value_dim, block_size)
    check(make_case(sequences, dtype, shape), device, window, softcap, with_sinks)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("dims", [(64, 64), (80, 80), (96, 96), (128, 128), (192, 128), (256, 256)])
def test_attention_of_every_head_size_equals_the_reference(device, dtype, dims):
    """One sequence decodes while one is in prefill, four query heads on each kv head."""
    check(make_case([(1, 70), (33, 40)], dtype, Shape(8, 2, *dims)), device)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("features", [{}, {"window": 900, "softcap": 5.0, "with_sinks": True}], ids=["plain", "all"])
def test_attention_long_contexts_are_cut_and_merged(device, dtype, features):
    case = make_case([(1, 1500), (1, 3), (40, 700), (1, 256), (1, 257)], dtype, Shape(4, 1, 32, 16))
    plan = plan_attention(case.to(device).batch, AttentionShape(4, 1, features.get("window"), 16))
    assert any(tiles.partials for tiles in plan)
    check(case, device, **features)


@pytest.mark.parametrize("context", [256, 257, 270, 287, 288, 530])
def test_attention_cut_through_the_newest_tokens_equals_the_reference(device, context):
    """The last piece holds tokens that the tile's first rows do not see at all."""
    check(make_case([(32, context)], torch.float32, Shape(1, 1, 16, 16)), device)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("is_latent", [False, True])
def test_attention_over_ranges_of_keys_joined_equals_the_reference(device, dtype, is_latent):
    """Ranges of the last sequence are cut and merged."""
    shape = Shape(16, 1, 40, 32, has_values_in_keys=True) if is_latent else Shape(4, 1, 32, 16)
    case = make_case([(1, 70), (5, 130), (40, 300), (1, 1500)], dtype, shape).to(device)
    check_ranges(case, paged_attention, TOLERANCE[dtype])


@pytest.mark.parametrize("window", [1, 2, 63, 64, 65, 200])
def test_attention_sliding_window_equals_the_reference(device, window):
    check(make_case([(1, 200), (70, 190)], torch.float32), device, window=window)


def test_attention_soft_cap_and_sinks_equal_the_reference(device):
    case = make_case([(1, 80), (9, 20)], torch.float32)
    check(case, device, softcap=5.0)
    check(case, device, with_sinks=True)


def test_attention_of_one_row_equals_the_reference(device):
    check(make_case([(1, 1)], torch.float32), device)


def test_attention_takes_a_query_strided_as_transformers_leaves_it(device):
    case = make_case([(3, 3), (1, 40)], torch.float32).to(device)
    strided = case.query.transpose(0, 1).contiguous().transpose(0, 1)
    assert not strided.is_contiguous()
    args = (case.layer, case.batch, 0.25)
    assert torch.equal(paged_attention(strided, *args), paged_attention(case.query, *args))


def test_attention_nan_in_the_context_reaches_the_output(device):
    """Otherwise the poison in these tests would prove nothing."""
    case = make_case([(1, 40)], torch.float32).to(device)
    case.layer.key[case.batch.block_table[0, 1]] = float("nan")
    assert paged_attention(case.query, case.layer, case.batch, 0.25).isnan().all()


def test_attention_repeated_step_gives_the_same_bits(device):
    case = make_case([(1, 900), (40, 100), (1, 5)], torch.float16, Shape(8, 2, 64, 64)).to(device)
    args = (case.query, case.layer, case.batch, 0.125)
    assert torch.equal(paged_attention(*args), paged_attention(*args))


def test_attention_takes_pages_beyond_32_bits(device):
    """The context's one page starts more than 2^31 elements into the pool."""
    case = make_case([(1, 16)], torch.float16).to(device)
    home = int(case.batch.block_table[0, 0])
    page_elements, far = case.layer.key.stride(0), 2**31 // case.layer.key.stride(0) + 1
    pool = far_memory((far + 1) * page_elements, case.query.dtype, device)
    views = []
    for near in (case.layer.key, case.layer.value):
        shape = (far + 1, *near.shape[1:])
        offset = near.storage_offset() - case.layer.key.storage_offset()
        views.append(torch.as_strided(pool, shape, near.stride(), offset))
        views[-1][far] = near[home]
    table = torch.full_like(case.batch.block_table, far)
    away = AttentionBatch(case.batch.cu_seqlens, case.batch.context_lens, table, case.batch.slot_mapping)
    args = (case.query, case.layer, case.batch, 0.25)
    assert torch.equal(paged_attention(case.query, KvLayer(*views), away, 0.25), paged_attention(*args))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("window", [None, 3, 50])
def test_attention_of_images_both_ways_equals_the_reference(device, dtype, window):
    """Images over several tiles and blocks of context, begun in an earlier step, next to each other, in cut contexts;
    next to prompts and decoding rows without images."""
    case = make_case([(1, 129), (150, 150), (40, 90), (37, 37), (30, 700)], dtype, Shape(10, 2, 24, 40))
    images = [(1, 5, 90), (1, 90, 91), (1, 91, 150), (2, 30, 70), (3, 36, 37), (4, 675, 690)]
    check(with_images(case, images), device, window)


def first_spans(case: Case, count: int) -> np.ndarray:
    return np.array(case.batch.spans[:count], dtype=np.int64).reshape(-1, 3)


def test_attention_reserved_tables_serve_one_step_after_another(device):
    """Work lists as a CUDA graph uses them: addresses and launches stay, their contents are replaced; unused rows stay
    NaN."""
    case = make_case([(1, 900), (1, 30), (1, 257), (1, 1)], torch.float32).to(device)
    shape = AttentionShape(2, 2, None, 16)
    memory = StagedMemory(1 << 16, device)
    tiles = reserve_attention(shape, max_sequences=4, max_rows=4, max_partials=12, memory=memory)[:1]
    attach_attention(case.batch, shape, tiles)
    output = torch.full((4, 4, 16), float("nan"), device=device)
    launches = prepare_attention(case.query, case.layer, case.batch, 0.25, output)
    assert len(launches) == 1, "all decode; the last part of a context merges the others"
    for count in (4, 2, 0, 3):
        refill_attention(tiles, first_spans(case, count), None, shape)
        memory.send()
        output.fill_(float("nan"))
        for launch in launches:
            launch.run()
        wanted = expected(case, 0.25, None, None, None)[:count]
        torch.testing.assert_close(output[:count].cpu().double(), wanted, rtol=1e-5, atol=1e-5)
        assert output[count:].isnan().all()


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=["one height", "two heights"])
def test_attention_reserved_tables_of_every_height_serve_prompts_with_decoding(device, dtype):
    """With block tables in another order than the sequences."""
    sequences = [(1, 600), (37, 37), (40, 290), (3, 20), (1, 1)]
    case = make_case(sequences, dtype).to(device)
    rows = len(case.query)
    shape = AttentionShape(2, 2, None, 16 if dtype == torch.float32 else 64)
    memory = StagedMemory(1 << 16, device)
    tiles = reserve_attention(shape, max_sequences=5, max_rows=rows, max_partials=12, memory=memory)
    assert [one.rows for one in tiles] == [16, 16 if dtype == torch.float32 else 64]
    places = np.array([3, 0, 4, 1, 2])
    kept = dataclasses.replace(case.batch, block_table=case.batch.block_table[np.argsort(places)])
    attach_attention(kept, shape, tiles)
    output = torch.full((rows, 4, 16), float("nan"), dtype=dtype, device=device)
    launches = prepare_attention(case.query, case.layer, kept, 0.25, output)
    wanted = expected(case, 0.25, None, None, None)
    for count in (5, 2, 3):
        refill_attention(tiles, first_spans(case, count), places[:count], shape)
        memory.send()
        output.fill_(float("nan"))
        for launch in launches:
            launch.run()
        stop = sum(length for length, _ in sequences[:count])
        tolerance = TOLERANCE[dtype]
        torch.testing.assert_close(output[:stop].cpu().double(), wanted[:stop], rtol=tolerance, atol=tolerance)
        assert output[stop:].isnan().all()


def test_attention_reserved_tables_serve_images_of_one_step_after_another(device):
    """The ends of rows are data at a fixed address too; a step without images has other launches for the same batch."""
    case = make_case([(37, 37), (1, 600), (40, 290)], torch.float32)
    steps = [with_images(case, [(0, 3, 30), (2, 240, 288)]), with_images(case, [(0, 0, 37), (2, 285, 290)])]
    case, rows = case.to(device), len(case.query)
    ends = torch.zeros(rows, dtype=torch.int32, device=device)
    batch = dataclasses.replace(case.batch, row_ends=ends)
    shapes = [AttentionShape(2, 2, None, 16, sees_ahead=ahead) for ahead in (True, False)]
    memory = StagedMemory(1 << 16, device)
    for shape in shapes:
        attach_attention(batch, shape, reserve_attention(shape, 3, rows, 12, memory))
    output = torch.full((rows, 4, 16), float("nan"), device=device)
    launches = prepare_attention(case.query, case.layer, batch, 0.25, output)
    for one in steps:
        ends.copy_(one.batch.row_ends)
        refill_attention(plan_attention(batch, shapes[0]), first_spans(case, 3), None, shapes[0])
        memory.send()
        for launch in launches:
            launch.run()
        torch.testing.assert_close(output.cpu().double(), expected(one, 0.25, None, None, None), rtol=1e-5, atol=1e-5)
    refill_attention(plan_attention(batch, shapes[1]), first_spans(case, 3), None, shapes[1])
    memory.send()
    for launch in prepare_attention(case.query, case.layer, batch.causal, 0.25, output):
        launch.run()
    torch.testing.assert_close(output.cpu().double(), expected(case, 0.25, None, None, None), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("heads", "key_dim", "value_dim"), [(4, 24, 16), (20, 576, 512), (34, 320, 48), (36, 40, 32)])
@pytest.mark.parametrize("is_fp8", [False, True], ids=["", "fp8"])
def test_attention_over_values_in_their_keys_equals_the_reference(device, dtype, heads, key_dim, value_dim, is_fp8):
    """Keys in one part and in two; heads of one tile and of several."""
    shape = Shape(heads, 1, key_dim, value_dim, has_values_in_keys=True)
    case = make_case([(1, 40), (3, 19), (1, 300)], dtype, shape)
    check(in_fp8(case) if is_fp8 else case, device)


def test_attention_over_wide_keys_beside_values_equals_the_reference(device):
    check(make_case([(1, 40), (3, 19)], torch.float32, Shape(20, 1, 576, 64)), device)
