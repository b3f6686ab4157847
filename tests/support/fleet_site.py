"""A server with two bases and two engines each, under load, whose engines are killed and restarted."""

from __future__ import annotations

import json
import os
import random
import signal
import sqlite3
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import peft
import torch
import transformers
from peft_uploads import form, make_adapter
from server_process import Child, Place, served
from tiny_base import make_base

BASES = ("amber", "birch")
LENGTH = 120


@dataclass(frozen=True)
class FleetPlace(Place):
    """Settings of two bases with two engines each."""

    fleet: str = ""
    """More settings."""

    def prepare(self) -> FleetPlace:
        base = 'name = "{0}"\npath = "{1}/{0}"\ndtype = "float32"\nengines = {{ min = 2, max_wait_s = 300.0 }}\n'
        self.config.write_text(
            "".join(f"[[bases]]\n{base.format(name, self.base)}" for name in BASES)
            + "[engine]\npool_bytes = 16_777_216\nmax_num_batched_tokens = 64\nnum_threads = 1\n"
            "[validation]\nparity = false\n[server]\ndrain_seconds = 60\nlame_duck_seconds = 0\n" + self.fleet
        )
        return self


Pids = Callable[[Child], list[int]]
"""Returns the processes of a server's engines."""


@dataclass(frozen=True)
class Fleet:
    server: Child
    place: Place
    key: str
    operator: str
    adapters: tuple[Path, ...]
    """Their folders; the first belongs to the first base, the second to the second, and so on."""
    pids: Pids

    @property
    def models(self) -> tuple[str, ...]:
        return (*BASES, *(f"acme/{folder.name}" for folder in self.adapters))

    def body(self, number: int) -> dict[str, Any]:
        """Return the number-th request of the load: greedy or seeded, to one of the models."""
        sampling = {"temperature": 0.0} if number // 2 % 2 else {"temperature": 1.1, "seed": number, "top_p": 0.95}
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
        return self.pids(self.server)

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


def local_pids(server: Child) -> list[int]:
    pid = server.process.pid
    children = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
    return [int(child) for child in children if b"spawn_main" in command_line(child)]


def make_fleet(folder: Path, num_adapters: int, settings: str = "", pids: Pids = local_pids) -> Iterator[Fleet]:
    bases = {name: make_base(folder / "bases" / name, context=512, seed=seed) for seed, name in enumerate(BASES)}
    place = FleetPlace(folder, folder / "bases", fleet=settings).prepare()
    key = place.key_of("acme")
    operator = place.loramux("key", "create", "--tenant", "acme", "--scope", "operator")["key"]
    adapters = []
    with served(place) as server, server.http(key) as client:
        for number in range(num_adapters):
            base = BASES[number % 2]
            adapters.append(make_adapter(bases[base], folder / f"a{number}", rank=4 + number % 3, seed=number))
            body = form(adapters[-1], f"a{number}")
            body["data"]["base_model"] = base
            answer = client.post("/v1/adapters", **body)
            assert answer.status_code == 201, answer.text
        yield Fleet(server, place, key, operator, tuple(adapters), pids)
        server.process.terminate()
        assert server.process.wait(60) == 0


def command_line(pid: str) -> bytes:
    """Return the command line of a process that may end at any time."""
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


def check_weights(fleet: Fleet, answers: list[list[int]]) -> None:
    """Every greedy token is the one that PEFT chooses with the requested adapter."""
    for which, base in enumerate(BASES):
        folder = fleet.place.base / base
        tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
        model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
        adapters = {one.name: one for one in fleet.adapters[which::2]}
        wrapped = peft.PeftModel.from_pretrained(model, str(next(iter(adapters.values()))), "first")
        for name, one in adapters.items():
            wrapped.load_adapter(str(one), name)
        for number, answer in enumerate(answers):
            body = fleet.body(number)
            name = body["model"].removeprefix("acme/")
            if not (body["temperature"] == 0.0 and (name == base or name in adapters)):
                continue
            if name == base:
                with wrapped.disable_adapter():
                    check_greedy(wrapped, tokenizer(body["prompt"]).input_ids, answer)
            else:
                wrapped.set_adapter(name)
                check_greedy(wrapped, tokenizer(body["prompt"]).input_ids, answer)


def check_greedy(model: torch.nn.Module, prompt: list[int], answer: list[int]) -> None:
    with torch.no_grad():
        logits = model(torch.tensor([prompt + answer])).logits[0, len(prompt) - 1 : -1]
    chosen = logits[range(len(answer)), answer]
    assert (logits.max(-1).values - chosen).max() < 1e-3


def survives_kills(fleet: Fleet, streams: int, kills: int, pause: float) -> int:
    entries, undisturbed = len(fleet.ledger()), fleet.answers(streams)
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
    check_bill(fleet, entries + streams * (1 + len(disturbed)))
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
