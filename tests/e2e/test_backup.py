"""docs/operations/backup.md, step by step: back up a running server, lose everything, restore, and prove the bill."""

from __future__ import annotations

import os
import shutil
import sqlite3
import subprocess
from contextlib import closing
from pathlib import Path

import pytest
from peft_uploads import form, make_adapter
from postgres_server import postgres_programs, start_postgres
from server_process import Child, Place, served

ASKED = {"model": "acme/support", "prompt": "hello", "max_tokens": 5, "temperature": 0}
BIN = postgres_programs()


def use(child: Child, key: str) -> str:
    """One answer of the adapter."""
    with child.http(key) as client:
        return client.post("/v1/completions", json=ASKED).raise_for_status().json()["choices"][0]["text"]


def upload(child: Child, key: str, adapter: Path) -> None:
    with child.http(key) as client:
        client.post("/v1/adapters", **form(adapter, "support")).raise_for_status()


@pytest.mark.slow
def test_sqlite_backup_of_a_running_server_is_restored_and_reconciled(base_dir: Path, tmp_path: Path) -> None:
    (tmp_path / "first").mkdir()
    place, backup = Place(tmp_path / "first", base_dir, in_process=True).prepare(), tmp_path / "backup"
    var = place.folder / "var"
    key = place.key_of("acme")
    shutil.copytree(var, backup, ignore=lambda _, names: [name for name in names if name != "pepper"])
    with served(place) as child:
        upload(child, key, make_adapter(base_dir, tmp_path / "adapter"))
        answer = use(child, key)
        with (
            closing(sqlite3.connect(var / "loramux.sqlite3")) as source,
            closing(sqlite3.connect(backup / "loramux.sqlite3")) as target,
        ):
            source.backup(target)
        shutil.copytree(var / "blobs", backup / "blobs")
        use(child, key)  # after the backup: lost
    shutil.rmtree(var)
    shutil.copytree(backup, var)
    with served(place) as child:
        assert use(child, key) == answer
    place.loramux("usage", "reconcile")  # exit code 1 would be a difference


@pytest.mark.slow
def test_postgresql_backup_is_restored_into_another_database_and_reconciled(base_dir: Path, tmp_path: Path) -> None:
    server = start_postgres(Path("/tmp") / f"lm-backup-{os.getpid()}")
    try:
        url = server.get_uri()
        server.psql("CREATE DATABASE one")
        server.psql("CREATE DATABASE two")
        first, second = (url.replace("/postgres?", f"/{name}?") for name in ("one", "two"))
        (tmp_path / "at").mkdir()
        place = Place(tmp_path / "at", base_dir, in_process=True, url=first).prepare()
        place.loramux("migrate")
        key = place.key_of("acme")
        with served(place) as child:
            upload(child, key, make_adapter(base_dir, tmp_path / "adapter"))
            answer = use(child, key)
            dump = ["pg_dump", "--format=custom", f"--file={tmp_path}/dump", first]
            subprocess.run([BIN / dump[0], *dump[1:]], check=True, capture_output=True)
        restored = ["pg_restore", f"--dbname={second}", f"{tmp_path}/dump"]
        subprocess.run([BIN / restored[0], *restored[1:]], check=True, capture_output=True)
        place = Place(place.folder, base_dir, in_process=True, url=second).prepare()
        with served(place) as child:
            assert use(child, key) == answer
        place.loramux("usage", "reconcile")
    finally:
        server.cleanup()
