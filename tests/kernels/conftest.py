"""Operators run by their C++ twins here; the references that stand in for them are tested beside them."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from loramux_kernels.native import native_library


@pytest.fixture(autouse=True)
def _two_threads() -> Iterator[None]:
    """Enough to show a mistake in sharing the work; the suite may run beside others."""
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="session")
def native() -> None:
    """Skip where the C++ operators cannot be compiled: the test would compare the reference with itself."""
    if native_library() is None:
        native_library.cache_clear()  # an earlier test of this process may have found no compiler, or no file left
    if native_library() is None:
        pytest.skip("no C++ compiler")
