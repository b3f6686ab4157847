"""Calls of tools and thoughts through the official client, on a real engine."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from typing import Any

import jsonschema
import openai
import pytest
from constrained_site import END_OF_THOUGHT, THINK, TOOLS_TEMPLATE, constrained_site
from site_fixture import Site

from loramux_api.bodies import decode_body
from loramux_api.schemas.chat import ChatBody, to_request

WEATHER = {
    "type": "object",
    "properties": {"city": {"type": "string", "maxLength": 9}, "unit": {"enum": ["C", "F"]}},
    "required": ["city", "unit"],
    "additionalProperties": False,
}
TOOLS = [
    {"type": "function", "function": {"name": "get_weather", "parameters": WEATHER, "strict": True}},
    {"type": "function", "function": {"name": "now", "description": "the time"}},
]
SCHEMAS = {"get_weather": WEATHER, "now": {"type": "object", "maxProperties": 0}}
HELLO = [{"role": "user", "content": "hello"}]


@pytest.fixture(scope="module")
def tools_site(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Site]:
    with constrained_site(tmp_path_factory.mktemp("tools"), TOOLS_TEMPLATE, adapters=1, thinks=True) as made:
        yield made


def ask(site: Site, **fields: Any) -> Any:
    """One chat with tools and without a thought, at a high temperature."""
    extra = {"enable_thinking": False, "return_token_ids": True} | fields.pop("extra_body", {})
    sampling = {"model": "acme/a0", "messages": HELLO, "tools": TOOLS, "temperature": 1.2, "seed": 4, "max_tokens": 400}
    return site.openai().chat.completions.create(**sampling | fields, extra_body=extra)


def check_calls(calls: list[tuple[str, str]]) -> None:
    assert calls
    for name, arguments in calls:
        jsonschema.validate(json.loads(arguments), SCHEMAS[name])


def reassembled(chunks: list[Any]) -> list[tuple[str, str]]:
    """The calls of a stream: a first delta with id, type and name each, then arguments only."""
    calls: dict[int, list[str]] = {}
    for delta in (delta for chunk in chunks for delta in chunk.choices[0].delta.tool_calls or []):
        if delta.index not in calls:
            assert delta.id.startswith("call_")
            assert delta.type == "function"
            calls[delta.index] = [delta.function.name, ""]
        else:
            assert (delta.id, delta.function.name) == (None, None)
        calls[delta.index][1] += delta.function.arguments
    assert list(calls) == list(range(len(calls)))
    return [(name, arguments) for name, arguments in calls.values()]


@pytest.mark.parametrize("seed", range(3))
def test_required_choice_calls_with_valid_arguments(tools_site: Site, seed: int) -> None:
    choice = ask(tools_site, tool_choice="required", parallel_tool_calls=False, seed=seed).choices[0]
    assert (choice.finish_reason, choice.message.content) == ("tool_calls", None)
    (call,) = choice.message.tool_calls
    check_calls([(call.function.name, call.function.arguments)])


@pytest.mark.parametrize("seed", range(3))
def test_streamed_calls_reassemble_to_those_of_the_whole_answer(tools_site: Site, seed: int) -> None:
    fields = {"tool_choice": "required", "parallel_tool_calls": False, "seed": seed}
    whole = ask(tools_site, **fields).choices[0].message.tool_calls
    with ask(tools_site, **fields, stream=True) as stream:
        chunks = list(stream)
    calls = reassembled(chunks)
    check_calls(calls)
    assert calls == [(call.function.name, call.function.arguments) for call in whole]
    assert [c.choices[0].finish_reason for c in chunks if c.choices[0].finish_reason] == ["tool_calls"]


def test_named_choice_calls_that_function_and_stops(tools_site: Site) -> None:
    choice = ask(tools_site, tool_choice={"type": "function", "function": {"name": "get_weather"}}).choices[0]
    assert [call.function.name for call in choice.message.tool_calls] == ["get_weather"]
    assert choice.finish_reason == "stop"


def test_auto_choice_leaves_the_answer_a_text_until_a_call_begins(tools_site: Site) -> None:
    choice = ask(tools_site, max_tokens=12).choices[0]
    assert choice.message.tool_calls is None
    assert choice.message.content
    assert choice.finish_reason in ("length", "stop")


def test_none_choice_neither_shows_the_tools_to_the_model_nor_reads_calls(tools_site: Site) -> None:
    with_none = ask(tools_site, tool_choice="none", max_tokens=5)
    without = ask(tools_site, tools=openai.NOT_GIVEN, max_tokens=5)
    assert (
        with_none.usage.prompt_tokens == without.usage.prompt_tokens < ask(tools_site, max_tokens=5).usage.prompt_tokens
    )


def test_conversation_with_calls_and_their_results_reaches_the_template(tools_site: Site) -> None:
    call = {"id": "call_1", "type": "function", "function": {"name": "now", "arguments": '{"zone": "UTC"}'}}
    messages = [
        *HELLO,
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "call_1", "content": "noon"},
    ]
    answer = ask(tools_site, messages=messages, max_tokens=1)
    prompt = bytes(t for t in answer.model_dump()["prompt_token_ids"] if t < 256).decode()
    assert '<tool_call>{"name": "now", "arguments": {"zone": "UTC"}}</tool_call>' in prompt
    assert "tool: noon" in prompt
    assert "tools: get_weather now" in prompt


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"tool_choice": {"type": "function", "function": {"name": "gone"}}}, "tool_choice"),
        ({"tools": [*TOOLS, TOOLS[0]]}, "tools"),
        ({"tools": [], "tool_choice": "required"}, "tool_choice"),
        ({"messages": [*HELLO, {"role": "tool", "content": "noon"}]}, "messages[1].tool_call_id"),
        ({"extra_body": {"chat_template_kwargs": {"tools": []}}}, "chat_template_kwargs.tools"),
        ({"reasoning_effort": "high", "tools": openai.NOT_GIVEN}, None),
        (
            {"tools": [{"type": "function", "function": {"name": "f", "strict": True, "parameters": {"not": {}}}}]},
            "tools",
        ),
        ({"extra_body": {"guided_regex": "a"}}, "guided_regex"),
    ],
)
def test_tools_that_cannot_be_served_are_refused_by_name(tools_site: Site, fields: dict[str, Any], param: str) -> None:
    if param is None:
        assert ask(tools_site, **fields, max_tokens=1)
        return
    with pytest.raises(openai.BadRequestError) as refused:
        ask(tools_site, **fields)
    assert refused.value.param == param


def think(site: Site, **fields: Any) -> Any:
    """A thought of some tokens that is ended by a bias, and then the answer."""
    return ask(site, tools=openai.NOT_GIVEN, **fields)


def test_constrained_answer_may_think_first_and_then_follows_the_format(tools_site: Site) -> None:
    """The bias makes the model open a thought at once and end it soon; only what follows has the format."""
    format = {"type": "json_schema", "json_schema": {"name": "w", "schema": WEATHER, "strict": True}}
    bias = {str(THINK): 9, str(END_OF_THOUGHT): 9}
    fields = {"response_format": format, "extra_body": {"enable_thinking": True}, "logit_bias": bias}
    answer = think(tools_site, **fields)
    choice, ids = answer.choices[0], answer.model_dump()["choices"][0]["token_ids"]
    assert ids[0] == THINK
    num_thought = ids.index(END_OF_THOUGHT) + 1
    assert answer.usage.completion_tokens_details.reasoning_tokens == num_thought
    spelled = {THINK: b"<think>", END_OF_THOUGHT: b""}
    thought = b"".join(spelled.get(t) or bytes([t]) for t in ids[1 : num_thought - 1]).decode(errors="replace")
    for name in ("reasoning_content", "reasoning"):  # both are absent if there was no thought
        assert getattr(choice.message, name, "").strip() == thought.strip()
    jsonschema.validate(json.loads(choice.message.content), WEATHER)
    with think(tools_site, **fields, stream=True) as stream:
        deltas = [chunk.choices[0].delta for chunk in stream]
    assert "".join(delta.content or "" for delta in deltas) == choice.message.content
    for name in ("reasoning_content", "reasoning"):
        thoughts = (getattr(delta, name, None) or "" for delta in deltas)
        assert "".join(thoughts).strip() == thought.strip()


def test_prompt_that_has_closed_the_thought_leaves_none(tools_site: Site) -> None:
    format = {"type": "json_schema", "json_schema": {"name": "w", "schema": WEATHER, "strict": True}}
    answer = think(tools_site, logit_bias={str(THINK): 100}, response_format=format)
    assert answer.usage.completion_tokens_details.reasoning_tokens == 0
    jsonschema.validate(json.loads(answer.choices[0].message.content), WEATHER)


@pytest.mark.parametrize(
    ("syntax", "definition"),
    [("lark", 'start: LINE{1,3} "end"\nLINE: /[ab"]{1,3}/ "\\n"'), ("regex", '([ab"]{1,3}\\n){1,3}end')],
)
def test_custom_tools_input_follows_its_grammar(tools_site: Site, syntax: str, definition: str) -> None:
    grammar = {"type": "grammar", "grammar": {"syntax": syntax, "definition": definition}}
    tool = {"type": "custom", "custom": {"name": "write", "format": grammar}}
    for seed in range(3):
        answer = ask(tools_site, tools=[tool], tool_choice="required", parallel_tool_calls=False, seed=seed)
        [call] = answer.choices[0].message.tool_calls
        assert answer.choices[0].finish_reason == "tool_calls"
        assert re.fullmatch(r'([ab"]{1,3}\n){1,3}end', call.custom.input), call


@pytest.mark.parametrize("definition", ["start: (", 'start: "a"\n%ignore / /', "begin: /a/"])
def test_grammar_of_a_custom_tool_that_cannot_be_used_is_refused(tools_site: Site, definition: str) -> None:
    grammar = {"type": "grammar", "grammar": {"syntax": "lark", "definition": definition}}
    tool = {"type": "custom", "custom": {"name": "write", "format": grammar}}
    with pytest.raises(openai.BadRequestError) as refused:
        ask(tools_site, tools=[tool])
    assert refused.value.param == "tools"


def test_template_gets_tools_as_they_were_sent() -> None:
    body = decode_body(json.dumps({"model": "tiny", "messages": HELLO, "tools": TOOLS}).encode(), ChatBody)
    assert to_request(body).chat.template["tools"] == TOOLS


def with_argument(schema: str, *, strict: bool) -> str:
    """The body of a chat with one tool, as text: some numbers have no other form."""
    parameters = (
        f'{{"type": "object", "properties": {{"e": {schema}}}, "required": ["e"], "additionalProperties": false}}'
    )
    function = f'{{"name": "lookup", "strict": {json.dumps(strict)}, "parameters": {parameters}}}'
    return (
        f'{{"model": "acme/a0", "messages": {json.dumps(HELLO)}, "max_tokens": 2, "enable_thinking": false, '
        f'"tools": [{{"type": "function", "function": {function}}}]}}'
    )


@pytest.mark.parametrize(
    ("schema", "path"),
    [
        ('{"type": "string", "pattern": "^(?!x)"}', "/properties/e/pattern"),
        ('{"type": "number", "maximum": 1.8e308}', "/properties/e/maximum"),
        ('{"type": "integer", "maximum": 18446744073709551616}', "/properties/e/maximum"),
        ('{"type": null}', "/properties/e/type"),
        ('{"$ref": "#/$defs/gone"}', "/properties/e/$ref"),
    ],
)
def test_part_of_a_tool_that_cannot_be_enforced_is_left_out_or_named(tools_site: Site, schema: str, path: str) -> None:
    with tools_site.http() as http:
        sent = {"headers": {"content-type": "application/json"}}
        taken = http.post("/v1/chat/completions", content=with_argument(schema, strict=False), **sent)
        assert taken.status_code == 200, taken.text
        refused = http.post("/v1/chat/completions", content=with_argument(schema, strict=True), **sent)
    assert refused.status_code == 400
    error = refused.json()["error"]
    assert (error["param"], error["code"]) == ("tools", "invalid_constraint")
    assert error["message"].startswith(f"'tools' cannot be enforced: tool 'lookup', {path}: ")
