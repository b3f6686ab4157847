"""Which of an operator's implementations serves a tensor."""

from __future__ import annotations

import os

import torch


def runs_triton(tensor: torch.Tensor) -> bool:
    """Whether the Triton kernels serve `tensor`: on a GPU, or anywhere under TRITON_INTERPRET=1, which is for tests."""
    return tensor.is_cuda or os.environ.get("TRITON_INTERPRET") == "1"
