"""rms_norm, rope_write_kv and gated on the CPU: their C++ twins against the references in float32."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from layer_cases import GateCase, NormCase, RopeCase, gate_cases, norm_cases, rope_cases

from loramux_kernels.layer_operators import (
    Activation,
    gated,
    gated_reference,
    rms_norm,
    rms_norm_reference,
    rope_write_kv,
    rope_write_kv_reference,
)
from loramux_kernels.tables import KvLayer, Rotation

TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 2e-2, torch.float16: 3e-3}
DTYPES = list(TOLERANCE)

pytestmark = pytest.mark.usefixtures("native")


def assert_close(got: torch.Tensor, wanted: torch.Tensor) -> None:
    tolerance = TOLERANCE[got.dtype]
    torch.testing.assert_close(got.float(), wanted.float(), rtol=tolerance, atol=tolerance, equal_nan=True)


@settings(max_examples=60, deadline=None)
@given(case=norm_cases(DTYPES))
def test_rms_norm_equals_the_reference(case: NormCase) -> None:
    x, wanted_x = case.x.clone(), case.x.clone()
    y = rms_norm(x, case.norm, case.delta, case.factor)
    assert_close(y, rms_norm_reference(wanted_x, case.norm, case.delta, case.factor))
    assert_close(x, wanted_x)


@settings(max_examples=60, deadline=None)
@given(case=rope_cases(DTYPES))
def test_rope_write_kv_equals_the_reference(case: RopeCase) -> None:
    got, wanted = case, case.copy()
    rope_write_kv(*got.arguments)
    rope_write_kv_reference(*wanted.arguments)
    assert_close(got.query, wanted.query)
    assert_close(got.layer.key, wanted.layer.key)
    assert_close(got.layer.value, wanted.layer.value)


def test_rope_write_kv_takes_heads_longer_than_the_native_operator_does() -> None:
    query, key, value = torch.randn(3, 1, 2, 600)
    layer = KvLayer(torch.zeros(1, 2, 4, 600), torch.zeros(1, 2, 4, 600))
    turned = query.clone()
    rope_write_kv(turned, key, value, Rotation(torch.zeros(1, 600), torch.ones(1, 600)), layer, torch.tensor([3]))
    assert_close(turned, torch.cat((-query[..., 300:], query[..., :300]), dim=-1))
    assert torch.equal(layer.value[0, :, 3], value[0])


@pytest.mark.parametrize("activation", ["silu", "gelu_tanh"])
@settings(max_examples=40, deadline=None)
@given(case=gate_cases(DTYPES))
def test_gated_equals_the_reference(case: GateCase, activation: Activation) -> None:
    assert_close(gated(case.gate, case.up, activation), gated_reference(case.gate, case.up, activation))


@pytest.mark.parametrize("activation", ["silu", "gelu_tanh"])
def test_gated_of_huge_gates_is_finite(activation: Activation) -> None:
    gate = torch.tensor([[-3e38, -200.0, -88.0, 0.0, 88.0, 200.0, 1e30, torch.inf, torch.nan]])
    got = gated(gate, torch.ones_like(gate), activation)
    assert_close(got, torch.tensor([[0.0, 0.0, 0.0, 0.0, 88.0, 200.0, 1e30, torch.inf, torch.nan]]))
