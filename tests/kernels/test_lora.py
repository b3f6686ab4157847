"""lora_shrink and lora_expand, each against float64 sums over whole matrices, on ragged segments."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from lora_cases import Case, by_heads, head_inputs, make_case

from loramux_kernels.lora import lora_expand, lora_expand_reference, lora_shrink, lora_shrink_reference
from loramux_kernels.native.loader import native_for
from loramux_kernels.tables import LoraTable, Segments

pytestmark = pytest.mark.usefixtures("native")

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 1e-2, torch.float16: 2e-3}


def check(case: Case) -> None:
    """Compare the operators' result with whole matrices in float64. Rows of the base and of rank 0 must not change."""
    dtype = case.x.dtype
    v = lora_shrink(case.x, case.pool, case.table, case.group, case.segments)
    assert v.dtype == torch.float32
    assert v.shape[:2] == (len(case.group.sites), case.segments.rows)
    y = case.y.clone()
    lora_expand(v, case.pool, case.table, case.group, case.segments, y)
    expected = case.y.double()
    for slot, start, stop in case.segments.spans:
        for site, first in enumerate(case.group.out_starts[:-1]):
            a, b = case.a[slot, site].double(), case.b[slot, site].double()
            exact = case.x[start:stop].double() @ a.T
            inner = v[site, start:stop, : len(a)]
            torch.testing.assert_close(inner.double(), exact, rtol=1e-4, atol=1e-4)
            added = inner.to(dtype).double() @ b
            expected[start:stop, first : first + b.shape[1]] += case.table.scales[slot, site].double() * added
    scale = expected.abs().amax().item() + 1 if expected.numel() else 1.0
    torch.testing.assert_close(y.double(), expected, rtol=TOLERANCE[dtype], atol=TOLERANCE[dtype] * scale * 0.1)
    assert torch.equal(y[case.segments.rows :], case.y[case.segments.rows :])


@settings(max_examples=60, deadline=None)
@given(
    dtype=st.sampled_from(DTYPES),
    ranks=st.lists(st.lists(st.integers(0, 40), min_size=2, max_size=2), min_size=1, max_size=5),
    rows=st.data(),
    in_features=st.integers(1, 100),
    out_features=st.tuples(st.integers(1, 90), st.integers(1, 90)),
    base_rows=st.integers(0, 3),
)
def test_lora_of_ragged_segments_equals_the_reference(dtype, ranks, rows, in_features, out_features, base_rows):
    counts = rows.draw(st.lists(st.integers(0, 9), min_size=len(ranks), max_size=len(ranks)))
    check(make_case(dtype, ranks, counts, in_features, out_features, base_rows))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    ("ranks", "rows"),
    [
        ([[16]], [1]),
        ([[8], [64], [1], [17]], [1, 1, 1, 1]),
        ([[33]], [130]),
        ([[0], [16]], [3, 2]),
        ([[0]], [4]),
        ([[256]], [2]),
    ],
    ids=["one row", "one row each", "prefill", "rank 0 beside 16", "rank 0 alone", "many tiles"],
)
def test_lora_of_serving_shapes_equals_the_reference(dtype, ranks, rows):
    check(make_case(dtype, ranks, rows, in_features=96, out_features=(2080,)))


def test_lora_without_adapter_rows_changes_nothing():
    case = make_case(torch.bfloat16, [[8]], [])
    check(case)
    assert case.segments.rows == 0


def test_lora_expand_takes_an_output_with_a_row_stride():
    case = make_case(torch.bfloat16, [[20, 5]], [6], out_features=(33, 64))
    wide = torch.full((8, 300), float("nan"), dtype=torch.bfloat16)
    y = wide[:, 10:107]
    y.copy_(case.y)
    v = lora_shrink(case.x, case.pool, case.table, case.group, case.segments)
    lora_expand(v, case.pool, case.table, case.group, case.segments, y)
    other = case.y.clone()
    lora_expand(v, case.pool, case.table, case.group, case.segments, other)
    assert torch.equal(y, other)
    assert wide[:, :10].isnan().all()
    assert wide[:, 107:].isnan().all()


def test_lora_shrink_takes_inputs_with_a_row_stride():
    case = make_case(torch.float32, [[20]], [6])
    wide = torch.full((8, 80), float("nan"))
    wide[:, :40] = case.x
    args = (case.pool, case.table, case.group, case.segments)
    assert torch.equal(lora_shrink(wide[:, :40], *args), lora_shrink(case.x, *args))


def test_lora_takes_offsets_beyond_32_bits():
    case = make_case(torch.bfloat16, [[16]], [2])
    far = 2**31 + 64
    try:
        pool = torch.empty(far + len(case.pool), dtype=torch.bfloat16)  # untouched memory is not held
    except RuntimeError:
        pytest.skip("no 4 GiB of address space")
    pool[far:] = case.pool
    moved = LoraTable(case.table.a_offsets + far, case.table.b_offsets + far, case.table.ranks, case.table.scales)
    near = lora_shrink(case.x, case.pool, case.table, case.group, case.segments)
    away = lora_shrink(case.x, pool, moved, case.group, case.segments)
    assert torch.equal(near, away)
    results = []
    for place, table in ((case.pool, case.table), (pool, moved)):
        results.append(case.y.clone())
        lora_expand(near, place, table, case.group, case.segments, results[-1])
    assert torch.equal(*results)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("threads", [1, 3])
def test_lora_row_is_independent_of_its_neighbours(dtype, threads):
    """Bit for bit: alone, among other revisions, in a long prefill, by one thread or many."""
    if native_for(torch.empty(0, dtype=dtype)) is None:
        pytest.skip("torch promises no such thing")
    ranks = [[24, 8], [40, 3], [16, 16]]
    case = make_case(dtype, ranks, [7, 50, 1], in_features=200, out_features=(96, 1100))
    torch.set_num_threads(threads)
    v = lora_shrink(case.x, case.pool, case.table, case.group, case.segments)
    y = case.y.clone()
    lora_expand(v, case.pool, case.table, case.group, case.segments, y)
    for slot, start, stop in case.segments.spans:
        for row in {start, (start + stop) // 2, stop - 1}:
            alone = Segments((0, 1), (slot,))
            v_alone = lora_shrink(case.x[row : row + 1], case.pool, case.table, case.group, alone)
            y_alone = case.y[row : row + 1].clone()
            lora_expand(v_alone, case.pool, case.table, case.group, alone, y_alone)
            assert torch.equal(y_alone[0], y[row])


@pytest.mark.parametrize("dtype", DTYPES)
def test_lora_references_agree_with_the_operators(dtype):
    case = make_case(dtype, [[24], [0], [7]], [3, 2, 4])
    args = (case.pool, case.table, case.group, case.segments)
    v, v_reference = lora_shrink(case.x, *args), lora_shrink_reference(case.x, *args)
    for slot, start, stop in case.segments.spans:
        rank = int(case.table.ranks[slot, 0])
        torch.testing.assert_close(v[:, start:stop, :rank], v_reference[:, start:stop, :rank], rtol=1e-4, atol=1e-4)
    y, y_reference = case.y.clone(), case.y.clone()
    lora_expand(v, *args, y)
    lora_expand_reference(v, *args, y_reference)
    torch.testing.assert_close(y, y_reference)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("ranks", "rows"), [([[16]], [1]), ([[8], [0], [37], [3]], [1, 4, 70, 5]), ([[33]], [9])])
@pytest.mark.parametrize(("num_heads", "first", "width"), [(3, 0, 40), (3, 24, 21), (1, 1, 140), (5, 7, 13)])
def test_lora_of_heads_reads_each_heads_columns(dtype, ranks, rows, num_heads, first, width):
    """In both ways of a transposed product: B's columns and then A, A and then B's columns."""
    case = make_case(dtype, ranks, rows, in_features=50, out_features=(num_heads * max(64, first + width),))
    (transposed, of_b), (table, of_a) = by_heads(case, num_heads, first, width)
    for (shrinks, narrow, size), (expands, wide, into) in (
        ((transposed, of_b, width), (transposed, of_a, 50)),
        ((table, of_a, 50), (table, of_b, width)),
    ):
        x, _ = head_inputs(case, num_heads, size)
        _, y = head_inputs(case, num_heads, into)
        v = lora_shrink(x, case.pool, shrinks, narrow, case.segments)
        assert v.shape[:2] == (num_heads, case.segments.rows)
        got, wanted = y.clone(), y.double()
        lora_expand(v, case.pool, expands, wide, case.segments, got)
        for slot, start, stop in case.segments.spans:
            a, b = case.a[slot, 0].double(), case.b[slot, 0].double()
            for head in range(num_heads):
                columns = slice(first + head * b.shape[1] // num_heads, None)
                b_of_head = b[:, columns][:, :width]
                one, other = (b_of_head, a) if size == width else (a, b_of_head)
                inner = x[start:stop, head].double() @ one.T
                torch.testing.assert_close(v[head, start:stop, : len(a)].double(), inner, rtol=1e-4, atol=1e-4)
                added = v[head, start:stop, : len(a)].to(dtype).double() @ other
                wanted[start:stop, head] += case.table.scales[slot, 0].double() * added
        scale = wanted.abs().amax().item() + 1
        torch.testing.assert_close(got.double(), wanted, rtol=TOLERANCE[dtype], atol=TOLERANCE[dtype] * scale * 0.1)
        assert torch.equal(got[case.segments.rows :], y[case.segments.rows :])
        other = y.clone()
        lora_expand_reference(
            lora_shrink_reference(x, case.pool, shrinks, narrow, case.segments),
            *(case.pool, expands, wide, case.segments, other),
        )
        torch.testing.assert_close(other.double(), wanted, rtol=TOLERANCE[dtype], atol=TOLERANCE[dtype] * scale * 0.1)
