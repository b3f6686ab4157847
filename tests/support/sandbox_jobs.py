"""Jobs for the tests of the sandbox, good and bad."""

from __future__ import annotations

import errno
import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any


def prepare(setup: bytes) -> Callable[[bytes], bytes]:
    served = json.loads(setup)

    def work(payload: bytes) -> bytes:
        name, argument = json.loads(payload)
        return json.dumps({"setup": served, "told": JOBS[name](argument)}).encode()

    return work


def prepare_wrongly(setup: bytes) -> Callable[[bytes], bytes]:
    served = json.loads(setup)
    if served == "no file":
        raise FileNotFoundError(served)
    raise ValueError(f"the setup says {served!r}")


def allocate(size: int) -> int:
    return len(bytearray(size))


def spin(_: Any) -> None:
    while True:
        pass


def write(path: str) -> None:
    Path(path).write_bytes(b"x" * 100)


def write_over(path: str) -> None:
    with open(path, "r+b") as file:
        file.write(b"x")


def attempt(told: list[str]) -> str:
    """Do what a process would that was taken over; return the refusal, or what it got."""
    name, path = told
    try:
        return str(ATTACKS[name](path))
    except OSError as error:
        return errno.errorcode[error.errno or 0]


ATTACKS: dict[str, Callable[[str], Any]] = {
    "read": lambda path: Path(path).read_bytes(),
    "list": os.listdir,
    "write": write,
    "write over": write_over,
    "truncate": lambda path: os.truncate(path, 0),
    "remove": os.remove,
    "make a folder": os.mkdir,
    "link into its own folder": lambda path: os.link(path, "/tmp/stolen"),
    "run": lambda path: subprocess.run([path], check=False).returncode,
    "open through a link": lambda path: Path(path).read_bytes(),
    "kill": lambda pid: os.kill(int(pid), 0),
    "connect to an abstract socket": lambda name: socket.socket(socket.AF_UNIX).connect("\0" + name),
}


def end_by(signal_number: int) -> None:
    os.kill(os.getpid(), signal_number)


def answer_and_die(beginning: str) -> None:
    """Begin an answer, and be killed before its end."""
    for name in os.listdir("/proc/self/fd"):
        with suppress(OSError), socket.socket(fileno=os.dup(int(name))) as connection:
            connection.sendall(beginning.encode())
    end_by(signal.SIGKILL)


def seen(_: Any) -> dict[str, Any]:
    return {
        "environment": sorted(os.environ),
        "nice": os.nice(0),
        "session": os.getsid(0),
        "descriptors": len(os.listdir("/proc/self/fd")),
        "pid": os.getpid(),
        "parent": os.getppid(),
    }


def connects(port: int) -> bool:
    """Try to reach a listener of the server's machine."""
    try:
        socket.create_connection(("127.0.0.1", port), timeout=5).close()
    except OSError:
        return False
    return True


def orphan(seconds: float) -> int:
    """Leave a child that ends by itself, and return its number."""
    return subprocess.Popen([sys.executable, "-c", f"import time; time.sleep({seconds})"]).pid


JOBS: dict[str, Callable[[Any], Any]] = {
    "allocate": allocate,
    "spin": spin,
    "sleep": time.sleep,
    "write": write,
    "seen": seen,
    "exit": os._exit,
    "end by": end_by,
    "answer and die": answer_and_die,
    "connects": connects,
    "orphan": orphan,
    "raise": lambda text: (_ for _ in ()).throw(ValueError(text)),
    "attempt": attempt,
    "modules": lambda names: [name for name in names if name in sys.modules],
}
