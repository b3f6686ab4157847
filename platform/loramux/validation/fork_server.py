"""A warm process that forks a limited one for every job: `python -m loramux.validation.fork_server MODULE FD`.

MODULE has `prepare(setup)`, which does once what every job needs and returns the function that does a job. The setup
comes on standard input, sockets with one job each on the Unix socket FD; when that closes, nobody is left to serve.
The standard library's fork server runs the parent's main module again in every child, and limits nothing.
"""

from __future__ import annotations

import gc
import importlib
import os
import resource
import signal
import socket
import sys
import traceback
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import NoReturn

import msgspec

from loramux.validation.protocol import Answer, Job, JobLimits
from loramux.validation.report import Usage

NICENESS = 10
OPEN_FILES = 256
IDLE_SECONDS = 900.0
"""A warm process that nobody wants anything of gives its memory back; the next job starts another."""

Work = Callable[[bytes], bytes]


def main(module: str, descriptor: int) -> None:
    """Serve jobs until the socket closes, or nothing has come for long."""
    os.nice(NICENESS)
    work: Work = importlib.import_module(module).prepare(sys.stdin.buffer.read())
    gc.collect()
    gc.freeze()  # so that a collection in a child copies no page that it shares
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # children leave no zombies
    with socket.socket(fileno=descriptor) as control, suppress(TimeoutError):
        control.settimeout(IDLE_SECONDS)
        while True:
            _, descriptors, _, _ = socket.recv_fds(control, 1, 1)
            if not descriptors:
                return
            if os.fork() == 0:
                control.close()
                _serve(descriptors[0], work)
            os.close(descriptors[0])


def _serve(descriptor: int, work: Work) -> NoReturn:
    """One job, in the child."""
    try:
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)  # a job may wait for children of its own
        with socket.socket(fileno=descriptor) as connection, connection.makefile("rb") as incoming:
            job = msgspec.json.decode(incoming.read(), type=Job)
            _limit(job.limits)
            connection.sendall(msgspec.json.encode(_answer(work, bytes(job.payload))))
    finally:
        os._exit(0)


def _answer(work: Work, payload: bytes) -> Answer:
    try:
        result = work(payload)
    except MemoryError:
        return Answer(_usage(), fault="out_of_memory")
    except Exception as error:
        return Answer(_usage(), fault="crashed", trace=_trace(error))
    return Answer(_usage(), msgspec.Raw(result))


def _limit(limits: JobLimits) -> None:
    _set(resource.RLIMIT_DATA, _private_bytes() + limits.memory_bytes)
    _set(resource.RLIMIT_CPU, limits.cpu_seconds)
    _set(resource.RLIMIT_FSIZE, limits.file_bytes)
    _set(resource.RLIMIT_NOFILE, OPEN_FILES)
    _set(resource.RLIMIT_CORE, 0)
    signal.signal(signal.SIGALRM, signal.SIG_DFL)
    signal.setitimer(signal.ITIMER_REAL, limits.wall_seconds)


def _set(which: int, value: int) -> None:
    _, hard = resource.getrlimit(which)
    value = value if hard == resource.RLIM_INFINITY else min(value, hard)
    resource.setrlimit(which, (value, value))


def _private_bytes() -> int:
    """What RLIMIT_DATA counts of this process now."""
    status = Path("/proc/self/status").read_text()
    return int(status.partition("VmData:")[2].split()[0]) * 1024


def _trace(error: Exception) -> str:
    """Where it was raised, without its message, in which a tenant's words may stand."""
    frames = traceback.extract_tb(error.__traceback__)
    places = " > ".join(f"{Path(frame.filename).name}:{frame.lineno} {frame.name}" for frame in frames)
    return f"{type(error).__name__} at {places}"


def _usage() -> Usage:
    """Of this process and those that it waited for."""
    both = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    return Usage(
        cpu_seconds=round(sum(used.ru_utime + used.ru_stime for used in both), 3),
        peak_bytes=max(used.ru_maxrss for used in both) * 1024,
    )


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]))
