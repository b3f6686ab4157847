"""Linear attention's kernels against the torch reference: results, states, and what must not change."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch
from linear_cases import TAPS, Case, Sizes, make_linear_case

from loramux_kernels.cuda.linear_attention import gated_norm, linear_attention
from loramux_kernels.cuda.short_convolution import short_convolution
from loramux_kernels.cuda.work_lists import STATE_CHUNK, attach_states, reserve_states
from loramux_kernels.linear_attention import (
    gated_norm_reference,
    linear_attention_reference,
    short_convolution_reference,
)
from loramux_kernels.staged_memory import StagedMemory
from loramux_kernels.tables import AttentionBatch, StateLayer, StateShape

TOLERANCE = {torch.float32: 2e-5, torch.bfloat16: 2e-2, torch.float16: 4e-3}

SIZES = {
    "two value heads a key head": Sizes(2, 4, 8, 20),
    "as many": Sizes(3, 3, 16, 16),
    "one": Sizes(1, 1, 24, 40),
}
MIXED = [(1, 9), (STATE_CHUNK + 38, 0), (1, 0), (STATE_CHUNK + 1, 50), (2, 7), (STATE_CHUNK, 0), (1, 300), (5, 0)]
"""Decoding rows, prompts of one token and of several chunks, and chunks of prompts shorter than the convolution."""
FEW = [(1, 9), (STATE_CHUNK + 1, 50), (1, 0), (2, 7)]


def check(case: Case, dtype: torch.dtype) -> None:
    """Compare results and the whole pool, NaN included."""
    wanted = case.with_copied_pool()
    expected = linear_attention_reference(*wanted.arguments)
    got = linear_attention(*case.arguments)
    count, scale = case.batch.spans[-1][1], TOLERANCE[dtype]
    assert got.dtype == dtype
    torch.testing.assert_close(got[:count].float(), expected[:count].float(), atol=scale, rtol=scale)
    own = case.batch.state_tables
    case.state.write(own, *case.state.read(own))  # the reference clears the rest of a unit, which nothing reads
    torch.testing.assert_close(case.state.units, wanted.state.units, atol=scale, rtol=scale, equal_nan=True)


@pytest.mark.parametrize("by_key_head", [False, True], ids=["by kind", "by key head"])
@pytest.mark.parametrize("sizes", SIZES.values(), ids=SIZES)
def test_linear_attention_of_mixed_steps_equals_the_reference(device, sizes: Sizes, by_key_head: bool) -> None:
    check(make_linear_case(sizes, MIXED, torch.float32, device, by_key_head=by_key_head, padding=3), torch.float32)


@pytest.mark.parametrize("sizes", SIZES.values(), ids=SIZES)
def test_mamba2_of_mixed_steps_equals_the_reference(device, sizes: Sizes) -> None:
    check(make_linear_case(sizes, MIXED, torch.float32, device, padding=3, is_mamba=True), torch.float32)


@pytest.mark.parametrize("is_mamba", [False, True], ids=["gated delta", "mamba 2"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_linear_attention_in_half_precision_equals_the_reference(device, dtype: torch.dtype, is_mamba: bool) -> None:
    check(make_linear_case(SIZES["two value heads a key head"], FEW, dtype, device, is_mamba=is_mamba), dtype)


@pytest.mark.parametrize("spans", [[(1, 4), (1, 0)], [(40, 3)]], ids=["single rows", "a prompt"])
@pytest.mark.parametrize(
    ("sizes", "is_mamba"),
    [(Sizes(1, 2, 128, 128), False), (Sizes(1, 3, 128, 64), True), (Sizes(1, 1, 256, 64), True)],
    ids=["gated delta", "mamba 2", "mamba 2, wide states"],
)
def test_linear_attention_of_published_head_sizes_equals_the_reference(device, spans, sizes, is_mamba: bool) -> None:
    check(make_linear_case(sizes, spans, torch.float32, device, is_mamba=is_mamba), torch.float32)


DRAFTED = [(1, 9), (4, 9), (STATE_CHUNK + 38, 0), (6, 3), (70, 50), (2, 7), (2, 0), (STATE_CHUNK + 2, 40), (1, 8)]
DRAFTS = [0, 3, 0, 4, STATE_CHUNK + 8, 1, 1, 2, 0]


@pytest.mark.parametrize("is_mamba", [False, True], ids=["gated delta", "mamba 2"])
def test_linear_attention_stores_the_state_before_drafts(device, is_mamba: bool) -> None:
    """After one row, fewer than the convolution reads and more than a chunk, of one draft and of more than a chunk."""
    case = make_linear_case(SIZES["two value heads a key head"], DRAFTED, torch.float32, device, is_mamba=is_mamba)
    batch = replace(case.batch, draft_lens=torch.tensor(DRAFTS, dtype=torch.int32))
    check(replace(case, batch=batch), torch.float32)
    memory = StagedMemory(1 << 14, device)
    tiles = reserve_states(len(DRAFTED), batch.spans[-1][1], memory)
    tiles.refill(np.array(batch.spans), np.array(batch.prompt_ends), None, np.array(DRAFTS))
    memory.send()
    attach_states(batch := replace(batch), tiles)
    check(replace(case, batch=batch), torch.float32)


def test_short_convolution_stores_the_inputs_before_drafts(device) -> None:
    case = make_linear_case(Sizes(1, 1, 24, 40), DRAFTED, torch.float32, device)
    batch = replace(case.batch, draft_lens=torch.tensor(DRAFTS, dtype=torch.int32))
    shape = StateShape(0, 1, 64 * TAPS, 64, TAPS)
    units = torch.randn(len(DRAFTED), 1, shape.unit, device=device)
    tables = torch.arange(len(DRAFTED), dtype=torch.int32, device=device)[:, None]
    batch = replace(batch, state_tables=tables)
    x, kernel = torch.randn(batch.spans[-1][1], 64, device=device), torch.randn(64, TAPS + 1, device=device)
    state, wanted = StateLayer(shape, units, 0), StateLayer(shape, units.clone(), 0)
    got = short_convolution(x, kernel, None, state, batch)
    expected = short_convolution_reference(x, kernel, None, wanted, batch)
    torch.testing.assert_close(got, expected, atol=2e-5, rtol=2e-5)
    torch.testing.assert_close(state.units, wanted.units)


@pytest.mark.parametrize("is_mamba", [False, True], ids=["gated delta", "mamba 2"])
@pytest.mark.parametrize("cuts", [(1, 99), (2, 31, 67), (STATE_CHUNK, 1, 1, 66), (50, 50)])
def test_linear_attention_of_a_prompt_in_pieces_equals_the_whole(device, cuts: tuple[int, ...], is_mamba) -> None:
    sizes = SIZES["two value heads a key head"]
    whole = make_linear_case(sizes, [(100, 0)], torch.float32, device, is_mamba=is_mamba)
    expected = linear_attention_reference(*whole.with_copied_pool().arguments)
    start = 0
    for length in cuts:
        piece = make_linear_case(sizes, [(length, start)], torch.float32, device)
        parts = vars(whole.rows).values()
        rows = type(whole.rows)(*(None if part is None else part[start : start + length] for part in parts))
        tables = {"state_tables": whole.batch.state_tables, "prompt_lens": whole.batch.prompt_lens}
        batch = type(whole.batch)(**vars(piece.batch) | tables)
        got = linear_attention(rows, whole.weights, whole.state, batch)
        torch.testing.assert_close(got, expected[start : start + length], atol=5e-5, rtol=5e-5)
        start += length


def test_linear_attention_of_a_repeated_token_loses_no_digits(device) -> None:
    """Keys that are all alike, with step sizes of one and no decay, are the worst case of the triangular system."""
    case = make_linear_case(Sizes(1, 1, 16, 16), [(64, 0)], torch.float32, device)
    for part, value in ((case.rows.query, 1.0), (case.rows.key, 1.0), (case.rows.b, 30.0), (case.rows.a, -30.0)):
        part.fill_(value)
    check(case, torch.float32)


def test_linear_attention_lists_that_are_refilled_serve_every_step(device) -> None:
    """Reserved for more than a step holds, and filled by a larger step before."""
    sizes, memory = SIZES["one"], StagedMemory(1 << 14, device)
    tiles = reserve_states(9, 400, memory)

    def refill(batch: AttentionBatch) -> None:
        tiles.refill(np.array(batch.spans), np.array(batch.prompt_ends), None)
        memory.send()

    for seed, spans in enumerate((FEW, [(1, 3)], [(6, 0), (1, 2)])):
        case = make_linear_case(sizes, spans, torch.float32, device, padding=5, seed=seed)
        refill(case.batch)
        attach_states(case.batch, tiles)
        check(case, torch.float32)
    case = make_linear_case(sizes, [(1, 3), (1, 0), (1, 8)], torch.float32, device, padding=2)
    refill(case.batch)
    attach_states(case.batch, tiles.of_single_rows)
    check(case, torch.float32)


@pytest.mark.parametrize("dtype", TOLERANCE)
def test_gated_norm_after_the_gate_equals_the_reference(device, dtype: torch.dtype) -> None:
    gate = torch.randn(7, 3 * 37, device=device).to(dtype)[:, :74].unflatten(1, (2, 1, 37))
    x, weight = (torch.randn(*shape, device=device).to(dtype) for shape in ((7, 2, 37), (2, 37)))
    got = gated_norm(x, gate, weight, 1e-6, gates_first=True)
    expected = gated_norm_reference(x, gate, weight, 1e-6, gates_first=True)
    torch.testing.assert_close(got.float(), expected.float(), atol=TOLERANCE[dtype], rtol=TOLERANCE[dtype])


@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("by_key_head", [False, True], ids=["by kind", "by key head"])
def test_gated_norm_equals_the_reference(device, dtype: torch.dtype, by_key_head: bool) -> None:
    gate = make_linear_case(Sizes(3, 6, 8, 20), [(7, 0)], dtype, device, by_key_head=by_key_head).gate
    x, weight = torch.randn(7, 6, 20, device=device).to(dtype), torch.randn(20, device=device).to(dtype)
    got, expected = gated_norm(x, gate, weight, 1e-6), gated_norm_reference(x, gate, weight, 1e-6)
    assert got.dtype == dtype
    torch.testing.assert_close(got.float(), expected.float(), atol=TOLERANCE[dtype], rtol=TOLERANCE[dtype])
