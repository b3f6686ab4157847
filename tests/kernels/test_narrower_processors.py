"""The C++ operators as other processors compile them: in a separate process, because one process loads one library."""

from __future__ import annotations

import os
import platform
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from loramux_kernels.native import compiler
from loramux_kernels.native.prebuilt import LEVELS, processor_features

pytestmark = [
    pytest.mark.usefixtures("native"),
    pytest.mark.skipif(platform.machine() != "x86_64", reason="names features of x86 processors"),
]

AVX2 = ("-mno-avx512f", "-mno-avx512vl", "-mno-avx512bf16")
EMULATED_TILES = "-DLORAMUX_EMULATED_TILES"
OPERATORS = ("packed_linear", "lora", "paged_attention", "layer_operators", "kv_cache", "fp8_kv", "token_draws")
BY_TILES = ("packed_linear", "lora", "format_choice")


@pytest.mark.parametrize(
    ("command", "flags", "operators"),
    [
        pytest.param((), AVX2, OPERATORS, id="AVX2"),
        pytest.param((), (EMULATED_TILES,), BY_TILES, id="AMX, emulated"),
        pytest.param((), ("-mno-avx512bf16",), OPERATORS, id="AVX-512 without bf16", marks=pytest.mark.slow),
        pytest.param(("clang++",), (), OPERATORS, id="clang", marks=pytest.mark.slow),
    ],
)
def test_operators_are_right_on_another_processor_and_of_another_compiler(command, flags, operators):
    if command and shutil.which(command[0]) is None:
        pytest.skip(f"there is no {command[0]} here")
    if EMULATED_TILES in flags and "avx512_bf16" not in processor_features():
        pytest.skip("around the tiles, the code needs AVX-512 with bf16")
    root = Path(__file__).resolve().parents[2]
    files = [f"tests/kernels/test_{name}.py" for name in operators]
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-rs", "-p", "no:cacheprovider", "-p", "no:xdist", *files],
        env={**os.environ, "CXX": " ".join((*(command or compiler.find_compiler()), *flags))},
        cwd=root,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout[-8000:] + done.stderr[-2000:]
    assert " passed" in done.stdout
    assert EMULATED_TILES not in flags or "no tiles" not in done.stdout


@pytest.mark.parametrize("command", ["g++", "clang++"])
@pytest.mark.parametrize(("operator", "most"), [("linear", 1.6), ("attention", 4), ("lora", 4)])
def test_sums_stay_in_registers(operator, most, command, tmp_path):
    """GCC keeps what does not fit a register in memory: there, it stored 6 to 18 vectors for each multiplication."""
    if shutil.which(command) is None:
        pytest.skip(f"there is no {command} here")
    source = Path(compiler.__file__).parent / f"{operator}.cpp"
    assembly = tmp_path / "operator.s"
    flags = (*compiler.FLAGS, "-march=native", "-mfma", *AVX2)
    subprocess.run([command, *flags, "-S", str(source), "-o", str(assembly)], check=True)
    lines = assembly.read_text().splitlines()
    multiplications = sum(bool(re.search(r"\bvfn?m(add|sub)\d+ps\b.*%ymm", line)) for line in lines)
    stores = sum(bool(re.search(r"\bvmov\w+\s+%[xy]mm\d+, [^%]", line)) for line in lines)
    assert multiplications > 100
    assert stores < most * multiplications


@pytest.mark.slow
@pytest.mark.parametrize("level", LEVELS["aarch64"], ids=lambda level: level.name)
def test_operators_compile_for_arm(level, tmp_path):
    """Debian's cross compiler is enough for it; `tools/emulated_arm.sh` also runs the operators' tests."""
    command = shutil.which("aarch64-linux-gnu-g++")
    if command is None:
        pytest.skip("there is no aarch64-linux-gnu-g++ here")
    units = [str(source) for source in compiler.sources() if source.suffix == ".cpp"]
    library = tmp_path / "libloramux.so"
    compiler.compile_library([command, *compiler.FLAGS, *level.flags, *units, *compiler.LIBRARIES], library)
    assert library.read_bytes()[18:20] == b"\xb7\x00"  # EM_AARCH64
