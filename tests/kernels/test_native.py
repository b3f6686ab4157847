"""The C++ operators' life outside the operators: building, caching, one pool of threads, and doing without."""

from __future__ import annotations

import ctypes
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from loramux_kernels.native import compiler
from loramux_kernels.native.loader import NativeLoader, loaded_libraries
from loramux_kernels.packed_linear import PackedLinear, packed_linear_reference

LORA = """
import logging, torch
logging.basicConfig(format="%(message)s")
from loramux_kernels.lora import lora_expand, lora_shrink
from loramux_kernels.tables import LoraGroup, LoraTable, Segments
pool = torch.arange(64, dtype=torch.float32)
table = LoraTable(
    torch.tensor([[[0]]]), torch.tensor([[[32]]]), torch.ones(1, 1, dtype=torch.int32), torch.ones(1, 1)
)
group, segments = LoraGroup((0,), (8,)), Segments((0, 2), (0,))
y = torch.zeros(2, 8)
lora_expand(lora_shrink(torch.ones(2, 4), pool, table, group, segments), pool, table, group, segments, y)
print(y[1].tolist())
"""


def run(environment: dict[str, str]) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", LORA], env=environment, capture_output=True, text=True, check=True, timeout=120
    )


EXPECTED = str([6.0 * v for v in range(32, 40)])


def test_native_without_a_compiler_answers_the_same_and_logs_what_to_install(tmp_path):
    environment = {k: v for k, v in os.environ.items() if k != "CXX"}
    done = run({**environment, "PATH": str(tmp_path), "LORAMUX_CACHE_DIR": str(tmp_path)})
    assert done.stdout.strip() == EXPECTED
    assert done.stderr.count("no C++ compiler") == 1
    assert "g++" in done.stderr


def test_native_failing_compiler_is_named_in_the_log(tmp_path):
    broken = tmp_path / "c++"
    broken.write_text("#!/bin/sh\necho 'x.cpp:1: error: no luck' >&2\nexit 1\n")
    broken.chmod(0o755)
    environment = {
        **os.environ,
        "PATH": f"{tmp_path}:{os.environ['PATH']}",
        "LORAMUX_CACHE_DIR": str(tmp_path / "cache"),
    }
    environment.pop("CXX", None)
    done = run(environment)
    assert done.stdout.strip() == EXPECTED
    assert "no luck" in done.stderr


@pytest.mark.usefixtures("native")
def test_native_second_build_is_taken_from_the_cache(monkeypatch):
    library = compiler.compiled_library()
    monkeypatch.setattr(compiler, "compile_library", lambda *_: pytest.fail("compiled again"))
    assert compiler.compiled_library() == library


@pytest.mark.usefixtures("native")
def test_native_first_build_is_announced_before_the_compiler_runs(monkeypatch, tmp_path, caplog):
    """A compiler takes minutes on a busy machine: a first start without a line looks like one that hangs."""
    before: list[str] = []
    monkeypatch.setenv("LORAMUX_CACHE_DIR", str(tmp_path))
    monkeypatch.setattr(compiler, "compile_library", lambda *_: before.extend(caplog.messages))
    with caplog.at_level("INFO"):
        compiler.compiled_library()
    assert [line for line in before if "compiling the C++ operators" in line]


@pytest.mark.usefixtures("native")
def test_native_cache_holds_the_library_only():
    library = compiler.compiled_library()
    assert [path.name for path in library.parent.iterdir()] == [library.name]


def test_native_library_is_named_by_its_sources_and_flags(monkeypatch, tmp_path):
    command = ("c++",)
    source = tmp_path / "a.cpp"
    source.write_text("int a;")
    first = compiler._fingerprint(command, [source])
    source.write_text("int b;")
    assert compiler._fingerprint(command, [source]) != first
    assert compiler._fingerprint((*command, "-O2"), [source]) != compiler._fingerprint(command, [source])


@pytest.mark.usefixtures("native")
@pytest.mark.skipif(shutil.which("gcc") is None, reason="there is no gcc")
def test_native_library_built_with_gcc_as_cxx_loads(monkeypatch, tmp_path):
    source = tmp_path / "a.cpp"
    source.write_text(
        "#include <stdexcept>\n#include <string>\n"
        'extern "C" __attribute__((visibility("default"))) int length(int n) {\n'
        "  try { throw std::runtime_error(std::string(n, 'x')); }\n"
        "  catch (const std::exception& e) { return std::string(e.what()).size(); }\n}\n"
    )
    monkeypatch.setenv("CXX", "gcc")
    monkeypatch.setenv("LORAMUX_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.setattr(compiler, "sources", lambda: [source])
    assert compiler.find_compiler() == (shutil.which("gcc"),)
    assert ctypes.CDLL(str(compiler.compiled_library())).length(70) == 70


@pytest.mark.usefixtures("native")
def test_native_operators_use_torchs_threads():
    """A second OpenMP runtime in the process would have additional threads."""
    maps = Path("/proc/self/maps")
    if not maps.exists():
        pytest.skip("needs /proc")
    torch.ones(1000, 1000) @ torch.ones(1000, 1000)
    weights = [torch.randn(512, 512)]
    PackedLinear(weights, [None])(torch.randn(8, 512))
    mapped = {line.split()[-1] for line in maps.read_text().splitlines()}
    runtimes = {path for path in mapped if re.match(r"lib[gi]?omp\d*[.-]", Path(path).name)}
    assert len(runtimes) == 1
    before = len(list(Path("/proc/self/task").iterdir()))
    for _ in range(20):
        PackedLinear(weights, [None])(torch.randn(8, 512))
        torch.ones(1000, 1000) @ torch.ones(1000, 1000)
    assert len(list(Path("/proc/self/task").iterdir())) == before


@pytest.mark.usefixtures("native")
def test_native_failure_is_logged_once_and_linears_are_torchs(monkeypatch, caplog):
    def fail() -> Path:
        raise compiler.NativeUnavailable("no C++ compiler on PATH")

    monkeypatch.setattr("loramux_kernels.native.loader._loader", NativeLoader(fail))
    weights = [torch.randn(48, 32)]
    x = torch.randn(3, 32)
    assert torch.equal(PackedLinear(weights, [None])(x), packed_linear_reference(x, weights, [None]))
    PackedLinear(weights, [None])
    assert [record.levelname for record in caplog.records] == ["ERROR"], "once, and loudly"


@pytest.mark.usefixtures("native")
def test_native_failed_build_is_tried_again_after_a_growing_pause(caplog):
    now, tries, broken = [0.0], [], [True]

    def find() -> Path:
        tries.append(now[0])
        if broken[0]:
            raise compiler.NativeUnavailable("no space left on device")
        return compiler.compiled_library()

    def look() -> object:
        found = loader.library()
        if loader.retrying is not None:
            loader.retrying.join()
        return found or loader.library()

    loader = NativeLoader(find, clock=lambda: now[0])
    assert look() is None
    assert look() is None
    now[0] = 9.9
    assert look() is None
    assert tries == [0.0]
    now[0] = 10.0
    assert look() is None
    now[0] = 29.9
    assert look() is None
    assert tries == [0.0, 10.0]
    broken[0], now[0] = False, 30.0
    assert look() is not None
    now[0] = 1000.0
    assert look() is not None
    assert tries == [0.0, 10.0, 30.0]
    assert [record.levelname for record in caplog.records] == ["ERROR", "WARNING", "WARNING"]


@pytest.mark.skipif(not Path("/proc/self/maps").exists(), reason="reads what Linux says of the process")
def test_library_with_a_name_of_its_own_is_found_once_loaded(tmp_path):
    source = tmp_path / "made.c"
    source.write_text("int of_its_own(void) { return 7; }")
    library = tmp_path / "libfront test-1a2b.so.1.0.0"
    subprocess.run([*compiler.find_compiler(), "-shared", "-fPIC", str(source), "-o", str(library)], check=True)
    assert loaded_libraries("libfront") == []
    ctypes.CDLL(str(library))
    assert loaded_libraries("libfront") == [str(library)]
