"""A server with several workers: processes at one address, over one engine and one database."""

from __future__ import annotations

import json
import os
import re
import signal
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

import httpx
import pytest
from postgres_server import start_postgres
from server_process import Child, Place, served, spawned_by

WORKERS = 2
REQUEST = {"model": "tiny", "prompt": [1, 2, 3], "max_tokens": 2, "ignore_eos": True, "temperature": 0}
TOKENS = 5
LONG = REQUEST | {"max_tokens": 400, "stream": True, "return_token_ids": True}


@dataclass(frozen=True)
class Site:
    place: Place
    server: Child
    operator: str

    def key_of(self, tenant: str) -> str:
        return self.place.key_of(tenant)

    def post(self, key: str, **headers: str) -> httpx.Response:
        """Ask on a new connection, which any worker may accept."""
        with self.server.http(key) as client:
            return client.post("/v1/completions", json=REQUEST, headers=headers)

    def race(self, work: Callable[[int], httpx.Response], requests: int) -> list[httpx.Response]:
        with ThreadPoolExecutor(20) as threads:
            return list(threads.map(work, range(requests)))

    @contextmanager
    def asked(self, key: str) -> Iterator[httpx.Response]:
        """The response to a request for a long stream, on a new connection."""
        with (
            self.server.http(key) as client,
            client.stream("POST", "/v1/completions", json=LONG, timeout=300) as response,
        ):
            yield response

    def stream(self, key: str) -> list[int]:
        with self.asked(key) as response:
            assert response.status_code == 200, response.read()
            return tokens_of(response)

    def by_worker(self, metric: str) -> Counter[str]:
        """The samples of a metric, added up by worker."""
        found: Counter[str] = Counter()
        for line in httpx.get(f"{self.server.url}/metrics", timeout=60).text.splitlines():
            if line.startswith(f"{metric}{{") and (worker := re.search(r'worker="(\d+)"', line)):
                found[worker[1]] += float(line.split()[-1])
        return found

    def pids(self, of: str) -> list[int]:
        """The processes of a worker or an engine, oldest first, as the log names them."""
        return [int(pid) for pid in re.findall(rf"{of}[a-z ]*: process (\d+)", self.log)]

    @property
    def log(self) -> str:
        return (self.place.folder / "server.log").read_text()

    def reconcile(self) -> dict[str, int]:
        until(lambda: self.server.metric("loramux_completions_running") == 0)
        found: dict[str, int] = self.place.loramux("usage", "reconcile")
        return found

    def engine(self) -> dict[str, object]:
        headers = {"Authorization": f"Bearer {self.operator}"}
        return httpx.get(f"{self.server.url}/admin/engines", headers=headers, timeout=60).json()["data"][0]


def tokens_of(response: httpx.Response) -> list[int]:
    tokens: list[int] = []
    for line in response.iter_lines():
        if line and line != "data: [DONE]":
            event = json.loads(line.removeprefix("data: "))
            assert "error" not in event, event
            tokens += event["choices"][0]["token_ids"]
    return tokens


def until(happened: Callable[[], bool], seconds: float = 120.0) -> None:
    for _ in range(int(seconds / 0.1)):
        with suppress(httpx.TransportError):
            if happened():
                return
        threading.Event().wait(0.1)
    raise AssertionError("it did not happen")


@contextmanager
def serving_site(place: Place) -> Iterator[Site]:
    place.prepare()
    place.loramux("migrate")
    place.loramux("tenant", "create", "ops")
    operator = place.loramux("key", "create", "--tenant", "ops", "--scope", "operator")["key"]
    with served(place) as server:
        yield Site(place, server, operator)


@pytest.fixture(scope="module", params=["sqlite", "postgresql"])
def site(request: pytest.FixtureRequest, base_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Site]:
    folder, url = tmp_path_factory.mktemp("workers"), None
    with ExitStack() as stack:
        if request.param == "postgresql":
            database = start_postgres(Path("/tmp") / f"lm-workers-{os.getpid()}")
            stack.callback(database.cleanup)
            url = database.get_uri()
        yield stack.enter_context(serving_site(Place(folder, base_dir, url=url, workers=WORKERS)))


def test_budget_of_forty_tokens_is_spent_exactly_by_racing_workers(site: Site) -> None:
    assert_budget_is_spent_exactly(site)


@pytest.mark.slow
def test_budget_of_forty_tokens_is_spent_exactly_by_four_racing_workers(base_dir: Path, tmp_path: Path) -> None:
    with serving_site(Place(tmp_path, base_dir, workers=4)) as site:
        assert_budget_is_spent_exactly(site)


def assert_budget_is_spent_exactly(site: Site) -> None:
    key = site.key_of("beta")
    prices = site.place.folder / "prices.toml"
    meters = "".join(
        f'[[plans.prices]]\nmeter = "{meter}"\nprice = "0.01"\nvalid_from = 2023-01-01\n'
        for meter in ("input_uncached", "output")
    )
    prices.write_text(f'[[plans]]\nname = "flat"\ncurrency = "USD"\n{meters}')
    site.place.loramux("price", "apply", str(prices))
    site.place.loramux("price", "assign", "flat", "--tenant", "beta", "--from", "2023-01")
    # 40 tokens at 0.01; the hold of each request is rounded up by 0.000000001.
    site.place.loramux("budget", "set", "total", "0.400000008", "--tenant", "beta")
    answers = site.race(lambda _: site.post(key), 60)
    assert Counter(answer.status_code for answer in answers)[200] == 40 // TOKENS, Counter(map(repr, answers))
    served_by = site.by_worker("loramux_http_responses_total")
    assert len(served_by) == site.place.workers
    assert all(served_by.values()), "every worker has answered"
    assert site.reconcile()["drift_tokens"] == 0


def test_rate_limit_of_one_request_admits_one_over_all_workers(site: Site) -> None:
    key = site.key_of("gamma")
    site.place.loramux("limit", "set", "requests_per_minute", "1", "--tenant", "gamma")
    assert Counter(answer.status_code for answer in site.race(lambda _: site.post(key), 20)) == {200: 1, 429: 19}


def test_idempotency_key_runs_one_request_over_all_workers(site: Site) -> None:
    key = site.key_of("delta")
    answers = site.race(lambda _: site.post(key, **{"Idempotency-Key": "once"}), 20)
    assert {answer.status_code for answer in answers} <= {200, 409}
    answers = site.race(lambda _: site.post(key, **{"Idempotency-Key": "once"}), 20)
    assert {answer.status_code for answer in answers} == {200}
    assert len({answer.json()["id"] for answer in answers}) == 1
    with site.server.http(key) as client:
        usage = client.get("/v1/organization/usage/completions", params={"start_time": int(time.time()) - 3600}).json()
    counted = [result for bucket in usage["data"] for result in bucket["results"]]
    assert sum(result["num_model_requests"] for result in counted) == 1


def test_engine_restart_and_log_level_reach_all_workers(site: Site) -> None:
    key = site.key_of("epsilon")
    engines = site.pids("the engine tiny-0")
    with site.server.http(site.operator) as client:
        assert client.put("/admin/log-level", json={"level": "debug"}).is_success
        asked = client.post("/admin/engines/restart", json={"engine": "tiny-0", "seconds": 30})
        assert asked.status_code == 202, asked.text
    until(lambda: len(site.pids("the engine tiny-0")) == len(engines) + 1)
    assert not Path(f"/proc/{engines[-1]}").exists(), "one engine has the memory at a time"
    assert {answer.status_code for answer in site.race(lambda _: site.post(key), 12)} == {200}

    def debugging() -> set[int]:
        httpx.get(f"{site.server.url}/health/live")
        lines = [json.loads(line) for line in site.log.splitlines() if '"debug"' in line]
        return {line["worker"] for line in lines if "worker" in line}

    until(lambda: debugging() == set(range(WORKERS)), 30)
    with site.server.http(site.operator) as client:
        client.put("/admin/log-level", json={"level": "info"})


def test_killed_worker_is_replaced_and_streams_of_the_other_go_on(site: Site) -> None:
    key = site.key_of("zeta")
    undisturbed = site.stream(key)
    engines, doomed = site.pids("the engine tiny-0"), site.pids("worker 1 serves")[-1]
    outcomes: Counter[str] = Counter()
    killed = threading.Event()

    def ask(_: int) -> None:
        """Stream again and again, so that streams run when the worker is killed."""
        while True:
            is_last = killed.is_set()
            try:
                outcomes["whole" if site.stream(key) == undisturbed else "wrong"] += 1
            except httpx.HTTPError:
                outcomes["lost"] += 1
            if is_last:
                return

    with ThreadPoolExecutor(16) as threads:
        asked = [threads.submit(ask, number) for number in range(16)]
        until(lambda: all(site.by_worker("loramux_completions_running").values()), 30)
        os.kill(doomed, signal.SIGKILL)
        killed.set()
        for one in asked:
            one.result()
    assert outcomes["wrong"] == 0
    assert outcomes["whole"] >= 1, outcomes
    assert outcomes["lost"] >= 1, outcomes
    until(lambda: len(site.by_worker("loramux_completions_running")) == WORKERS)
    assert site.pids("worker 1 serves")[-1] != doomed
    assert site.pids("the engine tiny-0") == engines, "the engine goes on"
    assert site.reconcile()["drift_tokens"] == 0
    assert site.stream(key) == undisturbed


def test_stopped_server_lets_streams_of_all_workers_end_and_leaves_no_process(site: Site) -> None:
    key = site.key_of("eta")
    undisturbed, processes = site.stream(key), spawned_by(site.server.process.pid)
    assert len(processes) == WORKERS + 1
    ended: list[tuple[float, bool]] = []  # when, and whether whole

    def ask(_: int) -> None:
        """Stream again and again until the server takes no more; what it took, it ends."""
        while True:
            with ExitStack() as stack:
                try:
                    response = stack.enter_context(site.asked(key))
                except httpx.TransportError:
                    return
                if response.status_code == 503:
                    assert "server_draining" in response.read().decode()
                    return
                tokens = tokens_of(response)
            ended.append((time.monotonic(), tokens == undisturbed))

    with ThreadPoolExecutor(12) as threads:
        asked = [threads.submit(ask, number) for number in range(12)]
        until(lambda: all(site.by_worker("loramux_completions_running").values()), 30)
        os.killpg(site.server.process.pid, signal.SIGINT)  # as Ctrl-C in a terminal does
        stopped = time.monotonic()
        for one in asked:
            one.result()
    assert all(is_whole for _, is_whole in ended)
    assert any(when > stopped for when, _ in ended), "streams ran when the server was stopped"
    assert site.server.process.wait(60) == 0
    assert not any(Path(f"/proc/{pid}").exists() for pid in processes)
    assert "Traceback" not in site.log
    workers = {json.loads(line).get("worker") for line in site.log.splitlines() if "draining" in line}
    assert workers == set(range(WORKERS))
