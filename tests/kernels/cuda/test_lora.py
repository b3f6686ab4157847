"""lora_shrink and lora_expand as Triton kernels, against the torch references in float32."""

from __future__ import annotations

from itertools import permutations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from interpreted import far_memory
from lora_cases import Case, by_heads, head_inputs, make_case

from loramux_kernels.cuda.launch import run_all
from loramux_kernels.cuda.lora import (
    MAX_SPLITS,
    MIN_SPLIT,
    lora_expand,
    lora_shrink,
    new_intermediate,
    prepare_expand,
    prepare_shrink,
)
from loramux_kernels.cuda.work_lists import LONG, ROW, SHORT, RowTiles, TileMap, attach_tile_map, tile_map_of
from loramux_kernels.lora import lora_expand_reference, lora_shrink_reference
from loramux_kernels.staged_memory import StagedMemory
from loramux_kernels.tables import LoraGroup, LoraTable, Segments

DTYPES = [torch.float32, torch.float16] + [torch.bfloat16] * torch.cuda.is_available()  # the interpreter cannot bf16
TOLERANCE = {torch.float32: 1e-5, torch.float16: 1e-3, torch.bfloat16: 8e-3}


def case_on(device: torch.device, dtype: torch.dtype, ranks: list[list[int]], rows: list[int], **shape) -> Case:
    return make_case(dtype, ranks, rows, alignment=8, **shape).to(device)


def run(case: Case) -> torch.Tensor:
    args = (case.pool, case.table, case.group, case.segments)
    y = case.y.clone()
    lora_expand(lora_shrink(case.x, *args), *args, y)
    return y


def reference(case: Case) -> torch.Tensor:
    """In float32 throughout, however narrow the case's dtype."""
    args = (case.pool, case.table, case.group, case.segments)
    y = case.y.to(torch.float32, copy=True)
    lora_expand_reference(lora_shrink_reference(case.x, *args), *args, y)
    return y


def check(case: Case) -> None:
    y, wanted = run(case), reference(case)
    tolerance = TOLERANCE[case.x.dtype]
    largest = wanted.abs().amax(dim=1, keepdim=True) if wanted.numel() else wanted
    assert bool(((y.float() - wanted).abs() <= tolerance * largest).all()), (y.float() - wanted).abs().max()
    assert torch.equal(y[case.segments.rows :], case.y[case.segments.rows :]), "base rows are left alone"


@settings(max_examples=8, deadline=None)
@given(
    dtype=st.sampled_from(DTYPES),
    ranks=st.lists(st.lists(st.integers(0, 70), min_size=2, max_size=2), min_size=1, max_size=4),
    rows=st.data(),
    in_features=st.integers(1, 100),
    out_features=st.tuples(st.integers(1, 90), st.integers(1, 300)),
    base_rows=st.integers(0, 3),
)
def test_lora_of_ragged_segments_equals_the_reference(device, dtype, ranks, rows, in_features, out_features, base_rows):
    counts = rows.draw(st.lists(st.integers(0, 90), min_size=len(ranks), max_size=len(ranks)))
    shape = {"in_features": in_features, "out_features": out_features, "base_rows": base_rows}
    check(case_on(device, dtype, ranks, counts, **shape))


@pytest.mark.parametrize("rows", [1, 20, 100])
def test_expand_adds_every_split_and_nothing_past_the_rank_or_the_splits(device, rows: int) -> None:
    """Everything that shrink leaves undefined is NaN here."""
    case = case_on(device, torch.float32, [[33, 5], [16, 0]], [rows, rows], in_features=3000, out_features=(130, 40))
    args, y = (case.pool, case.table, case.group, case.segments), case.y.clone()
    v = new_intermediate(case.x, case.group, case.segments, case.table).fill_(float("nan"))
    assert len(v) == min(MAX_SPLITS, -(-3000 // MIN_SPLIT))
    run_all(prepare_shrink(case.x, *args, v))
    lora_expand(v, *args, y)
    wanted = reference(case)
    assert bool(((y - wanted).abs() <= 1e-5 * wanted.abs().amax(dim=1, keepdim=True)).all())


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    ("ranks", "rows"),
    [
        ([[16]], [1]),
        ([[8], [64], [1], [17]], [1, 1, 1, 1]),
        ([[16], [8]], [20, 12]),
        ([[33]], [130]),
        ([[16]], [65]),
        ([[64], [8], [32]], [100, 1, 20]),
        ([[0], [16]], [3, 2]),
        ([[256]], [2]),
    ],
    ids=["one row", "one row each", "short", "long", "long r16", "long beside short", "rank 0 beside 16", "r256"],
)
def test_lora_of_serving_shapes_equals_the_reference(device, dtype, ranks, rows):
    check(case_on(device, dtype, ranks, rows, in_features=1100, out_features=(520,)))


@pytest.mark.parametrize(("ranks", "rows"), [([[0], [0]], [4, 40]), ([[8]], [])], ids=["rank 0 alone", "base alone"])
def test_lora_step_without_adapters_launches_nothing(device, ranks, rows):
    case = case_on(device, torch.float32, ranks, rows)
    args = (case.pool, case.table, case.group, case.segments)
    v = lora_shrink(case.x, *args)
    assert prepare_shrink(case.x, *args, v) == []
    assert prepare_expand(v, *args, case.y) == []
    check(case)


def test_lora_in_features_are_split_where_a_step_has_few_rows(device):
    case = case_on(device, torch.float32, [[16, 8], [40, 3]], [1, 1], in_features=2100, out_features=(64, 24))
    v = lora_shrink(case.x, case.pool, case.table, case.group, case.segments)
    assert v.shape[0] == 5
    check(case)


def test_lora_takes_fused_slices_of_unequal_ranks_and_widths(device):
    ranks = [[8, 0, 33], [16, 5, 0], [64, 64, 64], [0, 0, 0]]
    check(case_on(device, torch.float32, ranks, [3, 40, 70, 5], in_features=200, out_features=(48, 600, 17)))


def test_lora_takes_rows_with_strides(device):
    case = case_on(device, torch.float32, [[20, 5]], [6], out_features=(33, 64))
    wide_x = torch.full((8, 80), float("nan"), device=device)
    wide_x[:, :40] = case.x
    wide_y = torch.full((8, 300), float("nan"), device=device)
    wide_y[:, 10:107] = case.y
    args = (case.pool, case.table, case.group, case.segments)
    lora_expand(lora_shrink(wide_x[:, :40], *args), *args, wide_y[:, 10:107])
    assert torch.equal(wide_y[:, 10:107], run(case))
    assert wide_y[:, :10].isnan().all()
    assert wide_y[:, 107:].isnan().all()


def test_lora_takes_offsets_beyond_32_bits(device):
    case = case_on(device, torch.float16, [[16], [24]], [2, 40])
    far = 2**31 + 64
    pool = far_memory(far + len(case.pool), case.pool.dtype, device)
    pool[far:] = case.pool
    offsets = (case.table.a_offsets + far, case.table.b_offsets + far)
    moved = LoraTable(*offsets, case.table.ranks, case.table.scales)
    y = case.y.clone()
    lora_expand(lora_shrink(case.x, pool, moved, case.group, case.segments), pool, moved, case.group, case.segments, y)
    assert torch.equal(y, run(case))


@pytest.mark.parametrize("rows", [[1, 1, 1, 1], [20, 9, 3, 1], [100, 70, 1, 40]])
def test_lora_repeated_step_gives_the_same_bits(device, rows):
    case = case_on(device, torch.float16, [[16], [8], [33], [64]], rows, in_features=1100)
    assert torch.equal(run(case), run(case))


def test_lora_reads_only_the_adapters_of_the_step(device):
    """Slot 1 holds NaN weights: one stray read would show."""
    case = case_on(device, torch.float32, [[16], [16], [16]], [2, 3, 4])
    first, last = case.table.a_offsets[1, 0, 0], case.table.b_offsets[1, 0, 0]
    case.pool[first : first + 16 * 40] = float("nan")
    case.pool[last : last + 16 * 48] = float("nan")
    skipping = Segments((0, 2, 4), (0, 2))
    args = (case.pool, case.table, case.group, skipping)
    y = case.y.clone()
    lora_expand(lora_shrink(case.x, *args), *args, y)
    assert not y.isnan().any()


@pytest.mark.parametrize("shape", [ROW, SHORT], ids=["row by row", "tiles"])
def test_lora_reserved_tables_serve_one_step_after_another(device, shape):
    """Tables as a CUDA graph uses them: addresses and launches stay, their contents are replaced."""
    ranks = [[16], [40], [0], [5]]
    case = case_on(device, torch.float32, ranks, [4, 3, 2, 3], in_features=600, out_features=(96,))
    memory = StagedMemory(1 << 16, device)
    reserved = TileMap(12, 64, (RowTiles.reserve(shape, 12, 64, memory),))
    steps = [Segments((0, 4, 7, 9, 12), (0, 1, 2, 3)), Segments((0, 1, 2), (3, 1)), Segments((0,), ())]
    fixed = Segments((0, 12), (0,))
    attach_tile_map(fixed, reserved)
    y = case.y.clone()
    args = (case.pool, case.table, case.group, fixed)
    v = lora_shrink(case.x, *args)
    launches = [*prepare_shrink(case.x, *args, v), *prepare_expand(v, *args, y)]
    assert len(launches) == 2
    for segments in steps:
        largest = case.table.ranks.amax(dim=1).cpu().numpy()
        reserved.refill(segments, largest[list(segments.slots)].astype("int64"))
        memory.send()
        y.copy_(case.y)
        for launch in launches:
            launch.run()
        other = Case(**{**vars(case), "segments": segments})
        torch.testing.assert_close(y, reference(other), rtol=1e-5, atol=1e-4)


def test_lora_reserved_tables_of_any_step_serve_long_and_short_segments(device):
    case = case_on(device, torch.float32, [[16], [70], [0], [5]], [40, 3, 2, 33], in_features=130)
    memory = StagedMemory(1 << 16, device)
    reserved = TileMap(80, 80, tuple(RowTiles.reserve(shape, 80, 80, memory) for shape in (SHORT, LONG)))
    fixed = Segments((0, 80), (0,))
    attach_tile_map(fixed, reserved)
    args, base = (case.pool, case.table, case.group, fixed), torch.zeros(80, case.y.shape[1], device=device)
    for segments in (case.segments, Segments((0, 2, 50), (1, 3))):
        largest = case.table.ranks.amax(dim=1).cpu().numpy()
        reserved.refill(segments, largest[list(segments.slots)].astype("int64"))
        memory.send()
        y = base.clone()
        lora_expand(lora_shrink(case.x[:80], *args), *args, y)
        wanted = reference(Case(**{**vars(case), "segments": segments, "y": base}))
        torch.testing.assert_close(y, wanted, rtol=1e-5, atol=2e-4)


def test_tile_map_holds_true_ranks_and_no_more(device):
    ranks = torch.tensor([[16, 8], [40, 0], [0, 0]], dtype=torch.int32, device=device)
    offsets = torch.zeros(3, 2, 4, dtype=torch.int64, device=device)
    table = LoraTable(offsets, offsets, ranks, torch.ones(3, 2, device=device))
    tile_map = tile_map_of(Segments((0, 1, 2, 12), (0, 1, 2)), table)
    (tiles,) = tile_map.tiles
    assert tiles.shape == ROW
    assert tiles.shrink.work.tolist()[1:] == [[0, 0, 1, 0], [1, 1, 2, 0], [1, 1, 2, 16], [1, 1, 2, 32]]
    assert tiles.expand.work.tolist()[1:] == [[0, 0, 1, 0], [1, 1, 2, 0]]
    assert (tile_map.rank, tile_map.rows) == (48, 12)


def test_group_table_is_made_once(device):
    from loramux_kernels.cuda.lora import group_table

    group = LoraGroup((3, 5), (300, 64))
    table = group_table(group, 256, device)
    assert table is group_table(LoraGroup((3, 5), (300, 64)), 256, device)
    assert table.blocks[:, :5].tolist() == [[0, 3, 0, 300, 0], [0, 3, 1, 300, 0], [1, 5, 0, 64, 300]]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("ranks", "rows"), [([[16], [40]], [1, 1]), ([[8], [0], [24]], [3, 4, 20]), ([[33]], [70])])
def test_lora_of_heads_reads_each_heads_columns(device, dtype, ranks, rows):
    """In both ways of a transposed product: B's columns and then A, A and then B's columns."""
    num_heads, first, width = 3, 24, 21
    case = case_on(device, dtype, ranks, rows, in_features=600, out_features=(num_heads * 64,))
    for (table, narrow), (_, wide) in permutations(by_heads(case, num_heads, first, width)):
        x, _ = head_inputs(case, num_heads, narrow.out_features[0])
        _, y = head_inputs(case, num_heads, wide.out_features[0])
        got, wanted = y.clone(), y.float()
        lora_expand(lora_shrink(x, case.pool, table, narrow, case.segments), case.pool, table, wide, case.segments, got)
        v = lora_shrink_reference(x, case.pool, table, narrow, case.segments)
        lora_expand_reference(v, case.pool, table, wide, case.segments, wanted)
        largest = wanted.abs().amax(dim=(1, 2), keepdim=True)
        assert bool(((got.float() - wanted).abs() <= TOLERANCE[dtype] * largest).all())
        assert torch.equal(got[case.segments.rows :], y[case.segments.rows :]), "base rows are left alone"
