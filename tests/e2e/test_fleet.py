"""Two bases with two engines each, real processes under load: engines are killed or restarted, and nobody notices."""

from __future__ import annotations

import json
import os
import random
import signal
import sqlite3
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import pytest
from peft_uploads import form, make_adapter
from server_process import Child, Place, served
from tiny_base import make_base

BASES = ("amber", "birch")
LENGTH = 120


@dataclass(frozen=True)
class FleetPlace(Place):
    """Settings of two bases with two engines each."""

    def prepare(self) -> FleetPlace:
        base = 'name = "{0}"\npath = "{1}/{0}"\ndtype = "float32"\nengines = {{ min = 2, max_wait_s = 300.0 }}\n'
        self.config.write_text(
            "".join(f"[[bases]]\n{base.format(name, self.base)}" for name in BASES)
            + "[engine]\npool_bytes = 16_777_216\nmax_num_batched_tokens = 64\nnum_threads = 1\n"
            "[validation]\nparity = false\n[server]\ndrain_seconds = 60\nlame_duck_seconds = 0\n"
        )
        return self


@dataclass(frozen=True)
class Fleet:
    server: Child
    place: Place
    key: str
    operator: str
    models: tuple[str, ...]

    def body(self, number: int) -> dict[str, Any]:
        """The number-th request of the load: greedy or seeded, for one of the models."""
        sampling = {"temperature": 0.0} if number % 2 else {"temperature": 1.1, "seed": number, "top_p": 0.95}
        prompt = f"{number} prompts differ from their beginning on"
        model = self.models[number % len(self.models)]
        return {"model": model, "prompt": prompt, "max_tokens": LENGTH, "ignore_eos": True} | sampling

    def answer(self, number: int) -> list[int]:
        """Stream the answer; any error is the test's."""
        body = self.body(number) | {"stream": True, "return_token_ids": True}
        tokens: list[int] = []
        with (
            httpx.Client(base_url=self.server.url, timeout=300) as client,
            client.stream("POST", "/v1/completions", json=body, headers=self.headers) as response,
        ):
            assert response.status_code == 200, response.read()
            lines = [line for line in response.iter_lines() if line]
        assert lines[-1] == "data: [DONE]", lines[-3:]
        for line in lines[:-1]:
            event = json.loads(line.removeprefix("data: "))
            assert "error" not in event, event
            tokens += event["choices"][0]["token_ids"]
        return tokens

    def answers(self, count: int) -> list[list[int]]:
        with ThreadPoolExecutor(count) as threads:
            return list(threads.map(self.answer, range(count)))

    @property
    def headers(self) -> dict[str, str]:
        return {"Authorization": f"Bearer {self.key}"}

    def engine_pids(self) -> list[int]:
        pid = self.server.process.pid
        children = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
        return [int(child) for child in children if b"spawn_main" in _command_line(child)]

    def engines(self) -> list[dict[str, Any]]:
        return self.admin("GET", "/admin/engines")["data"]

    def admin(self, method: str, path: str, **arguments: Any) -> Any:
        headers = {"Authorization": f"Bearer {self.operator}"}
        answer = httpx.request(method, self.server.url + path, headers=headers, timeout=60, **arguments)
        assert answer.is_success, answer.text
        return answer.json()

    def ledger(self) -> list[tuple[str, str, int]]:
        with sqlite3.connect(self.place.folder / "var/loramux.sqlite3") as records:
            query = "SELECT request_id, status, output_tokens FROM ledger_entries WHERE kind = 'usage'"
            return records.execute(query).fetchall()


def make_fleet(folder: Path, num_adapters: int) -> Iterator[Fleet]:
    bases = {name: make_base(folder / "bases" / name, context=512, seed=seed) for seed, name in enumerate(BASES)}
    place = FleetPlace(folder, folder / "bases").prepare()
    key = place.key_of("acme")
    operator = place.loramux("key", "create", "--tenant", "acme", "--scope", "operator")["key"]
    models = list(BASES)
    with served(place) as server, server.http(key) as client:
        for number in range(num_adapters):
            base = BASES[number % 2]
            adapter = make_adapter(bases[base], folder / f"adapter-{number}", rank=4 + number % 3, seed=number)
            body = form(adapter, f"a{number}")
            body["data"]["base_model"] = base
            answer = client.post("/v1/adapters", **body)
            assert answer.status_code == 201, answer.text
            models.append(f"acme/a{number}")
        yield Fleet(server, place, key, operator, tuple(models))
        server.process.terminate()
        assert server.process.wait(60) == 0


@pytest.fixture(scope="module")
def fleet(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Fleet]:
    yield from make_fleet(tmp_path_factory.mktemp("fleet"), 4)


def _command_line(pid: str) -> bytes:
    """Of a process that may end at any time."""
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes()
    except OSError:
        return b""


def until(happened: Any, seconds: float = 120.0) -> None:
    for _ in range(int(seconds / 0.1)):
        if happened():
            return
        threading.Event().wait(0.1)
    raise AssertionError("it did not happen")


def all_serve(fleet: Fleet) -> bool:
    return all(engine["state"] == "ready" for engine in fleet.engines())


def check_bill(fleet: Fleet, expected: int) -> None:
    """One entry a request, each with every token, and no drift against what the engines counted."""
    entries = fleet.ledger()
    assert len(entries) == len({id for id, _, _ in entries}) == expected
    assert {(status, tokens) for _, status, tokens in entries} == {("completed", LENGTH)}
    assert fleet.server.metric("loramux_ledger_drift_tokens") == 0
    assert fleet.place.loramux("usage", "reconcile")["drift_tokens"] == 0


def kill_engines(fleet: Fleet, kills: int, pause: float, ended: threading.Event) -> int:
    """kill -9 of a random engine, again and again, until the load has ended."""
    chosen, killed = random.Random(kills), 0
    while killed < kills and not ended.wait(pause):
        if pids := fleet.engine_pids():
            os.kill(chosen.choice(pids), signal.SIGKILL)
            killed += 1
    return killed


def survives_kills(fleet: Fleet, streams: int, kills: int, pause: float) -> int:
    undisturbed = fleet.answers(streams)
    ended, killed = threading.Event(), 0
    with ThreadPoolExecutor(1) as thread:
        killing = thread.submit(kill_engines, fleet, kills, pause, ended)
        try:
            disturbed = [fleet.answers(streams)]
            while not killing.done():
                disturbed.append(fleet.answers(streams))
        finally:
            ended.set()
        killed = killing.result()
    assert all(answers == undisturbed for answers in disturbed)
    until(lambda: all_serve(fleet))
    check_bill(fleet, streams * (1 + len(disturbed)))
    return killed


def restarts(fleet: Fleet, names: list[str], streams: int) -> None:
    """Restart the engines one after the other under load, and compare every answer with the undisturbed one."""
    entries, undisturbed, rounds = len(fleet.ledger()), fleet.answers(streams), 1
    for name in names:
        starts = next(engine["starts"] for engine in fleet.engines() if engine["engine"] == name)
        fleet.admin("POST", "/admin/engines/restart", json={"engine": name, "seconds": 0})
        is_ready = False
        while not is_ready:
            assert fleet.answers(streams) == undisturbed
            rounds += 1
            found = next(engine for engine in fleet.engines() if engine["engine"] == name)
            is_ready = found["starts"] > starts and found["state"] == "ready"
    check_bill(fleet, entries + streams * rounds)


def test_killed_and_restarted_engines_cost_no_stream_no_token_and_no_entry(fleet: Fleet) -> None:
    assert survives_kills(fleet, streams=6, kills=1, pause=0.3) == 1
    restarts(fleet, ["birch-1"], streams=6)


@pytest.mark.slow
def test_sixty_four_streams_over_forty_adapters_survive_ten_kills_and_a_rolling_restart(tmp_path: Path) -> None:
    for fleet in make_fleet(tmp_path, 40):
        assert survives_kills(fleet, streams=64, kills=10, pause=3.0) == 10
        restarts(fleet, [engine["engine"] for engine in fleet.engines()], streams=64)
