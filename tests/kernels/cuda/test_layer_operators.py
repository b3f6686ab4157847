"""rms_norm, rope_write_kv and gated as Triton kernels, against the references in float32."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from layer_cases import GateCase, NormCase, RopeCase, gate_cases, norm_cases, random_norm, rope_cases

from loramux_kernels.cuda.layer_operators import gated, rms_norm, rope_write_kv
from loramux_kernels.layer_operators import gated_reference, rms_norm_reference, rope_write_kv_reference
from loramux_kernels.tables import KvLayer, Norm, OwnWeights, Rotation, Segments

TOLERANCE = {torch.float32: 2e-6, torch.float16: 3e-3}
DTYPES = list(TOLERANCE)


def assert_close(got: torch.Tensor, wanted: torch.Tensor) -> None:
    tolerance = TOLERANCE[got.dtype]
    torch.testing.assert_close(got.float(), wanted.float(), rtol=tolerance, atol=tolerance, equal_nan=True)


def moved(norm: Norm | None, device: torch.device) -> Norm | None:
    return None if norm is None else replace(norm, weight=norm.weight.to(device))


@settings(max_examples=10, deadline=None)
@given(case=norm_cases(DTYPES))
def test_rms_norm_equals_the_reference(device, case: NormCase) -> None:
    norm = moved(case.norm, device)
    x, wanted_x = case.x.to(device).clone(), case.x.to(device).clone()
    delta = None if case.delta is None else case.delta.to(device)
    assert_close(rms_norm(x, norm, delta, case.factor), rms_norm_reference(wanted_x, norm, delta, case.factor))
    assert_close(x, wanted_x)


@pytest.mark.parametrize("vectors", [1, 3], ids=["rows", "heads"])
@pytest.mark.parametrize("dtype", DTYPES)
def test_rms_norm_takes_the_weights_of_the_rows_adapters(device, dtype: torch.dtype, vectors: int) -> None:
    """Slot 2 has a weight and slot 0 has none; rows of no segment keep the norm's."""
    torch.manual_seed(0)
    width, rows = 50, 7
    pool = torch.randn(300, device=device).to(dtype)
    offsets = torch.full((3, 4), -1, device=device)
    offsets[2, 1] = 200
    x = torch.randn(rows * vectors, width, device=device).to(dtype)
    norm = moved(random_norm(width, True), device)
    own = OwnWeights(pool, offsets, 1, Segments((0, 2, 5), (0, 2)), added=1.0, vectors=vectors)
    got = rms_norm(x, norm, None, 1.0, own)
    wanted = rms_norm_reference(x, norm, own=own)
    assert_close(got, wanted)
    others = rms_norm_reference(x, norm)
    changed = (wanted != others).any(dim=1).view(rows, vectors).all(dim=1)
    assert changed.tolist() == [False, False, True, True, True, False, False]
    weights = own.of_rows(norm.weight.to(dtype), rows)
    assert_close(weights[2:5], pool[200:250].expand(3, -1))
    assert_close(weights[[0, 1, 5, 6]], norm.weight.to(dtype).expand(4, -1))


def on(case: RopeCase, device: torch.device) -> RopeCase:
    rotation = case.rotation
    return replace(
        case.copy(),
        **{name: getattr(case, name).to(device).clone() for name in ("query", "key", "value", "slot_mapping")},
        rotation=None if rotation is None else Rotation(rotation.cos.to(device), rotation.sin.to(device)),
        layer=KvLayer(case.layer.key.to(device).clone(), case.layer.value.to(device).clone()),
        query_norm=moved(case.query_norm, device),
        key_norm=moved(case.key_norm, device),
    )


@settings(max_examples=10, deadline=None)
@given(case=rope_cases(DTYPES))
def test_rope_write_kv_equals_the_reference(device, case: RopeCase) -> None:
    got, wanted = on(case, device), on(case, device)
    rope_write_kv(*got.arguments)
    rope_write_kv_reference(*wanted.arguments)
    assert_close(got.query, wanted.query)
    assert_close(got.layer.key, wanted.layer.key)
    assert_close(got.layer.value, wanted.layer.value)


def test_rope_write_kv_stores_nothing_of_a_token_without_a_slot(device) -> None:
    query, key, value = torch.randn(3, 2, 1, 8, device=device)
    layer = KvLayer(torch.zeros(1, 1, 4, 8, device=device), torch.zeros(1, 1, 4, 8, device=device))
    rope_write_kv(query, key, value, None, layer, torch.tensor([-1, 2], device=device), None, None)
    assert torch.equal(layer.key[0, 0, 2], key[1, 0])
    assert layer.key.count_nonzero() == layer.value.count_nonzero() == 8


@pytest.mark.parametrize("activation", ["silu", "gelu_tanh"])
@settings(max_examples=10, deadline=None)
@given(case=gate_cases(DTYPES))
def test_gated_equals_the_reference(device, case: GateCase, activation) -> None:
    gate, up = case.gate.to(device), case.up.to(device)
    assert_close(gated(gate, up, activation), gated_reference(gate, up, activation))
