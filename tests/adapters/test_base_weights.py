"""Fitting to the base: DoRA's factors equal those of the merged weight, and copies must equal the base's own."""

from __future__ import annotations

import contextlib
import dataclasses

import pytest
import torch
from torch import nn

from loramux_adapters import base_weights
from loramux_adapters.base_weights import BaseWeights, LocalMatrix, base_linear, dora_columns, fit_to_base
from loramux_adapters.components import AdapterPlan, BaseCopy
from loramux_adapters.errors import AdapterRejected
from loramux_adapters.weights import AdapterWeights, LoraWeights
from loramux_kernels.packed_linear import PackedLinear


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("rank", [1, 19])
def test_dora_factors_equal_those_of_the_merged_weight(rank: int, bias: bool) -> None:
    """Weights are packed: the second of two linears that are computed together."""
    torch.manual_seed(rank)
    first, second = nn.Linear(24, 16, bias=bias), nn.Linear(24, 40, bias=bias)
    packed = PackedLinear([m.weight.data for m in (first, second)], [m.bias for m in (first, second)])
    pair = LoraWeights(torch.randn(rank, 24), torch.randn(40, rank), 1.7)
    magnitude = torch.rand(40) + 0.5
    with torch.no_grad():
        known = base_linear(second, packed, slice(16, 56))
        factors, shifts = dora_columns(magnitude, pair, known, "m")
        merged = second.weight + pair.scale * pair.b @ pair.a
        wanted = magnitude / merged.norm(dim=1)
        torch.testing.assert_close(factors, wanted, rtol=1e-5, atol=1e-6)
        x = torch.randn(3, 24)
        got = (second(x) + pair.scale * x @ pair.a.T @ pair.b.T) * factors + shifts
        expected = x @ (wanted[:, None] * merged).T + (second.bias if bias else 0)
    torch.testing.assert_close(got, expected, rtol=1e-4, atol=1e-4)


def test_dora_factors_beyond_the_dtype_are_refused() -> None:
    linear = nn.Linear(8, 8).to(torch.float16)
    known = base_linear(linear, linear, slice(None))
    nothing = LoraWeights(torch.zeros(1, 8).half(), torch.zeros(8, 1).half(), 1.0)
    with pytest.raises(AdapterRejected, match="DoRA's factors") as caught, torch.no_grad():
        dora_columns(torch.full((8,), 60_000.0).half(), nothing, known, "m")
    assert caught.value.code == "weights_overflow"


def test_base_copy_that_differs_is_refused() -> None:
    own = torch.randn(5, 4)
    base = BaseWeights({}, {"embed": LocalMatrix(own)})
    plan = AdapterPlan((), 0, copies=(BaseCopy("embed", 5, 4, "base_layer.weight"),))
    weights = AdapterWeights(plan, {}, copies={"embed": own.clone()})
    assert not fit_to_base(weights, base).copies
    other = dataclasses.replace(weights, copies={"embed": own + 1e-3})
    with pytest.raises(AdapterRejected, match="save_embedding_layers=False") as caught:
        fit_to_base(other, base)
    assert (caught.value.code, caught.value.field) == ("base_differs", "embed.base_layer.weight")


@pytest.mark.parametrize("stored", [torch.float32, torch.float16])
def test_base_copy_of_a_trainer_in_bfloat16_is_the_bases(stored: torch.dtype) -> None:
    own = torch.randn(5, 4).to(stored)
    base = BaseWeights({}, {"embed": LocalMatrix(own)})
    plan = AdapterPlan((), 0, copies=(BaseCopy("embed", 5, 4, "base_layer.weight"),))
    rounded = own.to(torch.bfloat16).to(stored)
    assert not torch.equal(rounded, own)
    assert not fit_to_base(AdapterWeights(plan, {}, copies={"embed": rounded}), base).copies
    other = rounded.clone()
    other[3, 2] *= 1 + 2**-7  # the next value of bfloat16
    with pytest.raises(AdapterRejected) as caught:
        fit_to_base(AdapterWeights(plan, {}, copies={"embed": other}), base)
    assert caught.value.code == "base_differs"


def test_work_aside_of_one_device_has_one_stream(monkeypatch: pytest.MonkeyPatch) -> None:
    """cuBLAS keeps a workspace for every stream that it has seen, and a load has hundreds of linears."""
    made: list[torch.device] = []

    class Stream:
        def __init__(self, device: torch.device) -> None:
            made.append(device)

        def synchronize(self) -> None:
            pass

    monkeypatch.setattr(torch.cuda, "Stream", Stream)
    monkeypatch.setattr(torch.cuda, "stream", lambda _: contextlib.nullcontext())
    card = torch.device("cuda", 7)
    for _ in range(3):
        with base_weights._aside(card):
            pass
    assert made == [card]
