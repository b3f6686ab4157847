"""The engine on the Triton kernels: on a GPU or in Triton's interpreter, as tests/kernels/cuda is run."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch

collect_ignore_glob = [] if os.environ.get("TRITON_INTERPRET") == "1" or torch.cuda.is_available() else ["test_*.py"]


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if item.path.is_relative_to(Path(__file__).parent):
            item.add_marker("gpu")
