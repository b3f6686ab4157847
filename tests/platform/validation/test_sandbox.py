"""A job may do nothing but answer: what it takes too much of ends it, and nobody else."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from loramux.validation.protocol import JobLimits
from loramux.validation.sandbox import JobCrashed, JobEnded, JobOutOfMemory, Sandbox, SandboxDied

LIMITS = JobLimits(memory_bytes=32 << 20, cpu_seconds=20, wall_seconds=60)


@pytest.fixture(scope="module")
def sandbox() -> Iterator[Sandbox]:
    os.environ["SOMEBODYS_SECRET"] = "x"
    with closing(Sandbox("sandbox_jobs", json.dumps("the setup").encode())) as sandbox:
        yield sandbox
    del os.environ["SOMEBODYS_SECRET"]


def run(sandbox: Sandbox, name: str, argument: Any = None, limits: JobLimits = LIMITS) -> Any:
    result = json.loads(bytes(sandbox.run(json.dumps([name, argument]).encode(), limits).result))
    assert result["setup"] == "the setup"
    return result["told"]


def test_a_job_sees_nothing_of_the_server(sandbox: Sandbox) -> None:
    seen = run(sandbox, "seen")
    assert "SOMEBODYS_SECRET" not in seen["environment"]
    assert "PATH" in seen["environment"]
    assert seen["nice"] >= 10
    assert seen["session"] != os.getsid(0)
    assert seen["descriptors"] <= 6  # the three standard ones, its own socket twice, and the listing itself
    assert run(sandbox, "seen")["pid"] != seen["pid"]


def test_memory_is_bounded(sandbox: Sandbox) -> None:
    assert run(sandbox, "allocate", 16 << 20) == 16 << 20
    with pytest.raises(JobOutOfMemory):
        run(sandbox, "allocate", 64 << 20)


def test_processor_time_is_bounded(sandbox: Sandbox) -> None:
    with pytest.raises(JobEnded):
        run(sandbox, "spin", limits=JobLimits(32 << 20, cpu_seconds=1, wall_seconds=60))


def test_time_is_bounded(sandbox: Sandbox) -> None:
    with pytest.raises(JobEnded):
        run(sandbox, "sleep", 600, JobLimits(32 << 20, cpu_seconds=20, wall_seconds=0.2))


def test_a_job_writes_no_file_that_it_was_not_allowed(sandbox: Sandbox, tmp_path: Path) -> None:
    with pytest.raises(JobCrashed):
        run(sandbox, "write", str(tmp_path / "x"))
    assert (tmp_path / "x").read_bytes() == b""
    run(sandbox, "write", str(tmp_path / "x"), JobLimits(32 << 20, 20, 60, file_bytes=100))
    assert len((tmp_path / "x").read_bytes()) == 100


def test_a_job_that_raises_or_exits_harms_no_other(sandbox: Sandbox) -> None:
    with pytest.raises(JobCrashed, match=r"ValueError at .*sandbox_jobs.py:\d+") as crashed:
        run(sandbox, "raise", "what it should not")
    assert "what it should not" not in str(crashed.value)
    with pytest.raises(JobEnded):
        run(sandbox, "exit", 1)
    assert run(sandbox, "allocate", 1) == 1


def test_jobs_run_beside_each_other(sandbox: Sandbox) -> None:
    with ThreadPoolExecutor(4) as threads:
        sleeper = threads.submit(run, sandbox, "sleep", 1.0)
        pids = {told["pid"] for told in threads.map(lambda _: run(sandbox, "seen"), range(8))}
        assert not sleeper.done()
    assert len(pids) == 8


def test_a_warm_process_that_died_is_started_again(sandbox: Sandbox) -> None:
    run(sandbox, "kill the warm process")
    deadline = time.monotonic() + 60
    while time.monotonic() < deadline:
        try:
            assert run(sandbox, "allocate", 1) == 1
            return
        except (SandboxDied, JobEnded):  # met it while it was dying
            continue
    raise AssertionError("it was not started again")


def test_a_module_that_does_not_start_is_said_to_have_died() -> None:
    with closing(Sandbox("no_such_module", b"1")) as sandbox, pytest.raises(SandboxDied, match="no_such_module"):
        sandbox.run(b"1", LIMITS)
