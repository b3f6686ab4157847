"""Kernels of `engine.batch_invariant`: a row's result is the same in every bit, whichever rows are computed with it."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch
from attention_cases import Shape
from attention_cases import make_case as attention_case
from lora_cases import make_case

from loramux_kernels.cuda import lora
from loramux_kernels.cuda.fixed_product import fixed_product
from loramux_kernels.cuda.lora import lora_expand, lora_shrink
from loramux_kernels.cuda.paged_attention import paged_attention
from loramux_kernels.cuda.work_lists import TileMap, attach_tile_map
from loramux_kernels.fixed_product import FixedProducts, fixed_product_reference
from loramux_kernels.tables import AttentionBatch, Segments

pytestmark = pytest.mark.usefixtures("alike_rows")

DTYPES = [torch.float32, torch.float16] + [torch.bfloat16] * torch.cuda.is_available()  # the interpreter cannot bf16
TOLERANCE = {torch.float32: 1e-5, torch.float16: 2e-3, torch.bfloat16: 2e-2}


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("is_transposed", [False, True])
def test_fixed_product_of_a_row_is_bit_equal_for_any_number_of_rows(device, dtype, is_transposed: bool) -> None:
    """Ragged widths, a weight as a linear holds it or not, and rows that are not contiguous."""
    torch.manual_seed(0)
    weight = torch.randn(150, 70, device=device).to(dtype)
    weight = weight.T.contiguous().T if is_transposed else weight
    x, bias = torch.randn(64, 151, device=device).to(dtype)[:, 1:], torch.randn(70, device=device).to(dtype)
    whole = fixed_product(x, weight, bias)
    wanted = fixed_product_reference(x.double(), weight.double(), bias.double())
    torch.testing.assert_close(whole.double(), wanted, rtol=TOLERANCE[dtype], atol=20 * TOLERANCE[dtype])
    for first, last in ((0, 1), (9, 16), (37, 38), (20, 64)):
        assert torch.equal(fixed_product(x[first:last], weight, bias), whole[first:last]), (first, last)


@torch.inference_mode()
def test_fixed_products_are_those_of_linears_and_matrices(device) -> None:
    """Other sums are refused by their operator's name; a batched product over one input is no sum."""
    linear = torch.nn.Linear(40, 24, device=device)
    x = torch.randn(2, 9, 40, device=device)
    with FixedProducts(ValueError):
        found, plain = linear(x), x[0] @ linear.weight.T
        outer = x[:, :, :1] @ x[:, :1, :]
        with pytest.raises(ValueError, match="bmm"):
            torch.bmm(x, x.mT)
    rows = fixed_product(x.view(-1, 40), linear.weight.T, linear.bias)
    assert torch.equal(found.view(-1, 24), rows)
    assert torch.equal(plain, fixed_product(x[0], linear.weight.T, None))
    assert outer.shape == (2, 9, 40)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("others", [(), (1,), (40, 3)], ids=["alone", "with one row", "with a prompt"])
def test_adapters_of_a_row_are_bit_equal_with_any_other_rows(
    device, dtype, others: tuple[int, ...], monkeypatch
) -> None:
    """The rows of one adapter, of which there are seven or one, after those of other adapters. There are more programs
    than items, which are otherwise split among them."""
    monkeypatch.setattr(lora, "resident_programs", lambda *_: 24)
    case = make_case(dtype, [[20, 5], [64, 16], [8, 0]], [7, 40, 3], 600, (48, 24), alignment=8).to(device)

    def added(lengths: tuple[int, ...], rows: torch.Tensor) -> torch.Tensor:
        cu_seqlens = (0, *np.cumsum((*lengths, len(rows))).tolist())
        segments = Segments(cu_seqlens, (*range(1, 1 + len(lengths)), 0))
        ranks = case.table.ranks.amax(dim=1)[list(segments.slots)].cpu().numpy().astype(np.int64)
        attach_tile_map(segments, TileMap.for_step(segments, ranks, rows.device, is_invariant=True))
        x = torch.cat((case.x[7 : 7 + sum(lengths)], rows))
        y = x.new_zeros(len(x), 72)
        v = lora_shrink(x, case.pool, case.table, case.group, segments)
        lora_expand(v, case.pool, case.table, case.group, segments, y)
        return y[sum(lengths) :]

    own = case.x[:7]
    whole = added((), own)
    assert float(whole.float().abs().sum()) > 0
    assert torch.equal(added(others, own), whole)
    assert torch.equal(added(others, own[4:5]), whole[4:5])


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("window", [None, 70])
def test_attention_of_a_row_is_bit_equal_in_any_chunk_with_any_sequences(device, dtype, window: int | None) -> None:
    """A prompt whole, in chunks and as single rows, with contexts that would be cut."""
    case = attention_case([(40, 340), (1, 1500), (1, 3)], dtype, Shape(8, 2, 64, 32)).to(device)
    batch, tables = replace(case.batch, is_invariant=True), case.batch.block_table

    def attended(first: int, last: int) -> torch.Tensor:
        """The rows [first, last) of the first sequence alone."""
        own = AttentionBatch(
            cu_seqlens=torch.tensor((0, last - first), dtype=torch.int32),
            context_lens=torch.tensor((300 + last,), dtype=torch.int32),
            block_table=tables[:1],
            slot_mapping=batch.slot_mapping[first:last],
            is_invariant=True,
        )
        return paged_attention(case.query[first:last], case.layer, own, 0.1, sliding_window=window)

    whole = paged_attention(case.query, case.layer, batch, 0.1, sliding_window=window)
    for first, last in ((0, 40), (0, 13), (13, 40), (39, 40), (17, 18)):
        assert torch.equal(attended(first, last), whole[first:last]), (first, last)
