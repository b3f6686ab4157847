"""Bad input: every refusal has all four keys, names the field, and nothing reaches the engine."""

from __future__ import annotations

from typing import Any

import pytest
from site_fixture import Site

CHAT = {"model": "tiny", "messages": [{"role": "user", "content": "hi"}]}
TEXT = {"model": "tiny", "prompt": "hi"}


def messages(*given: object) -> dict[str, Any]:
    return CHAT | {"messages": list(given)}


BAD_CHATS = [
    ({}, "model", "Missing required parameter: 'model'"),
    ({"model": "tiny"}, "messages", "Missing required parameter: 'messages'"),
    (CHAT | {"model": 5}, "model", "Expected `str`, got `int`"),
    (messages(), "messages", "length >= 1"),
    (CHAT | {"messages": "hi"}, "messages", "Expected `array`, got `str`"),
    (messages({"content": "hi"}), "messages[0].role", "Missing required parameter"),
    (messages({"role": "user"}), "messages[0].content", "is missing"),
    (messages({"role": "robot", "content": "x"}), "messages[0].role", "'robot'"),
    (messages(CHAT["messages"][0], {"role": "robot", "content": "x"}), "messages[1].role", "assistant, tool"),
    (messages({"role": "tool", "content": "x"}), "messages[0].tool_call_id", "Missing required parameter"),
    (messages({"role": "user", "content": 7}), "messages[0].content", "got `int`"),
    (messages({"role": "user", "content": [{"type": "text"}]}), "messages[0].content[0]", "with a 'text'"),
    (
        messages({"role": "user", "content": [{"type": "text", "text": "x"}, {"type": "image_url", "image_url": {}}]}),
        "messages[0].content[1]",
        "holds no image",
    ),
    (
        messages({"role": "assistant", "content": "x", "tool_calls": [{"id": "1"}]}),
        "messages[0].tool_calls[0].function",
        "Missing required parameter",
    ),
    (messages({"role": "user", "content": "x" * 300}), "messages", "maximum context length is 256"),
    (CHAT | {"top_logprobs": 3}, "top_logprobs", "needs 'logprobs'"),
    (CHAT | {"logprobs": True, "top_logprobs": 21}, "top_logprobs", "<= 20"),
    (CHAT | {"logprobs": 5}, "logprobs", "Expected `bool | null`"),
    (CHAT | {"tools": [{"type": "function"}]}, "tools[0].function", "Missing required parameter"),
    (CHAT | {"tools": [{"type": "function", "function": {"name": "f"}}]}, "tools", "model.tool_parser"),
    (CHAT | {"tool_choice": "required"}, "tool_choice", "'tools' is empty"),
    (CHAT | {"functions": [{}]}, "functions", "send 'tools'"),
    (CHAT | {"response_format": {"type": "xml"}}, "response_format.type", "json_schema"),
    (CHAT | {"response_format": {"type": "json_schema"}}, "response_format.json_schema", "Missing required"),
    (CHAT | {"guided_regex": "a", "guided_choice": ["a"]}, "guided_choice", "several"),
    (CHAT | {"guided_whitespace_pattern": " "}, "guided_whitespace_pattern", "not supported"),
    (CHAT | {"modalities": ["text", "audio"]}, "modalities", "reads and writes text"),
    (CHAT | {"audio": {"voice": "x"}}, "audio", "reads and writes text"),
    (CHAT | {"web_search_options": {}}, "web_search_options", "does not search"),
    (CHAT | {"store": True}, "store", "not stored"),
    (CHAT | {"chat_template": "{{ x }}"}, "chat_template", "a revision brings its own"),
    (
        CHAT | {"add_generation_prompt": True, "continue_final_message": True},
        "continue_final_message",
        "leave one out",
    ),
    (CHAT | {"reasoning_effort": "hgh"}, "reasoning_effort", "hgh"),
    (CHAT | {"maxTokens": 3}, "maxTokens", "Did you mean 'max_tokens'"),
    (CHAT | {"max_new_tokens": 3}, "max_new_tokens", "send 'max_tokens'"),
    (CHAT | {"seed ": 3}, "seed ", "Did you mean 'seed'"),
    (CHAT | {f"x{i}": i for i in range(65)}, None, "65 fields"),
    (
        CHAT | {"tools": [{"type": "function", "function": {"name": "f", "description": "x" * (600 << 10)}}]},
        "tools",
        "bytes of JSON",
    ),
]
BAD_TEXTS = [
    ({"model": "tiny"}, "prompt", "Missing required parameter: 'prompt'"),
    (TEXT | {"prompt": []}, "prompt", "length >= 1"),
    (TEXT | {"prompt": [1, "a"]}, "prompt", "not a mixture"),
    (TEXT | {"prompt": {}}, "prompt", "got `object`"),
    (TEXT | {"prompt": [1.5]}, "prompt[0]", "got `float`"),
    (TEXT | {"prompt": [[]]}, "prompt", "holds no token"),
    (TEXT | {"prompt": [260]}, "prompt", "0 to 259"),
    (TEXT | {"prompt": ["a"] * 65, "n": 2}, "prompt", "at most 128"),
    (TEXT | {"temperature": 2.5}, "temperature", "<= 2"),
    (TEXT | {"temperature": -0.1}, "temperature", ">= 0"),
    (TEXT | {"temperature": "1"}, "temperature", "got `str`"),
    (TEXT | {"top_p": 1.5}, "top_p", "<= 1"),
    (TEXT | {"top_k": -2}, "top_k", ">= -1"),
    (TEXT | {"min_p": 2}, "min_p", "<= 1"),
    (TEXT | {"seed": 2**63}, "seed", ""),
    (TEXT | {"repetition_penalty": 0}, "repetition_penalty", ">= 0.01"),
    (TEXT | {"repetition_penalty": 1e-38}, "repetition_penalty", ">= 0.01"),
    (TEXT | {"repetition_penalty": 101}, "repetition_penalty", "<= 100"),
    (TEXT | {"presence_penalty": 3}, "presence_penalty", "<= 2"),
    (TEXT | {"frequency_penalty": -3}, "frequency_penalty", ">= -2"),
    (TEXT | {"logit_bias": {"a": 1}}, "logit_bias", "Expected `int`"),
    (TEXT | {"logit_bias": {"65": 101}}, "logit_bias", "<= 100"),
    (TEXT | {"logit_bias": {"9999": 1}}, "logit_bias", "token 9999"),
    (TEXT | {"stop": [""]}, "stop[0]", "length >= 1"),
    (TEXT | {"stop": ["x"] * 17}, "stop", "length <= 16"),
    (TEXT | {"stop_token_ids": [999]}, "stop_token_ids", "token 999"),
    (TEXT | {"allowed_token_ids": [999]}, "allowed_token_ids", "token 999"),
    (TEXT | {"allowed_token_ids": []}, "allowed_token_ids", "length >= 1"),
    (TEXT | {"allowed_token_ids": [1], "guided_choice": ["a"]}, "allowed_token_ids", "together with 'guided_choice'"),
    (TEXT | {"logprobs": 1, "logprob_token_ids": [999]}, "logprob_token_ids", "token 999"),
    (TEXT | {"logprob_token_ids": [5]}, "logprob_token_ids", "together with 'logprobs'"),
    (TEXT | {"min_tokens": 17}, "min_tokens", "more than the 16"),
    (TEXT | {"max_tokens": 0}, "max_tokens", "send 'echo'"),
    (TEXT | {"max_tokens": 255}, "prompt", "255 for the completion"),
    (TEXT | {"max_tokens": -1, "echo": True}, "max_tokens", ">= 0"),
    (TEXT | {"n": 129}, "n", "<= 128"),
    (TEXT | {"n": True}, "n", "got `bool`"),
    (TEXT | {"logprobs": 21}, "logprobs", "<= 20"),
    (TEXT | {"best_of": 4}, "best_of", "ask for n choices"),
    (TEXT | {"use_beam_search": True}, "use_beam_search", "not searched for"),
    (TEXT | {"priority": 3}, "priority", "service_tier"),
    (TEXT | {"skip_special_tokens": False}, "skip_special_tokens", "never shown"),
    (TEXT | {"truncate_prompt_tokens": -2}, "truncate_prompt_tokens", ">= -1"),
    (TEXT | {"truncation_side": "middle"}, "truncation_side", "middle"),
    (TEXT | {"suffix": "end"}, "suffix", "at its end only"),
    (TEXT | {"temprature": 1}, "temprature", "Unrecognized request argument"),
    (TEXT | {"stream": "yes"}, "stream", "got `str`"),
    (TEXT | {"stream_options": {"include_usage": True}}, "stream_options", "when 'stream' is true"),
    (TEXT | {"stream": True, "stream_options": {"x": 1}}, "stream_options.x", "Unknown parameter"),
]


def refused(site: Site, path: str, status: int, **content: Any) -> dict[str, Any]:
    """The error of a refused POST: its shape is checked here, and that the engine saw nothing."""
    with site.http() as client:
        response = client.post(path, **content)
    assert response.status_code == status, response.text
    assert response.headers["x-request-id"]
    assert list(response.json()) == ["error"]
    assert list(response.json()["error"]) == ["message", "type", "param", "code"]
    assert site.engine.requests == []
    return response.json()["error"]


@pytest.mark.parametrize(("body", "param", "told"), BAD_CHATS)
def test_bad_chats(site: Site, body: dict[str, Any], param: str, told: str) -> None:
    error = refused(site, "/v1/chat/completions", 400, json=body)
    assert (error["param"], error["type"]) == (param, "invalid_request_error")
    assert told in error["message"]


@pytest.mark.parametrize(("body", "param", "told"), BAD_TEXTS)
def test_bad_texts(site: Site, body: dict[str, Any], param: str, told: str) -> None:
    error = refused(site, "/v1/completions", 400, json=body)
    assert (error["param"], error["type"]) == (param, "invalid_request_error")
    assert told in error["message"]


@pytest.mark.parametrize(
    "body", [b"", b"{", b"[]", b"null", b'"hi"', b'{"model": "\\ud800"}', b"\xff\xfe", b'{"model": NaN}', b"a=b"]
)
@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/completions"])
def test_bodies_that_are_no_json_object(site: Site, path: str, body: bytes) -> None:
    error = refused(site, path, 400, content=body, headers={"content-type": "application/json"})
    assert error["param"] is None
    assert error["message"]


def test_an_over_long_prompt_has_openais_code(site: Site) -> None:
    error = refused(site, "/v1/completions", 400, json=TEXT | {"prompt": "x" * 300})
    assert error["code"] == "context_length_exceeded"


def test_a_body_that_is_too_large_is_refused_before_it_is_read(site: Site) -> None:
    error = refused(site, "/v1/completions", 413, json=TEXT | {"prompt": "x" * (17 << 20)})
    assert error["code"] == "request_too_large"
    assert str(1 << 20) in error["message"]


@pytest.mark.parametrize("model", ["globex/upper", "acme/nothing", "nothing", "", "../../etc", "acme/x@99", "x" * 5000])
def test_an_absent_model_and_another_tenants_get_the_same_answer(site: Site, model: str) -> None:
    error = refused(site, "/v1/completions", 404, json=TEXT | {"model": model})
    shown = model[:160]
    assert error == {
        "message": f"The model `{shown}` does not exist or you do not have access to it.",
        "type": "invalid_request_error",
        "param": "model",
        "code": "model_not_found",
    }


def test_unknown_urls_and_wrong_methods(site: Site) -> None:
    assert refused(site, "/v1/chat", 404)["code"] == "unknown_url"
    assert refused(site, "/v1/models", 405)["code"] == "method_not_allowed"


@pytest.mark.parametrize(
    "harmless",
    [
        {"tools": [], "tool_choice": "auto", "functions": None, "parallel_tool_calls": True},
        {"response_format": {"type": "text"}, "modalities": ["text"], "service_tier": "auto", "store": False},
        {"metadata": {"a": "b"}, "user": "u", "safety_identifier": "s", "prompt_cache_key": "k", "prediction": None},
        {"stop": None, "seed": None, "temperature": None, "logit_bias": None, "stream_options": None, "n": None},
    ],
)
def test_openai_fields_that_ask_for_nothing_are_taken(site: Site, harmless: dict[str, Any]) -> None:
    with site.http() as client:
        assert client.post("/v1/chat/completions", json=CHAT | harmless).status_code == 200
