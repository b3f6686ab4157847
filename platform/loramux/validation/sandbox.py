"""Work on hostile bytes, in processes that are warm, limited and worth nothing.

SandboxError
├── SandboxDied     the warm process ended or never came up: the operator's side
├── JobEnded        the kernel ended the job at one of its limits of time
├── JobOutOfMemory  it asked for more memory than it may have
└── JobCrashed      it raised what it should not have; the message says where
"""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import threading
from contextlib import suppress

import msgspec

from loramux.validation.protocol import MAX_ANSWER_BYTES, Answer, Job, JobLimits

START_SECONDS = 120.0
"""How long a warm process may take to come up, on a machine that is busy."""

_PASSED_ON = ("PATH", "HOME", "TMPDIR", "LANG", "LC_ALL", "LD_LIBRARY_PATH", "CXX", "LORAMUX_CACHE_DIR")
"""Of the environment; nothing else of the server's, whose secrets may stand in it."""
_OWN = {
    # One thread each: forking leaves the others of a pool behind, and serving needs the cores.
    "OMP_NUM_THREADS": "1",
    "OPENBLAS_NUM_THREADS": "1",
    "MKL_NUM_THREADS": "1",
    "HF_HUB_OFFLINE": "1",
    "TOKENIZERS_PARALLELISM": "false",
}


class SandboxError(Exception):
    """Base of what a sandbox raises."""


class SandboxDied(SandboxError):
    """No job can be done."""


class JobEnded(SandboxError):
    """Ended without an answer."""


class JobOutOfMemory(SandboxError):
    """The message is empty: nothing more is known."""


class JobCrashed(SandboxError):
    """Our own fault, met on somebody's bytes."""


class Sandbox:
    """Runs the jobs of one module, each in a process of its own that is forked from a warm one.

    The warm process starts with the first job, has no secrets, no connections and one thread, and gives way to
    everybody else (nice). Threads may share a Sandbox; `run` blocks.
    """

    def __init__(self, module: str, setup: bytes) -> None:
        self._module = module
        self._setup = setup
        self._lock = threading.Lock()
        self._process: subprocess.Popen[bytes] | None = None
        self._control: socket.socket | None = None

    def run(self, payload: bytes, limits: JobLimits) -> Answer:
        """Do one job; `payload` and the answer's result are JSON. Raises SandboxError."""
        with suppress(SandboxDied):
            return self._run(payload, limits)
        return self._run(payload, limits)  # it was idle and left in that very moment, or somebody ended it

    def _run(self, payload: bytes, limits: JobLimits) -> Answer:
        ours, theirs = socket.socketpair()
        with ours:
            with theirs:
                self._hand_over(theirs)
            ours.settimeout(limits.wall_seconds + START_SECONDS)
            reason = "it gave no answer"
            try:
                ours.sendall(msgspec.json.encode(Job(limits, msgspec.Raw(payload))))
                ours.shutdown(socket.SHUT_WR)
                data = _read(ours)
            except (OSError, ValueError) as error:
                reason, data = str(error), b""
        if data:
            return _checked(data)
        with self._lock:
            if self._died:
                raise SandboxDied(f"the process for {self._module} ended")
        raise JobEnded(reason)

    def close(self) -> None:
        """Stop the warm process; jobs that run go on to their end."""
        with self._lock:
            self._stop()

    def _hand_over(self, connection: socket.socket) -> None:
        with self._lock:
            if self._died:
                self._stop()
                self._start()
            assert self._control is not None
            try:
                socket.send_fds(self._control, [b"j"], [connection.fileno()])
            except OSError as error:
                raise SandboxDied(f"the process for {self._module} ended: {error}") from None

    def _start(self) -> None:
        self._control, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        environment = {name: os.environ[name] for name in _PASSED_ON if name in os.environ} | _OWN
        environment["PYTHONPATH"] = os.pathsep.join(filter(None, sys.path))
        command = [sys.executable, "-P", "-m", "loramux.validation.fork_server", self._module, str(theirs.fileno())]
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
        assert self._process.stdin is not None
        with suppress(BrokenPipeError), self._process.stdin as standard_input:
            standard_input.write(self._setup)

    def _stop(self) -> None:
        if self._control is not None:
            self._control.close()
        if self._process is not None:
            self._process.kill()  # it holds nothing that could be left half-done
            self._process.wait()
        self._control = self._process = None

    @property
    def _died(self) -> bool:
        """Whether the warm process is gone, which closes its end of the control socket."""
        if self._control is None:
            return True
        try:
            return self._control.recv(1, socket.MSG_PEEK | socket.MSG_DONTWAIT) == b""
        except BlockingIOError:
            return False
        except OSError:
            return True


def _read(connection: socket.socket) -> bytes:
    data = bytearray()
    while chunk := connection.recv(1 << 16):
        data += chunk
        if len(data) > MAX_ANSWER_BYTES:
            raise ValueError(f"an answer of more than {MAX_ANSWER_BYTES} bytes")
    return bytes(data)


def _checked(data: bytes) -> Answer:
    try:
        answer = msgspec.json.decode(data, type=Answer)
    except msgspec.MsgspecError as error:
        raise JobCrashed(f"its answer is none: {error}") from None
    if answer.fault == "out_of_memory":
        raise JobOutOfMemory
    if answer.fault is not None:
        raise JobCrashed(answer.trace)
    return answer
