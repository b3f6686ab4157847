"""route, grouped_linear, combine and the LoRA kernels on a mixture's rows, against the torch references."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from lora_cases import make_case

from loramux_kernels.cuda.lora import lora_expand, lora_shrink
from loramux_kernels.cuda.mixture import FEW_ROWS, combine, expert_segments, grouped_linear, route
from loramux_kernels.lora import lora_expand_reference, lora_shrink_reference
from loramux_kernels.mixture import combine_reference, grouped_linear_reference, route_reference
from loramux_kernels.tables import Routes, Segments

TOLERANCE = {torch.float32: 1e-5, torch.float16: 2e-3, torch.bfloat16: 1.6e-2}


def some_choices(tokens: int, experts: int, choices: int, seed: int = 0) -> torch.Tensor:
    """Different experts for each token, the first ones more often."""
    generator = torch.Generator().manual_seed(seed)
    odds = torch.linspace(3.0, 0.1, experts).expand(tokens, -1)
    return torch.multinomial(odds, choices, generator=generator)


def some_padding(tokens: int, padding: int, device: torch.device) -> torch.Tensor:
    return torch.where(torch.arange(tokens) < tokens - padding, 7, -1).to(device)


@settings(max_examples=6, deadline=None)
@given(tokens=st.integers(1, 600), experts=st.integers(1, 9), choices=st.integers(1, 4), padding=st.integers(0, 9))
def test_route_equals_the_reference(device, tokens: int, experts: int, choices: int, padding: int) -> None:
    chosen = some_choices(tokens, experts, min(choices, experts)).to(device)
    kv_slots = some_padding(tokens, padding, device)
    for slots in (None, kv_slots):
        got, wanted = route(chosen, experts, slots), route_reference(chosen, experts, slots)
        for name in ("tokens", "experts", "places", "starts"):
            assert torch.equal(getattr(got, name), getattr(wanted, name)), name


@pytest.mark.parametrize("dtype", list(TOLERANCE))
@pytest.mark.parametrize(("tokens", "experts"), [(5, 6), (40, 3)], ids=["few rows", "many rows"])
def test_mixture_equals_the_reference(device, tokens: int, experts: int, dtype: torch.dtype, exact_bfloat16) -> None:
    """Ragged widths, a transposed weight with biases, experts without a row, and tokens that only pad."""
    torch.manual_seed(0)
    choices, width, columns = 2, 150, 70
    assert (tokens * choices <= FEW_ROWS * experts) is (tokens == 5)
    chosen, padding = some_choices(tokens, experts, choices).to(device), 2
    routes = route_reference(chosen, experts, some_padding(tokens, padding, device))
    live = int(routes.starts[-1])
    x = torch.randn(tokens * choices, width, device=device).to(dtype)
    x[live:] = float("nan")
    weight = torch.randn(experts, columns, width, device=device).to(dtype)
    bias = torch.randn(experts, columns, device=device).to(dtype)
    for held, own in ((weight, None), (weight.transpose(1, 2).contiguous().transpose(1, 2), bias)):
        y = grouped_linear(x, held, own, routes.starts)
        wanted = grouped_linear_reference(x.float(), held.float(), None if own is None else own.float(), routes.starts)
        largest = wanted[:live].abs().amax()
        assert y.dtype == dtype
        torch.testing.assert_close(y[:live].float(), wanted[:live], rtol=0, atol=TOLERANCE[dtype] * float(largest))
        weights = torch.rand(tokens, choices, device=device)
        got, exact = combine(y, routes, weights), combine_reference(y.float(), routes, weights)
        real = slice(0, tokens - padding)
        torch.testing.assert_close(got[real].float(), exact[real], rtol=TOLERANCE[dtype], atol=TOLERANCE[dtype])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("max_rank", [32, 80])
def test_mixture_adapters_on_experts_equal_the_reference(device, dtype, max_rank: int, exact_bfloat16) -> None:
    """Adapters of several ranks on some experts; base rows and padding are left alone."""
    experts, tokens, choices, num_sites, first_site = 3, 50, 2, 5, 1
    ranks = [[0, 8, 0, max_rank, 0], [0, 0, 17, 5, 0], [0] * 5]
    case = make_case(dtype, [[rank] for row in ranks for rank in row], [1] * 15, in_features=72, alignment=8).to(device)
    step = Segments((0, 20, 31, 33), (0, 1, 2))
    chosen = some_choices(tokens, experts, choices).to(device)
    routes = route(chosen, experts, some_padding(tokens, 4, device))
    table = type(case.table)(**{k: v[first_site:] for k, v in vars(case.table).items() if isinstance(v, torch.Tensor)})
    x = torch.randn(tokens * choices, 72, device=device).to(dtype)
    y = torch.randn(tokens * choices, 48, device=device).to(dtype)
    got, wanted = y.clone(), y.to(torch.float32, copy=True)
    segments = expert_segments(routes, step, num_sites, max_rank)
    lora_expand(lora_shrink(x, case.pool, table, case.group, segments), case.pool, table, case.group, segments, got)
    for row in range(len(x)):
        one = slice(row, row + 1)
        if (place := adapter_row(routes, step, row, num_sites)) is not None:
            alone = Segments((0, 1), (place,))
            v = lora_shrink_reference(x[one], case.pool, table, case.group, alone)
            lora_expand_reference(v, case.pool, table, case.group, alone, wanted[one])
    assert (wanted != y.float()).any(dim=1).sum() > 20
    scale = wanted.abs().amax(dim=1, keepdim=True)
    assert bool(((got.float() - wanted).abs() <= TOLERANCE[dtype] * scale).all())


def adapter_row(routes: Routes, step: Segments, row: int, num_sites: int) -> int | None:
    """Return the row of the table that a route's row is multiplied by."""
    token, expert = int(routes.tokens[row]), int(routes.experts[row])
    if row >= int(routes.starts[-1]) or token >= step.rows:
        return None
    slot = next(slot for slot, first, last in step.spans if first <= token < last)
    return slot * num_sites + expert
