"""The step's cost is measured on steps that decode, with the pool or the rows being what is short."""

import subprocess
import sys

import pytest
from specs import BENCHMARKS
from step_cost import PARTS, Bench, measure


@pytest.mark.parametrize("prefix_cache", [False, True])
@pytest.mark.parametrize("tight", [False, True])
def test_every_row_decodes_and_others_wait(tight: bool, prefix_cache: bool) -> None:
    cost = measure(Bench(8, tight=tight, prefix_cache=prefix_cache), 5)
    assert cost.plan > 0 < cost.commit
    assert cost.rows == 8 or (tight and 0 < cost.rows < 16)


def test_requests_wait_throughout() -> None:
    bench = Bench(8, tight=False, prefix_cache=False)
    for _ in range(60):
        bench.step()
    assert len(bench.scheduler.running) == 8
    assert len(bench.scheduler.queue) == 8


def test_parts_of_a_step_on_an_idle_device_are_its_whole_time() -> None:
    """In a separate process, because triton reads its setting when it is imported."""
    pytest.importorskip("triton")
    options = ("--rows", "3", "--contexts", "40", "--kinds", "plain", "all", "--steps", "5", "--rounds", "1")
    command = [sys.executable, str(BENCHMARKS / "step_cost.py"), "gpu", *options]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    names, *rows = (line.split() for line in done.stdout.splitlines())
    assert names == ["rows", "context", "kind", *PARTS, "rest", "total"]
    assert [row[:3] for row in rows] == [["3", "40", "plain"], ["3", "40", "all"]]
    for _, _, _, *parts, total in rows:
        assert all(float(part) >= 0 for part in parts)
        assert float(total) >= max(map(float, parts)) > 0
