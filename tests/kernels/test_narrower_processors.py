"""The C++ operators as other processors compile them: in a process of its own, since one process loads one library."""

from __future__ import annotations

import os
import platform
import subprocess
import sys
from pathlib import Path

import pytest

from loramux_kernels.native import compiler

pytestmark = [
    pytest.mark.usefixtures("native"),
    pytest.mark.skipif(platform.machine() != "x86_64", reason="names features of x86 processors"),
]

OPERATORS = ("packed_linear", "lora", "paged_attention", "layer_operators", "kv_cache", "fp8_kv", "token_draws")


@pytest.mark.parametrize(
    "left_out",
    [
        pytest.param(("avx512f", "avx512vl", "avx512bf16"), id="AVX2"),
        pytest.param(("avx512bf16",), id="AVX-512 without bf16", marks=pytest.mark.slow),
    ],
)
def test_operators_are_right_on_a_narrower_processor(left_out):
    root = Path(__file__).resolve().parents[2]
    files = [f"tests/kernels/test_{name}.py" for name in OPERATORS]
    compile_for_it = " ".join((*compiler.find_compiler(), *(f"-mno-{feature}" for feature in left_out)))
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-p", "no:xdist", *files],
        env={**os.environ, "CXX": compile_for_it},
        cwd=root,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout[-8000:] + done.stderr[-2000:]
    assert " passed" in done.stdout
