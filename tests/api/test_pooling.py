"""/v1/embeddings, /v1/classify, /pooling, /v1/score and /v1/rerank: shapes, refusals, bounds, with a scripted engine.

Its vector for a text is (mean of the token ids, 1, 2, ..., 7), its row for a token (id modulo 8, (id + 1) modulo 8,
...), and it sends some rows twice. What a model computes: tests/e2e/test_pooling.py.
"""

from __future__ import annotations

import base64
import json
import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import openai
import pytest
from site_fixture import Site
from task_adapters import TaskAdapter

from loramux_client import Client, UploadRejected

TENANT = "vectorous"
ADAPTERS: dict[str, dict[str, Any]] = {
    "classes": {"num_labels": 8},
    "relevance": {"num_labels": 1},
    "vectors": {},
    "tokens": {"num_labels": 8, "of_tokens": True},
    "unnamed": {"num_labels": 8, "of_tokens": True},
}


@pytest.fixture(scope="module")
def adapters(base_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    root = tmp_path_factory.mktemp("tasks")
    made = {name: TaskAdapter(base_dir, root / name, 1, **fields).folder for name, fields in ADAPTERS.items()}
    labels = {"id2label": {str(i): f"class {i}" for i in range(8)}, "model_type": "llama"}
    (made["classes"] / "config.json").write_text(json.dumps(labels))
    (made["tokens"] / "config.json").write_text(json.dumps(labels | {"problem_type": "multi_label_classification"}))
    (made["vectors"] / "loramux.toml").write_text("matryoshka_dimensions = [4]\n")
    (made["vectors"] / "1_Pooling").mkdir()
    (made["vectors"] / "1_Pooling/config.json").write_text('{"pooling_mode_mean_tokens": true}')
    return made


@pytest.fixture(scope="module", autouse=True)
def uploaded(site: Site, adapters: dict[str, Path]) -> dict[str, Any]:
    with site.http("all-scopes") as http:
        http.post("/admin/tenants", json={"name": TENANT})
        site.keys[TENANT] = http.post(f"/admin/tenants/{TENANT}/keys", json={}).json()["key"]
    with Client(site.url, api_key=site.keys[TENANT]) as client:
        return {name: client.uploads.push(folder, name) for name, folder in adapters.items()}


@pytest.fixture
def client(site: Site) -> Iterator[openai.OpenAI]:
    with site.openai(TENANT) as found:
        yield found


def ask(site: Site, path: str, **body: Any) -> dict[str, Any]:
    with site.http(TENANT) as http:
        answer = http.post(path, json={"model": "tiny"} | body)
    assert answer.status_code == 200, answer.text
    return answer.json()


def refused(site: Site, path: str, **body: Any) -> dict[str, Any]:
    with site.http(TENANT) as http:
        answer = http.post(path, json={"model": "tiny"} | body)
    assert answer.status_code == 400, answer.text
    assert not site.engine.requests
    return answer.json()["error"]


def raw(text: str) -> np.ndarray:
    ids = [257, *text.encode()]
    return np.array([sum(ids) / len(ids), *range(1, 8)], dtype=np.float32)


def unit(vector: np.ndarray) -> np.ndarray:
    return vector / np.linalg.norm(vector.astype(np.float64))


def test_official_client_gets_vectors_of_length_one(client: openai.OpenAI) -> None:
    """It asks for base64 by itself."""
    answer = client.embeddings.create(model="tiny", input=["one", "and two"])
    assert [one.index for one in answer.data] == [0, 1]
    for one, text in zip(answer.data, ["one", "and two"], strict=True):
        np.testing.assert_allclose(one.embedding, unit(raw(text)), rtol=1e-6)
    assert (answer.usage.prompt_tokens, answer.usage.total_tokens) == (4 + 8, 4 + 8)
    assert answer.model == "tiny"


@pytest.mark.parametrize(
    ("given", "count"), [("one", 1), ([257, 5], 1), ([[257, 5], [6]], 2), (["one", "two", "one"], 3)]
)
def test_embeddings_take_texts_and_token_ids(client: openai.OpenAI, given: Any, count: int) -> None:
    answer = client.embeddings.create(model="tiny", input=given, encoding_format="float")
    assert len(answer.data) == count
    assert all(len(one.embedding) == 8 for one in answer.data)


def test_embeddings_base64_is_float32_and_raw_where_asked(site: Site) -> None:
    asked = {"input": "one", "normalize": False}
    (coded,) = ask(site, "/v1/embeddings", **asked, encoding_format="base64")["data"]
    assert np.frombuffer(base64.b64decode(coded["embedding"]), dtype="<f4").tolist() == raw("one").tolist()
    (plain,) = ask(site, "/v1/embeddings", **asked)["data"]
    assert plain == {"object": "embedding", "index": 0, "embedding": raw("one").tolist()}


def test_adapter_for_vectors_has_its_own_pooling_and_lengths(site: Site) -> None:
    (one,) = ask(site, "/v1/embeddings", model=f"{TENANT}/vectors", input="one", dimensions=4)["data"]
    np.testing.assert_allclose(one["embedding"], unit(raw("one")[:4]), rtol=1e-6)
    ask(site, "/v1/embeddings", model=f"{TENANT}/vectors", input="one", pooling="last")
    ask(site, "/v1/embeddings", input="one")
    assert [request.pooling for request in site.engine.requests] == ["mean", "last", "last"]


def test_dimensions_of_a_model_not_trained_for_them_are_refused(site: Site) -> None:
    assert len(ask(site, "/v1/embeddings", input="one", dimensions=8)["data"]) == 1
    site.engine.requests.clear()
    error = refused(site, "/v1/embeddings", input="one", dimensions=4)
    assert error["param"] == "dimensions"
    assert "matryoshka_dimensions" in error["message"]


def test_classes_are_named_and_add_up_to_one(site: Site) -> None:
    answer = ask(site, "/v1/classify", model=f"{TENANT}/classes", input=["one", "two"])
    assert [one["label"] for one in answer["data"]] == ["class 0", "class 0"]
    logits = raw("one").astype(np.float64)
    np.testing.assert_allclose(
        answer["data"][0]["probs"], np.exp(logits - logits.max()) / np.exp(logits - logits.max()).sum()
    )
    assert answer["data"][0]["num_classes"] == 8
    assert (answer["model"], answer["usage"]["completion_tokens"]) == (f"{TENANT}/classes@1", 0)
    assert {request.pooling for request in site.engine.requests} == {"classify"}
    (plain,) = ask(site, "/classify", model=f"{TENANT}/classes", input="one", use_activation=False)["data"]
    assert plain["probs"] == raw("one").tolist()


def softmax(logits: np.ndarray) -> np.ndarray:
    powers = np.exp(logits.astype(np.float64))
    return powers / powers.sum(axis=-1, keepdims=True)


def row(token_id: int) -> np.ndarray:
    return np.array([(token_id + n) % 8 for n in range(8)], dtype=np.float32)


def test_every_token_has_its_place_and_class(site: Site) -> None:
    """The two bytes of a character are two tokens at one place; the token that begins every text has none."""
    texts = ["é is one", "two"]
    answer = ask(site, "/v1/classify", model=f"{TENANT}/tokens", input=texts)
    assert [(one["index"], one["num_classes"]) for one in answer["data"]] == [(0, 8), (1, 8)]
    for one, text in zip(answer["data"], texts, strict=True):
        ids = [257, *text.encode()]
        places = [(None, None), *((i, i + 1) for i, character in enumerate(text) for _ in character.encode())]
        assert [(token["start"], token["end"]) for token in one["tokens"]] == places
        assert [token["token_id"] for token in one["tokens"]] == ids
        for token in one["tokens"]:
            probs = softmax(row(token["token_id"]))
            np.testing.assert_allclose(token["probs"], probs)
            assert token["label"] == f"class {probs.argmax()}"
            assert token["score"] == max(token["probs"])
    assert [token["token"] for token in answer["data"][1]["tokens"]] == ["<|bos|>", "t", "w", "o"]
    assert answer["usage"]["total_tokens"] == len(texts[0].encode()) + len(texts[1]) + 2
    assert {request.pooling for request in site.engine.requests} == {"token_classify"}


def test_tokens_without_names_of_labels_or_texts_have_numbers(site: Site) -> None:
    model = f"{TENANT}/unnamed"
    (one,) = ask(site, "/classify", model=model, input=[5, 6], use_activation=False)["data"]
    assert [(token["label"], token["score"]) for token in one["tokens"]] == [("LABEL_2", 7.0), ("LABEL_1", 7.0)]
    assert [token["probs"] for token in one["tokens"]] == [row(5).tolist(), row(6).tolist()]
    assert {token["start"] for token in one["tokens"]} == {None}
    (empty,) = ask(site, "/classify", model=model, input="")["data"]
    assert [token["token_id"] for token in empty["tokens"]] == [257]


def test_places_of_a_shortened_text_are_those_in_the_whole_text(site: Site) -> None:
    for side, places in (("right", [None, *range(4)]), ("left", list(range(295, 300)))):
        asked = {"input": "x" * 300, "truncate_prompt_tokens": 5, "truncation_side": side}
        (one,) = ask(site, "/v1/classify", model=f"{TENANT}/tokens", **asked)["data"]
        assert [token["start"] for token in one["tokens"]] == places


def test_more_tokens_and_labels_than_an_answer_may_hold_are_refused(site: Site) -> None:
    error = refused(site, "/v1/classify", model=f"{TENANT}/tokens", input=["x" * 80] * 2048)
    assert error["param"] == "input"
    assert "153846 tokens" in error["message"]


@pytest.mark.parametrize("task", [None, "token_classify"])
def test_pooling_of_tokens_has_a_row_for_each_token(site: Site, task: str | None) -> None:
    asked = {"model": f"{TENANT}/tokens", "input": ["one", "and two"]} | ({"task": task} if task else {})
    answer = ask(site, "/pooling", **asked)
    assert {one["object"] for one in answer["data"]} == {"pooling"}
    for one, text in zip(answer["data"], asked["input"], strict=True):
        rows = np.stack([row(token_id) for token_id in (257, *text.encode())])
        np.testing.assert_allclose(one["data"], softmax(rows))
    coded = ask(site, "/pooling", **asked, use_activation=False, encoding_format="base64")["data"][1]
    assert np.frombuffer(base64.b64decode(coded["data"]), dtype="<f4").tolist() == rows.flatten().tolist()


@pytest.mark.parametrize("task", [None, "embed", "classify"])
def test_pooling_is_by_the_models_task_or_by_the_one_that_is_asked_for(site: Site, task: str | None) -> None:
    asked = {"input": "one"} | ({"task": task} if task else {})
    if task != "embed":
        (one,) = ask(site, "/pooling", model=f"{TENANT}/classes", **asked)["data"]
        np.testing.assert_allclose(one["data"], softmax(raw("one")))
    if task != "classify":
        (one,) = ask(site, "/pooling", model=f"{TENANT}/vectors", dimensions=4, **asked)["data"]
        np.testing.assert_allclose(one["data"], unit(raw("one")[:4]), rtol=1e-6)


@pytest.mark.parametrize("names", [("text_1", "text_2"), ("queries", "documents"), ("data_1", "data_2")])
def test_scores_of_a_model_for_vectors_are_cosines(site: Site, names: tuple[str, str]) -> None:
    first, second = names
    found = ask(site, "/v1/score", **{first: "one", second: ["one", "and two"]})["data"]
    cosines = [1.0, float(unit(raw("one")) @ unit(raw("and two")))]
    assert [one["score"] for one in found] == pytest.approx(cosines, rel=1e-6)
    assert [one["index"] for one in found] == [0, 1]
    assert len(site.engine.requests) == 2, "each text is read once"
    pairs = ask(site, "/score", **{first: ["one", "two"], second: ["and two", "one"]})["data"]
    assert pairs[0]["score"] == pytest.approx(cosines[1], rel=1e-6)


def test_scores_of_a_classifier_are_of_both_texts_together(site: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(site.engine, "labels", 1)
    found = ask(site, "/v1/rerank", model=f"{TENANT}/relevance", query="ab", documents=["cd", "e"])
    assert [request.prompt_token_ids for request in site.engine.requests] == [[*b"abcd"], [*b"abe"]]
    assert {request.pooling for request in site.engine.requests} == {"classify"}
    means = [sum(b"abcd") / 4, sum(b"abe") / 3]
    assert [one["relevance_score"] for one in found["results"]] == pytest.approx(
        [1 / (1 + math.exp(-m)) for m in means]
    )
    plain = ask(site, "/v1/score", model=f"{TENANT}/relevance", text_1="ab", text_2="e", use_activation=False)
    assert plain["data"][0]["score"] == pytest.approx(means[1])


@pytest.mark.parametrize("path", ["/rerank", "/v1/rerank", "/v2/rerank"])
def test_documents_are_ranked_the_best_first(site: Site, path: str) -> None:
    documents = ["zzzz", {"text": "query"}, "quern"]
    answer = ask(site, path, query="query", documents=documents)
    assert answer["results"][0]["index"] == 1
    scores = [one["relevance_score"] for one in answer["results"]]
    assert scores == sorted(scores, reverse=True)
    assert answer["results"][0]["document"] == {"text": "query"}
    best = ask(site, path, query="query", documents=documents, top_n=2, return_documents=False)["results"]
    assert len(best) == 2
    assert "document" not in best[0]
    assert answer["usage"]["total_tokens"] == answer["usage"]["prompt_tokens"] > 0


MODELS = {
    "/v1/chat/completions": {"messages": [{"role": "user", "content": "one"}]},
    "/v1/completions": {"prompt": "one"},
    "/v1/embeddings": {"input": "one"},
    "/v1/classify": {"input": "one"},
    "/v1/rerank": {"query": "one", "documents": ["two"]},
    "/pooling": {"input": "one", "task": "classify"},
    "/pooling#tokens": {"input": "one", "task": "token_classify"},
    "/pooling#vector": {"input": "one", "task": "embed"},
}


@pytest.mark.parametrize(
    ("model", "path", "way_out"),
    [
        (f"{TENANT}/classes", "/v1/chat/completions", "/v1/classify"),
        (f"{TENANT}/classes", "/v1/completions", "/v1/classify"),
        (f"{TENANT}/classes", "/v1/embeddings", "/v1/classify"),
        (f"{TENANT}/classes", "/v1/rerank", "num_labels=1"),
        (f"{TENANT}/vectors", "/v1/chat/completions", "/v1/embeddings"),
        (f"{TENANT}/vectors", "/v1/classify", "/v1/embeddings"),
        ("tiny", "/v1/classify", "SEQ_CLS"),
        *(
            (f"{TENANT}/tokens", path, "/v1/classify")
            for path in MODELS
            if path not in ("/v1/classify", "/pooling#tokens")
        ),
        (f"{TENANT}/classes", "/pooling#tokens", "/v1/classify"),
        (f"{TENANT}/classes", "/pooling#vector", "/v1/classify"),
        (f"{TENANT}/vectors", "/pooling#tokens", "/v1/embeddings"),
        ("tiny", "/pooling", "TOKEN_CLS"),
    ],
)
def test_model_trained_for_another_task_is_refused_with_the_way_out(
    site: Site, model: str, path: str, way_out: str
) -> None:
    error = refused(site, path.partition("#")[0], model=model, **MODELS[path])
    assert (error["code"], error["param"]) == ("unsupported_task", "model")
    assert way_out in error["message"]


@pytest.mark.parametrize(
    ("path", "body", "field"),
    [
        ("/v1/embeddings", {"input": []}, "input"),
        ("/v1/embeddings", {"input": ["one", 5]}, "input"),
        ("/v1/embeddings", {"input": [[]]}, "input"),
        ("/v1/embeddings", {"input": [[9999]]}, "input"),
        ("/v1/embeddings", {"input": "x" * 300}, "input"),
        ("/v1/classify", {"input": "x" * 300, "model": f"{TENANT}/tokens"}, "input"),
        ("/v1/classify", {"input": "", "model": f"{TENANT}/tokens", "add_special_tokens": False}, "input"),
        ("/pooling", {"input": "one", "task": "token_embed"}, "task"),
        ("/v1/embeddings", {"input": ["x"] * 2049}, "input"),
        ("/v1/embeddings", {"input": "one", "pooling": "cls"}, "pooling"),
        ("/v1/embeddings", {"input": "one", "dimensions": 0}, "dimensions"),
        ("/v1/embeddings", {"messages": [], "input": "one"}, "messages"),
        ("/v1/score", {"text_1": "one"}, "text_2"),
        ("/v1/score", {"text_1": ["one", "two"], "text_2": ["a", "b", "c"]}, "text_1"),
        ("/v1/score", {"text_1": "one", "queries": "one", "text_2": "two"}, "queries"),
        ("/v1/score", {"text_1": "one", "text_2": "x" * 300}, "text_2"),
        ("/v1/rerank", {"query": "one", "documents": []}, "documents"),
        ("/v1/rerank", {"query": "one", "documents": ["x"] * 2049}, "documents"),
        ("/v1/rerank", {"query": "one", "documents": [{"title": "two"}]}, "documents[0].text"),
        ("/v1/rerank", {"query": "one", "documents": ["two"], "rank_fields": ["title"]}, "rank_fields"),
    ],
)
def test_bad_input_is_refused_by_its_name(site: Site, path: str, body: dict[str, Any], field: str) -> None:
    assert refused(site, path, **body)["param"] == field


def test_text_as_long_as_the_context_is_taken_and_a_longer_one_shortened(site: Site) -> None:
    ask(site, "/v1/embeddings", input="x" * 255)
    ask(site, "/v1/embeddings", input="x" * 300, truncate_prompt_tokens=-1)
    ask(site, "/v1/embeddings", input="xy", truncate_prompt_tokens=2)
    assert [len(request.prompt_token_ids) for request in site.engine.requests] == [256, 256, 2]
    assert site.engine.requests[2].prompt_token_ids == [257, *b"x"]


def test_as_many_inputs_as_openai_takes_are_answered(site: Site) -> None:
    assert len(ask(site, "/v1/embeddings", input=["x"] * 2048)["data"]) == 2048


def test_task_is_shown_by_report_and_revision(site: Site, uploaded: dict[str, Any]) -> None:
    assert {name: one.report.found.task for name, one in uploaded.items()} == {
        "classes": "SEQ_CLS",
        "relevance": "SEQ_CLS",
        "vectors": "FEATURE_EXTRACTION",
        "tokens": "TOKEN_CLS",
        "unnamed": "TOKEN_CLS",
    }
    with site.http(TENANT) as http:
        shown = {name: http.get(f"/v1/adapters/{name}/revisions/1").json()["bundle"] for name in uploaded}
    assert [shown[name]["task"] for name in ADAPTERS] == [
        *("SEQ_CLS", "SEQ_CLS", "FEATURE_EXTRACTION", "TOKEN_CLS", "TOKEN_CLS"),
    ]
    assert (shown["tokens"]["problem_type"], len(shown["tokens"]["labels"])) == (None, 8)
    assert (shown["classes"]["num_labels"], shown["classes"]["labels"][7]) == (8, "class 7")
    assert (shown["vectors"]["pooling"], shown["vectors"]["matryoshka_dimensions"]) == ("mean", [4])


@pytest.mark.parametrize(
    ("file", "text"),
    [
        ("config.json", '{"id2label": {"0": "a", "1": "b"}}'),
        ("config.json", '{"id2label": {"0": "a", "x": "b"}}'),
        ("loramux.toml", 'labels = ["a", "b"]'),
        ("loramux.toml", 'pooling = "mean"'),
    ],
)
@pytest.mark.parametrize("name", ["classes", "tokens"])
def test_labels_that_do_not_fit_the_head_are_refused(
    site: Site, adapters: dict[str, Path], tmp_path: Path, file: str, text: str, name: str
) -> None:
    for known in ("adapter_config.json", "adapter_model.safetensors"):
        (tmp_path / known).write_bytes((adapters[name] / known).read_bytes())
    (tmp_path / file).write_text(text)
    with Client(site.url, api_key=site.keys[TENANT]) as client, pytest.raises(UploadRejected) as caught:
        client.uploads.push(tmp_path, "unfit")
    assert caught.value.param == file


@pytest.mark.parametrize(("name", "task"), [("classes", "SEQ_CLS"), ("vectors", "FEATURE_EXTRACTION")])
def test_fine_tuning_job_from_an_adapter_without_text_is_refused_by_its_task(site: Site, name: str, task: str) -> None:
    error = refused(site, "/v1/fine_tuning/jobs", model=f"{TENANT}/{name}", training_file="file-none")
    assert (error["code"], error["param"]) == ("unsupported_task", "model")
    assert f"task type {task}" in error["message"]
    assert "upload it" in error["message"]
