"""rescale as a Triton kernel, against its torch reference in float32."""

from __future__ import annotations

import torch
from hypothesis import given, settings
from rescale_cases import RescaleCase, rescale_cases

from loramux_kernels.cuda.lora import rescale
from loramux_kernels.lora import rescale_reference

TOLERANCE = {torch.float32: 1e-6, torch.float16: 1e-3}


@settings(max_examples=25, deadline=None)
@given(case=rescale_cases([torch.float32, torch.float16]))
def test_rescale_of_ragged_segments_equals_the_reference(device, case: RescaleCase) -> None:
    case = case.to(device)
    y, wanted = case.y.clone(), case.y.float()
    rescale(y, case.pool, case.offsets, case.group, case.segments)
    rescale_reference(wanted, case.pool, case.offsets, case.group, case.segments)
    torch.testing.assert_close(y.float(), wanted, rtol=TOLERANCE[y.dtype], atol=TOLERANCE[y.dtype])
    assert torch.equal(y[case.segments.rows :], case.y[case.segments.rows :]), "base rows are left alone"
