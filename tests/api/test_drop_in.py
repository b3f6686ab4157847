"""Requests of clients written for OpenAI and for vLLM, and the answers that they read; each line names its source."""

from __future__ import annotations

import json
from importlib.metadata import version
from typing import Any

import httpx
import openai
import pytest
from site_fixture import Site

HELLO = [{"role": "user", "content": "hello"}]
CHAT = {"model": "tiny", "messages": HELLO}
SAID = "user: hello\nassistant:"


def post(site: Site, path: str, **body: Any) -> dict[str, Any]:
    with site.http() as client:
        response = client.post(path, json=body)
    assert response.status_code == 200, response.text
    return response.json()


def events(site: Site, path: str, **body: Any) -> list[dict[str, Any]]:
    with site.http() as client:
        response = client.post(path, json=body | {"stream": True})
    lines = [line.removeprefix("data: ") for line in response.text.splitlines() if line.startswith("data: ")]
    assert lines[-1] == "[DONE]"
    return [json.loads(line) for line in lines[:-1]]


def test_message_with_unknown_fields_of_a_client_is_answered(site: Site) -> None:
    answer = site.openai().chat.completions.create(**CHAT).choices[0].message.model_dump()
    again = [*HELLO, answer | {"provider_specific_fields": {"x": 1}, "thinking_blocks": None}, *HELLO]
    assert site.openai().chat.completions.create(model="tiny", messages=again).choices[0].message.content


@pytest.mark.parametrize(
    "fields",
    [
        {"add_generation_prompt": True},
        {"continue_final_message": False},
        {"priority": 0},
        {"skip_special_tokens": True},
        {"spaces_between_special_tokens": True},
        {"top_logprobs": 0},
        {"include_stop_str_in_output": False},
        {"use_beam_search": False, "length_penalty": 1.0},
        {"bad_words": [], "allowed_token_ids": None, "logprob_token_ids": None, "cache_salt": None},
        {"tools": [{"type": "function", "function": {"name": "f"}}], "tool_choice": "none"},
        {"documents": [], "mm_processor_kwargs": None, "request_id": "mine", "include_reasoning": True},
        {"stream_options": None, "return_tokens_as_token_ids": None, "truncate_prompt_tokens": None},
    ],
    ids="+".join,
)
def test_vllm_field_that_asks_for_nothing_is_accepted(site: Site, fields: dict[str, Any]) -> None:
    assert post(site, "/v1/chat/completions", **CHAT, **fields)["choices"][0]["message"]["content"] == SAID


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/completions"])
def test_continuous_usage_is_in_every_chunk(site: Site, path: str) -> None:
    body = CHAT if "chat" in path else {"model": "tiny", "prompt": "hello"}
    options = {"include_usage": True, "continuous_usage_stats": True}
    chunks = events(site, path, **body, max_tokens=5, stream_options=options)
    counts = [chunk["usage"]["completion_tokens"] for chunk in chunks]
    assert counts[-3:] == [4, 5, 5]
    assert counts == sorted(counts)
    assert {chunk["usage"]["prompt_tokens"] for chunk in chunks} == {chunks[-1]["usage"]["prompt_tokens"]}
    assert chunks[-1]["choices"] == []


def test_continuous_usage_without_usage_is_not_sent(site: Site) -> None:
    chunks = events(site, "/v1/chat/completions", **CHAT, stream_options={"continuous_usage_stats": True})
    assert not any("usage" in chunk for chunk in chunks)


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/completions"])
def test_last_content_chunk_carries_the_finish_reason(site: Site, path: str) -> None:
    body = CHAT if "chat" in path else {"model": "tiny", "prompt": "hello"}
    choices = [chunk["choices"][0] for chunk in events(site, path, **body, max_tokens=3)]
    texts = [choice.get("text") or choice.get("delta", {}).get("content") for choice in choices]
    assert [choice["finish_reason"] for choice in choices] == [None] * (len(choices) - 1) + ["length"]
    assert texts[-3:] == (list("use") if "chat" in path else list("hel"))


def test_several_choices_stream_each_end_once(site: Site) -> None:
    chunks = events(site, "/v1/completions", model="tiny", prompt=["ab", "c"], max_tokens=2)
    ends = {
        c["choices"][0]["index"]: c["choices"][0]["finish_reason"] for c in chunks if c["choices"][0]["finish_reason"]
    }
    texts = {i: "".join(c["choices"][0]["text"] for c in chunks if c["choices"][0]["index"] == i) for i in (0, 1)}
    assert (ends, texts) == ({0: "length", 1: "stop"}, {0: "ab", 1: "c"})


def test_health_of_vllm_needs_no_key_and_has_no_body(site: Site) -> None:
    response = httpx.get(f"{site.url}/health")
    assert (response.status_code, response.content) == (200, b"")


def test_models_have_a_root(site: Site) -> None:
    model = site.openai().models.retrieve("tiny").model_dump()
    assert (model["root"], model["parent"]) == ("tiny", None)


def test_wrong_key_is_refused_in_openais_words(site: Site) -> None:
    wrong = openai.OpenAI(base_url=f"{site.url}/v1", api_key="sk-lm-0123456789abcdefghij", max_retries=0)
    with pytest.raises(openai.AuthenticationError) as refusal:
        wrong.models.list()
    assert refusal.value.body["message"].startswith("Incorrect API key provided: ")
    missing = httpx.get(f"{site.url}/v1/models").json()["error"]["message"]
    assert missing.startswith("You didn't provide an API key.")


def test_token_ids_in_place_of_texts_of_logprobs(site: Site) -> None:
    fields = {"return_tokens_as_token_ids": True, "max_tokens": 2}
    text = post(site, "/v1/completions", model="tiny", prompt="ab", logprobs=2, **fields)["choices"][0]["logprobs"]
    assert text["tokens"] == ["token_id:97", "token_id:98"]
    assert list(text["top_logprobs"][0]) == ["token_id:97", "token_id:98"]
    chat = post(site, "/v1/chat/completions", **CHAT, logprobs=True, top_logprobs=1, **fields)["choices"][0]
    assert [one["token"] for one in chat["logprobs"]["content"]] == [f"token_id:{ord(c)}" for c in "us"]


@pytest.mark.parametrize(
    ("fields", "kept"),
    [
        ({"truncate_prompt_tokens": 3}, "fgh"),
        ({"truncate_prompt_tokens": 3, "truncation_side": "left"}, "fgh"),
        ({"truncate_prompt_tokens": 3, "truncation_side": "right"}, "abc"),
        ({"truncate_prompt_tokens": 100}, "abcdefgh"),
        ({"truncate_prompt_tokens": -1, "max_tokens": 250}, "cdefgh"),
    ],
)
@pytest.mark.parametrize("as_ids", [False, True])
def test_prompt_is_truncated(site: Site, fields: dict[str, Any], kept: str, as_ids: bool) -> None:
    prompt = list(b"abcdefgh") if as_ids else "abcdefgh"
    fields = fields | {"return_token_ids": True, "add_special_tokens": False}
    answer = post(site, "/v1/completions", model="tiny", prompt=prompt, **fields)
    assert bytes(answer["choices"][0]["prompt_token_ids"]).decode() == kept


def test_answer_continues_the_final_message(site: Site) -> None:
    messages = [*HELLO, {"role": "assistant", "content": "Here "}]
    fields = {"add_generation_prompt": False, "continue_final_message": True, "return_token_ids": True}
    answer = post(site, "/v1/chat/completions", model="tiny", messages=messages, **fields)
    assert bytes(answer["prompt_token_ids"]).decode() == "user: hello\nassistant: Here "
    echoed = post(site, "/v1/chat/completions", model="tiny", messages=messages, echo=True, max_tokens=4, **fields)
    assert echoed["choices"][0]["message"]["content"] == "Here user"
    chunks = events(site, "/v1/chat/completions", model="tiny", messages=messages, echo=True, max_tokens=4, **fields)
    assert "".join(chunk["choices"][0]["delta"].get("content", "") for chunk in chunks) == "Here user"


@pytest.mark.parametrize("field", ["prefix", "partial"])
def test_assistants_last_message_is_continued_if_it_is_a_prefix(site: Site, field: str) -> None:
    """DeepSeek's and Mistral's field, and Kimi's."""
    for text, goes_on in [("Here ", "assistant: Here "), ("", "assistant: \nassistant:")]:
        messages = [*HELLO, {"role": "assistant", "content": text, field: True}]
        answer = post(site, "/v1/chat/completions", model="tiny", messages=messages, return_token_ids=True)
        assert bytes(answer["prompt_token_ids"]).decode() == f"user: hello\n{goes_on}"


@pytest.mark.parametrize("is_prefix", [True, False, None])
def test_earlier_message_is_not_continued(site: Site, is_prefix: bool | None) -> None:
    messages = [*HELLO, {"role": "assistant", "content": "Here ", "prefix": is_prefix}]
    messages += [*HELLO] if is_prefix else []
    answer = post(site, "/v1/chat/completions", model="tiny", messages=messages, return_token_ids=True)
    assert bytes(answer["prompt_token_ids"]).decode().endswith("\nassistant:")


def test_prompt_ends_with_the_last_message_without_generation_prompt(site: Site) -> None:
    answer = post(site, "/v1/chat/completions", **CHAT, add_generation_prompt=False, return_token_ids=True)
    assert bytes(answer["prompt_token_ids"]).decode() == "user: hello\n"


def test_image_is_refused_by_name(site: Site) -> None:
    content = [{"type": "text", "text": "what?"}, {"type": "image_url", "image_url": {"url": "https://x/y.png"}}]
    with pytest.raises(openai.BadRequestError, match=r"'image_url', and this model reads text only") as refusal:
        site.openai().chat.completions.create(model="tiny", messages=[{"role": "user", "content": content}])
    assert refusal.value.param == "messages[0].content[1]"


def test_prompt_logprobs_of_texts_in_vllms_shape(site: Site) -> None:
    answer = post(site, "/v1/completions", model="tiny", prompt=["abc", "d"], n=2, prompt_logprobs=1, max_tokens=1)
    first = answer["choices"][0]["prompt_logprobs"]
    assert first[0] is None
    assert first[1] == {"97": {"logprob": -0.25, "rank": 1, "decoded_token": "a"}}
    assert [len(choice["prompt_logprobs"]) for choice in answer["choices"]] == [4, 4, 2, 2]
    assert answer["choices"][1]["prompt_logprobs"] == first
    wanted = [request.sampling.prompt_logprobs for request in site.engine.requests]
    assert wanted == [1, None, 1, None], "a prompt is scored once"


def test_prompt_logprobs_of_a_chat_in_vllms_shape(site: Site) -> None:
    answer = post(site, "/v1/chat/completions", **CHAT, prompt_logprobs=2, max_tokens=1)
    assert len(answer["prompt_logprobs"]) == answer["usage"]["prompt_tokens"]
    assert [len(one) for one in answer["prompt_logprobs"][1:]] == [2] * (answer["usage"]["prompt_tokens"] - 1)
    assert post(site, "/v1/chat/completions", **CHAT, max_tokens=1)["prompt_logprobs"] is None


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("prompt", ["héllo", list("héllo".encode())])
def test_echo_repeats_the_prompt_with_its_logprobs(site: Site, prompt: object, stream: bool) -> None:
    body = {"model": "tiny", "prompt": prompt, "echo": True, "logprobs": 1, "max_tokens": 3, "n": 2}
    if stream:
        choices = [c["choices"][0] for c in events(site, "/v1/completions", **body)]
        parts = [[c for c in choices if c["index"] == i] for i in (0, 1)]
    else:
        parts = [[c] for c in post(site, "/v1/completions", **body)["choices"]]
    for of_choice in parts:
        assert "".join(c["text"] for c in of_choice) == "héllohé"
        logprobs = {
            key: [one for c in of_choice if c["logprobs"] for one in c["logprobs"][key]]
            for key in ("tokens", "token_logprobs", "top_logprobs", "text_offset")
        }
        special = isinstance(prompt, str)  # the tokenizer puts one before a text
        scores = [-0.25] * (6 if special else 5)
        assert logprobs["token_logprobs"][: 1 + len(scores)] == [None, *scores]
        assert logprobs["top_logprobs"][0] is None
        assert all(len(top) == 1 for top in logprobs["top_logprobs"][1:])
        assert logprobs["tokens"][special : special + 4] == ["h", "bytes:\\xc3", "bytes:\\xa9", "l"]
        assert logprobs["text_offset"][special : special + 7] == [0, 1, 1, 2, 3, 4, 5]


def test_echo_without_logprobs_scores_nothing(site: Site) -> None:
    answer = post(site, "/v1/completions", model="tiny", prompt="ab", echo=True, max_tokens=1)
    assert (answer["choices"][0]["text"], answer["choices"][0]["logprobs"]) == ("aba", None)
    assert site.engine.requests[0].sampling.prompt_logprobs is None


@pytest.mark.parametrize(
    ("fields", "told"),
    [
        ({"prompt_logprobs": -1}, ">= 0"),
        ({"prompt_logprobs": 21}, "<= 20"),
        ({"prompt_logprobs": 1, "stream": True}, "leave one out"),
        ({"prompt_logprobs": 20, "prompt": ["x" * 200] * 100}, "the most is 200000"),
    ],
)
def test_prompt_logprobs_out_of_range_are_refused(site: Site, fields: dict[str, Any], told: str) -> None:
    with site.http() as client:
        refused = client.post("/v1/completions", json={"model": "tiny", "prompt": "x"} | fields)
    assert (refused.status_code, refused.json()["error"]["param"]) == (400, "prompt_logprobs")
    assert told in refused.json()["error"]["message"]


def test_repeated_prompt_of_an_idempotency_key_is_kept(site: Site) -> None:
    body = {"model": "tiny", "prompt": "ab", "echo": True, "logprobs": 0, "max_tokens": 1}
    with site.http(Idempotency_Key="echo-once") as client:
        first, second = (client.post("/v1/completions", json=body) for _ in range(2))
    assert second.headers["idempotent-replayed"] == "true"
    assert second.json() == first.json()
    assert first.json()["choices"][0]["text"] == "aba"


def test_text_is_tokenized_with_special_tokens_and_without(site: Site) -> None:
    with_special = post(site, "/tokenize", model="tiny", prompt="hé", return_token_strs=True)
    assert with_special == {
        "count": 4,
        "max_model_len": 256,
        "tokens": [257, *"hé".encode()],
        "token_strs": ["<|bos|>", "h", "Ã", "©"],
    }
    without = post(site, "/tokenize", model="tiny", prompt="hé", add_special_tokens=False)
    assert post(site, "/tokenize", prompt="hé", add_special_tokens=False) == without, "without a model: the first base"
    assert post(site, "/detokenize", tokens=without["tokens"]) == {"prompt": "hé"}
    assert (without["tokens"], without["token_strs"]) == (list("hé".encode()), None)
    assert post(site, "/detokenize", model="tiny", tokens=with_special["tokens"]) == {"prompt": "<|bos|>hé"}


def test_conversation_is_tokenized_as_a_chat_reads_it(site: Site) -> None:
    body = {"model": "tiny", "messages": [*HELLO, {"role": "assistant", "content": "Sure,"}]}
    for fields, end in [
        ({}, "assistant: Sure,\nassistant:"),
        ({"add_generation_prompt": False}, "assistant: Sure,\n"),
        ({"continue_final_message": True}, "assistant: Sure,"),
    ]:
        tokens = post(site, "/tokenize", **body, **fields)["tokens"]
        assert bytes(tokens).decode() == f"user: hello\n{end}"
        answer = post(site, "/v1/chat/completions", **body, **fields, return_token_ids=True)
        assert answer["prompt_token_ids"] == tokens


def test_text_longer_than_the_context_is_counted(site: Site) -> None:
    assert post(site, "/tokenize", model="tiny", prompt="x" * 300, add_special_tokens=False)["count"] == 300


@pytest.mark.parametrize(
    ("path", "fields", "param"),
    [
        ("/tokenize", {}, "prompt"),
        ("/tokenize", {"prompt": "x", "messages": HELLO}, "prompt"),
        ("/tokenize", {"prompt": "x" * 10_000}, "prompt"),
        ("/tokenize", {"prompt": "x", "chat_template": "{{ x }}"}, "chat_template"),
        ("/detokenize", {"tokens": [999]}, "tokens"),
        ("/detokenize", {"tokens": ["a"]}, "tokens[0]"),
    ],
)
def test_tokenizing_refuses_by_the_fields_name(site: Site, path: str, fields: dict[str, Any], param: str) -> None:
    with site.http() as client:
        refused = client.post(path, json={"model": "tiny"} | fields)
    assert (refused.status_code, refused.json()["error"]["param"]) == (400, param)


def test_another_tenants_model_is_not_tokenized_for(site: Site) -> None:
    with site.http() as client:
        assert client.post("/tokenize", json={"model": "globex/upper", "prompt": "x"}).status_code == 404
    assert httpx.post(f"{site.url}/tokenize", json={"model": "tiny", "prompt": "x"}).status_code == 401


def test_version_load_and_tokenizer_are_described_as_in_vllm(site: Site) -> None:
    with site.http("all-scopes") as http:
        assert http.get("/version").json() == {"version": version("loramux")}
        assert http.get("/load").json().keys() == {"server_load"}
    with site.http() as http:
        assert http.get("/load").status_code == 403
        info = http.get("/tokenizer_info").json()
        assert info["tokenizer_class"]
        assert info["bos_token"] == "<|bos|>"
        assert info["model_max_length"] == http.get("/v1/models/tiny").json()["max_model_len"]
        assert http.get("/tokenizer_info", params={"model": "absent"}).status_code == 404
    assert httpx.get(f"{site.url}/tokenizer_info").status_code == 401


@pytest.mark.parametrize("keys", [["not_a_token_id"], ["bad1", "bad2"], ["1.5"], ["0x10"], ["", " 1"]])
def test_logit_bias_with_a_key_that_is_no_token_id_names_it(site: Site, keys: list[str]) -> None:
    with site.http() as http:
        answer = http.post("/v1/chat/completions", json=CHAT | {"logit_bias": {"5": 1, **dict.fromkeys(keys, 1)}})
    assert answer.status_code == 400
    assert answer.json()["error"]["param"] == "logit_bias"
    assert all(repr(key) in answer.json()["error"]["message"] for key in keys)


def test_trainers_find_what_they_call_around_a_load(site: Site) -> None:
    """The calls of TRL's `VLLMClient`, which trains on log probabilities and pushes adapters."""
    with site.http("all-scopes") as http:
        info = http.get("/server_info", params={"config_format": "json"}).json()["vllm_config"]
        assert info["model_config"]["max_model_len"] == http.get("/v1/models").json()["data"][0]["max_model_len"]
        assert info["model_config"]["logprobs_mode"] == "raw_logprobs"
        assert info["model_config"]["dtype"] == "torch.float32"
        assert info["parallel_config"]["data_parallel_size"] == 1
        assert info["weight_transfer_config"] is None
        assert json.loads(http.get("/server_info").json()["vllm_config"]) == info
        assert http.get("/get_world_size").json() == {"world_size": 1}
        assert http.post("/pause", params={"mode": "keep"}).json() == {"status": "paused"}
        assert http.post("/resume").json() == {"status": "resumed"}


@pytest.mark.parametrize("query", ["", "?mode=abort", "?mode=wait"])
def test_pause_that_would_end_or_delay_requests_is_refused(site: Site, query: str) -> None:
    with site.http("all-scopes") as http:
        refused = http.post(f"/pause{query}")
    assert (refused.status_code, refused.json()["error"]["param"]) == (400, "mode")


@pytest.mark.parametrize(
    ("method", "path"), [("GET", "/server_info"), ("GET", "/get_world_size"), ("POST", "/pause"), ("POST", "/resume")]
)
def test_routes_of_trainers_are_for_operators(site: Site, method: str, path: str) -> None:
    with site.http() as http:
        assert http.request(method, path).status_code == 403
