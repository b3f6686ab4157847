"""Memory of the host in large pages."""

from __future__ import annotations

import mmap

import pytest
import torch

from loramux_kernels.device import LARGE_PAGE, zeros_in_large_pages


@pytest.mark.skipif(not hasattr(mmap, "MADV_HUGEPAGE"), reason="the machine's kernel has no large pages")
@pytest.mark.parametrize("num_bytes", [LARGE_PAGE, LARGE_PAGE + 4, 9_830_400, 19_660_800])
def test_large_tensors_begin_at_a_large_page(num_bytes: int) -> None:
    tensors = [zeros_in_large_pages(num_bytes // 4, torch.float32) for _ in range(3)]
    for number, tensor in enumerate(tensors):
        assert tensor.data_ptr() % LARGE_PAGE == 0
        assert tensor.shape == (num_bytes // 4,)
        assert not tensor.any()
        tensor.fill_(number + 1)
    for number, tensor in enumerate(tensors):
        assert torch.equal(tensor, torch.full_like(tensor, number + 1)), "they share memory"


def test_small_tensors_are_zeros_too() -> None:
    tensor = zeros_in_large_pages(1000, torch.bfloat16)
    assert tensor.dtype == torch.bfloat16
    assert tensor.shape == (1000,)
    assert not tensor.any()
