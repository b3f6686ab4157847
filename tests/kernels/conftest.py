"""Operators run by their C++ twins here; the references that replace them are tested too."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from loramux_kernels.native import compiler
from loramux_kernels.native.loader import native_library


@pytest.fixture(autouse=True)
def _two_threads() -> Iterator[None]:
    """Use two threads: enough to show a mistake in sharing the work, because the suite may run together with others."""
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="session")
def native() -> None:
    """Skip if there is no C++ compiler: the test would compare the reference with itself.

    If there is a compiler, operators that do not compile are a failure and not a reason to skip.
    """
    try:
        compiler.find_compiler()
    except compiler.NativeUnavailable as missing:
        pytest.skip(str(missing))
    compiler.compiled_library()
    assert native_library() is not None
