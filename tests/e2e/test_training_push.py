"""Pushes to a real engine: each version says its number, so that a stale answer would be seen."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import openai
import peft
import pytest
import torch
import transformers
from safetensors.torch import load_file, save
from server_process import Child, Place, served

CONFIG, WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
UPDATES = 12


class Numbers:
    """Adapters that answer every prompt with one token again and again: the version's token."""

    def __init__(self, base: Path, folder: Path) -> None:
        torch.manual_seed(0)
        model = transformers.AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32)
        head = model.lm_head.weight.detach()
        likeliest = (head @ head.T / head.norm(dim=1)).argmax(dim=0)
        self.tokens = [token for token in range(256) if likeliest[token] == token]
        """Tokens whose own row of the head is the direction that makes them the likeliest."""
        self._head = head
        config = peft.LoraConfig(r=2, target_modules=["down_proj"], lora_bias=True, task_type="CAUSAL_LM")
        peft.get_peft_model(model, config).save_pretrained(folder)
        self._config, self._tensors = (folder / CONFIG).read_bytes(), load_file(folder / WEIGHTS)

    def token(self, version: int) -> int:
        return self.tokens[version % len(self.tokens)]

    def files(self, version: int) -> dict[str, Any]:
        """The form's files. The bias of the down projections points to the version's token, and nothing else counts."""
        bias = 1e6 * self._head[self.token(version)]
        tensors = {name: bias.clone() if one.dim() == 1 else one for name, one in self._tensors.items()}
        return {CONFIG: (CONFIG, self._config), WEIGHTS: (WEIGHTS, save(tensors, metadata={"format": "pt"}))}


@pytest.fixture(scope="module")
def place(base_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> Place:
    place = Place(tmp_path_factory.mktemp("place"), base_dir).prepare()
    text = place.config.read_text().replace("parity = false", "parity = true")
    place.config.write_text(text + "[pushes]\nkeep = 4\nparity_interval_s = 0.1\n")
    return place


@pytest.fixture(scope="module")
def key(place: Place) -> str:
    place.loramux("tenant", "create", "lab")
    return place.loramux("key", "create", "--tenant", "lab", "--scope", "push", "--scope", "inference")["key"]


@pytest.fixture(scope="module")
def server(place: Place, key: str) -> Iterator[Child]:
    del key
    with served(place) as server:
        yield server


@pytest.fixture(scope="module")
def numbers(base_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> Numbers:
    numbers = Numbers(base_dir, tmp_path_factory.mktemp("numbers"))
    assert len(numbers.tokens) > UPDATES
    return numbers


def push(server: Child, key: str, numbers: Numbers, version: int, name: str = "policy") -> str:
    with server.http(key) as http:
        data = {"lora_name": name, "load_inplace": "true"}
        pushed = http.post("/v1/load_lora_adapter", data=data, files=numbers.files(version)).raise_for_status()
        return pushed.headers["x-loramux-version"]


def test_no_answer_is_stale_and_each_names_its_version(server: Child, key: str, numbers: Numbers) -> None:
    over, wrong, seen = threading.Event(), list[Any](), set[str]()

    def ask() -> None:
        client = server.openai(key)
        while not over.is_set():
            stream = client.completions.create(
                model="policy", prompt="why? " * 20, max_tokens=24, temperature=0, stream=True,
                extra_body={"return_token_ids": True, "ignore_eos": True},
            )  # fmt: skip
            for chunk in stream:
                choice = chunk.choices[0].model_dump()
                version = int(chunk.model.rpartition("@")[2])
                seen.add(chunk.model)
                if set(choice["token_ids"]) - {numbers.token(version)}:
                    wrong.append((chunk.model, choice["token_ids"]))

    assert push(server, key, numbers, 1) == "lab/policy@1"
    clients = [threading.Thread(target=ask) for _ in range(3)]
    for client in clients:
        client.start()
    for version in range(2, UPDATES + 1):
        assert push(server, key, numbers, version) == f"lab/policy@{version}"
        answer = server.openai(key).completions.create(
            model="policy", prompt="why? " * 20, max_tokens=3, temperature=0, logprobs=0,
            extra_body={"return_token_ids": True, "ignore_eos": True},
        )  # fmt: skip
        assert answer.model == f"lab/policy@{version}"
        assert answer.choices[0].model_dump()["token_ids"] == [numbers.token(version)] * 3
    over.set()
    for client in clients:
        client.join()
    assert wrong == []
    assert len(seen) > 2
    older = server.openai(key).completions.create(
        model=f"policy@{UPDATES - 2}", prompt="x", max_tokens=2, temperature=0, extra_body={"return_token_ids": True}
    )
    assert older.choices[0].model_dump()["token_ids"] == [numbers.token(UPDATES - 2)] * 2
    with pytest.raises(openai.NotFoundError):
        server.openai(key).completions.create(model="policy@1", prompt="x")


def test_log_probabilities_are_those_of_peft_in_full_precision(
    server: Child, key: str, base_dir: Path, tmp_path: Path
) -> None:
    from peft_uploads import make_adapter

    adapter = make_adapter(base_dir, tmp_path / "adapter", seed=9)
    files = {name: (name, (adapter / name).read_bytes()) for name in (CONFIG, WEIGHTS)}
    prompt = list(b"full precision")
    with server.http(key) as http:
        http.post("/v1/load_lora_adapter", data={"lora_name": "exact"}, files=files).raise_for_status()
        body = {"model": "exact", "prompt": prompt, "max_tokens": 8, "temperature": 1.0, "seed": 2**63 - 1}
        more = {"logprobs": 0, "return_token_ids": True, "top_k": 0, "top_p": 1.0, "repetition_penalty": 1.0, "n": 1}
        text = http.post("/v1/completions", json=body | more).raise_for_status().text
    choice = json.loads(text)["choices"][0]
    tokens, logprobs = choice["token_ids"], choice["logprobs"]["token_logprobs"]
    assert choice["prompt_token_ids"] == prompt
    assert len(tokens) == len(logprobs)
    model = transformers.AutoModelForCausalLM.from_pretrained(base_dir, dtype=torch.float32)
    model = peft.PeftModel.from_pretrained(model, adapter).eval()
    with torch.inference_mode():
        logits = model(torch.tensor([prompt + tokens])).logits[0, len(prompt) - 1 : -1]
    wanted = torch.log_softmax(logits, -1)[range(len(tokens)), tokens]
    assert logprobs == pytest.approx(wanted.tolist(), abs=2e-5)
    assert any(len(str(value).partition(".")[2]) > 6 for value in logprobs), "they are not rounded"


@pytest.mark.slow
def test_parity_marks_a_version_afterwards(server: Child, key: str, numbers: Numbers) -> None:
    pushed = push(server, key, numbers, 3, "marked")
    until = time.monotonic() + 120
    with server.http(key) as http:
        while True:
            live = {one["id"]: one for one in http.get("/v1/training_adapters").json()["data"]}
            if live[pushed]["parity"] is not None:
                break
            assert time.monotonic() < until, live
            time.sleep(0.5)
    assert (live[pushed]["parity"], "PEFT" in live[pushed]["parity_detail"]) == ("passed", True)
