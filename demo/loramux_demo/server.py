"""The real server as a child process: started, waited for, and always ended."""

from __future__ import annotations

import os
import signal
import subprocess
import time
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from types import FrameType

import click
import httpx

from loramux_demo.house import LORAMUX, House

START_SECONDS = 300.0
"""A first start on a busy machine reads torch from a cold disk."""
STOP_SECONDS = 40.0
DEATH_SECONDS = 3.0
"""From the first failing request to the end of a server whose engine died."""
POLL_SECONDS = 0.1
LAST_LINES = 20


class ServerDied(click.ClickException):
    """The server ended by itself or never became ready; the message ends with its last log lines."""


class DemoServer:
    """A running `loramux serve`."""

    def __init__(self, house: House, process: subprocess.Popen[bytes]) -> None:
        self._house = house
        self._process = process

    def wait_until_ready(self) -> None:
        """Return once /health/ready says so; raises ServerDied."""
        deadline = time.monotonic() + START_SECONDS
        with httpx.Client(base_url=self._house.url, trust_env=False) as client:
            while not _ready(client):
                self.demand_alive()
                if time.monotonic() > deadline:
                    raise self._died(f"was not ready after {START_SECONDS:.0f} seconds")
                time.sleep(POLL_SECONDS)

    @contextmanager
    def blamed(self) -> Iterator[None]:
        """Where this block fails because the server died, ServerDied says so instead."""
        try:
            yield
        except (click.ClickException, httpx.TransportError):
            with suppress(subprocess.TimeoutExpired):
                self._process.wait(DEATH_SECONDS)
            self.demand_alive()
            raise

    def demand_alive(self) -> None:
        """Raise ServerDied if the server has ended."""
        code = self._process.poll()
        if code is not None:
            raise self._died(f"ended with exit code {code}")

    def wait(self) -> None:
        """Block for as long as the server lives, which it should until somebody presses Ctrl-C; raises ServerDied."""
        self._process.wait()
        self.demand_alive()

    def stop(self) -> None:
        """SIGTERM, so that it drains; SIGKILL to it and its engine if it does not, or on a second Ctrl-C."""
        self._process.terminate()
        try:
            self._process.wait(STOP_SECONDS)
        except (subprocess.TimeoutExpired, KeyboardInterrupt):
            os.killpg(self._process.pid, signal.SIGKILL)
            self._process.wait()

    def _died(self, what: str) -> ServerDied:
        with self._house.log.open(errors="replace") as log:
            last = "".join(deque(log, LAST_LINES))
        return ServerDied(f"the server {what}. The last lines of its log:\n{last}")


@contextmanager
def running_server(house: House) -> Iterator[DemoServer]:
    """Start `loramux serve` on `house`; it is ended however this block is left, SIGTERM and a closed terminal included.

    It gets a session of its own, so that Ctrl-C reaches the demo alone, which then ends it in order.
    """
    with _signals_raise(signal.SIGTERM, signal.SIGHUP), house.log.open("wb") as log:
        process = subprocess.Popen(  # noqa: S603 - our own command
            [*LORAMUX, "serve", "--config", str(house.config)],
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        server = DemoServer(house, process)
        try:
            yield server
        finally:
            server.stop()


@contextmanager
def _signals_raise(*numbers: signal.Signals) -> Iterator[None]:
    def leave(number: int, _: FrameType | None) -> None:
        raise SystemExit(128 + number)

    before = {number: signal.signal(number, leave) for number in numbers}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _ready(client: httpx.Client) -> bool:
    try:
        return client.get("/health/ready").is_success
    except httpx.TransportError:
        return False
