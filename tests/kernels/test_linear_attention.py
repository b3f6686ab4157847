"""Layers with states on a CPU: the C++ operator for decoding rows against the torch reference."""

from __future__ import annotations

import pytest
import torch
from linear_cases import Sizes, make_linear_case

from loramux_kernels.linear_attention import linear_attention, linear_attention_reference
from loramux_kernels.native.loader import native_for

TOLERANCE = {torch.float32: 2e-5, torch.bfloat16: 2e-2, torch.float16: 4e-3}
SIZES = {
    "two value heads a key head": Sizes(2, 4, 8, 20),
    "odd": Sizes(1, 3, 13, 7),
    "wide": Sizes(3, 3, 128, 100),
}
SPANS = [(1, 9), (70, 0), (1, 0), (1, 2), (5, 30), (1, 300)]
CPU = torch.device("cpu")


@pytest.mark.parametrize("is_mamba", [False, True], ids=["gated delta", "mamba 2"])
@pytest.mark.parametrize("sizes", SIZES.values(), ids=SIZES)
@pytest.mark.parametrize("dtype", TOLERANCE)
def test_decoding_rows_in_cpp_equal_the_reference(dtype: torch.dtype, sizes: Sizes, is_mamba: bool) -> None:
    """Results, and the whole pool, in which pages without states are NaN."""
    if native_for(torch.empty(0, dtype=dtype)) is None:
        pytest.skip("the C++ operators do not serve this dtype here")
    case = make_linear_case(sizes, SPANS, dtype, CPU, is_mamba=is_mamba)
    wanted = case.with_copied_pool()
    expected = linear_attention_reference(*wanted.arguments)
    got = linear_attention(*case.arguments)
    scale = TOLERANCE[dtype]
    torch.testing.assert_close(got.float(), expected.float(), atol=scale, rtol=scale)
    own = case.batch.state_tables
    case.state.write(own, *case.state.read(own))  # the reference clears the rest of a unit, which nothing reads
    torch.testing.assert_close(case.state.units, wanted.state.units, atol=scale, rtol=scale, equal_nan=True)


@pytest.mark.parametrize("is_mamba", [False, True], ids=["gated delta", "mamba 2"])
def test_decoding_row_in_cpp_is_the_same_to_the_bit_beside_any_others(is_mamba: bool) -> None:
    sizes = SIZES["two value heads a key head"]
    case = make_linear_case(sizes, [(1, 9), (1, 2), (1, 300)], torch.float32, CPU, is_mamba=is_mamba)
    alone = case.with_copied_pool()
    together = linear_attention(*case.arguments)
    for i in range(3):
        parts = vars(alone.rows).values()
        rows = type(alone.rows)(*(None if part is None else part[i : i + 1] for part in parts))
        tables = (alone.batch.context_lens[i : i + 1], alone.batch.block_table[i : i + 1], alone.batch.slot_mapping)
        own = (alone.batch.state_tables[i : i + 1], alone.batch.prompt_lens[i : i + 1])
        batch = type(alone.batch)(torch.tensor([0, 1], dtype=torch.int32), *tables, *own)
        assert torch.equal(linear_attention(rows, alone.weights, alone.state, batch)[0], together[i])
