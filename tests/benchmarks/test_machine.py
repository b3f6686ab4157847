"""The use of a machine by a run is measured: memory of the whole process tree, and processor time by owner."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Iterator

import psutil
import pytest
from machine import Watch, describe, tree_pss

HOLD = "import subprocess, sys, time; {body}; print('ready', flush=True); time.sleep(60)"


def end(process: subprocess.Popen[bytes]) -> None:
    """Kill a process and its children."""
    if process.poll() is None:
        for one in [*psutil.Process(process.pid).children(recursive=True), process]:
            one.kill()
        process.wait()


@pytest.fixture
def parent() -> Iterator[subprocess.Popen[bytes]]:
    """A process whose child holds 200 MB."""
    child = HOLD.format(body="data = bytearray(200_000_000); data[::4096] = b'x' * len(data[::4096])")
    body = f"c = subprocess.Popen([sys.executable, '-c', {child!r}], stdout=subprocess.PIPE); c.stdout.readline()"
    process = subprocess.Popen([sys.executable, "-c", HOLD.format(body=body)], stdout=subprocess.PIPE)
    assert process.stdout is not None
    process.stdout.readline()
    yield process
    end(process)
    process.stdout.close()


def test_memory_is_that_of_the_whole_tree(parent: subprocess.Popen[bytes]) -> None:
    assert 200_000_000 < tree_pss(psutil.Process(parent.pid)) < 400_000_000


def test_a_watch_sees_memory_even_in_a_window_too_short_to_sample(parent: subprocess.Popen[bytes]) -> None:
    with Watch(parent.pid) as watch:
        pass
    assert watch.resources.peak_pss_bytes > 200_000_000


def test_own_processor_time_is_not_the_others() -> None:
    """This process works: the time is its own."""
    with Watch(os.getpid()) as watch:
        until = time.process_time() + 0.5
        while time.process_time() < until:
            pass
    assert 0 < watch.resources.own_cores < 1.2


def test_a_process_that_is_gone_takes_nothing(parent: subprocess.Popen[bytes]) -> None:
    with Watch(parent.pid) as watch:
        end(parent)
    assert watch.resources.peak_pss_bytes == 0


def test_the_machine_describes_itself() -> None:
    machine = describe(threads=1)
    assert machine.cores >= 1
    assert machine.cpu
    assert machine.packages["torch"] != "absent"
    assert 1e9 < machine.bandwidth_bytes_per_s < 1e13
