"""/v1/responses through the official client: items, tools, thoughts, formats and the events of a stream."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any
from unittest.mock import ANY

import openai
import pytest
from chat_site import chat_site, prompts, say
from constrained_site import constrained_site
from pydantic import BaseModel, Field
from site_fixture import Site

from loramux.engine.messages import EngineFault

FULL = (
    '<think>hm, é</think>\n\nLook: <tool_call>{"name": "now", "arguments": {"zone": "UTC"}}</tool_call>\n'
    '<tool_call>{"name": "get_weather", "arguments": {}}</tool_call>'
)
"""An answer with a thought, a text and two calls."""
TOOLS = [
    {"type": "function", "name": "now", "parameters": {"type": "object", "properties": {"zone": {"type": "string"}}}},
    {"type": "function", "name": "get_weather", "description": "the weather", "strict": False},
]


@pytest.fixture(scope="module")
def chats(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Site]:
    with chat_site(tmp_path_factory.mktemp("responses")) as made:
        yield made


def create(site: Site, **fields: Any) -> Any:
    return site.openai().responses.create(**{"model": "tiny", "input": "hello"} | fields)


def events_of(site: Site, **fields: Any) -> list[Any]:
    with create(site, stream=True, **fields) as stream:
        return list(stream)


def items(response: Any) -> list[Any]:
    """The output without what differs from one answer to the next: ids."""
    return [{k: v for k, v in item.items() if k not in ("id", "call_id")} for item in response.model_dump()["output"]]


@pytest.mark.parametrize("stream", [False, True])
def test_bound_of_the_whole_context_is_lowered_to_what_the_prompt_leaves(chats: Site, stream: bool) -> None:
    """Agents (Kimi Code) send the size of the context as the bound of each answer."""
    chats.engine.script = lambda _: [65] * 5000
    if stream:
        response = events_of(chats, max_output_tokens=4096)[-1].response
    else:
        response = create(chats, max_output_tokens=4096)
    assert (response.status, response.incomplete_details.reason) == ("incomplete", "max_output_tokens")
    assert response.usage.total_tokens == 4096
    bounds: tuple[dict[str, Any], ...] = ({"max_tokens": 4096}, {"max_completion_tokens": 131_072})
    for bound in bounds:
        asked = {"model": "tiny", "messages": [{"role": "user", "content": "hello"}]} | bound
        chat = chats.openai().chat.completions.create(**asked)
        assert (chat.choices[0].finish_reason, chat.usage.total_tokens) == ("length", 4096)


def test_tokens_of_a_prompt_are_counted_and_nothing_is_run(chats: Site) -> None:
    say(chats, "x")
    asked: dict[str, Any] = {"model": "tiny", "input": "hello", "instructions": "S", "tools": TOOLS}
    counted = chats.openai().responses.input_tokens.count(**asked, personality="friendly", truncation="auto")
    assert not chats.engine.requests
    assert counted.object == "response.input_tokens"
    assert counted.input_tokens == create(chats, **asked).usage.input_tokens


def test_counting_the_tokens_of_a_prompt_needs_a_scope_and_a_model(chats: Site) -> None:
    body = {"model": "tiny", "input": "hello"}
    with chats.http("no-scopes") as http:
        assert http.post("/v1/responses/input_tokens", json=body).status_code == 403
    with chats.http() as http:
        assert http.post("/v1/responses/input_tokens", json=body | {"model": "acme/absent"}).status_code == 404
        refused = http.post("/v1/responses/input_tokens", json=body | {"previous_response_id": "resp_1"})
    assert (refused.status_code, refused.json()["error"]["param"]) == (400, "previous_response_id")


def test_response_of_a_text_has_openais_fields(chats: Site) -> None:
    say(chats, "Good day.")
    response = create(chats, instructions="Be kind.", temperature=0.5, metadata={"team": "a"}, user="u1")
    assert response.id.startswith("resp_")
    assert (response.output_text, response.status, response.error) == ("Good day.", "completed", None)
    assert (response.instructions, response.temperature, response.metadata) == ("Be kind.", 0.5, {"team": "a"})
    assert (response.model, response.tool_choice, response.tools) == ("tiny", "auto", [])
    assert response.store is False
    assert prompts(chats) == ["system: Be kind.user: helloassistant:"]
    usage = response.usage
    assert usage.input_tokens == len(chats.engine.requests[0].prompt_token_ids)
    assert (usage.output_tokens, usage.total_tokens) == (10, usage.input_tokens + 10)


def test_answer_with_thought_text_and_calls_becomes_items(chats: Site) -> None:
    say(chats, FULL)
    response = create(chats, tools=TOOLS)
    thought, message, now, weather = response.output
    assert (thought.type, thought.content[0].text, thought.summary) == ("reasoning", "hm, é", [])
    assert message.content[0].text == "Look: "
    assert (now.type, now.name, json.loads(now.arguments)) == ("function_call", "now", {"zone": "UTC"})
    assert (weather.name, weather.arguments) == ("get_weather", "{}")
    assert len({one.call_id for one in (now, weather)}) == 2
    assert 0 < response.usage.output_tokens_details.reasoning_tokens < response.usage.output_tokens


def test_stream_has_openais_events_in_order(chats: Site) -> None:
    say(chats, "<think>a</think>b")
    events = events_of(chats)
    assert [event.sequence_number for event in events] == list(range(len(events)))
    assert [event.type.removeprefix("response.") for event in events] == [
        "created",
        "in_progress",
        "output_item.added",
        "content_part.added",
        "reasoning_text.delta",
        "reasoning_text.done",
        "content_part.done",
        "output_item.done",
        "output_item.added",
        "content_part.added",
        "output_text.delta",
        "output_text.done",
        "content_part.done",
        "output_item.done",
        "completed",
    ]
    assert events[0].response.status == "in_progress"
    assert events[-1].response.usage.output_tokens > 0
    assert events[10].item_id == events[8].item.id == events[-1].response.output[1].id


def test_stream_is_framed_with_the_events_names_and_has_no_done(chats: Site) -> None:
    say(chats, "hi")
    with chats.http() as http:
        body = http.post("/v1/responses", json={"model": "tiny", "input": "x", "stream": True}).text
    frames = body.strip().split("\n\n")
    for frame in frames:
        name, data = frame.split("\n")
        assert name == f"event: {json.loads(data.removeprefix('data: '))['type']}"
    assert "[DONE]" not in body


def test_stream_reassembles_to_the_whole_answer(chats: Site) -> None:
    say(chats, FULL)
    whole = create(chats, tools=TOOLS)
    events = events_of(chats, tools=TOOLS)
    final = events[-1].response
    assert items(final) == items(whole)
    for index, item in enumerate(final.output):
        deltas = [event.delta for event in events if event.type.endswith("delta") and event.output_index == index]
        assert "".join(deltas) == (item.arguments if item.type == "function_call" else item.content[0].text)


def test_clients_stream_helper_returns_the_final_response(chats: Site) -> None:
    say(chats, FULL)
    with chats.openai().responses.stream(model="tiny", input="x", tools=TOOLS) as stream:
        texts = [event.delta for event in stream if event.type == "response.output_text.delta"]
        final = stream.get_final_response()
    assert "".join(texts) == final.output_text == "Look: "


def test_output_is_sent_back_as_the_next_turns_input(chats: Site) -> None:
    say(chats, FULL)
    first = create(chats, tools=TOOLS)
    results = [
        {"type": "function_call_output", "call_id": item.call_id, "output": f"result of {item.name}"}
        for item in first.output
        if item.type == "function_call"
    ]
    say(chats, "done")
    asked = [{"role": "user", "content": [{"type": "input_text", "text": "hello"}]}, *first.output, *results]
    assert create(chats, tools=TOOLS, input=asked, store=False).output_text == "done"
    (prompt,) = prompts(chats)
    assert prompt == (
        "tools: now get_weather in <tool_call></tool_call>\nuser: helloassistant: Look: "
        '<tool_call>{"name": "now", "arguments": {"zone": "UTC"}}</tool_call>'
        '<tool_call>{"name": "get_weather", "arguments": {}}</tool_call>'
        "tool: result of nowtool: result of get_weatherassistant:"
    )


def test_instructions_and_leading_developer_turns_are_one_system_turn(chats: Site) -> None:
    say(chats, "x")
    create(chats, instructions="A", input=[{"role": "developer", "content": "B"}, {"role": "user", "content": "C"}])
    assert prompts(chats) == ["system: A\n\nBuser: Cassistant:"]


@pytest.mark.parametrize("stream", [False, True])
def test_answer_cut_by_its_length_is_incomplete(chats: Site, stream: bool) -> None:
    say(chats, "too long")
    if stream:
        end = events_of(chats, max_output_tokens=3)[-1]
        assert end.type == "response.incomplete"
        response = end.response
    else:
        response = create(chats, max_output_tokens=3)
    assert (response.status, response.incomplete_details.reason) == ("incomplete", "max_output_tokens")
    assert (response.output_text, response.output[0].status) == ("too", "incomplete")


BROKEN = {
    "by a fault of the engine": ([65, 66, EngineFault("internal_error", "it broke")], "it broke"),
    "by a fault of the adapter": ([65, 66, EngineFault("adapter_not_finite", "not finite")], "ended early"),
}


@pytest.mark.parametrize("script", BROKEN)
def test_stream_that_fails_is_raised_by_clients_that_ignore_its_last_event(chats: Site, script: str) -> None:
    """OpenAI's events: `error` with a field `error`, at which its clients raise, and then `response.failed`."""
    tokens, words = BROKEN[script]
    chats.engine.script = lambda _: list(tokens)
    with create(chats, stream=True) as stream, pytest.raises(openai.APIError, match=words) as failed:
        list(stream)
    assert failed.value.body == {"type": "server_error", "code": "server_error", "message": ANY, "param": None}
    with chats.http() as http:
        lines = http.post("/v1/responses", json={"model": "tiny", "input": "hi", "stream": True}).text.splitlines()
    *_, error, last = [json.loads(line.removeprefix("data: ")) for line in lines if line.startswith("data: ")]
    assert (error["type"], error["code"], error["message"]) == ("error", "server_error", error["error"]["message"])
    assert (last["type"], last["sequence_number"]) == ("response.failed", error["sequence_number"] + 1)
    assert last["response"]["error"] == {"code": "server_error", "message": error["message"]}


def test_empty_answer_has_an_empty_message(chats: Site) -> None:
    say(chats, "")
    assert [item.type for item in create(chats).output] == ["message"]
    assert [event.type for event in events_of(chats)].count("response.output_item.done") == 1


def test_allowed_tools_are_those_that_may_be_called(chats: Site) -> None:
    say(chats, "x")
    allowed = {"type": "allowed_tools", "mode": "required", "tools": [{"type": "function", "name": "now"}]}
    response = create(chats, tools=TOOLS, tool_choice=allowed)
    assert response.tool_choice.type == "allowed_tools"
    assert "tools: now get_weather" in prompts(chats)[0]
    assert "get_weather" not in chats.engine.requests[0].constraint.grammar
    create(chats, tools=TOOLS, tool_choice={"type": "function", "name": "get_weather"})
    assert "now" not in chats.engine.requests[1].constraint.grammar


def test_logprobs_are_given_for_the_messages_tokens_only(chats: Site) -> None:
    say(chats, "<think>a</think>bc")
    asked = {"include": ["message.output_text.logprobs", "reasoning.encrypted_content"], "top_logprobs": 2}
    whole = create(chats, **asked).output[1].content[0]
    assert [one.token for one in whole.logprobs] == ["b", "c"]
    assert all(len(one.top_logprobs) == 2 for one in whole.logprobs)
    events = events_of(chats, **asked)
    deltas = [event for event in events if event.type == "response.output_text.delta"]
    assert [one.token for event in deltas for one in event.logprobs] == ["b", "c"]
    assert create(chats).output[1].content[0].logprobs == []


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"previous_response_id": "resp_1"}, "previous_response_id"),
        ({"conversation": "conv_1"}, "conversation"),
        ({"store": True}, "store"),
        ({"background": True}, "background"),
        ({"extra_body": {"truncation": "middle"}}, "truncation"),
        ({"prompt": {"id": "pmpt_1"}}, "prompt"),
        ({"tools": [{"type": "web_search"}], "tool_choice": "required"}, "tool_choice"),
        ({"tools": [{"type": "fuction", "name": "f"}]}, "tools[0].type"),
        ({"tools": [{"type": "function"}]}, "tools[0].name"),
        ({"tools": TOOLS, "tool_choice": {"type": "function", "name": "gone"}}, "tool_choice"),
        ({"tools": TOOLS, "tool_choice": {"type": "web_search"}}, "tool_choice"),
        ({"input": [{"type": "item_reference", "id": "msg_1"}]}, "input[0]"),
        ({"input": [{"type": "computer_call", "id": "x"}]}, "input[0].type"),
        ({"input": [{"role": "robot", "content": "x"}]}, "input[0].role"),
        ({"input": [{"role": "user"}]}, "input[0].content"),
        ({"input": [{"role": "user", "content": [{"type": "input_image"}]}]}, "input[0].content[0].image_url"),
        (
            {"input": [{"role": "user", "content": [{"type": "input_image", "image_url": "https://x/y.png"}]}]},
            "input[0].content[0]",
        ),
        ({"input": [{"type": "function_call", "call_id": "c", "arguments": "["}]}, "input[0].name"),
        ({"input": [{"type": "function_call_output", "output": "x"}]}, "input[0].call_id"),
        ({"input": "x" * 300_000}, "input"),
        ({"text": {"format": {"type": "xml"}}}, "text.format.type"),
        ({"text": {"format": {"type": "json_schema", "name": "n"}}}, "text.format.schema"),
        ({"text": {"verbosit": "high"}}, "text.verbosit"),
        (
            {"text": {"format": {"type": "json_schema", "schema": {"not": {}}, "name": "n", "strict": True}}},
            "text.format",
        ),
        ({"extra_body": {"chat_template_kwargs": {"tools": 1}}}, "chat_template_kwargs.tools"),
        ({"extra_body": {"messages": [{"role": "user", "content": "x"}]}}, "messages"),
        ({"extra_body": {"max_tokens": 3}}, "max_tokens"),
        ({"extra_body": {"stream_options": {}}}, "stream_options"),
    ],
)
def test_request_that_cannot_be_served_is_refused_by_name(chats: Site, fields: dict[str, Any], param: str) -> None:
    with pytest.raises(openai.BadRequestError) as refused:
        create(chats, **fields)
    assert refused.value.param == param
    assert "'messages'" not in refused.value.message or param == "messages"


@pytest.mark.parametrize(
    "fields",
    [
        {"store": False, "background": False, "truncation": "disabled", "prompt_cache_key": "k", "max_tool_calls": 3},
        {"reasoning": {"summary": "auto"}, "include": ["reasoning.encrypted_content"], "text": {"verbosity": "high"}},
        {"reasoning": {"effort": "max"}},
        {"truncation": "auto"},
        {"tools": [{"type": "web_search"}, *TOOLS]},
        {"input": []},
        {"tools": TOOLS, "tool_choice": "none", "parallel_tool_calls": False},
        {"input": [{"type": "reasoning", "id": "rs_1", "summary": []}, {"role": "user", "content": "x"}]},
    ],
)
def test_hints_and_values_that_ask_for_nothing_are_taken(chats: Site, fields: dict[str, Any]) -> None:
    say(chats, "fine")
    assert create(chats, **fields).output_text == "fine"


class City(BaseModel):
    name: str = Field(max_length=9)
    is_capital: bool


def test_parse_gives_the_clients_model_on_a_real_engine(tmp_path_factory: pytest.TempPathFactory) -> None:
    with constrained_site(tmp_path_factory.mktemp("parse"), adapters=1) as site:
        asked = {"model": "acme/a0", "input": "x", "text_format": City, "max_output_tokens": 200}
        response = site.openai().responses.parse(**asked)
        assert isinstance(response.output_parsed, City)
        with site.openai().responses.stream(**asked) as stream:
            assert isinstance(stream.get_final_response().output_parsed, City)
