"""Matrices with a row for each token, scattered over pages, read as one matrix."""

from __future__ import annotations

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from loramux_adapters.bank import PagedRows, VocabularyExtras
from loramux_adapters.weights import Matrix, MatrixKind, lay_out


def scattered(dense: torch.Tensor, page: int, seed: int) -> PagedRows:
    """`dense` in pages of a pool that is otherwise NaN."""
    matrix = Matrix("m", MatrixKind.ROWS, *dense.shape, fills_pages=True)
    layout = lay_out([matrix], page, dense.itemsize)
    pages = torch.randperm(layout.num_pages + 3, generator=torch.Generator().manual_seed(seed)).tolist()
    pool = torch.full(((layout.num_pages + 3) * page,), float("nan"))
    for block in layout.blocks:
        start = pages[block.page] * page
        pool[start : start + block.size] = dense[block.start : block.start + block.rows].flatten()
    return PagedRows(pool, page, [pages[block.page] for block in layout.blocks], matrix)


@settings(max_examples=40, deadline=None)
@given(
    rows=st.integers(1, 60), width=st.integers(1, 12), page=st.integers(12, 90), count=st.integers(0, 5),
    seed=st.integers(0, 99),
)  # fmt: skip
def test_paged_rows_read_as_one_matrix(rows: int, width: int, page: int, count: int, seed: int) -> None:
    torch.manual_seed(seed)
    dense = torch.randn(rows, width)
    paged = scattered(dense, page, seed)
    index = torch.randint(rows, (count,))
    assert torch.equal(paged.gather(index), dense[index])
    down, up = torch.randn(count, width), torch.randn(count, rows)
    torch.testing.assert_close(paged.times_rows(down), down @ dense.T)
    torch.testing.assert_close(paged.times_columns(up), up @ dense, rtol=1e-4, atol=1e-5)
    assert torch.equal(torch.cat([block for _, block in paged.blocks()]), dense)


def test_token_rows_replace_only_their_tokens() -> None:
    tokens, rows = torch.tensor([2, 5, 9]), torch.randn(3, 4)
    part = VocabularyExtras(rows=scattered(rows, 8, 1), token_ids=tokens)
    ids, y = torch.tensor([9, 0, 2, 10, 5, 9]), torch.randn(6, 4)
    wanted = y.clone()
    wanted[[0, 2, 4, 5]] = 3 * rows[[2, 0, 1, 2]]
    part.change_embeddings(y, ids, 3.0)
    assert torch.equal(y, wanted)
    x, logits = torch.randn(2, 4), torch.randn(2, 11)
    wanted = logits.clone()
    wanted[:, tokens] = x @ rows.T
    part.change_logits(logits, x)
    torch.testing.assert_close(logits, wanted)


def test_head_pair_changes_its_own_tokens_where_another_adapter_of_the_step_has_more() -> None:
    a, b = torch.randn(2, 4), torch.randn(11, 2)
    part = VocabularyExtras(pair=(scattered(a, 8, 1), scattered(b, 8, 2), 0.5))
    x, logits = torch.randn(3, 4), torch.randn(3, 16)
    wanted = logits.clone()
    wanted[:, :11] += 0.5 * (x @ a.T @ b.T)
    part.change_logits(logits, x)
    torch.testing.assert_close(logits, wanted)
