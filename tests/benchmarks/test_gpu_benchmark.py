"""The GPU benchmark without a GPU: its grid and floors, its tables, and its whole flow at tiny shapes."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from floors import Ceilings, StepBytes, Work, adapter_bytes, attention_work, kv_bytes_per_token, lora_work
from grid import FULL, LLAMA_8B, QUICK, Mix
from tables import Report, geometric_mean

ROOT = Path(__file__).resolve().parents[2]
GPU = ROOT / "benchmarks" / "gpu"

needs_triton = pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="triton is not installed")


def test_the_grid_is_the_one_that_was_promised():
    cells = list(FULL.decodes())
    assert len(cells) == len(set(cells))
    assert {batch for batch, _, _ in cells} == {1, 8, 32, 64, 128}
    assert {512, 4096} <= {context for _, context, _ in cells}
    at_64 = {mix.name for batch, _, mix in cells if batch == 64}
    assert {"base", "1 r16", "8 r64", "32 mixed", "all r16"} <= at_64
    # One row cannot ask for eight adapters: such a mix is the one-adapter mix again.
    assert {mix.name for batch, _, mix in cells if batch == 1} == {"base", "1 r16", "1 r64", "1 mixed"}


def test_base_cells_come_before_those_that_are_compared_with_them():
    seen = set()
    for batch, context, mix in FULL.decodes():
        if mix.adapters == 0:
            seen.add((batch, context))
        assert (batch, context) in seen, "the overhead is over this cell's base"


def test_rows_of_an_adapter_lie_together_and_ranks_take_turns():
    mix = Mix("3", 3, (8, 64))
    assert mix.slots(7) == [0, 0, 0, 1, 1, 2, 2]
    assert [mix.rank(adapter) for adapter in range(3)] == [8, 64, 8]
    assert Mix("base", 0, (16,)).slots(2) == [-1, -1]
    assert Mix("all", None, (16,)).slots(3) == [0, 1, 2]


def test_floors_against_published_sizes():
    """Llama-3.1-8B: 83.9 MB for rank 16 on all linears, 128 KiB of KV a token."""
    assert adapter_bytes(LLAMA_8B, 16) == 83_886_080
    assert kv_bytes_per_token(LLAMA_8B) == 131_072
    read = StepBytes(weights=15 * 10**9, kv=64 * 1024 * 131_072, adapters=8 * 83_886_080)
    assert read.omega == pytest.approx(0.0284, abs=1e-3)
    assert read.floor_ms(Ceilings(4e9, 1)) == pytest.approx(6.07, abs=0.01)


def test_the_floor_is_the_slower_of_memory_and_arithmetic():
    ceilings = Ceilings(bytes_per_ms=10, flops_per_ms=100)
    assert Work(50, 100).floor_ms(ceilings) == 5
    assert Work(50, 1000).floor_ms(ceilings) == 10
    lora = lora_work(100, (40, 60), [8, 8, 16], [8, 16])
    assert lora.num_bytes == 2 * (24 * 300 + 3 * 300)
    assert lora.flops == 2 * 32 * 300
    decode, prefill = attention_work(LLAMA_8B, [(1, 10)]), attention_work(LLAMA_8B, [(3, 3)])
    assert decode.flops == 4 * 10 * 4096
    assert prefill.flops == 4 * (3 + 2 + 1) * 4096


def test_tables(tmp_path, capsys):
    report = Report({"card": "none"})
    report.add("Kernels", rows=8, us=12.3456, note=None)
    report.add("Kernels", rows=64, us=0.5, note="fits not")
    report.write(tmp_path)
    text = (tmp_path / "results.md").read_text()
    assert "- card: none" in text
    assert "| rows | us | note |\n|---|---|---|\n| 8 | 12.35 | - |\n| 64 | 0.5 | fits not |" in text
    assert json.loads((tmp_path / "results.json").read_text())["sections"]["Kernels"][1]["rows"] == 64
    assert "Kernels: rows 8" in capsys.readouterr().out
    assert geometric_mean([2.0, 8.0]) == pytest.approx(4.0)


BLOCKED = """
import sys
class Blocked:
    def find_spec(self, name, *_):
        if name.split(".")[0] in {"litestar", "sqlalchemy", "granian", "alembic", "psycopg", "openai", "click"}:
            raise ImportError(f"{name} is not on a GPU machine")
sys.meta_path.insert(0, Blocked())
import runpy
sys.argv = ["gpu", *sys.argv[1:]]
runpy.run_path(sys.argv.pop(1), run_name="__main__")
"""


def benchmark(*arguments: str) -> subprocess.CompletedProcess[str]:
    roots = os.pathsep.join(str(ROOT / name) for name in ("kernels", "adapters", "platform"))
    environment = {**os.environ, "PYTHONPATH": roots, "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-c", BLOCKED, str(GPU), *arguments]
    return subprocess.run(command, env=environment, capture_output=True, text=True, check=False, cwd=ROOT)


@needs_triton
def test_the_whole_flow_at_tiny_shapes_and_without_a_web_framework_or_sql(tmp_path):
    done = benchmark("--device", "cpu", "--quick", "--out", str(tmp_path))
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-4000:]
    results = json.loads((tmp_path / "results.json").read_text())
    sections = results["sections"]
    assert sections.keys() == {
        "Ceilings", "LoRA shrink and expand", "Paged attention, one layer", "KV write, one layer", "Sampling",
        "PEFT's decode step, one adapter", "Decode step", "Prefill step", "End to end",
    }  # fmt: skip
    assert len(sections["Decode step"]) == len(list(QUICK.decodes()))
    assert all(row["note"] == "" for row in sections["Decode step"] + sections["Prefill step"])
    assert {row["output_tokens"] for row in sections["End to end"]} == {sections["End to end"][0]["output_tokens"]}
    assert results["facts"]["card"].startswith("no GPU")


def test_a_peer_that_is_not_there_is_named(tmp_path):
    done = benchmark("--device", "cpu", "--quick", "--peer", "vllm", "--out", str(tmp_path))
    assert done.returncode == 2
    assert "give NAME=PATH with NAME one of vllm, sglang" in done.stderr
