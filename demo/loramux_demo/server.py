"""The demo's folder with settings and data, and a real server that uses it and runs as a child process."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections import deque
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import Any

import click
import httpx

from loramux_demo.assets import MODEL_NAME, OWNERS, base_folder

HOST = "127.0.0.1"
POOL_BYTES = 256 << 20
CUSTOMER, OPERATOR = "acme", "operator"
CUSTOMER_SCOPES = (
    *("inference", "adapters", "usage", "keys", "projects", "members", "limits", "billing", "audit", "webhooks"),
)
LORAMUX = (sys.executable, "-m", "loramux_api")
"""The `loramux` command of this environment."""
START_SECONDS = 300.0
"""Seconds that the server has to start. Generous, because a first start may read torch from a cold disk."""
STOP_SECONDS = 40.0
DEATH_SECONDS = 3.0
"""Seconds that a server with a dead engine has to exit."""
POLL_SECONDS = 0.1
LAST_LINES = 20


@dataclass(frozen=True)
class Workspace:
    """A folder with settings, database, blobs and the server's log."""

    folder: Path
    port: int

    @property
    def config(self) -> Path:
        """Path of the settings file."""
        return self.folder / "loramux.toml"

    @property
    def log(self) -> Path:
        """Path of the server's log."""
        return self.folder / "server.log"

    @property
    def url(self) -> str:
        """Address of the server."""
        return f"http://{HOST}:{self.port}"

    def prepare(self) -> None:
        """Write the settings: the demo's base model, on SQLite."""
        self.folder.mkdir(parents=True, exist_ok=True)
        self.config.write_text(
            f"""\
[server]
host = "{HOST}"
port = {self.port}

[model]
path = {json.dumps(str(base_folder()))}
served_model_name = "{MODEL_NAME}"

[engine]
pool_bytes = {POOL_BYTES}

[validation]
parity = false

[records]
url = "sqlite:///loramux.sqlite3"
blobs = "blobs"
cache = "cache"
pepper_file = "pepper"
"""
        )

    def loramux(self, *arguments: str) -> Any:
        """Run `loramux ARGUMENTS --json` on this workspace and return its output. Raises click.ClickException."""
        command = [*LORAMUX, *arguments, "--config", str(self.config), "--json"]
        done = subprocess.run(command, capture_output=True, text=True, check=False)  # noqa: S603 - our own command
        if done.returncode:
            raise click.ClickException(f"loramux {' '.join(arguments)} failed: {done.stderr.strip()}")
        return json.loads(done.stdout)


def create_customers(workspace: Workspace) -> dict[str, str]:
    """Create the demo's tenants with a key each. Returns the keys by tenant."""
    keys = {}
    for tenant in OWNERS:
        workspace.loramux("tenant", "create", tenant)
        keys[tenant] = workspace.loramux("key", "create", "--tenant", tenant)["key"]
    return keys


def console_keys(workspace: Workspace) -> dict[str, str]:
    """Create the keys for the console's sign-in links: a customer's key with every scope, and the operator's key."""
    workspace.loramux("tenant", "create", OPERATOR)
    scopes = {CUSTOMER: CUSTOMER_SCOPES, OPERATOR: ("operator", *CUSTOMER_SCOPES)}
    return {
        tenant: workspace.loramux(
            "key", "create", "--tenant", tenant, "--name", "console", *_repeated("--scope", names)
        )["key"]
        for tenant, names in scopes.items()
    }


def sign_in_links(workspace: Workspace, keys: dict[str, str]) -> dict[str, str]:
    """Return a link for each key, which signs a browser in once. If the server has no console, return none."""
    if httpx.get(workspace.url, trust_env=False).raise_for_status().json()["console"] is None:
        return {}
    links = {}
    for tenant, key in keys.items():
        made = httpx.post(f"{workspace.url}/console/links", headers={"Authorization": f"Bearer {key}"}, trust_env=False)
        made.raise_for_status()
        links[tenant] = workspace.url + made.json()["path"]
    return links


def _repeated(option: str, values: Iterable[str]) -> list[str]:
    return [word for value in values for word in (option, value)]


def free_port(wanted: int | None) -> int:
    """Return `wanted` if it is free, otherwise a port chosen by the system."""
    for port in (wanted, 0):
        if port is not None:
            with suppress(OSError), socket.create_server((HOST, port)) as attempt:
                return attempt.getsockname()[1]
    raise click.ClickException(f"no port of {HOST} is free")


class ServerDied(click.ClickException):
    """The server exited or did not become ready. The message has its last log lines."""


class DemoServer:
    """A running `loramux serve`."""

    def __init__(self, workspace: Workspace, process: subprocess.Popen[bytes]) -> None:
        self._workspace = workspace
        self._process = process

    @property
    def pid(self) -> int:
        """Process id of the server; its engine is a child process."""
        return self._process.pid

    def wait_until_ready(self) -> None:
        """Wait until /health/ready answers 200. Raises ServerDied."""
        deadline = time.monotonic() + START_SECONDS
        with httpx.Client(base_url=self._workspace.url, trust_env=False) as client:
            while not _ready(client):
                self.ensure_alive()
                if time.monotonic() > deadline:
                    raise self._died(f"was not ready after {START_SECONDS:.0f} seconds")
                time.sleep(POLL_SECONDS)

    @contextmanager
    def explain_failures(self) -> Iterator[None]:
        """Raise ServerDied if the block fails because the server died."""
        try:
            yield
        except (click.ClickException, httpx.TransportError):
            with suppress(subprocess.TimeoutExpired):
                self._process.wait(DEATH_SECONDS)
            self.ensure_alive()
            raise

    def ensure_alive(self) -> None:
        """Raise ServerDied if the server has exited."""
        code = self._process.poll()
        if code is not None:
            raise self._died(f"ended with exit code {code}")

    def wait(self) -> None:
        """Wait until the server exits; it should not exit before Ctrl-C. Raises ServerDied."""
        self._process.wait()
        self.ensure_alive()

    def stop(self) -> None:
        """Send SIGTERM; after a time-out or a second Ctrl-C, SIGKILL to the server and its engine."""
        self._process.terminate()
        try:
            self._process.wait(STOP_SECONDS)
        except (subprocess.TimeoutExpired, KeyboardInterrupt):
            os.killpg(self._process.pid, signal.SIGKILL)
            self._process.wait()

    def _died(self, reason: str) -> ServerDied:
        with self._workspace.log.open(errors="replace") as log:
            last = "".join(deque(log, LAST_LINES))
        return ServerDied(f"the server {reason}. The last lines of its log:\n{last}")


@contextmanager
def running_server(workspace: Workspace) -> Iterator[DemoServer]:
    """Run `loramux serve` on `workspace` for the block. SIGTERM and a closed terminal end it too.

    The server has its own session, so that Ctrl-C reaches only the demo, which then stops the server in order.
    """
    with _signals_raise(signal.SIGTERM, signal.SIGHUP), workspace.log.open("wb") as log:
        process = subprocess.Popen(  # noqa: S603 - our own command
            [*LORAMUX, "serve", "--config", str(workspace.config)],
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        server = DemoServer(workspace, process)
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
