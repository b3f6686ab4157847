"""rescale on the CPU: each row by its own adapter's vectors, base rows and slices without vectors untouched."""

from __future__ import annotations

import torch
from hypothesis import given, settings
from rescale_cases import RescaleCase, rescale_cases

from loramux_kernels.lora import rescale


@settings(max_examples=60, deadline=None)
@given(case=rescale_cases([torch.float32, torch.bfloat16]))
def test_rescale_applies_each_rows_own_vectors(case: RescaleCase) -> None:
    y, wanted = case.y.clone(), case.y.float()
    rescale(y, case.pool, case.offsets, case.group, case.segments)
    for slot, first, last in case.segments.spans:
        for pair, a, b in zip(case.vectors[slot], case.group.out_starts, case.group.out_starts[1:], strict=False):
            if pair is not None:
                wanted[first:last, a:b] = wanted[first:last, a:b] * pair[0].float() + pair[1].float()
    torch.testing.assert_close(y, wanted.to(y.dtype))
