"""A server's process: its signals, and its end."""

from __future__ import annotations

import asyncio
import logging
import os
import signal
import sys
from collections.abc import Callable
from typing import NoReturn

STOPPING = (signal.SIGTERM, signal.SIGINT)


class Signals:
    """Counts requests to stop: SIGTERM and SIGINT, or orders of the process that has started this one."""

    def __init__(self) -> None:
        self.first, self.second = asyncio.Event(), asyncio.Event()
        self.number: int | None = None
        """Number of the first signal."""
        self._act: Callable[[], None] | None = None

    def listen(self) -> None:
        """Receive this process's signals from now on."""
        for number in STOPPING:
            asyncio.get_running_loop().add_signal_handler(number, self.receive, number)

    def on_first(self, act: Callable[[], None] | None) -> None:
        """Call `act` at each request to stop, also if there was one already; None: call nothing."""
        self._act = act
        if act is not None and self.first.is_set():
            act()

    def receive(self, number: int = signal.SIGTERM) -> None:
        """Count a request to stop."""
        self.number = self.number or number
        (self.second if self.first.is_set() else self.first).set()
        if self._act is not None:
            self._act()


def ignore_signals() -> None:
    """Ignore both signals from now on, because the process ends by itself."""
    for number in STOPPING:
        asyncio.get_running_loop().remove_signal_handler(number)
        signal.signal(number, signal.SIG_IGN)


def exit_now(code: int) -> NoReturn:
    """End the process after everything is closed.

    A normal end of the interpreter would take seconds: it waits for a thread that still imports torch, and frees
    torch's objects.
    """
    logging.shutdown()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)
