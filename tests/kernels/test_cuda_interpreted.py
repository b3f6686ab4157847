"""GPU code in Triton's interpreter: in a separate process, because triton reads its setting when it is imported."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="triton is not installed")

FOLDERS = ("tests/kernels/cuda", "tests/platform/engine/cuda")


def test_gpu_kernels_and_engine_pass_in_the_interpreter() -> None:
    root = Path(__file__).resolve().parents[2]
    command = [
        sys.executable,
        "-m",
        "pytest",
        "-q",
        "-p",
        "no:cacheprovider",
        "-n",
        "auto",
        *(str(root / f) for f in FOLDERS),
    ]
    # Use no GPU even if there is one: `pytest tests/kernels/cuda` without the interpreter tests the kernels on it.
    environment = {**os.environ, "TRITON_INTERPRET": "1", "CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, env=environment, cwd=root, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout[-8000:] + done.stderr[-2000:]
    assert " passed" in done.stdout
