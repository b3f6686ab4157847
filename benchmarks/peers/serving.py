"""A server process for the length of a block: started, waited for, and stopped with all its children."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

import httpx
from loadgen import Target

START_SECONDS = 600.0
STOP_SECONDS = 60.0


class SystemFailed(RuntimeError):
    """A system could not be measured: it did not start, was not ready in time, or refused a necessary request."""


@dataclass(frozen=True)
class Serving:
    """A server that answers."""

    target: Target
    pid: int
    start_s: float


@dataclass(frozen=True)
class Command:
    """The command and environment of a server."""

    arguments: Sequence[str]
    health_url: str
    log: Path
    environment: Mapping[str, str]
    """Environment variables in addition to those of this process."""


def free_port() -> int:
    """Return a port that is not in use now."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


@contextmanager
def running(command: Command) -> Iterator[tuple[int, float]]:
    """Start the server, wait for a healthy answer, yield (pid, seconds of the start), and stop the server. Raises
    SystemFailed.
    """
    started = time.perf_counter()
    command.log.parent.mkdir(parents=True, exist_ok=True)
    with command.log.open("wb") as log:
        process = subprocess.Popen(
            command.arguments,
            stdout=log,
            stderr=subprocess.STDOUT,
            env={**os.environ, **command.environment},
            start_new_session=True,
        )
    try:
        _wait(process, command, started + START_SECONDS)
        yield process.pid, time.perf_counter() - started
    finally:
        _stop(process)


def _wait(process: subprocess.Popen[bytes], command: Command, deadline: float) -> None:
    while not _healthy(command.health_url):
        if process.poll() is not None:
            raise SystemFailed(f"{_name(command)} ended with {process.returncode}; {_tail(command.log)}")
        if time.perf_counter() > deadline:
            raise SystemFailed(f"{_name(command)} was not ready in {START_SECONDS:.0f} s; {_tail(command.log)}")
        time.sleep(0.2)


def _healthy(url: str) -> bool:
    try:
        return httpx.get(url, timeout=5.0).is_success
    except httpx.HTTPError:
        return False


def _stop(process: subprocess.Popen[bytes]) -> None:
    """SIGTERM and patience, then the whole process group: a server's workers must not outlive its measurement."""
    if process.poll() is None:
        process.send_signal(signal.SIGTERM)
        with suppress(subprocess.TimeoutExpired):
            process.wait(STOP_SECONDS)
    with suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def _name(command: Command) -> str:
    return " ".join(command.arguments[:4])


def _tail(log: Path) -> str:
    return f"the end of {log}:\n" + "\n".join(log.read_text(errors="replace").splitlines()[-15:])
