"""Adapters for vectors, classes and scores over HTTP: PEFT's numbers, in batches with requests that generate."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import numpy as np
import openai
import pytest
from adapter_zoo import Zoo
from server_process import Child, Place, served
from task_adapters import TaskAdapter
from tiny_base import byte_tokenizer

from loramux_client import Client

TOLERANCE = 1e-5
ADAPTERS: dict[str, dict[str, Any]] = {
    "three": {"num_labels": 3},
    "many": {"num_labels": 40, "target_modules": ["q_proj", "v_proj"]},
    "relevance": {"num_labels": 1, "r": 4},
    "vectors": {},
    "tokens": {"num_labels": 5, "of_tokens": True},
    "entities": {"num_labels": 9, "of_tokens": True, "target_modules": ["q_proj", "v_proj"]},
}
TASKS = {"vectors": "FEATURE_EXTRACTION", "tokens": "TOKEN_CLS", "entities": "TOKEN_CLS"}
PROMPTS = [[3 + (7 * i + j) % 90 for j in range(3 + 23 * i)] for i in range(5)]


@dataclass(frozen=True)
class Served:
    """A server, and PEFT's models of its adapters."""

    server: Child
    key: str
    adapters: dict[str, TaskAdapter]

    def ask(self, path: str, **body: Any) -> dict[str, Any]:
        with self.server.http(self.key) as http:
            answer = http.post(path, json=body)
        assert answer.status_code == 200, answer.text
        return answer.json()


@pytest.fixture(scope="module")
def running(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    """Uploads are compared with PEFT, too; chunks of 64 tokens cut the longer prompts."""
    root = tmp_path_factory.mktemp("pooling")
    base = Zoo("llama", root, vocab_size=260, max_position_embeddings=1024, pad_token_id=None).base
    byte_tokenizer().save_pretrained(base)
    place = Place(root, base).prepare()
    place.config.write_text(place.config.read_text().replace("parity = false", "parity = true"))
    key = place.key_of("acme")
    made = {n: TaskAdapter(base, root / n, i, **fields) for i, (n, fields) in enumerate(ADAPTERS.items())}
    with served(place) as server:
        with Client(server.url, api_key=key) as client:
            for name, adapter in made.items():
                report = client.uploads.push(adapter.folder, name).report
                assert report.found.task == TASKS.get(name, "SEQ_CLS")
                assert {"parity_of_layers", "parity_of_tokens"} <= {
                    c.name for c in report.checks if c.outcome == "passed"
                }
        yield Served(server, key, made)


def close(found: Any, wanted: np.ndarray) -> bool:
    difference = np.abs(np.asarray(found, dtype=np.float64) - wanted).max()
    return difference <= TOLERANCE * max(1.0, np.abs(wanted).max())


def check(running: Served, name: str, prompt: list[int]) -> None:
    """One request, compared with PEFT."""
    model, adapter = f"acme/{name}", running.adapters[name]
    if name == "vectors":
        for pooling in ("last", "mean"):
            asked = {"model": model, "input": prompt, "pooling": pooling, "normalize": False}
            (one,) = running.ask("/v1/embeddings", **asked)["data"]
            assert close(one["embedding"], adapter.vector(prompt, pooling)), (name, pooling)
    elif name in TASKS:
        wanted = adapter.logits(prompt)
        (one,) = running.ask("/v1/classify", model=model, input=prompt, use_activation=False)["data"]
        assert close([token["probs"] for token in one["tokens"]], wanted), name
        (one,) = running.ask("/pooling", model=model, input=prompt, use_activation=False)["data"]
        assert close(one["data"], wanted), name
    else:
        (one,) = running.ask("/v1/classify", model=model, input=prompt, use_activation=False)["data"]
        wanted = adapter.logits(prompt)
        assert close(one["probs"], wanted), name
        assert one["label"] == f"LABEL_{wanted.argmax()}"


def test_all_tasks_with_generating_requests_are_pefts(running: Served) -> None:
    def generate(number: int) -> list[int]:
        prompt = PROMPTS[number % 5]
        body = {"model": "tiny", "prompt": prompt, "max_tokens": 24, "temperature": 0, "ignore_eos": True}
        return running.ask("/v1/completions", **body, return_token_ids=True)["choices"][0]["token_ids"]

    alone = [generate(number) for number in range(5)]
    asked = [(name, prompt) for prompt in PROMPTS for name in ADAPTERS]
    with ThreadPoolExecutor(16) as pool:
        beside = pool.map(generate, range(20))
        for done in [pool.submit(check, running, *one) for one in asked * 2]:
            done.result()
        assert list(beside) == alone * 4


def test_tokens_of_a_text_are_classified_where_transformers_finds_them(running: Served) -> None:
    tokenizer, adapter = byte_tokenizer(), running.adapters["tokens"]
    text = "Zoë lives in Köln " * 9  # more than a chunk
    found = tokenizer(text, return_offsets_mapping=True)
    (one,) = running.ask("/v1/classify", model="acme/tokens", input=text)["data"]
    logits = adapter.logits(found["input_ids"]).astype(np.float64)
    assert [token["label"] for token in one["tokens"]] == [f"LABEL_{best}" for best in logits.argmax(axis=1)]
    assert close(
        [token["probs"] for token in one["tokens"]], np.exp(logits) / np.exp(logits).sum(axis=1, keepdims=True)
    )
    assert [(token["start"], token["end"]) for token in one["tokens"]][1:] == found["offset_mapping"][1:]


def test_pairs_of_texts_are_scored_as_transformers_does(running: Served) -> None:
    tokenizer, adapter = byte_tokenizer(), running.adapters["relevance"]
    documents = ["the sea is wide", "bread", "a river of stone"]
    logits = [adapter.logits(tokenizer("what is wide?", text)["input_ids"])[0] for text in documents]
    asked = {"model": "acme/relevance", "query": "what is wide?", "documents": documents}
    results = running.ask("/v1/rerank", **asked)["results"]
    wanted = sorted(
        ((1 / (1 + np.exp(-float(one))), text) for one, text in zip(logits, documents, strict=True)), reverse=True
    )
    assert [one["document"]["text"] for one in results] == [text for _, text in wanted]
    assert close([one["relevance_score"] for one in results], np.array([score for score, _ in wanted]))


def test_official_client_embeds_texts_and_the_bill_has_their_tokens(running: Served) -> None:
    tokenizer, adapter = byte_tokenizer(), running.adapters["vectors"]
    before = int(time.time()) - 60
    with running.server.openai(running.key) as client:
        texts = ["one", "another, longer one"]
        answer = client.embeddings.create(model="acme/vectors", input=texts)
    for one, text in zip(answer.data, texts, strict=True):
        vector = adapter.vector(tokenizer(text)["input_ids"], "last").astype(np.float64)
        assert close(one.embedding, vector / np.linalg.norm(vector))
    assert answer.usage.prompt_tokens == sum(len(tokenizer(text)["input_ids"]) for text in texts)
    with running.server.http(running.key) as http:
        asked = {"start_time": before, "group_by": "model"}
        page = http.get("/v1/organization/usage/completions", params=asked).json()
    found = [one for bucket in page["data"] for one in bucket["results"] if "vectors" in (one["model"] or "")]
    assert sum(one["output_tokens"] for one in found) == 0
    assert sum(one["input_tokens"] for one in found) >= answer.usage.prompt_tokens


def test_batch_of_embeddings_is_answered_line_by_line(running: Served) -> None:
    adapter = running.adapters["vectors"]
    lines = [
        {"custom_id": f"{i}", "method": "POST", "url": "/v1/embeddings", "body": {"model": "acme/vectors", "input": p}}
        for i, p in enumerate(PROMPTS)
    ]
    with running.server.openai(running.key) as client:
        content = "\n".join(map(json.dumps, lines)).encode()
        file = client.files.create(file=("lines.jsonl", content), purpose="batch")
        batch = client.batches.create(input_file_id=file.id, endpoint="/v1/embeddings", completion_window="24h")
        results = outcome(client, batch.id)
    for line in results:
        vector = adapter.vector(PROMPTS[int(line["custom_id"])], "last").astype(np.float64)
        assert close(line["response"]["body"]["data"][0]["embedding"], vector / np.linalg.norm(vector))
    assert len(results) == len(PROMPTS)


def outcome(client: openai.OpenAI, batch_id: str) -> list[dict[str, Any]]:
    deadline = time.monotonic() + 120
    while (batch := client.batches.retrieve(batch_id)).status not in ("completed", "failed"):
        assert time.monotonic() < deadline, batch
        time.sleep(0.2)
    assert batch.status == "completed", batch
    return [json.loads(line) for line in client.files.content(batch.output_file_id).text.splitlines()]
