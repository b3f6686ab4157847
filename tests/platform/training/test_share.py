"""A job gives way to the requests of its machine: bursts within its share, and pauses first."""

from __future__ import annotations

import asyncio
import math
import os
import signal
import subprocess
import sys
from asyncio.subprocess import Process
from pathlib import Path
from typing import cast

import pytest
from listening import until

from loramux.training.share import BURST_SECONDS, BUSY, MAX_CREDIT_SECONDS, QUIET, ComputeShare

pytestmark = pytest.mark.anyio


class SignalledProcess:
    """Remembers its state."""

    def __init__(self) -> None:
        self.is_stopped = False

    def send_signal(self, number: int) -> None:
        self.is_stopped = number == signal.SIGSTOP


class Machine:
    """A share and a process on a clock of milliseconds."""

    def __init__(self, share: float) -> None:
        self.now = 0
        self.share = ComputeShare(share, lambda: self.now / 1000)
        self.process = SignalledProcess()

    def run(self, seconds: float, *, busy: bool) -> float:
        """Let requests run, or none; return the part of the time for which the process computed."""
        self.share.note_busy(busy)
        computed, turn, duration = 0, float(self.now), round(1000 * seconds)
        for _ in range(duration):
            if self.now >= turn:
                wait = self.share.next_turn()
                turn = math.inf if wait is None else self.now + 1000 * wait
            computed += not self.process.is_stopped
            self.now += 1
        return computed / duration


@pytest.mark.parametrize("share", [0.0, 0.05, 0.1, 0.5, 1.0])
async def test_job_has_its_share_beside_requests_that_never_pause(share: float) -> None:
    machine = Machine(share)
    with machine.share.limiting(cast(Process, machine.process)):
        machine.run(0.1, busy=True)
        assert machine.run(20.0, busy=True) == pytest.approx(share, abs=0.02)


async def test_job_computes_in_the_pauses_and_then_not_beside_requests() -> None:
    machine = Machine(0.1)
    with machine.share.limiting(cast(Process, machine.process)):
        for _ in range(5):
            assert machine.run(0.5, busy=False) == 1
            assert machine.run(0.5, busy=True) == 0
        machine.run(60.0, busy=False)
        rest = MAX_CREDIT_SECONDS / 0.1
        assert machine.run(rest, busy=True) == 0
        assert machine.run(BURST_SECONDS / 0.1 + 20.0, busy=True) > 0.08, "a long pause is not held against it for ever"


async def test_released_process_computes_also_beside_requests() -> None:
    machine = Machine(0.0)
    with machine.share.limiting(cast(Process, machine.process)):
        machine.run(0.1, busy=True)
        assert machine.process.is_stopped
        machine.share.release(cast(Process, machine.process))
        assert machine.run(1.0, busy=True) == 1
    assert not machine.process.is_stopped


def state_of(process: Process) -> str:
    return Path(f"/proc/{process.pid}/stat").read_text().rpartition(")")[2].split()[0]


async def becomes(process: Process, stopped: bool) -> None:
    await until(lambda: (state_of(process) == "T") == stopped)


async def test_process_is_stopped_and_continued_by_the_notes_of_its_server() -> None:
    share = ComputeShare(0.0)
    theirs, ours = os.pipe()
    process = await asyncio.create_subprocess_exec(sys.executable, "-c", "import time; time.sleep(600)")
    async with share.enforced(theirs):
        with share.limiting(process):
            os.write(ours, QUIET + BUSY)
            await becomes(process, stopped=True)
            os.write(ours, QUIET)
            await becomes(process, stopped=False)
            os.write(ours, BUSY)
            await becomes(process, stopped=True)
            os.close(ours)
            await becomes(process, stopped=False)
        os.close(theirs)
        process.kill()
        await process.wait()


async def test_stopped_process_goes_on_if_its_trainer_ends_the_limits() -> None:
    share = ComputeShare(0.0)
    process = await asyncio.create_subprocess_exec(sys.executable, "-c", "import time; time.sleep(600)")
    with share.limiting(process):
        async with share.enforced(None):
            share.note_busy(True)
            await becomes(process, stopped=True)
        await becomes(process, stopped=False)
    process.kill()
    await process.wait()


def test_job_that_gives_way_has_the_kernels_lowest_priority_on_every_thread() -> None:
    source = (
        "import os, threading; from loramux.training.child import give_way; give_way(); found = []\n"
        "thread = threading.Thread(target=lambda: found.append(os.sched_getscheduler(0))); thread.start()\n"
        "thread.join(); print(os.sched_getscheduler(0), *found, os.nice(0))"
    )
    ran = subprocess.run([sys.executable, "-c", source], check=True, capture_output=True, text=True)
    assert ran.stdout.split() == [str(os.SCHED_IDLE), str(os.SCHED_IDLE), "19"]
