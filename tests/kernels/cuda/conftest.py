"""The kernels' own tests: on a GPU as they are compiled, elsewhere in Triton's interpreter.

    pytest -m gpu                                  # where a GPU is
    TRITON_INTERPRET=1 pytest tests/kernels/cuda   # anywhere; `tests/kernels/test_cuda_interpreted.py` does this

Without either nothing here is collected.
"""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from interpreted import INTERPRETED, alike_rows, exact_bfloat16, quicken_interpreter

quicken_interpreter()

collect_ignore_glob = [] if INTERPRETED or torch.cuda.is_available() else ["test_*.py"]


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if item.path.is_relative_to(Path(__file__).parent):
            item.add_marker("gpu")


@pytest.fixture(scope="session")
def device() -> torch.device:
    """The device on which the kernels run."""
    return torch.device("cpu" if INTERPRETED else "cuda")


@pytest.fixture(autouse=True)
def _poisoned_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    """New tensors start as NaN, so that an element that no kernel wrote shows."""

    def poisoned(make):
        def made(*args, **kwargs):
            tensor = make(*args, **kwargs)
            return tensor.fill_(float("nan") if tensor.is_floating_point() else -1)

        return made

    monkeypatch.setattr(torch.Tensor, "new_empty", poisoned(torch.Tensor.new_empty))
    monkeypatch.setattr(torch, "empty", poisoned(torch.empty))


@pytest.fixture(name="alike_rows")
def _alike_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    alike_rows(monkeypatch)


@pytest.fixture(name="exact_bfloat16")
def _exact_bfloat16(monkeypatch: pytest.MonkeyPatch) -> None:
    exact_bfloat16(monkeypatch)
