"""Faults around a real server: full disks, absent stores, too few descriptors (docs/operations/drills.md).

pytest tests/e2e/test_drills.py -m slow -s
"""

from __future__ import annotations

import os
import shutil
import signal
import socket
import subprocess
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import httpx
import pytest
from peft_uploads import form, make_adapter
from postgres_server import postgres_programs, start_postgres
from running_server import free_port
from s3_server import RCLONE
from server_process import Child, Place, served

pytestmark = pytest.mark.slow

POSTGRESQL = postgres_programs()
PATIENCE_SECONDS = 120
NEEDS_ROOT = pytest.mark.skipif(os.geteuid() != 0, reason="mounts a small file system")


@contextmanager
def small_disk(folder: Path, mebibytes: int) -> Iterator[Path]:
    """A separate file system, which can be filled."""
    folder.mkdir(parents=True, exist_ok=True)
    subprocess.run(["mount", "-t", "tmpfs", "-o", f"size={mebibytes}m", "tmpfs", str(folder)], check=True)
    try:
        yield folder
    finally:
        subprocess.run(["umount", "--lazy", str(folder)], check=True)


def fill(folder: Path) -> Path:
    """Take every byte that is free."""
    filler = folder / "filler"
    with filler.open("wb", buffering=0) as file, suppress(OSError):
        while file.write(b"x" * 4096):
            pass
    return filler


def ask(child: Child, key: str, model: str = "tiny") -> httpx.Response:
    with child.http(key) as client:
        return client.post("/v1/completions", json={"model": model, "prompt": "hello", "max_tokens": 4})


def upload(child: Child, key: str, adapter: Path, name: str) -> httpx.Response:
    with child.http(key) as client:
        return client.post("/v1/adapters", **form(adapter, name))


def eventually(what: str, holds: Callable[[], object]) -> None:
    until = time.monotonic() + PATIENCE_SECONDS
    while time.monotonic() < until:
        if holds():
            return
        time.sleep(0.2)
    raise AssertionError(f"{what}: not within {PATIENCE_SECONDS} s")


def assert_refused(answer: httpx.Response) -> None:
    """The server's side is at fault, the client may try again, and no traceback is told."""
    assert answer.status_code == 503, (answer.status_code, answer.text)
    assert answer.json()["error"]["message"]
    assert "Traceback" not in answer.text


def ready(child: Child) -> int:
    return httpx.get(f"{child.url}/health/ready", timeout=30).status_code


@pytest.fixture(scope="module")
def adapters(base_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    root = tmp_path_factory.mktemp("adapters")
    return [make_adapter(base_dir, root / str(seed), seed=seed) for seed in range(3)]


@NEEDS_ROOT
def test_full_disk_of_the_database_refuses_and_loses_nothing(base_dir: Path, tmp_path: Path) -> None:
    with small_disk(tmp_path / "var", 8) as disk:
        place = Place(tmp_path, base_dir, in_process=True).prepare()
        key = place.key_of("acme")
        with served(place) as child:
            ask(child, key).raise_for_status()
            filler = fill(disk)
            while_full = [ask(child, key) for _ in range(20)]
            for answer in while_full:
                if answer.status_code != 200:
                    assert_refused(answer)
            assert any(answer.status_code == 503 for answer in while_full), "the disk was not full enough"
            assert httpx.get(f"{child.url}/health/live").status_code == 200
            filler.unlink()
            eventually("answers again", lambda: ask(child, key).status_code == 200)
            eventually("all is settled", lambda: child.metric("loramux_unsettled_requests") == 0)
            assert child.metric("loramux_ledger_drift_tokens") == 0
            print(f"\nwhile full: {Counter(answer.status_code for answer in while_full)}")
        place.loramux("usage", "reconcile")
    assert "Traceback" not in (tmp_path / "server.log").read_text()


@NEEDS_ROOT
@pytest.mark.parametrize("which", ["blobs", "cache"])
def test_full_disk_of_blobs_and_cache_refuses_uploads_and_leaves_nothing(
    which: str, base_dir: Path, tmp_path: Path, adapters: list[Path]
) -> None:
    with small_disk(tmp_path / "disk", 2) as disk:
        place = Place(tmp_path, base_dir, in_process=True).prepare()
        with place.config.open("a") as file:
            file.write(f'[records]\n{which} = "disk/{which}"\n')
        key = place.key_of("acme")
        with served(place) as child:
            assert upload(child, key, adapters[0], "first").status_code == 201
            ask(child, key, "acme/first").raise_for_status()
            filler = fill(disk)
            refused = upload(child, key, adapters[1], "second")
            print(f"\n{which} full: {refused.status_code} {refused.text}")
            if refused.status_code != 201:
                assert_refused(refused)
            answer = ask(child, key, "acme/second")
            assert answer.status_code in (200, 404, 503), answer.text
            assert ask(child, key, "acme/first").status_code == 200, "what is loaded is served"
            assert ask(child, key).status_code == 200
            filler.unlink()
            assert upload(child, key, adapters[2], "third").status_code == 201
            ask(child, key, "acme/third").raise_for_status()
    assert "Traceback" not in (tmp_path / "server.log").read_text()


@contextmanager
def bucket(folder: Path, port: int) -> Iterator[subprocess.Popen[bytes]]:
    command = [RCLONE, "serve", "s3", str(folder), "--addr", f"127.0.0.1:{port}", "--auth-key", "key,secret"]
    with subprocess.Popen(
        [*command, "--config", "/dev/null", "--vfs-cache-mode", "off"], stderr=subprocess.DEVNULL
    ) as s3:
        try:
            eventually("S3", lambda: _listens(port))
            yield s3
        finally:
            s3.kill()


def _listens(port: int) -> bool:
    with socket.socket() as probe:
        return probe.connect_ex(("127.0.0.1", port)) == 0


def test_absent_object_store_stops_no_loaded_adapter_and_heals(
    base_dir: Path, tmp_path: Path, adapters: list[Path]
) -> None:
    port = free_port()
    (tmp_path / "s3/bucket").mkdir(parents=True)
    place = Place(tmp_path, base_dir, in_process=True).prepare()
    with place.config.open("a") as file:
        options = f'endpoint = "http://127.0.0.1:{port}", region = "us-east-1", access_key_id = "key"'
        file.write(f'[records]\nblobs = "s3://bucket"\nblob_options = {{ {options}, secret_access_key = "secret" }}\n')
    with bucket(tmp_path / "s3", port) as s3:
        key = place.key_of("acme")
        with served(place) as child:
            for number in (0, 1):
                assert upload(child, key, adapters[number], f"a{number}").status_code == 201
            ask(child, key, "acme/a0").raise_for_status()
            s3.kill()
            s3.wait()
            began = time.monotonic()
            assert ask(child, key, "acme/a0").status_code == 200
            assert ask(child, key).status_code == 200
            uploading = threading.Thread(target=lambda: upload(child, key, adapters[2], "late"))
            uploading.start()
            assert ready(child) == 200
            print(f"\nwithout S3: answered after {time.monotonic() - began:.1f} s")
            with bucket(tmp_path / "s3", port):
                uploading.join(PATIENCE_SECONDS)
                assert not uploading.is_alive(), "an upload is answered, one way or the other"
                eventually("uploads again", lambda: upload(child, key, adapters[2], "again").status_code == 201)
                ask(child, key, "acme/again").raise_for_status()
    assert "Traceback" not in (tmp_path / "server.log").read_text()


def test_absent_database_refuses_and_settles_later(base_dir: Path, tmp_path: Path) -> None:
    """PostgreSQL is stopped without a clean shutdown and started again: requests are refused, then all is settled."""
    folder = Path("/tmp") / f"lm-drill-{os.getpid()}"
    server = start_postgres(folder)
    place = Place(tmp_path, base_dir, in_process=True, url=server.get_uri()).prepare()
    as_owner = ["runuser", "-u", folder.owner(), "--"] if os.geteuid() == 0 and folder.owner() != "root" else []
    control = [*as_owner, str(POSTGRESQL / "pg_ctl"), "-D", str(folder), "-s", "-w"]
    started = Path(f"{folder}/postmaster.opts").read_text().split("\n")[0]
    try:
        place.loramux("migrate")
        key = place.key_of("acme")
        with served(place) as child:
            ask(child, key).raise_for_status()
            subprocess.run([*control, "-m", "immediate", "stop"], check=True)
            eventually("not ready", lambda: ready(child) == 503)
            began = time.monotonic()
            answers = [ask(child, key) for _ in range(3)]
            print(
                f"\nwithout the database: {[answer.status_code for answer in answers]}, "
                f"{time.monotonic() - began:.1f} s"
            )
            for answer in answers:
                assert_refused(answer)
            options = started.split(None, 1)[1].replace('"', "'")
            subprocess.run([*control, "-o", options, "-l", "/dev/null", "start"], check=True)
            eventually("ready", lambda: ready(child) == 200)
            ask(child, key).raise_for_status()
            eventually("all is settled", lambda: child.metric("loramux_unsettled_requests") == 0)
        place.loramux("usage", "reconcile")
    finally:
        with suppress(Exception):
            server.cleanup()
        shutil.rmtree(folder, ignore_errors=True)
    assert "Traceback" not in (tmp_path / "server.log").read_text()


def test_exhausted_descriptors_end_no_server(base_dir: Path, tmp_path: Path) -> None:
    """More connections than the process may have files: those that wait are served when others leave."""
    place = Place(tmp_path, base_dir, in_process=True).prepare()
    key = place.key_of("acme")
    with served(place) as child:
        subprocess.run(["prlimit", "--pid", str(child.process.pid), "--nofile=160:160"], check=True)
        idle = []
        for _ in range(400):
            with suppress(OSError):
                idle.append(socket.create_connection(("127.0.0.1", int(child.url.rpartition(":")[2])), timeout=5))
        assert child.process.poll() is None
        for connection in idle:
            connection.close()
        eventually("answers again", lambda: _status(child, key) == 200)
        child.process.send_signal(signal.SIGTERM)
        assert child.process.wait(60) == 0
    place.loramux("usage", "reconcile")


def _status(child: Child, key: str) -> int:
    try:
        return ask(child, key).status_code
    except httpx.TransportError:
        return 0
