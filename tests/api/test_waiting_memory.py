"""Work that waits for a tenant takes no memory that grows with it, measured as the server's resident memory."""

from __future__ import annotations

import ctypes
import gc
import json
import os
import socket
import time
from collections.abc import Iterator
from pathlib import Path
from urllib.parse import urlsplit

import httpx
import pytest
from site_fixture import Site

from loramux_api import http_layer

MIB = 1 << 20
TEXT = "/v1/completions"
LINES = 22


def resident() -> int:
    """Bytes of this process, which the server is a part of, after what is free was given back."""
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


@pytest.fixture
def client(site: Site) -> Iterator[httpx.Client]:
    with site.http("all-scopes") as made:
        made.timeout = 300
        yield made


def upload(client: httpx.Client, data: bytes) -> str:
    answer = client.post("/v1/files", files={"file": ("input.jsonl", data)}, data={"purpose": "batch"})
    assert answer.status_code == 200, answer.text
    return str(answer.json()["id"])


def status_of(client: httpx.Client, batch: str) -> str:
    return str(client.get(f"/v1/batches/{batch}").json()["status"])


def wait_for(condition: object, seconds: float = 120) -> None:
    deadline = time.monotonic() + seconds
    while not condition():  # type: ignore[operator]
        assert time.monotonic() < deadline, "it did not happen in time"
        time.sleep(0.02)


def test_lines_of_batches_that_wait_are_on_the_disk_and_end_with_a_cancellation(
    site: Site, client: httpx.Client
) -> None:
    """A line is decoded when it has its place: 66 lines of 700 KB would be some 260 MiB."""
    window = site.server.app.state.programs.batches.worker._server.window
    body = {"model": "tiny", "prompt": [1] * 340_000, "max_tokens": 1}
    lines = [{"custom_id": str(n), "method": "POST", "url": TEXT, "body": body} for n in range(LINES)]
    file = upload(client, b"".join(json.dumps(line, separators=(",", ":")).encode() + b"\n" for line in lines))
    del lines, body
    window._slots._free -= 10_000  # other tenants' lines have every place
    try:
        before = resident()
        asked = {"input_file_id": file, "endpoint": TEXT, "completion_window": "24h"}
        batches = [client.post("/v1/batches", json=asked).json()["id"] for _ in range(3)]
        wait_for(lambda: all(status_of(client, batch) == "in_progress" for batch in batches))
        wait_for(lambda: sum(map(len, window._slots._waiting.values())) == LINES * len(batches))
        grown = resident() - before
        assert grown < 48 * MIB, f"{grown >> 20} MiB for lines that wait"
        for batch in batches:
            client.post(f"/v1/batches/{batch}/cancel")
        wait_for(lambda: all(status_of(client, batch) == "cancelled" for batch in batches))
        assert not window._slots._waiting, "the lines are gone though no place was free"
    finally:
        window._slots._free += 10_000


def reader(site: Site, file: str) -> socket.socket:
    """A connection that has asked for a file and reads none of it."""
    url = urlsplit(site.url)
    connection = socket.socket()
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
    connection.connect((str(url.hostname), int(url.port or 0)))
    key = site.keys["all-scopes"]
    head = f"GET /v1/files/{file}/content HTTP/1.1\r\nHost: {url.netloc}\r\nAuthorization: Bearer {key}\r\n\r\n"
    connection.sendall(head.encode())
    return connection


def test_downloads_that_are_not_read_are_counted_and_take_a_part_of_a_file_each(
    site: Site, client: httpx.Client
) -> None:
    memory = site.server.app.state.platform.memory
    file = upload(client, b"x" * (15 * MIB))
    before = resident()
    readers = [reader(site, file) for _ in range(20)]
    try:
        wait_for(lambda: memory._held.total() >= 20 * MIB)
        time.sleep(1)
        grown = resident() - before
        assert grown < 60 * MIB, f"{grown >> 20} MiB for 20 unread downloads"
    finally:
        for one in readers:
            one.close()
    wait_for(lambda: memory._held.total() == 0)


def test_a_reader_that_takes_nothing_is_disconnected(
    site: Site, client: httpx.Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(http_layer, "READER_SECONDS", 0.3)
    memory = site.server.app.state.platform.memory
    file = upload(client, b"x" * (15 * MIB))
    with reader(site, file) as silent:
        silent.settimeout(120)
        assert silent.recv(1, socket.MSG_PEEK), "the answer has begun, and a part of the file is held"
        wait_for(lambda: memory._held.total() == 0)
        received = 0
        while data := silent.recv(1 << 20):
            received += len(data)
    assert received < 15 * MIB


def test_a_tenant_beyond_its_memory_waits_and_others_do_not(
    site: Site, client: httpx.Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    memory = site.server.app.state.platform.memory
    monkeypatch.setattr(memory, "per_tenant", 3 * MIB)
    file = upload(client, b"x" * (8 * MIB))
    readers = [reader(site, file) for _ in range(6)]
    try:
        wait_for(lambda: memory._held.total() == 3 * MIB)
        time.sleep(0.3)
        assert memory._held.total() == 3 * MIB, "three downloads are read; the others wait"
        with site.http("globex") as other:
            body = {"model": "tiny", "prompt": "hi", "max_tokens": 1}
            assert other.post(TEXT, json=body).status_code == 200
    finally:
        for one in readers:
            one.close()
    wait_for(lambda: memory._held.total() == 0)


def test_a_whole_download_is_an_attachment_that_no_browser_shows_or_keeps(client: httpx.Client) -> None:
    data = b"<html><script>1</script>" * 50_000
    answer = client.get(f"/v1/files/{upload(client, data)}/content")
    assert answer.content == data
    assert answer.headers["content-disposition"] == "attachment; filename*=UTF-8''input.jsonl"
    assert answer.headers["x-content-type-options"] == "nosniff"
    assert answer.headers["cache-control"] == "no-store"
    assert int(answer.headers["content-length"]) == len(data)
