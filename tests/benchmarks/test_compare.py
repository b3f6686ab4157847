"""The whole command: our real server and PEFT, measured and compared."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import report

COMPARE = Path(__file__).resolve().parents[2] / "benchmarks" / "compare.py"


def compare(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, str(COMPARE), *arguments], capture_output=True, text=True, check=False)


@pytest.mark.slow
def test_one_command_measures_ours_and_peft_and_they_say_the_same(tmp_path: Path) -> None:
    out = tmp_path / "out"
    smallest = ("--models", "micro", "--dtypes", "float32", "--workloads", "w24-base,w24-mix", "--threads", "1")
    done = compare(*smallest, "--out", str(out))
    assert done.returncode == 0, done.stderr
    results = report.read(out)
    assert {(m.case.system, m.case.mode) for m in results.measurements} == {
        ("loramux", "continuous"),
        ("loramux", "static"),
        ("peft", "static"),
    }
    assert len(results.measurements) == 6
    assert all(m.figures.failed == m.figures.wrong_length == 0 for m in results.measurements)
    assert [(a.same, a.requests) for a in results.agreements] == [(24, 24)] * 4
    for m in results.measurements:
        assert (m.floor is not None) == (m.case.system == "loramux")
    assert done.stdout == (out / report.REPORT).read_text() + "\n"
    again = compare(*smallest, "--out", str(out))
    assert again.returncode == 0, again.stderr
    assert report.read(out).measurements == results.measurements, "what is measured is not measured again"


@pytest.mark.parametrize(
    ("arguments", "reason"),
    [
        (["--models", "7b"], "7b not known; there are micro, 20m, 0.5b"),
        (["--workloads", "w64-mix,w65-mix"], "workload 'w65-mix' does not exist; there are w64-base"),
        (["--dtypes", "int8"], "int8 not known; there are bfloat16, float32"),
        (["--systems", "peft,vllm"], "vllm not known; there are loramux, peft"),
        (["--peer", "vllm"], "'vllm' is not vllm=/path/to/a/virtual/environment"),
        (["--peer", "vllm=/nowhere"], "/nowhere has no bin/python"),
        (["--peer", "llama.cpp=/nowhere"], "/nowhere has no bin/llama-server"),
    ],
)
def test_wrong_arguments_are_refused_with_the_way_out(arguments: list[str], reason: str) -> None:
    done = compare(*arguments)
    assert done.returncode != 0
    assert reason in done.stderr
