"""An encoder as a base over HTTP: uploads compared with PEFT, vectors, classes and scores equal to PEFT's."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from encoder_zoo import EncoderZoo, word_tokenizer
from listening import until_true
from server_process import Child, Place, served

from loramux_client import Client
from loramux_client.errors import UploadRejected

TOLERANCE = 1e-5
ADAPTERS: dict[str, dict[str, Any]] = {
    "three": {"num_labels": 3},
    "relevance": {"num_labels": 1, "r": 4},
    "vectors": {},
    "narrow": {"target_modules": ["query", "value"], "r": 3},
    "tokens": {"num_labels": 4, "of_tokens": True, "target_modules": ["query", "dense"]},
}
TEXTS = ["where is my parcel?", "a", "delivery takes two days. " * 4, "the sea, the sea"]


@dataclass(frozen=True)
class Served:
    """A server, and the encoder with PEFT's models of its adapters."""

    server: Child
    key: str
    zoo: EncoderZoo

    def post(self, path: str, **body: Any) -> Any:
        with self.server.http(self.key) as http:
            return http.post(path, json=body)

    def ask(self, path: str, **body: Any) -> dict[str, Any]:
        answer = self.post(path, **body)
        assert answer.status_code == 200, answer.text
        return answer.json()


@pytest.fixture(scope="module")
def running(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    root = tmp_path_factory.mktemp("encoders")
    zoo = EncoderZoo("bert", root)
    word_tokenizer().save_pretrained(zoo.base)
    (zoo.base / "modules.json").write_text(
        json.dumps(
            [
                {"idx": 0, "name": "0", "path": "", "type": "sentence_transformers.models.Transformer"},
                {"idx": 1, "name": "1", "path": "1_Pooling", "type": "sentence_transformers.models.Pooling"},
            ]
        )
    )
    (zoo.base / "1_Pooling").mkdir()
    (zoo.base / "1_Pooling/config.json").write_text(json.dumps({"pooling_mode_cls_token": True}))
    place = Place(root, zoo.base).prepare()
    place.config.write_text(place.config.read_text().replace("parity = false", "parity = true"))
    key = place.key_of("acme")
    with served(place) as server:
        with Client(server.url, api_key=key) as client:
            for name, fields in ADAPTERS.items():
                uploaded = zoo.adapters / f"{name} uploaded"
                zoo.add(name, **fields)
                report = client.uploads.push(uploaded if uploaded.exists() else zoo.adapters / name, name).report
                task = "TOKEN_CLS" if "of_tokens" in fields else "SEQ_CLS"
                assert report.found.task == (task if "num_labels" in fields else "FEATURE_EXTRACTION")
                passed = {check.name for check in report.checks if check.outcome == "passed"}
                assert {"parity_of_layers", "parity_of_tokens"} <= passed, report.checks
        yield Served(server, key, zoo)


def close(found: Any, wanted: np.ndarray) -> bool:
    difference = np.abs(np.asarray(found, dtype=np.float64) - wanted).max()
    return difference <= TOLERANCE * max(1.0, np.abs(wanted).max())


@torch.no_grad()
def states(running: Served, name: str | None, text: str) -> np.ndarray:
    """PEFT's last hidden states of a text."""
    inputs = word_tokenizer()(text, return_tensors="pt")
    model = running.zoo.plain if name is None else running.zoo.made[name].model
    return model(**inputs).last_hidden_state[0].numpy()


@torch.no_grad()
def logits(running: Served, name: str, *texts: str) -> np.ndarray:
    """PEFT's numbers of the classes of a text, or of a pair."""
    return running.zoo.made[name].model(**word_tokenizer()(*texts, return_tensors="pt")).logits[0].numpy()


def test_encoder_vectors_and_classes_of_many_adapters_at_once_are_pefts(running: Served) -> None:
    def vector(name: str | None, text: str, **fields: Any) -> bool:
        model = "tiny" if name is None else f"acme/{name}"
        (one,) = running.ask("/v1/embeddings", model=model, input=text, normalize=False, **fields)["data"]
        found = states(running, name, text)
        return close(one["embedding"], found.mean(axis=0) if fields.get("pooling") == "mean" else found[0])

    def classes(name: str, text: str) -> bool:
        (one,) = running.ask("/v1/classify", model=f"acme/{name}", input=text, use_activation=False)["data"]
        return close(one["probs"], logits(running, name, text))

    with ThreadPoolExecutor(12) as pool:
        done = [pool.submit(vector, name, text) for name in (None, "vectors", "narrow") for text in TEXTS]
        done += [pool.submit(vector, name, text, pooling="mean") for name in (None, "narrow") for text in TEXTS]
        done += [pool.submit(classes, name, text) for name in ("three", "relevance") for text in TEXTS]
        assert all(one.result() for one in done)


def test_encoder_tokens_are_classified_as_pefts(running: Served) -> None:
    for text in TEXTS:
        (one,) = running.ask("/v1/classify", model="acme/tokens", input=text, use_activation=False)["data"]
        assert [token["token_id"] for token in one["tokens"]] == word_tokenizer()(text)["input_ids"]
        assert close([token["probs"] for token in one["tokens"]], logits(running, "tokens", text))


def test_encoder_reranks_pairs_with_their_token_types(running: Served) -> None:
    documents = ["bread", "the sea is wide", "a river of stone, and more"]
    asked = {"model": "acme/relevance", "query": "what is wide?", "documents": documents}
    results = running.ask("/v1/rerank", **asked)["results"]
    numbers = [float(logits(running, "relevance", "what is wide?", text)[0]) for text in documents]
    wanted = sorted(((1 / (1 + np.exp(-number)), i) for i, number in enumerate(numbers)), reverse=True)
    assert [one["index"] for one in results] == [i for _, i in wanted]
    assert close([one["relevance_score"] for one in results], np.array([score for score, _ in wanted]))


def test_official_client_embeds_with_an_encoder(running: Served) -> None:
    with running.server.openai(running.key) as client:
        answer = client.embeddings.create(model="acme/vectors", input=TEXTS)
        model = client.models.retrieve("tiny")
    for one, text in zip(answer.data, TEXTS, strict=True):
        vector = states(running, "vectors", text)[0].astype(np.float64)
        assert close(one.embedding, vector / np.linalg.norm(vector))
    assert model.tasks == ["FEATURE_EXTRACTION"]


@pytest.mark.parametrize("model", ["tiny", "acme/vectors", "acme/three"])
def test_encoder_refuses_to_generate_and_names_what_it_does(running: Served, model: str) -> None:
    messages = [{"role": "user", "content": "hi"}]
    bodies = {
        "/v1/chat/completions": {"messages": messages},
        "/v1/completions": {"prompt": "hi"},
        "/v1/responses": {"input": "hi"},
    }
    for path, body in bodies.items():
        answer = running.post(path, model=model, **body)
        error = answer.json()["error"]
        assert (answer.status_code, error["code"]) == (400, "unsupported_task"), answer.text
        assert ("/v1/classify" if model == "acme/three" else "/v1/embeddings") in error["message"]


def test_encoder_text_longer_than_its_positions_is_refused(running: Served) -> None:
    answer = running.post("/v1/embeddings", model="tiny", input="a " * 200)
    assert (answer.status_code, answer.json()["error"]["code"]) == (400, "context_length_exceeded")


@pytest.mark.parametrize("side", ["right", "left"])
def test_encoder_text_is_cut_as_transformers_cuts_it(running: Served, side: str) -> None:
    text = "b c d e f g " * 60
    asked = {"truncate_prompt_tokens": -1, "truncation_side": side}
    body = {"model": "acme/vectors", "input": text, "normalize": False}
    (one,) = running.ask("/v1/embeddings", **body, **asked)["data"]
    tokenizer = word_tokenizer()
    tokenizer.truncation_side = side
    inputs = tokenizer(text, truncation=True, max_length=130, return_tensors="pt")
    with torch.no_grad():
        assert close(one["embedding"], running.zoo.made["vectors"].model(**inputs).last_hidden_state[0, 0].numpy())


def test_canary_gets_its_share_of_an_encoders_requests_and_is_guarded(running: Served) -> None:
    with Client(running.server.url, api_key=running.key) as client:
        client.uploads.push(running.zoo.adapters / "vectors", "narrow")
    path, asked = "/v1/adapters/acme/narrow", {"model": "acme/narrow", "input": TEXTS[0], "normalize": False}
    trained = {"acme/narrow@1": "narrow", "acme/narrow@2": "vectors"}
    vectors = {model: states(running, name, TEXTS[0])[0] for model, name in trained.items()}
    with running.server.http(running.key) as http:
        targets = [{"revision": revision, "weight": 1} for revision in (1, 2)]
        http.put(f"{path}/aliases/default", json={"targets": targets}).raise_for_status()
        measures = {"measures": ["errors"]}
        http.put(f"{path}/aliases/default/guard", json=measures).raise_for_status()
        answers = [running.ask("/v1/embeddings", **asked, user=f"user {i}") for i in range(32)]
        assert {answer["model"] for answer in answers} == trained.keys()
        assert all(close(answer["data"][0]["embedding"], vectors[answer["model"]]) for answer in answers)

        def counted() -> dict[str, int]:
            return {one["model"]: one["requests"] for one in http.get(f"{path}/metrics").json()["data"]}

        until_true(lambda: sum(counted().values()) >= len(answers))
        assert all(counted()[model] for model in trained)
        http.post(f"{path}/promote", json={"revision": 1}).raise_for_status()


def shadow_of(running: Served, name: str, folder: Path, ask: Callable[[], Any]) -> dict[str, float]:
    """Compare the adapter's first revision with `folder` as its second, on one request; return the measures' means."""
    with Client(running.server.url, api_key=running.key) as client:
        client.uploads.push(folder, name)
    path = f"/v1/adapters/acme/{name}"
    with running.server.http(running.key) as http:
        http.post(f"{path}/promote", json={"revision": 1}).raise_for_status()
        started = http.post(f"{path}/shadow", json={"revision": 2, "share": 1})
        assert started.status_code == 201, started.text
        ask()
        until_true(lambda: http.get(f"{path}/shadow").json()["requests"]["compared"] == 1)
        found = http.get(f"{path}/shadow").json()
        http.delete(f"{path}/shadow").raise_for_status()
    assert found["requests"]["failed"] == 0
    return {measure: numbers["mean"] for measure, numbers in found["measures"].items()}


def test_shadow_compares_vectors_of_two_revisions(running: Served) -> None:
    text = TEXTS[0]
    asked = {"model": "acme/vectors", "input": text, "pooling": "mean"}
    found = shadow_of(
        running, "vectors", running.zoo.adapters / "narrow", lambda: running.ask("/v1/embeddings", **asked)
    )
    mine, other = (states(running, name, text).mean(axis=0).astype(np.float64) for name in ("vectors", "narrow"))
    cosine = mine @ other / (np.linalg.norm(mine) * np.linalg.norm(other))
    assert cosine < 0.999
    assert found == {"exact": 0, "cosine": pytest.approx(cosine, abs=1e-5)}


def test_shadow_compares_labels_of_two_revisions(running: Served) -> None:
    running.zoo.add("other three", 3)
    folder = running.zoo.adapters / "other three"
    asked = {"model": "acme/three", "input": TEXTS}
    found = shadow_of(running, "three", folder, lambda: running.ask("/v1/classify", **asked))
    same = [logits(running, "three", text).argmax() == logits(running, "other three", text).argmax() for text in TEXTS]
    assert found == {"exact": 0, "same_label": np.mean(same)}


@pytest.mark.parametrize("name", ["three", "vectors"])
def test_evaluation_of_an_adapter_without_text_is_refused_with_the_way_out(running: Served, name: str) -> None:
    grader = {"type": "exact"}
    asked = {"adapter": f"acme/{name}", "revision": 1, "against": "base", "file_id": "file-none", "grader": grader}
    answer = running.post("/v1/evaluations", **asked)
    error = answer.json()["error"]
    assert (answer.status_code, error["code"], error["param"]) == (400, "unsupported_task", "revision")
    assert "Start a shadow" in error["message"]


def test_adapter_for_text_generation_is_refused_on_an_encoder(running: Served) -> None:
    folder = running.zoo.adapters / "narrow"
    config = json.loads((folder / "adapter_config.json").read_text())
    other = folder.parent / "text"
    other.mkdir()
    (other / "adapter_config.json").write_text(json.dumps(config | {"task_type": "CAUSAL_LM"}))
    (other / "adapter_model.safetensors").write_bytes((folder / "adapter_model.safetensors").read_bytes())
    with Client(running.server.url, api_key=running.key) as client, pytest.raises(UploadRejected, match="encoder"):
        client.uploads.push(other, "text")
