"""The format matrix: made by PEFT, uploaded over HTTP, and answered with PEFT's own tokens, alone and all together."""

from __future__ import annotations

import copy
import json
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import peft
import pytest
import torch
import transformers
from adapter_zoo import Zoo
from format_matrix import REFUSED, SERVED, SERVED_ON_MIXTURES
from other_kinds import make_kind
from server_process import Place, served
from tiny_base import byte_tokenizer

from loramux_adapters.config import UNSUPPORTED_KINDS

PROMPTS = ([5, 80, 33, 7], [11, 12, 13, 200, 201, 9, 40, 41, 42, 43, 44, 45, 46, 47, 48, 49, 50])
OUTPUT = 8
CONFIG, WEIGHTS = "adapter_config.json", "adapter_model.safetensors"


@dataclass(frozen=True)
class Harness:
    """A server with every format, and what PEFT answers."""

    http: httpx.Client
    made: dict[str, dict[str, Any]]
    """The server's answers to the uploads."""
    wanted: dict[tuple[str, int], list[int]]
    """Expected tokens by the adapter's name, or the base's, and the prompt's number."""

    def ask(self, model: str, prompt: int) -> list[int]:
        body = {
            "model": model if model == "tiny" else f"acme/{model}",
            "prompt": PROMPTS[prompt],
            "max_tokens": OUTPUT,
            "temperature": 0,
            "return_token_ids": True,
            "ignore_eos": True,
        }
        answer = self.http.post("/v1/completions", json=body)
        assert answer.status_code == 200, answer.text
        return answer.json()["choices"][0]["token_ids"]


def upload(http: httpx.Client, name: str, folder: Path) -> httpx.Response:
    files = {file: (file, (folder / file).read_bytes()) for file in (CONFIG, WEIGHTS)}
    return http.post("/v1/adapters", data={"name": name}, files=files)


@torch.no_grad()
def greedy(model: torch.nn.Module, prompt: int) -> list[int]:
    keywords = dict(max_new_tokens=OUTPUT, do_sample=False, eos_token_id=None, pad_token_id=0)
    ids = torch.tensor([PROMPTS[prompt]])
    return model.generate(input_ids=ids, **keywords)[0, ids.shape[1] :].tolist()


@contextmanager
def harness_with(base_dir: Path, formats: Mapping[str, peft.PeftConfig], folder: Path) -> Iterator[Harness]:
    """A server of that base with an adapter of each format."""
    (folder / "server").mkdir()
    place = Place(folder / "server", base_dir).prepare()
    key = place.key_of("acme")
    base = transformers.AutoModelForCausalLM.from_pretrained(base_dir, dtype=torch.float32).eval()
    wanted = {("tiny", number): greedy(base, number) for number in range(len(PROMPTS))}
    for name, config in formats.items():
        model = make_kind(base_dir, folder / name, copy.deepcopy(config))
        wanted |= {(name, number): greedy(model, number) for number in range(len(PROMPTS))}
    with served(place) as server, server.http(key) as http:
        made = {}
        for name in formats:
            response = upload(http, name, folder / name)
            assert response.status_code == 201, response.text
            made[name] = response.json()
        yield Harness(http, made, wanted)


@pytest.fixture(scope="module")
def harness(base_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Harness]:
    with harness_with(base_dir, SERVED, tmp_path_factory.mktemp("formats")) as found:
        yield found


@pytest.mark.parametrize("name", SERVED)
def test_format_alone_answers_as_peft(harness: Harness, name: str) -> None:
    for number in range(len(PROMPTS)):
        assert harness.ask(name, number) == harness.wanted[name, number]
    assert any(harness.wanted[name, number] != harness.wanted["tiny", number] for number in range(len(PROMPTS)))


def ask_all(harness: Harness) -> dict[tuple[str, int], list[int]]:
    """Every model's answer to every prompt, asked at the same time."""
    asked = list(harness.wanted)
    with ThreadPoolExecutor(len(asked)) as pool:
        return dict(zip(asked, pool.map(lambda one: harness.ask(*one), asked), strict=True))


def test_formats_together_answer_as_peft(harness: Harness) -> None:
    assert ask_all(harness) == harness.wanted


@pytest.mark.parametrize("family", ["mixtral", pytest.param("qwen3_moe", marks=pytest.mark.slow)])
def test_formats_of_mixtures_of_experts_answer_as_peft(family: str, tmp_path: Path) -> None:
    base = Zoo(family, tmp_path, vocab_size=260).base
    byte_tokenizer().save_pretrained(base)
    with harness_with(base, SERVED_ON_MIXTURES, tmp_path) as harness:
        assert {one: harness.ask(*one) for one in harness.wanted} == harness.wanted
        assert ask_all(harness) == harness.wanted
    assert len({str([harness.wanted[name, n] for n in range(len(PROMPTS))]) for name, _ in harness.wanted}) == 4


@pytest.mark.parametrize("name", REFUSED)
def test_unsupported_field_is_refused_by_name(harness: Harness, name: str, base_dir: Path, tmp_path: Path) -> None:
    config, field = REFUSED[name]
    base = transformers.AutoModelForCausalLM.from_pretrained(base_dir, dtype=torch.float32)
    peft.get_peft_model(base, copy.deepcopy(config)).save_pretrained(tmp_path)
    response = upload(harness.http, "refused", tmp_path)
    error = response.json()["error"]
    assert response.is_client_error
    assert error["param"] == field, error
    assert field in error["message"] or config.peft_type.value in error["message"]


def test_unsupported_kind_is_refused_by_name(harness: Harness) -> None:
    for kind, refusal in UNSUPPORTED_KINDS.items():
        files = {CONFIG: (CONFIG, json.dumps({"peft_type": kind})), WEIGHTS: (WEIGHTS, b"\x02\0\0\0\0\0\0\0{}")}
        response = harness.http.post("/v1/adapters", data={"name": "refused"}, files=files)
        error = response.json()["error"]
        assert response.is_client_error
        assert error["code"] == "peft_type_unsupported"
        assert all(part in error["message"] for part in (kind, *refusal))
