"""A folder with everything one demo needs, and the `loramux` command line run on it."""

from __future__ import annotations

import json
import socket
import subprocess
import sys
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import click

from loramux_demo.assets import MODEL_NAME, OWNERS, base_folder

HOST = "127.0.0.1"
POOL_BYTES = 256 << 20
LORAMUX = (sys.executable, "-m", "loramux_api")
"""The `loramux` command, wherever it is installed."""


@dataclass(frozen=True)
class House:
    """Settings, database, blobs and the server's log."""

    folder: Path
    port: int

    @property
    def config(self) -> Path:
        """The settings file, as a user would write it."""
        return self.folder / "loramux.toml"

    @property
    def log(self) -> Path:
        """What the server says."""
        return self.folder / "server.log"

    @property
    def url(self) -> str:
        """Where the server listens."""
        return f"http://{HOST}:{self.port}"

    def furnish(self) -> None:
        """Write the settings: the shipped base model, on SQLite."""
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
        """Run `loramux ARGUMENTS --json` on this house and return what it prints; raises click.ClickException."""
        command = [*LORAMUX, *arguments, "--config", str(self.config), "--json"]
        done = subprocess.run(command, capture_output=True, text=True, check=False)  # noqa: S603 - our own command
        if done.returncode:
            raise click.ClickException(f"loramux {' '.join(arguments)} failed: {done.stderr.strip()}")
        return json.loads(done.stdout)


def create_customers(house: House) -> dict[str, str]:
    """Make the demo's tenants, and a key for each; returns the keys by tenant."""
    keys = {}
    for tenant in OWNERS:
        house.loramux("tenant", "create", tenant)
        keys[tenant] = house.loramux("key", "create", "--tenant", tenant)["key"]
    return keys


def free_port(wanted: int | None) -> int:
    """`wanted` if a server could listen there now, else a port of the system's choice."""
    for port in (wanted, 0):
        if port is not None:
            with suppress(OSError), socket.create_server((HOST, port)) as attempt:
                return attempt.getsockname()[1]
    raise click.ClickException(f"no port of {HOST} is free")
