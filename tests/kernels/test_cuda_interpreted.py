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
FILES = sorted(
    str(file.relative_to(ROOT))
    for folder in ("tests/kernels/cuda", "tests/platform/engine/cuda")
    for file in (ROOT / folder).glob("test_*.py")
)


@pytest.mark.parametrize("file", FILES)
def test_gpu_code_passes_in_the_interpreter(file: str) -> None:
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-p", "no:xdist", file]
    # Use no GPU even if there is one: `pytest tests/kernels/cuda` without the interpreter tests the kernels on it.
    environment = {**os.environ, "TRITON_INTERPRET": "1", "CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, env=environment, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout[-8000:] + done.stderr[-2000:]
    assert " passed" in done.stdout
