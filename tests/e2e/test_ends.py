"""How a server process ends, and what is left of the requests that it was serving."""

from __future__ import annotations

import json
import os
import shutil
import signal
import threading
import time
from pathlib import Path

import httpx
import pytest
from server_process import Child, Place, served

LONG = {
    "model": "tiny",
    "prompt": "x",
    "max_tokens": 1500,
    "stream": True,
    "ignore_eos": True,
    "return_token_ids": True,
}


class Reader(threading.Thread):
    """Reads a stream to its end, however it ends."""

    def __init__(self, server: Child, key: str) -> None:
        super().__init__()
        self.events: list[str] = []
        self.first = threading.Event()
        self._server = server
        self._key = key
        self.start()
        assert self.first.wait(60)

    def run(self) -> None:
        with self._server.http(self._key) as client, client.stream("POST", "/v1/completions", json=LONG) as response:
            try:
                rest = b""  # httpx's lines end at U+2028 and its like too, which an answer may contain
                for received in response.iter_bytes():
                    *lines, rest = (rest + received).split(b"\n")
                    self.events += [line.decode() for line in lines if line]
                    if self.events:
                        self.first.set()
            except httpx.HTTPError as error:
                self.events.append(type(error).__name__)

    @property
    def tokens(self) -> int:
        parsed = [json.loads(event[6:]) for event in self.events if event.startswith("data: {")]
        return sum(len(choice["token_ids"]) for event in parsed for choice in event.get("choices", []))


@pytest.mark.parametrize("in_process", [False, True], ids=["engine process", "engine thread"])
def test_sigterm_drains_streams_and_exits_with_zero(base_dir: Path, tmp_path: Path, in_process: bool) -> None:
    place = Place(tmp_path, base_dir, in_process).prepare()
    key = place.key_of("acme")
    with served(place) as server:
        reader = Reader(server, key)
        server.process.send_signal(signal.SIGTERM)
        deadline = time.monotonic() + 120
        while httpx.get(f"{server.url}/health/ready").status_code != 503:
            assert time.monotonic() < deadline
        with server.http(key) as client:
            refused = client.post("/v1/completions", json=LONG)
        assert (refused.status_code, refused.json()["error"]["code"]) == (503, "server_draining")
        reader.join(120)
        assert reader.events[-1] == "data: [DONE]"
        assert reader.tokens == LONG["max_tokens"]
        assert server.process.wait(60) == 0


def test_crash_closes_open_requests_unbilled_and_an_engine_that_dies_is_replaced(
    base_dir: Path, tmp_path: Path
) -> None:
    place = Place(tmp_path, base_dir).prepare()
    key = place.key_of("acme")
    with served(place) as server:
        reader = Reader(server, key)
        os.killpg(server.process.pid, signal.SIGKILL)
        reader.join(60)
        assert reader.events[-1] != "data: [DONE]"
    with served(place) as server:
        assert "1 requests closed as interrupted" in (place.folder / "server.log").read_text()
        query = {"start_time": int(time.time()) - 3600, "bucket_width": "1h"}
        with server.http(key) as client:
            page = client.get("/v1/organization/usage/completions", params=query).json()
        results = [result for bucket in page["data"] for result in bucket["results"]]
        assert sum(result["input_tokens"] + result["output_tokens"] for result in results) == 0
        reader = Reader(server, key)
        os.kill(server.engine_pid(), signal.SIGKILL)
        reader.join(120)
        assert reader.events[-1] == "data: [DONE]"
        assert reader.tokens == LONG["max_tokens"], "the next engine goes on with the stream"


def test_engine_that_cannot_be_started_again_ends_the_server(base_dir: Path, tmp_path: Path) -> None:
    base = shutil.copytree(base_dir, tmp_path / "base")
    with served(Place(tmp_path, base, max_wait_s=1.0).prepare()) as server:
        (base / "config.json").unlink()
        os.kill(server.engine_pid(), signal.SIGKILL)
        assert server.process.wait(400) == 1
