"""Two servers on one PostgreSQL and one fleet: engines in separate processes, over the encrypted channel."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import pytest
from peft_uploads import form, make_adapter
from postgres_server import start_postgres
from running_server import free_port
from server_process import LORAMUX, Child, Place, served
from tiny_base import make_base

LENGTH = 150
OF_GAMMA = "(SELECT id FROM tenants WHERE name = 'gamma')"


@dataclass(frozen=True)
class SharedPlace(Place):
    """Settings of a server that attaches to engines at `ports`."""

    ports: tuple[int, ...] = ()

    def prepare(self) -> SharedPlace:
        addresses = ", ".join(f'"tcp://127.0.0.1:{port}"' for port in self.ports)
        self.config.write_text(
            f'[[bases]]\nname = "tiny"\npath = "{self.base}"\ndtype = "float32"\n'
            f"engines = {{ addresses = [{addresses}] }}\n"
            "[engine]\npool_bytes = 16_777_216\nmax_num_batched_tokens = 64\nnum_threads = 1\n"
            "[fleet]\nlease_s = 5\n[validation]\nparity = false\n"
            "[server]\ndrain_seconds = 60\nlame_duck_seconds = 0\n"
            f'[records]\nurl = "{self.url}"\n'
        )
        return self


@contextmanager
def engine_at(place: Place, port: int) -> Iterator[subprocess.Popen[str]]:
    command = [*LORAMUX, "engine", "serve", "--config", str(place.config), "--json"]
    with (place.folder / f"engine-{port}.log").open("a") as log:
        engine = subprocess.Popen(
            [*command, "--listen", f"tcp://127.0.0.1:{port}"], stdout=subprocess.PIPE, stderr=log, text=True
        )
    assert engine.stdout is not None
    try:
        said = engine.stdout.readline()
        assert said, (place.folder / f"engine-{port}.log").read_text()
        assert json.loads(said)["address"] == f"tcp://127.0.0.1:{port}"
        yield engine
    finally:
        engine.kill()
        engine.wait()
        engine.stdout.close()


@dataclass(frozen=True)
class SharedFleet:
    place: SharedPlace
    engines: list[subprocess.Popen[str]]
    fronts: tuple[Child, Child]
    key: str
    operator: str
    records: Any
    stack: ExitStack

    def answer(self, front: Child, number: int) -> list[int]:
        """Stream an answer from one server; errors of every kind are raised to the caller."""
        model = "acme/a" if number % 2 else "tiny"
        sampling = {"temperature": 0.0} if number % 3 else {"temperature": 1.1, "seed": number}
        body = {"model": model, "prompt": f"{number} is asked", "max_tokens": LENGTH, "ignore_eos": True} | sampling
        tokens: list[int] = []
        with (
            front.http(self.key) as client,
            client.stream(
                "POST", "/v1/completions", json=body | {"stream": True, "return_token_ids": True}, timeout=300
            ) as response,
        ):
            assert response.status_code == 200, response.read()
            for line in response.iter_lines():
                if line and line != "data: [DONE]":
                    event = json.loads(line.removeprefix("data: "))
                    assert "error" not in event, event
                    tokens += event["choices"][0]["token_ids"]
        assert len(tokens) == LENGTH
        return tokens

    def answers(self, front: Child, numbers: range) -> list[list[int]]:
        with ThreadPoolExecutor(len(numbers)) as threads:
            return list(threads.map(lambda number: self.answer(front, number), numbers))

    def rows(self, query: str) -> list[list[str]]:
        lines = self.records.psql(f"COPY ({query}) TO STDOUT").splitlines()
        return [line.split("\t") for line in lines if not line.startswith("COPY")]

    def entries(self) -> dict[str, int]:
        """Ledger entries of usage by their status."""
        counted = self.rows(
            "SELECT status, count(*) FROM ledger_entries WHERE kind IN ('usage', 'interrupted') GROUP BY status"
        )
        return {status: int(count) for status, count in counted}

    def statuses(self, front: Child) -> list[dict[str, Any]]:
        answer = httpx.get(
            f"{front.url}/admin/engines", headers={"Authorization": f"Bearer {self.operator}"}, timeout=60
        )
        assert answer.is_success, answer.text
        return answer.json()["data"]

    def all_serve(self, front: Child) -> bool:
        return all(engine["state"] == "ready" for engine in self.statuses(front))


def until(happened: Any, seconds: float = 180.0) -> None:
    for _ in range(int(seconds / 0.1)):
        if happened():
            return
        threading.Event().wait(0.1)
    raise AssertionError("it did not happen")


@pytest.fixture(scope="module")
def fleet(tmp_path_factory: pytest.TempPathFactory) -> Iterator[SharedFleet]:
    folder = tmp_path_factory.mktemp("shared")
    base = make_base(folder / "base", context=512)
    server = start_postgres(Path("/tmp") / f"lm-fleet-{os.getpid()}")
    with ExitStack() as stack:
        stack.callback(server.cleanup)
        place = SharedPlace(folder, base, url=server.get_uri(), ports=(free_port(), free_port())).prepare()
        place.loramux("engine", "keys")
        place.loramux("migrate")
        key = place.key_of("acme")
        operator = place.loramux("key", "create", "--tenant", "acme", "--scope", "operator")["key"]
        engines = [stack.enter_context(engine_at(place, port)) for port in place.ports]
        fronts = (stack.enter_context(served(place)), stack.enter_context(served(place)))
        with fronts[0].http(key) as client:
            adapter = make_adapter(base, folder / "adapter", rank=4)
            answer = client.post("/v1/adapters", **form(adapter, "a"))
            assert answer.status_code == 201, answer.text
        yield SharedFleet(place, engines, fronts, key, operator, server, stack)


def statuses_of(fleet: SharedFleet, tenant: str, requests: int) -> list[int]:
    """Send requests to both servers at once, five tokens in all each time."""
    key = fleet.place.loramux("key", "create", "--tenant", tenant)["key"]
    body = {"model": "tiny", "prompt": [1, 2, 3], "max_tokens": 2, "ignore_eos": True}

    def ask(front: Child) -> int:
        with front.http(key) as client:
            return client.post("/v1/completions", json=body).status_code

    with ThreadPoolExecutor(20) as threads:
        return list(threads.map(ask, fleet.fronts * (requests // 2)))


def test_two_servers_share_engines_and_answers(fleet: SharedFleet) -> None:
    first, second = fleet.fronts
    assert fleet.answers(first, range(6)) == fleet.answers(second, range(6))


def test_rate_limit_of_one_request_admits_one_over_two_servers(fleet: SharedFleet) -> None:
    fleet.place.loramux("tenant", "create", "beta")
    fleet.place.loramux("limit", "set", "requests_per_minute", "1", "--tenant", "beta")
    statuses = statuses_of(fleet, "beta", 20)
    assert (statuses.count(200), statuses.count(429)) == (1, 19), statuses


def test_budget_for_seven_requests_admits_seven_over_two_servers(fleet: SharedFleet) -> None:
    prices = fleet.place.folder / "prices.toml"
    of = "".join(
        f'[[plans.prices]]\nmeter = "{meter}"\nprice = "0.01"\nvalid_from = 2023-01-01\n'
        for meter in ("input_uncached", "output")
    )
    prices.write_text(f'[[plans]]\nname = "flat"\ncurrency = "USD"\n{of}')
    fleet.place.loramux("tenant", "create", "gamma")
    fleet.place.loramux("price", "apply", str(prices))
    fleet.place.loramux("price", "assign", "flat", "--tenant", "gamma", "--from", "2023-01")
    # 7 requests of 5 tokens; a hold is rounded up by 0.000000001.
    fleet.place.loramux("budget", "set", "total", "0.350000007", "--tenant", "gamma")
    statuses = statuses_of(fleet, "gamma", 40)
    assert statuses.count(200) == 7, statuses
    assert fleet.rows(f"SELECT status, count(*) FROM ledger_entries WHERE tenant_id = {OF_GAMMA} GROUP BY status") == [
        ["completed", "7"]
    ]


@pytest.mark.slow
def test_engine_that_is_stopped_or_killed_breaks_no_stream_of_either_server_and_comes_back(fleet: SharedFleet) -> None:
    first, second = fleet.fronts
    undisturbed = fleet.answers(first, range(8))
    for number, end in ((0, signal.SIGSTOP), (1, signal.SIGKILL), (0, signal.SIGTERM)):
        with ThreadPoolExecutor(2) as threads:
            streams = [threads.submit(fleet.answers, front, range(8)) for front in fleet.fronts]
            busy = lambda: any(engine["requests"] for engine in fleet.statuses(first))  # noqa: E731
            with suppress(AssertionError):
                until(busy, 5)
            fleet.engines[number].send_signal(end)
            assert [stream.result() for stream in streams] == [undisturbed, undisturbed], end
        fleet.engines[number].kill()
        assert fleet.engines[number].wait(60) is not None
        fleet.engines[number] = fleet.stack.enter_context(engine_at(fleet.place, fleet.place.ports[number]))
        until(lambda: fleet.all_serve(first) and fleet.all_serve(second))
    assert first.metric("loramux_ledger_drift_tokens") == 0
    assert fleet.place.loramux("usage", "reconcile")["drift_tokens"] == 0


def test_killed_server_loses_its_own_requests_only(fleet: SharedFleet) -> None:
    first, second = fleet.fronts
    undisturbed = fleet.answers(first, range(6))
    with served(fleet.place) as doomed, ThreadPoolExecutor(8) as threads:
        before = fleet.entries()
        lost = [threads.submit(fleet.answer, doomed, number) for number in range(6)]
        kept = threads.submit(fleet.answers, second, range(6))
        until(lambda: any(engine["requests"] for engine in fleet.statuses(doomed)) or lost[0].done())
        os.killpg(doomed.process.pid, signal.SIGKILL)
        assert kept.result() == undisturbed
        told = 0
        for stream in lost:
            with suppress(httpx.HTTPError, AssertionError):
                told += len(stream.result()) == LENGTH
    until(lambda: second.metric("loramux_engine_running") == 0)
    until(lambda: fleet.rows("SELECT 1 FROM requests WHERE status = 'open'") == [])
    entries = {status: count - before.get(status, 0) for status, count in fleet.entries().items()}
    interrupted = entries.pop("interrupted", 0)
    assert 6 + told <= entries["completed"] <= 12 - interrupted, "each of the dead front's is closed once at most"
    assert fleet.rows("SELECT DISTINCT output_tokens FROM ledger_entries WHERE status = 'interrupted'") in ([], [["0"]])
    assert fleet.place.loramux("usage", "reconcile")["drift_tokens"] == 0
    assert fleet.answers(first, range(6)) == undisturbed
