"""A warm process that forks a limited one for every job: `main`, with the arguments MODULE, FD and NICENESS.

MODULE has `prepare(setup)`: it loads what every job needs, once, and returns the function that does one job. The setup
comes on standard input. Each job comes as a socket of its own over the Unix socket FD; when FD closes, the process
ends. multiprocessing's fork server is no alternative: it runs the parent's main module again in every child, limits
nothing, and answers with pickles.
"""

from __future__ import annotations

import ctypes
import gc
import importlib
import math
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

from loramux.validation.jail import code_paths, enter_jail, leave_network
from loramux.validation.report import ResourceUsage
from loramux.validation.sandbox import Job, JobLimits, JobResult

PR_SET_CHILD_SUBREAPER = 36
"""A constant of linux/prctl.h."""
"""Constants of linux/sched.h."""
OPEN_FILES = 256
IDLE_SECONDS = 900.0
"""The time after which an idle warm process ends and frees its memory; the next job starts another."""

Work = Callable[[bytes], bytes]


def main() -> NoReturn:
    """Serve the module and descriptor of the command line, then end at once."""
    module, descriptor, niceness = sys.argv[1:]
    serve(module, int(descriptor), int(niceness))
    os._exit(0)  # without the finalisation of libraries, which write to standard error about leaks


def serve(module: str, descriptor: int, niceness: int) -> None:
    """Fork a child for each job until the socket closes or no job has come for IDLE_SECONDS."""
    os.nice(niceness)
    _adopt_orphans()
    leave_network()
    work: Work = importlib.import_module(module).prepare(sys.stdin.buffer.read())
    code_paths()  # collected once, with the modules that every job has
    gc.collect()
    gc.freeze()  # a collection in a child must not copy shared pages
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # children leave no zombies
    with socket.socket(fileno=descriptor) as control, suppress(TimeoutError, ConnectionError):
        control.settimeout(IDLE_SECONDS)
        while True:
            _, descriptors, _, _ = socket.recv_fds(control, 1, 1)
            if not descriptors:
                return
            if os.fork() == 0:
                control.close()
                _serve(descriptors[0], work)
            os.close(descriptors[0])


def _adopt_orphans() -> None:
    """Become the parent of processes whose job was ended, so that they are reaped here and not left to process 1."""
    ctypes.CDLL(None, use_errno=True).prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)


def _serve(descriptor: int, work: Work) -> NoReturn:
    """Run one job, in the child."""
    try:
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)  # a job may wait for children of its own
        with socket.socket(fileno=descriptor) as connection, connection.makefile("rb") as incoming:
            job = msgspec.json.decode(incoming.read(), type=Job)
            _limit(job.limits)
            connection.sendall(msgspec.json.encode(_answer(work, bytes(job.payload))))
    finally:
        os._exit(0)


def _answer(work: Work, payload: bytes) -> JobResult:
    try:
        result = work(payload)
    except MemoryError:
        return JobResult(_usage(), fault="out_of_memory")
    except Exception as error:
        return JobResult(_usage(), fault="crashed", trace=_trace(error))
    return JobResult(_usage(), msgspec.Raw(result))


def _limit(limits: JobLimits) -> None:
    _set(resource.RLIMIT_DATA, _private_bytes() + limits.memory_bytes)
    _set(resource.RLIMIT_CPU, math.ceil(limits.cpu_seconds))
    _set(resource.RLIMIT_FSIZE, limits.file_bytes)
    _set(resource.RLIMIT_NOFILE, OPEN_FILES)
    _set(resource.RLIMIT_CORE, 0)
    enter_jail(limits.readable, limits.writable)
    # RLIMIT_CPU counts whole seconds. Both timers end the process.
    for timer, ends, seconds in (
        (signal.ITIMER_PROF, signal.SIGPROF, limits.cpu_seconds),
        (signal.ITIMER_REAL, signal.SIGALRM, limits.wall_seconds),
    ):
        signal.signal(ends, signal.SIG_DFL)
        signal.setitimer(timer, seconds)


def _set(which: int, value: int) -> None:
    _, hard = resource.getrlimit(which)
    value = value if hard == resource.RLIM_INFINITY else min(value, hard)
    resource.setrlimit(which, (value, value))


def _private_bytes() -> int:
    """Return the bytes of this process that RLIMIT_DATA counts now."""
    status = Path("/proc/self/status").read_text()
    return int(status.partition("VmData:")[2].split()[0]) * 1024


def _trace(error: Exception) -> str:
    """Name where `error` was raised, without its message, which may quote a tenant's file."""
    frames = traceback.extract_tb(error.__traceback__)
    places = " > ".join(f"{Path(frame.filename).name}:{frame.lineno} {frame.name}" for frame in frames)
    return f"{type(error).__name__} at {places}"


def _usage() -> ResourceUsage:
    """Return the usage of this process and of the children that it waited for."""
    both = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    return ResourceUsage(
        cpu_seconds=round(sum(used.ru_utime + used.ru_stime for used in both), 3),
        peak_bytes=max(used.ru_maxrss for used in both) * 1024,
    )
