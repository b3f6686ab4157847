"""A real server with a real engine, one sound adapter, and what somebody could leave behind in it."""

from __future__ import annotations

import sqlite3
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import psutil
from attacks import Files
from server_process import Child, Place

TABLES = ("adapters", "revisions", "aliases")


@dataclass(frozen=True)
class House:
    place: Place
    server: Child
    key: str
    sound: Files

    def upload(self, files: Files, name: str = "evil") -> httpx.Response:
        """As the multipart form has it."""
        parts = [(file, (file, content)) for file, content in files.items()]
        return self.send({"data": {"name": name}, "files": parts})

    def send(self, form: dict[str, Any]) -> httpx.Response:
        with self.server.http(self.key) as http:
            return http.post("/v1/adapters", **form)

    def kept(self) -> tuple[set[Path], list[int]]:
        """Every file that an upload could leave behind, and how many rows."""
        files = {path for path in self.place.folder.rglob("*") if path.is_file() and "sqlite3" not in path.name}
        with closing(sqlite3.connect(next(self.place.folder.rglob("*.sqlite3")))) as database:
            rows = [database.execute(f"SELECT count(*) FROM {table}").fetchone()[0] for table in TABLES]
        return files, rows

    def resident_bytes(self) -> int:
        """Of the process that takes the requests."""
        return int(psutil.Process(self.server.process.pid).memory_info().rss)
