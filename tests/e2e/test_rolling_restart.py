"""A server is replaced under load: no request fails before the load balancer knows, and two servers never share."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest
from running_server import free_port
from server_process import LORAMUX, Place, served

BODY = {"model": "tiny", "prompt": "hello", "max_tokens": 4, "temperature": 0}
LAME_DUCK = 6.0


class Load:
    """Clients that send one request after the other until the load balancer's probe fails."""

    def __init__(self, url: str, key: str, clients: int = 8) -> None:
        self.outcomes: Counter[str] = Counter()
        self.seconds_after_probe: float | None = None
        self._url, self._key = url, key
        self._out_of_service = threading.Event()
        self._threads = [threading.Thread(target=self._send) for _ in range(clients)]
        self._probe = threading.Thread(target=self._watch)

    def __enter__(self) -> Load:
        for thread in (*self._threads, self._probe):
            thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._out_of_service.set()
        for thread in (*self._threads, self._probe):
            thread.join(60)

    def wait_for(self, answers: int) -> None:
        deadline = time.monotonic() + 60
        while self.outcomes["200"] < answers:
            assert time.monotonic() < deadline, self.outcomes
            time.sleep(0.05)

    def join(self) -> None:
        self._probe.join(60)
        assert self._out_of_service.is_set()

    def _watch(self) -> None:
        """The load balancer: a request that begins after the probe has failed goes to another server."""
        while not self._out_of_service.is_set():
            with contextlib.suppress(httpx.TransportError):
                if httpx.get(f"{self._url}/health/ready").status_code == 503:
                    break
            time.sleep(0.05)
        self._out_of_service.set()

    def _send(self) -> None:
        headers = {"Authorization": f"Bearer {self._key}"}
        while not self._out_of_service.is_set():
            try:  # a connection each, as a refused one must show
                status = str(
                    httpx.post(f"{self._url}/v1/completions", json=BODY, headers=headers, timeout=60).status_code
                )
            except httpx.TransportError as error:
                status = type(error).__name__
            self.outcomes[status] += 1


def test_restart_under_load_refuses_nothing_within_the_lame_duck_time(base_dir: Path, tmp_path: Path) -> None:
    place = Place(tmp_path, base_dir, lame_duck_seconds=LAME_DUCK).prepare()
    key = place.key_of("acme")
    with served(place) as server:
        with Load(server.url, key) as load:
            load.wait_for(20)
            server.process.send_signal(signal.SIGTERM)
            load.join()
            assert httpx.get(f"{server.url}/health/live").status_code == 200
        assert server.process.wait(60) == 0
    assert set(load.outcomes) == {"200"}, load.outcomes
    log = (place.folder / "server.log").read_text()
    phases = ("requests are served for 6 s more", "draining:", "closing the connections", "closing the engine")
    assert [phase for phase in phases if phase not in log] == []
    assert sorted(phases, key=log.index) == list(phases)


@pytest.mark.slow
def test_restart_of_uvicorn_under_load_refuses_nothing_within_the_lame_duck_time(
    base_dir: Path, tmp_path: Path
) -> None:
    place = Place(tmp_path, base_dir, lame_duck_seconds=LAME_DUCK).prepare()
    key = place.key_of("acme")
    with uvicorn_process(place) as (process, url):
        with Load(url, key) as load:
            load.wait_for(20)
            process.send_signal(signal.SIGTERM)
            load.join()
        process.wait(60)
    assert set(load.outcomes) == {"200"}, load.outcomes


@contextlib.contextmanager
def uvicorn_process(place: Place) -> Iterator[tuple[subprocess.Popen[bytes], str]]:
    port = free_port()
    command = [sys.executable, "-m", "uvicorn", "--factory", "loramux_api.app:from_environment", "--port", str(port)]
    with (place.folder / "server.log").open("a") as log:
        process = subprocess.Popen(
            command, stderr=log, stdout=log, env=os.environ | {"LORAMUX_CONFIG": str(place.config)}
        )
    url = f"http://127.0.0.1:{port}"
    try:
        deadline = time.monotonic() + 120
        while True:
            with contextlib.suppress(httpx.TransportError):
                if httpx.get(f"{url}/health/ready").status_code == 200:
                    break
            assert process.poll() is None, (place.folder / "server.log").read_text()
            assert time.monotonic() < deadline
            time.sleep(0.1)
        yield process, url
    finally:
        process.kill()
        process.wait()


def test_two_servers_started_together_do_not_share_the_port(base_dir: Path, tmp_path: Path) -> None:
    """The loser ends with a sentence, however close the two starts are."""
    port = str(free_port())
    processes = []
    for name in ("one", "two"):
        (tmp_path / name).mkdir()
        place = Place(tmp_path / name, base_dir).prepare()
        command = [*LORAMUX, "serve", "--config", str(place.config), "--port", port, "--json"]
        processes.append(subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True))
    try:
        deadline = time.monotonic() + 120
        while not any(ended := [process.poll() is not None for process in processes]):
            assert time.monotonic() < deadline, "both servers run"
            time.sleep(0.05)
        loser, winner = sorted(processes, key=lambda process: process.poll() is None)
        said = loser.communicate(timeout=60)[1]
        assert (loser.returncode, f"cannot listen on 127.0.0.1:{port}" in said) == (1, True), said
        assert winner.stdout is not None
        assert '"serving"' in winner.stdout.readline()
        assert httpx.get(f"http://127.0.0.1:{port}/health/ready").status_code == 200
        assert ended.count(True) == 1
    finally:
        for process in processes:
            process.send_signal(signal.SIGTERM)
            process.communicate(timeout=60)


@pytest.mark.parametrize(("when", "code"), [("loading", 128 + signal.SIGINT), ("serving", 0)])
def test_ctrl_c_ends_the_server_without_noise(base_dir: Path, tmp_path: Path, when: str, code: int) -> None:
    """SIGINT reaches the whole process group, as from a terminal: no traceback and no leak report."""
    place = Place(tmp_path, base_dir).prepare()
    command = [*LORAMUX, "serve", "--config", str(place.config), "--port", str(free_port()), "--json"]
    process = subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, start_new_session=True
    )
    assert process.stdout is not None
    if when == "serving":
        assert "serving" in process.stdout.readline()
    else:
        deadline = time.monotonic() + 120
        while not engine_imports_torch(process.pid):
            assert time.monotonic() < deadline
            assert process.poll() is None
            time.sleep(0.05)
    os.killpg(process.pid, signal.SIGINT)
    _, log = process.communicate(timeout=120)
    lines = [line for line in log.splitlines() if not line.startswith("{")]
    assert (process.returncode, lines) == (code, [])
    assert [line for line in log.splitlines() if json.loads(line)["level"] != "info"] == []


def engine_imports_torch(pid: int) -> bool:
    """True once the engine's process has mapped torch's library: the import goes on for seconds."""
    children = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
    with contextlib.suppress(OSError):
        return any("libtorch" in Path(f"/proc/{child}/maps").read_text() for child in children)
    return False
