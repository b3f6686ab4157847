"""A server whose engine has two ranks: PEFT's tokens through HTTP, and the death of a rank under load."""

from __future__ import annotations

import os
import signal
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import httpx
import peft
import pytest
import torch
import transformers
from other_kinds import make_kind
from server_process import Child, Place, served, spawned_by

PROMPT = [5, 80, 33, 7, 11, 12, 13, 200, 201, 9, 40, 41, 42, 43, 44, 45, 46, 47]
OUTPUT = 24
KINDS = {
    "lora": peft.LoraConfig(r=8, target_modules="all-linear", task_type="CAUSAL_LM"),
    "dora": peft.LoraConfig(r=4, target_modules=["q_proj", "down_proj"], use_dora=True, task_type="CAUSAL_LM"),
}


@torch.no_grad()
def greedy(model: torch.nn.Module) -> list[int]:
    keywords = dict(max_new_tokens=OUTPUT, do_sample=False, eos_token_id=None, pad_token_id=0)
    return model.generate(input_ids=torch.tensor([PROMPT]), **keywords)[0, len(PROMPT) :].tolist()


def ask(http: httpx.Client, model: str, output: int = OUTPUT) -> httpx.Response:
    body = {"model": model, "prompt": PROMPT, "max_tokens": output, "temperature": 0}
    return http.post("/v1/completions", json=body | {"return_token_ids": True, "ignore_eos": True})


def check_answers(http: httpx.Client, wanted: dict[str, list[int]]) -> None:
    """All at once."""
    with ThreadPoolExecutor(len(wanted)) as threads:
        for model, answer in zip(wanted, threads.map(lambda model: ask(http, model), wanted), strict=True):
            assert answer.status_code == 200, answer.text
            assert answer.json()["choices"][0]["token_ids"] == wanted[model], model


def kill_under_load(server: Child, http: httpx.Client, pid: int) -> list[httpx.Response]:
    """Kill `pid` while sixteen long answers run; return what became of them, the base's and the adapter's in turns."""
    with ThreadPoolExecutor(16) as threads:
        answers = [threads.submit(ask, http, model, 600) for model in ("tiny", "acme/lora") * 8]
        time.sleep(1.5)
        assert not any(answer.done() for answer in answers), "the answers were to be long"
        os.kill(pid, signal.SIGKILL)
        return [answer.result(timeout=200) for answer in answers]


def check_ends(http: httpx.Client, ended: list[httpx.Response]) -> None:
    """Each request went on with the tokens that it would have had, or ended because no engine came in time."""
    assert {answer.status_code for answer in ended} <= {200, 503}
    whole = [ask(http, model, 600).json()["choices"][0]["token_ids"] for model in ("tiny", "acme/lora")]
    for number, answer in enumerate(ended):
        if answer.status_code == 200:
            assert answer.json()["choices"][0]["token_ids"] == whole[number % 2]


def wait_served(http: httpx.Client, seconds: float) -> None:
    end = time.monotonic() + seconds
    while ask(http, "tiny", 1).status_code != 200:
        assert time.monotonic() < end, "the engine did not come back"
        time.sleep(0.5)


@pytest.mark.slow
def test_server_of_two_ranks_answers_as_peft_does_and_outlives_each_of_them(base_dir: Path, tmp_path: Path) -> None:
    (tmp_path / "server").mkdir()
    place = Place(tmp_path / "server", base_dir, ranks=2).prepare()
    key = place.key_of("acme")
    base = transformers.AutoModelForCausalLM.from_pretrained(base_dir, dtype=torch.float32).eval()
    wanted = {"tiny": greedy(base)}
    for name, config in KINDS.items():
        wanted[f"acme/{name}"] = greedy(make_kind(base_dir, tmp_path / name, config))
    with served(place) as server, server.http(key) as http:
        http.timeout = httpx.Timeout(200)
        for name in KINDS:
            files = {
                f: (f, (tmp_path / name / f).read_bytes()) for f in ("adapter_config.json", "adapter_model.safetensors")
            }
            assert http.post("/v1/adapters", data={"name": name}, files=files).status_code == 201
        check_answers(http, wanted)
        for which in ("rank", "engine"):
            engine = server.engine_pid()
            (rank,) = spawned_by(engine)
            ended = kill_under_load(server, http, rank if which == "rank" else engine)
            wait_served(http, 100)
            check_ends(http, ended)
            assert not Path(f"/proc/{rank}").exists(), "no rank outlives its engine"
            assert not Path(f"/proc/{engine}").exists()
            check_answers(http, wanted)
        last = server.engine_pid(), *spawned_by(server.engine_pid())
    assert not any(Path(f"/proc/{pid}").exists() for pid in last)
