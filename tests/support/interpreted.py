"""Triton's interpreter as these tests need it: without needless work, and with products of bfloat16."""

from __future__ import annotations

import dataclasses
import os
import threading
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from loramux_kernels.device import zeros_in_large_pages

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"


def quicken_interpreter() -> None:
    """Remove work of the process's interpreter that changes no result."""
    if not INTERPRETED:
        return
    from triton.runtime import interpreter

    # It would copy each argument's whole storage back to its device; here kernels have written to it directly.
    interpreter.GridExecutor._restore_args_dev = lambda *_: None
    # It would compute each sum and product of integers again, in 64 bits, and drop the comparison if `debug` is off.
    builder = interpreter.interpreter_builder
    assert not builder.options.debug
    builder.options = dataclasses.replace(builder.options, sanitize_overflow=False)
    # It would replace all functions of the language at each launch and at each call of a function within a kernel.
    replace_language, replaced = interpreter._patch_lang, set[tuple[bool, bool]]()
    scope = SimpleNamespace(restore=lambda: None)

    def replace_once(function: Any) -> Any:
        seen = {id(value) for value in function.__globals__.values()}
        found = (id(interpreter.tl) in seen, id(interpreter.tl.core) in seen)
        if found not in replaced:
            replace_language(function)
            replaced.add(found)
        return scope

    interpreter._patch_lang = replace_once
    interpret, on_own_stack = interpreter.GridExecutor.__call__, _with_room_for_frames()
    one_launch = threading.Lock()  # ranks are threads, and the interpreter keeps a launch's program ids in a global

    def launch(*args: Any, **kwargs: Any) -> Any:
        with one_launch:
            return on_own_stack(interpret, *args, **kwargs)

    interpreter.GridExecutor.__call__ = launch


def _with_room_for_frames() -> Callable[..., Any]:
    """Return a function that calls its first argument with the others.

    CPython keeps frames in chunks of 16 KiB. A function that is called again and again at the end of a chunk makes and
    frees a chunk at each call, which was half of the time here. A frame of many variables takes a chunk that is larger
    than itself, and the frames of its callees get the rest.
    """
    variables = " = ".join(f"unused_{number}" for number in range(7000))
    made: dict[str, Any] = {}
    exec(
        f"def call(function, *args, **kwargs):\n if not function: {variables} = 0\n return function(*args, **kwargs)",
        made,
    )
    return made["call"]


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


def alike_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    """Multiply each row of a tile in the same way, as tensor cores do. The interpreter's library sums up a row
    differently at another place in the tile."""
    if not INTERPRETED:
        return
    from triton.runtime import interpreter

    def create(_builder: Any, a: Any, b: Any, d: Any, *_options: Any) -> Any:
        total = d.data.copy()
        for row, column in zip(b.data, a.data.T, strict=True):
            total += column[:, None].astype(total.dtype) * row.astype(total.dtype)
        return interpreter.TensorHandle(total, d.dtype.scalar)

    monkeypatch.setattr(interpreter.InterpreterBuilder, "create_dot", create)


def far_memory(elements: int, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """Return a flat tensor of zeros of which the host holds only what is written. Skips the test without room."""
    try:
        if device.type == "cpu":
            return zeros_in_large_pages(elements, dtype)
        return torch.zeros(elements, dtype=dtype, device=device)
    except (RuntimeError, OSError):
        pytest.skip("no 4 GiB of memory")
