"""Triton's interpreter as these tests need it: without needless copies, and with products of bfloat16."""

from __future__ import annotations

import os
from typing import Any

import pytest
import torch

from loramux_kernels.device import zeros_in_large_pages

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"


def keep_arguments_in_place() -> None:
    """Leave the arguments of a launch in their memory.

    The interpreter would copy each one's whole storage back to its device; here kernels have written to it directly.
    """
    if INTERPRETED:
        from triton.runtime.interpreter import GridExecutor

        GridExecutor._restore_args_dev = lambda *_: None


def exact_bfloat16(monkeypatch: pytest.MonkeyPatch) -> None:
    """Multiply bfloat16 as a GPU does: the interpreter holds such numbers as integers, and would multiply those."""
    if not INTERPRETED:
        return
    from triton.runtime import interpreter

    create_dot = interpreter.InterpreterBuilder.create_dot

    def widened(handle: Any) -> Any:
        if handle.dtype.scalar.name != "bf16":
            return handle
        return interpreter.TensorHandle((handle.data.astype("uint32") << 16).view("float32"), interpreter.tl.float32)

    def create(builder: Any, a: Any, b: Any, d: Any, *options: Any) -> Any:
        return create_dot(builder, widened(a), widened(b), d, *options)

    monkeypatch.setattr(interpreter.InterpreterBuilder, "create_dot", create)


def far_memory(elements: int, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """Return a flat tensor of zeros of which the host holds only what is written. Skips the test without room."""
    try:
        if device.type == "cpu":
            return zeros_in_large_pages(elements, dtype)
        return torch.zeros(elements, dtype=dtype, device=device)
    except (RuntimeError, OSError):
        pytest.skip("no 4 GiB of memory")
