"""Jobs in sandboxes: limits end the job that exceeds them and no other."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from pathlib import Path
from typing import Any

import msgspec
import pytest

from loramux.common.sandbox.jail import may_leave_network
from loramux.common.sandbox.sandbox import (
    JobCrashed,
    JobEnded,
    JobKilled,
    JobLimits,
    JobOutOfMemory,
    Sandbox,
    SandboxDied,
    SandboxUnusable,
)

LIMITS = JobLimits(memory_bytes=32 << 20, cpu_seconds=20, wall_seconds=60)


@pytest.fixture(scope="module")
def sandbox() -> Iterator[Sandbox]:
    os.environ["SERVER_SECRET"] = "x"
    with closing(Sandbox("sandbox_jobs", json.dumps("the setup").encode())) as sandbox:
        yield sandbox
    del os.environ["SERVER_SECRET"]


def run(sandbox: Sandbox, name: str, argument: Any = None, limits: JobLimits = LIMITS) -> Any:
    result = json.loads(bytes(sandbox.run(json.dumps([name, argument]).encode(), limits).value))
    assert result["setup"] == "the setup"
    return result["told"]


def test_sandbox_job_sees_nothing_of_the_server(sandbox: Sandbox) -> None:
    seen = run(sandbox, "seen")
    assert "SERVER_SECRET" not in seen["environment"]
    assert "PATH" in seen["environment"]
    assert seen["nice"] >= 10
    assert seen["session"] != os.getsid(0)
    assert seen["descriptors"] <= 6  # the three standard ones, its own socket twice, and the listing itself
    assert run(sandbox, "seen")["pid"] != seen["pid"]


def test_sandbox_memory_is_bounded(sandbox: Sandbox) -> None:
    assert run(sandbox, "allocate", 16 << 20) == 16 << 20
    with pytest.raises(JobOutOfMemory):
        run(sandbox, "allocate", 64 << 20)


def test_sandbox_processor_time_is_bounded(sandbox: Sandbox) -> None:
    with pytest.raises(JobEnded):
        run(sandbox, "spin", limits=JobLimits(32 << 20, cpu_seconds=1, wall_seconds=60))


def test_sandbox_wall_time_is_bounded(sandbox: Sandbox) -> None:
    with pytest.raises(JobEnded):
        run(sandbox, "sleep", 600, JobLimits(32 << 20, cpu_seconds=20, wall_seconds=0.2))


def test_sandbox_job_writes_no_larger_file_than_allowed(sandbox: Sandbox, tmp_path: Path) -> None:
    own = msgspec.structs.replace(LIMITS, writable=(str(tmp_path),))
    with pytest.raises(JobCrashed):
        run(sandbox, "write", str(tmp_path / "x"), own)
    assert (tmp_path / "x").read_bytes() == b""
    run(sandbox, "write", str(tmp_path / "x"), msgspec.structs.replace(own, file_bytes=100))
    assert len((tmp_path / "x").read_bytes()) == 100


def test_sandbox_job_that_raises_or_exits_harms_no_other(sandbox: Sandbox) -> None:
    with pytest.raises(JobCrashed, match=r"ValueError at .*sandbox_jobs.py:\d+") as crashed:
        run(sandbox, "raise", "what it should not")
    assert "what it should not" not in str(crashed.value)
    with pytest.raises(JobEnded):
        run(sandbox, "exit", 1)
    assert run(sandbox, "allocate", 1) == 1


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM])
def test_sandbox_job_killed_from_outside_is_no_fault_of_the_job(sandbox: Sandbox, number: signal.Signals) -> None:
    warm = run(sandbox, "seen")["parent"]
    with pytest.raises(JobKilled, match=f"killed by the signal {number}"):
        run(sandbox, "end by", number)
    assert run(sandbox, "seen")["parent"] == warm


USAGE = '{"cpu_seconds": 0, "peak_bytes": 0}'


@pytest.mark.parametrize(
    "beginning",
    ['{"usage": ', f'{{"usage": {USAGE}, "value": 1, "bulk_bytes": 3}}\nab', '{"value": ' + 100_000 * "["],
    ids=["half of the JSON", "half of the bulk", "JSON of depth"],
)
def test_sandbox_job_killed_while_it_answers_is_no_fault_of_the_job(sandbox: Sandbox, beginning: str) -> None:
    with pytest.raises(JobKilled):
        run(sandbox, "answer and die", beginning)


@pytest.mark.parametrize("number", [signal.SIGSEGV, signal.SIGABRT, signal.SIGPROF, signal.SIGALRM])
def test_sandbox_job_ended_by_its_code_or_its_limits_has_the_fault(sandbox: Sandbox, number: signal.Signals) -> None:
    with pytest.raises(JobEnded):
        run(sandbox, "end by", number)


def test_sandbox_is_ready_before_its_first_job_if_it_is_started() -> None:
    with closing(Sandbox("sandbox_jobs", json.dumps("the setup").encode())) as sandbox:
        sandbox.start()
        process = sandbox._process
        sandbox.start()
        assert process is not None
        assert run(sandbox, "seen")["parent"] == process.pid


def test_sandbox_jobs_run_concurrently(sandbox: Sandbox) -> None:
    with ThreadPoolExecutor(4) as threads:
        sleeper = threads.submit(run, sandbox, "sleep", 1.0)
        pids = {told["pid"] for told in threads.map(lambda _: run(sandbox, "seen"), range(8))}
        assert not sleeper.done()
    assert len(pids) == 8


def test_sandbox_warm_process_that_died_is_restarted(sandbox: Sandbox) -> None:
    os.kill(run(sandbox, "seen")["parent"], signal.SIGKILL)
    deadline = time.monotonic() + 60
    while time.monotonic() < deadline:
        try:
            assert run(sandbox, "allocate", 1) == 1
            return
        except (SandboxDied, JobEnded):  # met it while it was dying
            continue
    raise AssertionError("it was not started again")


def state_of(pid: int) -> str | None:
    """Return the letter of a process's state; None for one that does not exist, or was reaped."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except (FileNotFoundError, ProcessLookupError):
        return None


def gone(pid: int) -> bool:
    """Wait until a process is gone without a trace; False if it stays, as a zombie or alive."""
    deadline = time.monotonic() + 120
    while time.monotonic() < deadline:
        if state_of(pid) is None:
            return True
        time.sleep(0.02)
    return False


def test_sandbox_processes_leave_no_zombies() -> None:
    with closing(Sandbox("sandbox_jobs", json.dumps("the setup").encode())) as sandbox:
        seen = run(sandbox, "seen")
        assert gone(seen["pid"]), "a job that answered"
        with pytest.raises(JobEnded):
            run(sandbox, "sleep", 600, JobLimits(32 << 20, cpu_seconds=20, wall_seconds=0.1))
        assert gone(run(sandbox, "orphan", 0.2)), "a child that a job left behind"
        assert [pid for pid in children_of(seen["parent"]) if state_of(pid) == "Z"] == []
        os.kill(seen["parent"], signal.SIGKILL)
        assert gone(seen["parent"]), "a warm process that ended, before the next job"


def children_of(pid: int) -> list[int]:
    return [int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


def test_sandbox_job_reaches_no_network_unless_it_says_so(sandbox: Sandbox) -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        job = json.dumps(["connects", listener.getsockname()[1]]).encode()
        result = sandbox.run(job, LIMITS)
    assert json.loads(bytes(result.value))["told"] is not may_unshare_network(), (
        "where the kernel allows it, it is done"
    )
    assert may_leave_network() is may_unshare_network()


def may_unshare_network() -> bool:
    """Read the kernel's value in a separate process, with another tool."""
    flags = ["--net"] if os.geteuid() == 0 else ["--user", "--net"]
    return subprocess.run(["unshare", *flags, "true"], check=False, capture_output=True).returncode == 0


def test_sandbox_interrupt_from_the_terminal_is_left_to_the_server(capfd: pytest.CaptureFixture[str]) -> None:
    with closing(Sandbox("sandbox_jobs", json.dumps("the setup").encode())) as sandbox:
        warm = run(sandbox, "seen")["parent"]
        os.kill(warm, signal.SIGINT)
        assert run(sandbox, "seen")["parent"] == warm
    assert gone(warm)
    assert capfd.readouterr().err == ""


def test_sandbox_module_that_does_not_start_is_reported_as_died() -> None:
    with closing(Sandbox("no_such_module", b"1")) as sandbox, pytest.raises(SandboxDied, match="no_such_module"):
        sandbox.run(b"1", LIMITS)


def test_sandbox_whose_preparation_raises_says_why_and_tries_no_second_time(capfd: pytest.CaptureFixture[str]) -> None:
    with closing(Sandbox("sandbox_jobs:prepare_wrongly", json.dumps("wrong").encode())) as sandbox:
        for _ in range(2):
            with pytest.raises(SandboxUnusable, match="ValueError: the setup says 'wrong'"):
                sandbox.run(b"1", LIMITS)
    assert capfd.readouterr().err.count("Traceback") == 1, "one warm process answered both"


def test_sandbox_whose_preparation_lacks_a_file_is_started_again() -> None:
    with closing(Sandbox("sandbox_jobs:prepare_wrongly", json.dumps("no file").encode())) as sandbox:
        with pytest.raises(SandboxDied) as died:
            sandbox.run(b"1", LIMITS)
        assert not isinstance(died.value, SandboxUnusable)
