"""Sandboxes for jobs on untrusted bytes. Each job runs in a limited process that is forked from a warm process.

    server: Sandbox.run ── two sockets for each job ──> warm process: serve ── fork ──> limits, jail (`jail`), one job

`Sandbox` is the server's end. `main` is the warm process, with the arguments MODULE, FD and NICENESS. MODULE has
`prepare(setup)`, which loads the data that all jobs need and returns the function for one job. The setup comes on
standard input. Each job comes as two new sockets over the Unix socket FD: over the first socket the job's process reads
the job and answers, and on the second socket the warm process writes how the job's process has ended. When FD closes,
the warm process ends. The fork server of multiprocessing is not used: it runs the parent's main module again in every
child, sets no limits, and answers with pickles. Here all messages are JSON, never pickles: because a process that an
attacker controls may send any bytes. A job and its answer may have bulk bytes after a newline: JSON of megabytes would
stop the server's other threads while it is written or read.

SandboxError
├── SandboxDied     the warm process ended or never started: a fault of the server
│   ├── SandboxUnusable  its `prepare` raised, and will raise again; the message has the error
│   └── JobKilled        the job's process was killed, and not by its limits: for example because memory was short
├── JobEnded        the job ended without an answer: at one of its time limits, or by a fault in native code
├── JobOutOfMemory  the job needed more memory than it may have
└── JobCrashed      the job raised an unexpected exception; the message says where
"""

from __future__ import annotations

import ctypes
import importlib
import io
import logging
import math
import os
import resource
import signal
import socket
import subprocess
import sys
import threading
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from contextvars import ContextVar
from dataclasses import dataclass
from pathlib import Path
from typing import NoReturn

import msgspec

from loramux.common.garbage import freeze_garbage
from loramux.common.sandbox.jail import code_paths, enter_jail, leave_network

START_SECONDS = 120.0
"""Time for a warm process to start on a busy machine."""
_START = (
    # First of all, ignore interrupts. An interrupt from the terminal is for the server, which closes the socket when it
    # ends.
    "import signal; signal.signal(signal.SIGINT, signal.SIG_IGN); "
    "from loramux.common.sandbox.sandbox import main; main()"
)
_PASSED_ON = ("PATH", "HOME", "TMPDIR", "LANG", "LC_ALL", "LD_LIBRARY_PATH", "CXX", "LORAMUX_CACHE_DIR")
"""Environment variables that the process gets. Any other variable may hold a secret of the server."""
_OWN = {
    # One thread per process, because a forked child has no other threads of a pool, and serving needs the cores.
    "OMP_NUM_THREADS": "1",
    "OPENBLAS_NUM_THREADS": "1",
    "MKL_NUM_THREADS": "1",
    "HF_HUB_OFFLINE": "1",
    "TOKENIZERS_PARALLELISM": "false",
}
PR_SET_CHILD_SUBREAPER = 36
"""Constant of linux/prctl.h."""
FROM_OUTSIDE = frozenset({signal.SIGKILL, signal.SIGTERM, signal.SIGHUP})
"""Signals of which neither a limit of a job nor a fault in its code is the cause: from the operator, or from the
kernel if the machine's memory is short.
"""
STATUS_SECONDS = 10.0
"""Longest time between the end of a job's process and the warm process's message about it."""
OPEN_FILES = 256
IDLE_SECONDS = 900.0
"""Seconds after which an idle warm process ends and frees its memory. The next job starts another warm process."""
UNUSABLE_SECONDS = 60.0
"""Seconds after which an idle process ends if its preparation failed: the operator may have repaired the base."""
MAX_REASON = 1000
"""Characters of a preparation's error that are kept."""
Work = Callable[[bytes], bytes]
"""Function for one job: a message in, a message out (`split_bulk`)."""

logger = logging.getLogger(__name__)


class ResourceUsage(msgspec.Struct, frozen=True, kw_only=True):
    """Resources that the checks' processes used."""

    cpu_seconds: float
    peak_bytes: int
    """Peak resident memory, including pages shared with the warm process."""

    def plus(self, other: ResourceUsage | None) -> ResourceUsage:
        """Return the usage of two processes that ran one after the other."""
        if other is None:
            return self
        seconds = round(self.cpu_seconds + other.cpu_seconds, 3)
        return ResourceUsage(cpu_seconds=seconds, peak_bytes=max(self.peak_bytes, other.peak_bytes))


class JobLimits(msgspec.Struct, frozen=True):
    """Limits of one job's process, enforced by the kernel."""

    memory_bytes: int
    """Private memory beyond that of the warm process."""
    cpu_seconds: float
    wall_seconds: float
    file_bytes: int = 0
    """Size of the largest file that the job may write."""
    readable: tuple[str, ...] = ()
    """Folders that the job may read, by absolute paths; it cannot open other folders, except Python's own."""
    writable: tuple[str, ...] = ()
    """Folders that the job may read and write."""
    answer_bytes: int = 16 << 20
    """Size of the largest result, in bytes."""


class SandboxJob(msgspec.Struct, frozen=True):
    """A job in the form that is sent to the warm process."""

    limits: JobLimits
    payload: msgspec.Raw


class JobResult(msgspec.Struct, frozen=True):
    """A job's `value`, or its `fault`: out_of_memory, crashed or unusable.

    A process that the kernel ended sends no result.
    """

    usage: ResourceUsage
    value: msgspec.Raw = msgspec.Raw(b"null")
    bulk: bytes = b""
    """Bytes that come after the JSON."""
    bulk_bytes: int = 0
    """Number of bytes that the job sends after the JSON. If fewer come, it has ended while it sent them."""
    fault: str | None = None
    trace: str = ""
    """The place at which a crash was raised; for an unusable sandbox, the error of its preparation."""


class SandboxError(Exception):
    """Root of the sandbox's errors."""


class SandboxDied(SandboxError):
    """No job can run now."""


class SandboxUnusable(SandboxDied):
    """No job can run until the setup or the module changes. The setup comes from the server, so the message may be
    shown.
    """


class JobKilled(SandboxDied):
    """The job's process was killed from outside. The same job may end well later."""


class JobEnded(SandboxError):
    """The job ended without an answer."""


class JobOutOfMemory(SandboxError):
    """The job ran out of memory. The message is empty, because no other fact is known."""


class JobCrashed(SandboxError):
    """A bug of ours that uploaded bytes have triggered."""


@dataclass
class JobMeter:
    """Processor time of the jobs in a `metered` block."""

    cpu_seconds: float = 0.0


_meter: ContextVar[JobMeter | None] = ContextVar("job_meter", default=None)


@contextmanager
def metered() -> Iterator[JobMeter]:
    """Measure the jobs that this thread runs in the block. A job that the kernel ended counts with its full limits."""
    meter = JobMeter()
    token = _meter.set(meter)
    try:
        yield meter
    finally:
        _meter.reset(token)


def _charge(cpu_seconds: float) -> None:
    if (meter := _meter.get()) is not None:
        meter.cpu_seconds += cpu_seconds


class Sandbox:
    """Runs the jobs of one module, each in a separate process that is forked from a warm process.

    The warm process starts with the first job, or with `start`. The warm process has no secrets, no connections, one
    thread and a low priority (`niceness`). Threads may share a Sandbox; `run` blocks.
    """

    def __init__(self, module: str, setup: bytes, niceness: int = 10) -> None:
        self._module = module
        self._setup = setup
        self._niceness = niceness
        self._lock = threading.Lock()
        self._process: subprocess.Popen[bytes] | None = None
        self._control: socket.socket | None = None

    def start(self) -> None:
        """Start the warm process if none runs. The first job then waits only for the rest of its preparation."""
        with self._lock:
            self._ensure_started()

    def run(self, payload: bytes, limits: JobLimits, bulk: bytes = b"") -> JobResult:
        """Run one job; `payload` and the result's value are JSON. Raises SandboxError."""
        try:
            return self._run(payload, limits, bulk)
        except (SandboxUnusable, JobKilled):  # a second process would need as much memory as the killed one
            raise
        except SandboxDied:
            return self._run(payload, limits, bulk)  # the warm process has just ended, because it was idle or killed

    def _run(self, payload: bytes, limits: JobLimits, bulk: bytes) -> JobResult:
        (ours, theirs), (status, their_status) = socket.socketpair(), socket.socketpair()
        with ours, status:
            with theirs, their_status:
                self._hand_over(theirs, their_status)
            ours.settimeout(limits.wall_seconds + START_SECONDS)
            data, reason, ended_by = b"", "it gave no answer", 0
            try:
                with suppress(ConnectionError):  # the process has ended; its status says how
                    ours.sendall(msgspec.json.encode(SandboxJob(limits, msgspec.Raw(payload))) + b"\n")
                    ours.sendall(bulk)
                    ours.shutdown(socket.SHUT_WR)
                    data, made = _read(ours, limits.answer_bytes)
                result = _decoded(data)
                if result is not None and result.bulk_bytes == len(made):
                    _charge(result.usage.cpu_seconds)
                    return _checked(msgspec.structs.replace(result, bulk=made))
                ended_by = self._ending_signal(status)
            except (OSError, ValueError) as error:
                reason = str(error)
        if ended_by in FROM_OUTSIDE:
            raise JobKilled(f"a job of {self._module} was killed by the signal {ended_by}")
        _charge(limits.cpu_seconds)
        if data:
            raise JobCrashed("its answer is not a job result")
        raise JobEnded(reason)

    def close(self) -> None:
        """Stop the warm process. Running jobs continue to their end."""
        with self._lock:
            self._stop()

    def _hand_over(self, connection: socket.socket, status: socket.socket) -> None:
        with self._lock:
            self._ensure_started()
            assert self._control is not None
            try:
                socket.send_fds(self._control, [b"j"], [connection.fileno(), status.fileno()])
            except OSError as error:
                raise SandboxDied(f"the process for {self._module} ended: {error}") from None

    def _ending_signal(self, status: socket.socket) -> int:
        """Return the signal that ended a job's process, or 0. Raises SandboxDied if the warm process has ended too."""
        status.settimeout(STATUS_SECONDS)
        with suppress(ConnectionError, TimeoutError):
            if data := status.recv(1):
                return data[0]
        raise SandboxDied(f"the process for {self._module} ended")

    def _ensure_started(self) -> None:
        if self._died:
            self._stop()
            self._start()

    def _start(self) -> None:
        self._control, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        environment = {name: os.environ[name] for name in _PASSED_ON if name in os.environ} | _OWN
        environment["PYTHONPATH"] = os.pathsep.join(filter(None, sys.path))
        command = [sys.executable, "-P", "-c", _START, self._module, str(theirs.fileno()), str(self._niceness)]
        with theirs:
            self._process = subprocess.Popen(  # noqa: S603 - our own module
                command,
                stdin=subprocess.PIPE,
                stdout=subprocess.DEVNULL,
                cwd="/",
                env=environment,
                pass_fds=(theirs.fileno(),),
                start_new_session=True,
            )
        # Wait for the process's end from now on. Otherwise an idle process that ends would be a zombie until the next
        # job.
        threading.Thread(target=self._process.wait, name=f"{self._module} ends", daemon=True).start()
        assert self._process.stdin is not None
        with suppress(BrokenPipeError), self._process.stdin as standard_input:
            standard_input.write(self._setup)

    def _stop(self) -> None:
        if self._control is not None:
            self._control.close()
        if self._process is not None:
            self._process.kill()  # the process has no state that could be half-written
            self._process.wait()
        self._control = self._process = None

    @property
    def _died(self) -> bool:
        """Return whether the warm process has ended: its end of the control socket is then closed."""
        if self._control is None:
            return True
        try:
            return self._control.recv(1, socket.MSG_PEEK | socket.MSG_DONTWAIT) == b""
        except BlockingIOError:
            return False
        except OSError:
            return True


def _read(connection: socket.socket, max_bytes: int) -> tuple[bytes, bytes]:
    """Return an answer's JSON and its bulk. Raises ValueError if they have more than `max_bytes`."""
    text, bulk, is_bulk = io.BytesIO(), io.BytesIO(), False
    while chunk := connection.recv(1 << 16):
        if not is_bulk:
            line, newline, chunk = chunk.partition(b"\n")
            text.write(line)
            is_bulk = bool(newline)
        bulk.write(chunk)
        if text.tell() + bulk.tell() > max_bytes:
            raise ValueError(f"an answer of more than {max_bytes} bytes")
    return text.getvalue(), bulk.getvalue()


def _decoded(data: bytes) -> JobResult | None:
    """Return a job's answer; None if it is not whole."""
    try:
        return msgspec.json.decode(data, type=JobResult)
    except (ValueError, RecursionError):  # not JSON, or made to be deep
        return None


def _checked(answer: JobResult) -> JobResult:
    if answer.fault == "out_of_memory":
        raise JobOutOfMemory
    if answer.fault == "unusable":
        raise SandboxUnusable(answer.trace)
    if answer.fault is not None:
        raise JobCrashed(answer.trace)
    return answer


def main() -> NoReturn:
    """Serve the stage and the descriptor that the command line names, then exit at once."""
    stage, descriptor, niceness = sys.argv[1:]
    serve(stage, int(descriptor), int(niceness))
    os._exit(0)  # skip the finalisation of libraries, which report leaks on standard error


def serve(stage: str, descriptor: int, niceness: int) -> None:
    """Fork a child for each job until the socket closes or no job has come for IDLE_SECONDS.

    `stage` names the function that returns the work: a module that has `prepare`, or `module:function`.
    """
    os.nice(niceness)
    _adopt_orphans()
    leave_network()
    module, _, function = stage.partition(":")
    work = _prepared(getattr(importlib.import_module(module), function or "prepare"), sys.stdin.buffer.read())
    code_paths()  # collected once, when the modules of every job are loaded
    freeze_garbage()
    jobs: dict[int, int] = {}
    signal.signal(signal.SIGCHLD, lambda *_: _report_ended(jobs))
    with socket.socket(fileno=descriptor) as control, suppress(TimeoutError, ConnectionError):
        control.settimeout(UNUSABLE_SECONDS if isinstance(work, Unusable) else IDLE_SECONDS)
        while True:
            _, descriptors, _, _ = socket.recv_fds(control, 1, 2)
            if not descriptors:
                return
            connection, status = descriptors
            with _children_wait():  # a job is noted before its end is reported
                if (pid := os.fork()) == 0:
                    control.close()
                    for other in (status, *jobs.values()):
                        os.close(other)
                    _serve(connection, work)
                jobs[pid] = status
            os.close(connection)


def _report_ended(jobs: dict[int, int]) -> None:
    """Reap the children that have ended. Write the signal that ended a job, or 0, into the job's status socket, and
    forget the job. `jobs` has these sockets by process.
    """
    with suppress(ChildProcessError):
        while (ended := os.waitpid(-1, os.WNOHANG)) != (0, 0):
            pid, code = ended
            if (status := jobs.pop(pid, None)) is None:
                continue  # a child of a job that has ended
            with suppress(ConnectionError):  # the server has the answer, and does not ask
                os.write(status, bytes([os.WTERMSIG(code) if os.WIFSIGNALED(code) else 0]))
            os.close(status)


@contextmanager
def _children_wait() -> Iterator[None]:
    """Handle no end of a child in the block."""
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGCHLD})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGCHLD})


@dataclass(frozen=True, slots=True)
class Unusable:
    """Replaces the work of a module whose `prepare` raised an error. Every job gets this error as its answer."""

    reason: str

    def __call__(self, _: bytes) -> bytes:
        """Raise SandboxUnusable."""
        raise SandboxUnusable(self.reason)


def _prepared(prepare: Callable[[bytes], Work], setup: bytes) -> Work:
    """Return the work. If an error depends on the machine, the process ends, and the next job tries again."""
    try:
        return prepare(setup)
    except (MemoryError, OSError):
        raise
    except Exception as error:
        traceback.print_exc()  # for the operator's log
        return Unusable(f"{type(error).__name__}: {error}"[:MAX_REASON])


def _adopt_orphans() -> None:
    """Become the parent of processes whose job was ended. So this process reaps them, and not process 1."""
    ctypes.CDLL(None, use_errno=True).prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)


def _serve(descriptor: int, work: Work) -> NoReturn:
    """Run one job, in the child."""
    try:
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)  # a job may wait for its own children
        signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGCHLD})
        with socket.socket(fileno=descriptor) as connection, connection.makefile("rb") as incoming:
            text, bulk = split_bulk(incoming.read())
            job = msgspec.json.decode(text, type=SandboxJob)
            message = with_bulk(bytes(job.payload), bulk)
            apply_limits(job.limits)
            result, made = _answer(work, message)
            connection.sendall(msgspec.json.encode(msgspec.structs.replace(result, bulk_bytes=len(made))) + b"\n")
            connection.sendall(made)
    finally:
        os._exit(0)


def with_bulk(text: bytes, bulk: bytes) -> bytes:
    """Return the message of a job or an answer that has JSON and bulk bytes."""
    return text + b"\n" + bulk if bulk else text


def split_bulk(message: bytes) -> tuple[bytes, bytes]:
    """Return the JSON and the bulk bytes of a message."""
    text, _, bulk = message.partition(b"\n")
    return text, bulk


def _answer(work: Work, payload: bytes) -> tuple[JobResult, bytes]:
    try:
        result, bulk = split_bulk(work(payload))
    except MemoryError:
        return JobResult(_usage(), fault="out_of_memory"), b""
    except SandboxUnusable as error:
        return JobResult(_usage(), fault="unusable", trace=str(error)), b""
    except Exception as error:
        return JobResult(_usage(), fault="crashed", trace=_trace(error)), b""
    return JobResult(_usage(), msgspec.Raw(result)), bulk


def apply_limits(limits: JobLimits) -> None:
    """Limit this process for good."""
    _set(resource.RLIMIT_DATA, _private_bytes() + limits.memory_bytes)
    # The kernel kills at this limit. The timer below is earlier, so that a limit is not taken for a kill from outside.
    _set(resource.RLIMIT_CPU, math.ceil(limits.cpu_seconds) + 1)
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
    """Return the place where `error` was raised, without its message, which may quote a tenant's file."""
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
