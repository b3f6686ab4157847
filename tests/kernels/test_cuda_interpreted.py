"""GPU code in Triton's interpreter: in separate processes, because triton reads its setting when it is imported."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="triton is not installed")

ROOT = Path(__file__).resolve().parents[2]
LARGE = ("engine", "paged_attention", "fp8_kv", "lora", "sampling")
"""Files that take longer than a Python that imports torch and triton: each has its own process."""


def pieces() -> dict[str, list[str]]:
    """Return the files of each process; those of a folder that are not large share one."""
    found: dict[str, list[str]] = {}
    for folder in ("kernels", "platform/engine"):
        for file in sorted((ROOT / "tests" / folder / "cuda").glob("test_*.py")):
            name = file.stem.removeprefix("test_").removeprefix("gpu_")
            found.setdefault(name if name in LARGE else f"others of {folder}", []).append(str(file))
    return found


@pytest.mark.parametrize("files", pieces().values(), ids=pieces())
def test_gpu_code_passes_in_the_interpreter(files: list[str]) -> None:
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-p", "no:xdist", *files]
    # Use no GPU even if there is one: `pytest tests/kernels/cuda` without the interpreter tests the kernels on it.
    environment = {**os.environ, "TRITON_INTERPRET": "1", "CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, env=environment, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout[-8000:] + done.stderr[-2000:]
    assert " passed" in done.stdout
