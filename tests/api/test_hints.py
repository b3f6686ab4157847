"""Fields that are hints, or have a neutral value: accepted without effect, and named if the field is unknown."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import pytest
from chat_site import chat_site, prompts, say
from site_fixture import Site

USER = [{"role": "user", "content": "x"}]
CHAT, MESSAGE, RESPONSE, TEXT = "/v1/chat/completions", "/v1/messages", "/v1/responses", "/v1/completions"
COUNT, TOKENIZE = "/v1/messages/count_tokens", "/tokenize"
BODIES: dict[str, dict[str, Any]] = {
    CHAT: {"messages": USER},
    MESSAGE: {"messages": USER, "max_tokens": 9},
    COUNT: {"messages": USER},
    RESPONSE: {"input": "x"},
    TEXT: {"prompt": "x"},
    TOKENIZE: {"prompt": "x"},
}
IGNORED = "x-loramux-ignored-fields"
OF_OTHER_SERVERS = (
    "ebnf",
    "stop_regex",
    "lora_path",
    "adapter_id",
    "random_seed",
    "custom_logit_processor",
    "input_ids",
)
"""Fields of SGLang, LoRAX, llama.cpp and Mistral that change the answer, or choose the adapter."""


@pytest.fixture(scope="module")
def chats(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Site]:
    with chat_site(tmp_path_factory.mktemp("hints")) as made:
        yield made


def post(site: Site, path: str, fields: dict[str, Any], status: int = 200) -> Any:
    say(site, "fine")
    with site.http() as http:
        response = http.post(path, json={"model": "tiny"} | BODIES[path] | fields)
    assert response.status_code == status, response.text
    return response


@pytest.mark.parametrize(
    ("path", "fields"),
    [
        (MESSAGE, {"context_management": {"edits": [{"type": "clear_thinking_20251015", "keep": "all"}]}}),
        (MESSAGE, {"context_management": {"edits": [{"type": "clear_thinking_20251015", "keep": {"type": "all"}}]}}),
        (MESSAGE, {"context_management": {"edits": []}}),
        (MESSAGE, {"context_management": None}),
        (COUNT, {"context_management": {"edits": []}}),
        (MESSAGE, {"thinking": {"type": "adaptive"}, "output_config": {"effort": "max"}}),
        (MESSAGE, {"thinking": {"type": "enabled", "budget_tokens": 1024}}),
        (MESSAGE, {"thread": {"type": "create"}, "betas": ["message-threads"], "speed": "fast"}),
        (RESPONSE, {"reasoning": {"effort": "max", "summary": "auto", "mode": "pro"}}),
        (RESPONSE, {"text": {"verbosity": "low"}}),
        (RESPONSE, {"input": []}),
        (RESPONSE, {"input": [], "instructions": "be brief"}),
        (CHAT, {"reasoning_effort": "max", "verbosity": "low"}),
        (CHAT, {"thinking": {"type": "enabled", "budget_tokens": 5, "clear_thinking": True}}),
        (CHAT, {"thinking_token_budget": 7, "stream_interval": 2, "ec_transfer_params": None}),
        (CHAT, {"reasoning": {"effort": "high", "max_tokens": 9, "exclude": False}}),
        (TEXT, {"thinking_token_budget": 7}),
    ],
)
def test_hints_and_values_that_ask_for_nothing_are_taken(chats: Site, path: str, fields: dict[str, Any]) -> None:
    assert IGNORED not in post(chats, path, fields).headers


@pytest.mark.parametrize(
    "fields",
    [
        {"thinking": {"type": "disabled"}},
        {"reasoning": {"enabled": False}},
        {"reasoning": {"effort": "none"}},
        {"reasoning_effort": "none", "thinking": {"type": "enabled"}},
    ],
)
def test_thought_is_switched_off_by_each_of_its_fields(chats: Site, fields: dict[str, Any]) -> None:
    post(chats, CHAT, fields)
    assert prompts(chats) == ["user: xassistant:<think></think>"]


@pytest.mark.parametrize("fields", [{"include_reasoning": False}, {"reasoning": {"exclude": True}}])
@pytest.mark.parametrize("stream", [False, True])
def test_answer_is_without_its_thought_if_it_is_excluded(chats: Site, fields: dict[str, Any], stream: bool) -> None:
    say(chats, "<think>hm</think>fine")
    with chats.http() as http:
        response = http.post(CHAT, json={"model": "tiny", "messages": USER, "stream": stream} | fields)
    assert "hm" not in response.text
    assert "reasoning_content" not in response.text
    assert ("fine" in response.text) or stream


@pytest.mark.parametrize("path", BODIES)
def test_unknown_field_is_ignored_and_named_in_a_header(chats: Site, path: str) -> None:
    fields = {"client_metadata": {"a": 1}, "zzz\n1": [1], "x" * 99: True}
    named = post(chats, path, fields).headers[IGNORED]
    assert named == f"client_metadata, zzz%0A1, {'x' * 64}"


def test_unknown_field_within_an_object_with_hints_is_named_by_its_path(chats: Site) -> None:
    assert post(chats, RESPONSE, {"reasoning": {"colour": "red"}}).headers[IGNORED] == "reasoning.colour"


@pytest.mark.parametrize(
    ("path", "fields", "param"),
    [
        (CHAT, {"temprature": 0.5}, "temprature"),
        (CHAT, {"maxTokens": 5}, "maxTokens"),
        (CHAT, {"stop_sequences": ["a"]}, "stop_sequences"),
        (CHAT, {"top_a": 0.5}, "top_a"),
        (CHAT, {"seeed": 0}, "seeed"),
        (TEXT, {"messages": USER}, "messages"),
        *((path, {name: "x"}, name) for name in OF_OTHER_SERVERS for path in (CHAT, MESSAGE, RESPONSE, TEXT)),
        (CHAT, {"repeat_penalty": 1.1}, "repeat_penalty"),
        (CHAT, {"lora": [{"id": 0, "scale": 0.5}]}, "lora"),
        (CHAT, {"safe_prompt": True}, "safe_prompt"),
        (CHAT, {"reasoning_format": "hidden"}, "reasoning_format"),
        (MESSAGE, {"n": 2}, "n"),
        (MESSAGE, {"max_completion_tokens": 2}, "max_completion_tokens"),
        (MESSAGE, {"stop": "x" * 99}, "stop"),
        (RESPONSE, {"max_tokens": 5}, "max_tokens"),
        (RESPONSE, {"reasoning": {"efort": "low"}}, "reasoning.efort"),
        (RESPONSE, {"seeds": 0}, "seeds"),
        (TOKENIZE, {"add_special_token": False, "colour": 1, "add_generation_promt": True}, "add_generation_promt"),
    ],
)
def test_unknown_field_that_would_change_the_answer_is_refused_by_name(
    chats: Site, path: str, fields: dict[str, Any], param: str
) -> None:
    error = post(chats, path, fields, 400).json()["error"]
    assert (error["param"], error["code"]) == (param, "unknown_parameter")


@pytest.mark.parametrize(
    ("field", "instead"),
    [("ebnf", "structured_outputs"), ("lora_path", "model"), ("random_seed", "seed"), ("stop_regex", "stop")],
)
def test_refusal_of_another_servers_field_names_the_field_to_send(chats: Site, field: str, instead: str) -> None:
    assert f"send '{instead}'" in post(chats, CHAT, {field: "x"}, 400).json()["error"]["message"]


@pytest.mark.parametrize(
    "fields",
    [
        {"n": 1}, {"stop": []}, {"presence_penalty": 0}, {"temprature": None}, {"echo": False}, {"lora_path": None},
        {"repeat_penalty": 1.0}, {"safe_prompt": False}, {"reasoning_format": "parsed"},
    ],
)  # fmt: skip
def test_unknown_field_whose_value_asks_for_nothing_is_ignored(chats: Site, fields: dict[str, Any]) -> None:
    assert post(chats, MESSAGE, fields).headers[IGNORED] == next(iter(fields))


@pytest.mark.parametrize(
    "edit",
    [
        {"type": "clear_tool_uses_20250919"},
        {"type": "clear_thinking_20251015", "keep": {"type": "thinking_turns", "value": 1}},
        {"type": "clear_thinking_20251015"},
        {"type": "compact_20260112"},
    ],
)
def test_edit_that_cuts_the_prompt_is_refused_by_its_place(chats: Site, edit: dict[str, Any]) -> None:
    edits = [{"type": "clear_thinking_20251015", "keep": "all"}, edit]
    error = post(chats, MESSAGE, {"context_management": {"edits": edits}}, 400).json()["error"]
    assert error["param"] == "context_management.edits[1]"


def test_continued_thread_is_not_found_in_the_words_that_clients_replay_by(chats: Site) -> None:
    thread = {"thread": {"type": "continue", "previous_message_id": "msg_1"}}
    error = post(chats, MESSAGE, thread, 404).json()["error"]
    assert (error["type"], error["details"]) == ("not_found_error", {"error_code": "thread_not_found"})


@pytest.mark.parametrize("stream", [False, True])
def test_echo_without_a_token_gives_the_prompts_log_probabilities_and_bills_it(chats: Site, stream: bool) -> None:
    asked = {"prompt": ["abc", "de"], "max_tokens": 0, "echo": True, "logprobs": 1}
    options = {"stream": True, "stream_options": {"include_usage": True}} if stream else {}
    answer = post(chats, TEXT, asked | options)
    if stream:
        events = [json.loads(line[6:]) for line in answer.text.splitlines() if line.startswith("data: {")]
        choices, usage = [choice for event in events for choice in event["choices"]], events[-1]["usage"]
    else:
        choices, usage = answer.json()["choices"], answer.json()["usage"]
    found = {choice["index"]: choice for choice in choices}
    assert {index: (one["text"], one["finish_reason"]) for index, one in found.items()} == {
        0: ("abc", "length"),
        1: ("de", "length"),
    }
    assert found[0]["logprobs"]["tokens"] == ["<|bos|>", "a", "b", "c"]
    assert (usage["prompt_tokens"], usage["completion_tokens"]) == (7, 0)
