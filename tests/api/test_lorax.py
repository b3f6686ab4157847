"""Routes of LoRAX, with the adapter in the body, as its clients send and read them."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import httpx
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from peft_uploads import form, make_adapter
from scripted_engine import EOS
from site_fixture import Site
from tiny_base import byte_tokenizer

from loramux.common.units import TokenCounts
from loramux.engine.messages import TokenEvent
from loramux.serving.messages import Delta
from loramux.serving.output import OutputProcessor
from loramux.serving.tokenizer import StopAutomaton, Tokenizer
from loramux_api.controllers.lorax import GenerateBody, LoraxWriter

CLIENT = {
    "adapter_source": None,
    "merged_adapters": None,
    "api_token": None,
    "do_sample": False,
    "ignore_eos_token": False,
    "return_full_text": False,
    "stop": [],
    "truncate": None,
    "typical_p": None,
    "best_of": None,
    "watermark": False,
    "details": True,
    "decoder_input_details": False,
    "return_k_alternatives": None,
    "response_format": None,
}
"""Fields that LoRAX's Python client 0.6 sends in addition to its arguments."""


@pytest.fixture(scope="session")
def adapter(base_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_adapter(base_dir, tmp_path_factory.mktemp("lorax"), seed=31)


@pytest.fixture
def served(site: Site, adapter: Path) -> Iterator[str]:
    with site.http() as http:
        http.post("/v1/adapters", **form(adapter, "fr"))
        yield "acme/fr"
        http.delete("/v1/adapters/fr")


def ask(site: Site, path: str, inputs: str = "hello", tenant: str = "acme", **parameters: Any) -> httpx.Response:
    stream = parameters.pop("stream", False)
    with site.http(tenant) as http:
        return http.post(path, json={"inputs": inputs, "parameters": CLIENT | parameters, "stream": stream})


def events(response: httpx.Response) -> list[dict[str, Any]]:
    """Read the events as LoRAX's client does: every line that begins with `data:` is JSON."""
    assert response.status_code == 200
    return [json.loads(line.removeprefix("data:")) for line in response.text.splitlines() if line.startswith("data:")]


def test_the_adapter_in_the_body_answers(site: Site, served: str) -> None:
    for name in (served, "fr", "fr@1"):
        answer = ask(site, "/generate", adapter_id=name, max_new_tokens=50).json()
        assert answer["generated_text"] == "hello"
        details = answer["details"]
        assert (details["finish_reason"], details["prompt_tokens"], details["prefill"]) == ("eos_token", 6, [])
        assert "".join(token["text"] for token in details["tokens"]) == "hello"
        assert [token["id"] for token in details["tokens"]] == list(b"hello")
    sent = site.engine.requests[-1]
    assert sent.adapter is not None
    assert sent.sampling.temperature == 0
    assert ask(site, "/", adapter_id=served).json()[0]["generated_text"] == "hello"
    plain = ask(site, "/generate", details=False, return_full_text=True, max_new_tokens=2, temperature=0.5).json()
    assert plain == {"generated_text": "hellohe", "details": None}
    assert site.engine.requests[-1].adapter is None
    assert site.engine.requests[-1].sampling.temperature == 0.5


@pytest.mark.parametrize("path", ["/generate_stream", "/generate", "/"])
def test_a_stream_ends_with_the_text_and_the_details(site: Site, served: str, path: str) -> None:
    told = events(ask(site, path, adapter_id=served, stream=path != "/generate_stream"))
    assert [one["token"]["text"] for one in told] == list("hello")
    assert [one["generated_text"] for one in told] == [None] * 4 + ["hello"]
    assert told[-1]["details"] == {
        "finish_reason": "eos_token",
        "prompt_tokens": 6,
        "generated_tokens": 6,
        "seed": None,
    }
    stopped = events(ask(site, "/generate_stream", adapter_id=served, stop=["lo"]))
    assert "".join(one["token"]["text"] for one in stopped) == stopped[-1]["generated_text"] == "hel"
    assert stopped[-1]["details"]["finish_reason"] == "stop_sequence"
    short = events(ask(site, "/generate_stream", max_new_tokens=3))
    assert (short[-1]["generated_text"], short[-1]["details"]["finish_reason"]) == ("hel", "length")


def test_an_answer_without_a_token_has_an_end_too(site: Site) -> None:
    site.engine.script = lambda _: [EOS]
    (only,) = events(ask(site, "/generate_stream"))
    assert (only["generated_text"], only["token"]["special"]) == ("", True)


def deltas(token_ids: list[int], stop: tuple[str, ...]) -> list[Delta]:
    """Return the text that the server sends for an answer of these tokens."""
    output = OutputProcessor(0, Tokenizer(byte_tokenizer()), [65], StopAutomaton(stop), 0)
    made = []
    for place, id in enumerate(token_ids):
        last = "stop" if id == EOS else "length" if place == len(token_ids) - 1 else None
        made.append(output.push(TokenEvent(request_id="r", token_id=id, logprob=-0.5, finish_reason=last)))
        if output.finish_reason:
            break
    return [*made, Delta(index=0, finish_reason=output.finish_reason)]


@settings(max_examples=150, deadline=None)
@given(
    token_ids=st.lists(st.integers(0, 255) | st.sampled_from([*b"aaxyz\xc3\xa9", EOS]), min_size=1, max_size=12),
    stop=st.sampled_from([(), ("a",), ("xyz",), ("é", "aa")]),
)
def test_streamed_tokens_join_to_the_whole_text(token_ids: list[int], stop: tuple[str, ...]) -> None:
    body, usage = GenerateBody(inputs="x"), TokenCounts(prompt=1, output=len(token_ids))
    answer = deltas(token_ids, stop)
    streamed = LoraxWriter(body, SimpleNamespace(), [EOS])
    told = [event for delta in answer for event in streamed.chunk(delta)]
    told += streamed.closing(usage)
    collecting = LoraxWriter(body, SimpleNamespace(), [EOS])
    for delta in answer:
        collecting.collect(delta)
    whole = collecting.whole(usage)
    assert "".join(event.token.text for event in told) == told[-1].generated_text == whole.generated_text
    assert [event.details for event in told[:-1]] == [None] * (len(told) - 1)
    assert told[-1].details is not None
    assert (told[-1].details.finish_reason == "length") == (answer[-1].finish_reason == "length")


@pytest.mark.parametrize(
    ("parameters", "told"),
    [
        ({"adapter_source": "hub"}, "adapter_source"),
        ({"merged_adapters": {"ids": ["a"], "weights": [1]}}, "merged_adapters"),
        ({"best_of": 2}, "best_of"),
        ({"truncate": 5}, "truncate"),
        ({"nonsense": 1}, "parameters.nonsense"),
        ({"temperature": 9}, "parameters.temperature"),
        ({"max_new_tokens": 10_000}, "context length"),
    ],
)
def test_what_is_not_served_is_refused_by_name(site: Site, parameters: dict[str, Any], told: str) -> None:
    refused = ask(site, "/generate", **parameters)
    assert (refused.status_code, refused.json()["error_type"]) == (422, "validation")
    assert told in refused.json()["error"]


def test_a_wrong_key_and_a_limit_are_told_in_lorax_shape(site: Site) -> None:
    refused = httpx.post(f"{site.url}/generate", json={"inputs": "x"}, headers={"Authorization": "Bearer sk-lm-wrong"})
    assert (refused.status_code, refused.json()["error_type"]) == (401, "validation")
    assert "unknown" in refused.json()["error"]
    with site.http("all-scopes") as http:
        key = http.post("/v1/keys", json={"name": "tight", "scopes": ["inference"]}).json()
        http.put(f"/v1/limits/{key['id']}/requests_per_minute", json={"value": 1})
    headers = {"Authorization": f"Bearer {key['key']}"}
    answers = [httpx.post(f"{site.url}/generate", json={"inputs": "x"}, headers=headers) for _ in range(2)]
    assert [answer.status_code for answer in answers] == [200, 429]
    assert answers[1].json()["error_type"] == "overloaded"
    assert int(answers[1].headers["retry-after"]) > 0


def test_anothers_adapter_is_not_there(site: Site, served: str) -> None:
    answers = [ask(site, "/generate", tenant="globex", adapter_id=name) for name in (served, "acme/none")]
    assert {answer.status_code for answer in answers} == {404}
    assert answers[0].text.replace(served, "x") == answers[1].text.replace("acme/none", "x")
