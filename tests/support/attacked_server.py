"""A real server with a real engine and one valid adapter, and counts of what an attack could leave in it."""

from __future__ import annotations

import hashlib
import sqlite3
import time
from collections.abc import Iterator
from contextlib import closing, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import psutil
from attacks import Files
from live_folders import files_under, holding
from server_process import Child, Place

TABLES = ("adapters", "revisions", "aliases")


@dataclass(frozen=True)
class Harness:
    place: Place
    server: Child
    key: str
    sound: Files

    def upload(self, files: Files, name: str = "evil") -> httpx.Response:
        """Upload by the multipart form."""
        parts = [(file, (file, content)) for file, content in files.items()]
        return self.send({"data": {"name": name}, "files": parts})

    def send(self, form: dict[str, Any]) -> httpx.Response:
        with self.server.http(self.key) as http:
            return http.post("/v1/adapters", **form)

    def kept(self) -> tuple[set[Path], list[int]]:
        """Return every file that an upload could leave, and the number of rows."""
        files = {path for path in files_under(self.place.folder) if "sqlite3" not in path.name}
        return files, self.rows(*TABLES)

    @contextmanager
    def nothing_added(self) -> Iterator[None]:
        """Assert that there is no new file and no new row (an earlier upload's files may still be removed)."""
        files, rows = self.kept()
        yield
        until = time.monotonic() + 120
        while (left := self.kept())[0] - files or left[1] != rows:
            assert time.monotonic() < until, (left[0] - files, left[1], rows)
            time.sleep(0.1)

    def soon_removed(self, content: bytes) -> None:
        """Assert that no file holds `content` (what an upload received may still be removed)."""
        until = time.monotonic() + 120
        while left := holding(self.place.folder, content):
            assert time.monotonic() < until, left
            time.sleep(0.1)

    def rows(self, *tables: str) -> list[int]:
        """How many each table has."""
        with closing(
            sqlite3.connect(next(path for path in files_under(self.place.folder) if path.suffix == ".sqlite3"))
        ) as database:
            return [database.execute(f"SELECT count(*) FROM {table}").fetchone()[0] for table in tables]

    def resident_bytes(self) -> int:
        """Return the resident bytes of the process that takes the requests."""
        return int(psutil.Process(self.server.process.pid).memory_info().rss)


def announced(files: Files) -> dict[str, Any]:
    return {name: {"size": len(data), "sha256": hashlib.sha256(data).hexdigest()} for name, data in files.items()}


def opened(client: httpx.Client, files: dict[str, Any]) -> httpx.Response:
    return client.post("/v1/uploads", json={"adapter": "evil", "files": files})


def put(client: httpx.Client, id: str, name: str, data: bytes, offset: int = 0) -> httpx.Response:
    return client.put(f"/v1/uploads/{id}/files/{name}", params={"offset": offset}, content=data)


def ended(client: httpx.Client, id: str) -> dict[str, Any]:
    assert client.post(f"/v1/uploads/{id}/complete").status_code == 202
    for _ in range(3000):
        upload: dict[str, Any] = client.get(f"/v1/uploads/{id}").json()
        if upload["state"] != "validating":
            return upload
        time.sleep(0.02)
    raise AssertionError("it is still being validated")


def in_pieces(client: httpx.Client, files: Files) -> str:
    """An upload whose files came in halves; its id."""
    id = str(opened(client, announced(files)).json()["id"])
    for name, data in files.items():
        half = len(data) // 2
        for start, end in ((0, half), (half, len(data))):
            assert put(client, id, name, data[start:end], start).json()["received"] == end
    return id
