"""The C++ operators' life outside the operators: building, caching, one pool of threads, and doing without."""

from __future__ import annotations

import logging
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from loramux_kernels import PackedLinear, packed_linear_reference
from loramux_kernels.native import compiler, native_library

LORA = """
import logging, torch
logging.basicConfig(format="%(message)s")
from loramux_kernels import *
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


def test_without_a_compiler_the_answers_are_the_same_and_the_log_says_what_to_install(tmp_path):
    environment = {k: v for k, v in os.environ.items() if k != "CXX"}
    done = run({**environment, "PATH": str(tmp_path), "LORAMUX_CACHE_DIR": str(tmp_path)})
    assert done.stdout.strip() == EXPECTED
    assert done.stderr.count("no C++ compiler") == 1
    assert "g++" in done.stderr


def test_a_compiler_that_fails_is_named(tmp_path):
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
def test_a_second_build_is_the_first_one(monkeypatch):
    library = compiler.compiled_library()
    monkeypatch.setattr(compiler, "_compile", lambda *_: pytest.fail("compiled again"))
    assert compiler.compiled_library() == library


@pytest.mark.usefixtures("native")
def test_nothing_else_is_left_in_the_cache():
    library = compiler.compiled_library()
    assert [path.name for path in library.parent.iterdir()] == [library.name]


def test_another_source_is_another_library(monkeypatch, tmp_path):
    command = ("c++",)
    source = tmp_path / "a.cpp"
    source.write_text("int a;")
    first = compiler._fingerprint(command, [source])
    source.write_text("int b;")
    assert compiler._fingerprint(command, [source]) != first
    assert compiler._fingerprint((*command, "-O2"), [source]) != compiler._fingerprint(command, [source])


@pytest.mark.usefixtures("native")
def test_one_pool_of_threads():
    """A second OpenMP runtime in the process would have threads of its own."""
    maps = Path("/proc/self/maps")
    if not maps.exists():
        pytest.skip("needs /proc")
    torch.ones(1000, 1000) @ torch.ones(1000, 1000)
    weights = [torch.randn(512, 512)]
    PackedLinear(weights, [None])(torch.randn(8, 512))
    runtimes = {line.split()[-1] for line in maps.read_text().splitlines() if "omp" in line.rpartition("/")[2]}
    assert len(runtimes) == 1
    before = len(list(Path("/proc/self/task").iterdir()))
    for _ in range(20):
        PackedLinear(weights, [None])(torch.randn(8, 512))
        torch.ones(1000, 1000) @ torch.ones(1000, 1000)
    assert len(list(Path("/proc/self/task").iterdir())) == before


@pytest.mark.usefixtures("native")
def test_without_the_compiled_operators_linears_are_torch_s(monkeypatch, caplog):
    def fail() -> Path:
        raise compiler.NativeUnavailable("no C++ compiler on PATH")

    monkeypatch.setattr("loramux_kernels.native.compiled_library", fail)
    native_library.cache_clear()
    try:
        with caplog.at_level(logging.WARNING):
            weights = [torch.randn(48, 32)]
            x = torch.randn(3, 32)
            assert torch.equal(PackedLinear(weights, [None])(x), packed_linear_reference(x, weights, [None]))
            PackedLinear(weights, [None])
        assert [record.levelname for record in caplog.records] == ["WARNING"]
    finally:
        native_library.cache_clear()
