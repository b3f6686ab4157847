"""Jobs for the tests of the sandbox, good and bad."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any


def prepare(setup: bytes) -> Callable[[bytes], bytes]:
    served = json.loads(setup)

    def work(payload: bytes) -> bytes:
        name, argument = json.loads(payload)
        return json.dumps({"setup": served, "told": JOBS[name](argument)}).encode()

    return work


def allocate(size: int) -> int:
    return len(bytearray(size))


def spin(_: Any) -> None:
    while True:
        pass


def write(path: str) -> None:
    Path(path).write_bytes(b"x" * 100)


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
    """Leave a child behind that ends by itself, and answer with its number."""
    return subprocess.Popen(["sleep", str(seconds)]).pid


JOBS: dict[str, Callable[[Any], Any]] = {
    "allocate": allocate,
    "spin": spin,
    "sleep": time.sleep,
    "write": write,
    "seen": seen,
    "exit": os._exit,
    "connects": connects,
    "orphan": orphan,
    "raise": lambda text: (_ for _ in ()).throw(ValueError(text)),
    "kill the warm process": lambda _: os.kill(os.getppid(), signal.SIGKILL),
    "modules": lambda names: [name for name in names if name in sys.modules],
}
