"""/v1/messages through Anthropic's client: blocks, tools, thoughts, formats, events, errors and counting."""

from __future__ import annotations

import json
from collections.abc import Iterator
from datetime import UTC, datetime
from typing import Any, Literal

import anthropic
import httpx
import pytest
from chat_site import chat_site, prompts, say
from constrained_site import constrained_site
from pydantic import BaseModel
from site_fixture import Site

from loramux.engine.messages import EngineFault

FULL = (
    '<think>hm, é</think>\n\nLook: <tool_call>{"name": "now", "arguments": {"zone": "UTC"}}</tool_call>\n'
    '<tool_call>{"name": "get_weather", "arguments": {}}</tool_call>'
)
"""An answer with a thought, a text and two calls."""
TOOLS = [
    {"name": "now", "input_schema": {"type": "object", "properties": {"zone": {"type": "string"}}}},
    {"name": "get_weather", "description": "the weather", "input_schema": {"type": "object"}, "type": "custom"},
]
HELLO = [{"role": "user", "content": "hello"}]
IMAGE = {"type": "image", "source": {"type": "url", "url": "https://x/y.png"}}


@pytest.fixture(scope="module")
def chats(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Site]:
    with chat_site(tmp_path_factory.mktemp("messages")) as made:
        yield made


def client(site: Site, key: str | None = None) -> anthropic.Anthropic:
    return anthropic.Anthropic(base_url=site.url, api_key=key or site.keys["acme"], max_retries=0, timeout=20)


def create(site: Site, **fields: Any) -> Any:
    return client(site).messages.create(**{"model": "tiny", "messages": HELLO, "max_tokens": 500} | fields)


def blocks(message: Any) -> list[dict[str, Any]]:
    """The content without what differs from one answer to the next: ids."""
    return [{k: v for k, v in block.items() if k != "id"} for block in message.model_dump()["content"]]


def test_message_of_a_text_has_anthropics_fields(chats: Site) -> None:
    say(chats, "Good day.")
    message = create(chats, system="Be kind.", metadata={"user_id": "u1"})
    assert message.id.startswith("msg_")
    assert (message.type, message.role, message.model) == ("message", "assistant", "tiny")
    assert [(block.type, block.text) for block in message.content] == [("text", "Good day.")]
    assert (message.stop_reason, message.stop_sequence) == ("end_turn", None)
    assert prompts(chats) == ["system: Be kind.user: helloassistant:"]
    assert message.usage.input_tokens == len(chats.engine.requests[0].prompt_token_ids)
    assert (message.usage.output_tokens, message.usage.cache_read_input_tokens) == (10, 0)
    assert message._request_id


@pytest.mark.parametrize("stream", [False, True])
def test_answer_with_thought_text_and_calls_becomes_blocks(chats: Site, stream: bool) -> None:
    say(chats, FULL)
    if stream:
        asked = {"model": "tiny", "messages": HELLO, "max_tokens": 500, "tools": TOOLS}
        with client(chats).messages.stream(**asked) as events:
            message = events.get_final_message()
    else:
        message = create(chats, tools=TOOLS)
    thought, text, now, weather = message.content
    assert (thought.type, thought.thinking) == ("thinking", "hm, é")
    assert (text.type, text.text) == ("text", "Look: ")
    assert (now.type, now.name, now.input) == ("tool_use", "now", {"zone": "UTC"})
    assert (weather.name, weather.input) == ("get_weather", {})
    assert now.id != weather.id
    assert message.stop_reason == "tool_use"


def test_stream_has_anthropics_events_in_order(chats: Site) -> None:
    say(chats, "<think>a</think>b")
    with create(chats, stream=True) as stream:
        events = list(stream)
    assert [event.type for event in events] == [
        "message_start",
        "content_block_start",
        "content_block_delta",
        "content_block_stop",
        "content_block_start",
        "content_block_delta",
        "content_block_stop",
        "message_delta",
        "message_stop",
    ]
    assert (events[2].delta.type, events[2].delta.thinking) == ("thinking_delta", "a")
    assert (events[5].delta.type, events[5].delta.text) == ("text_delta", "b")
    assert [event.index for event in events[1:7]] == [0, 0, 0, 1, 1, 1]
    assert events[0].message.usage.input_tokens == events[7].usage.input_tokens > 0
    assert (events[7].delta.stop_reason, events[7].usage.output_tokens) == ("end_turn", 18)


def test_output_is_sent_back_with_the_results_of_its_calls(chats: Site) -> None:
    say(chats, FULL)
    first = create(chats, tools=TOOLS)
    results = [
        {"type": "tool_result", "tool_use_id": block.id, "content": [{"type": "text", "text": f"of {block.name}"}]}
        for block in first.content
        if block.type == "tool_use"
    ]
    say(chats, "done")
    asked = [
        *HELLO,
        {"role": "assistant", "content": first.content},
        {"role": "user", "content": [*results, {"type": "text", "text": "and?"}]},
    ]
    create(chats, tools=TOOLS, messages=asked, system=[{"type": "text", "text": "A"}, {"type": "text", "text": "B"}])
    assert prompts(chats) == [
        "tools: now get_weather in <tool_call></tool_call>\nsystem: A\nBuser: helloassistant: Look: "
        '<tool_call>{"name": "now", "arguments": {"zone": "UTC"}}</tool_call>'
        '<tool_call>{"name": "get_weather", "arguments": {}}</tool_call>'
        "tool: of nowtool: of get_weatheruser: and?assistant:"
    ]


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    ("fields", "reason", "sequence"),
    [
        ({"max_tokens": 3}, "max_tokens", None),
        ({"stop_sequences": ["xx", "long"]}, "stop_sequence", "long"),
        ({}, "end_turn", None),
    ],
)
def test_stop_reason_says_what_ended_the_answer(
    chats: Site, fields: dict[str, Any], reason: str, sequence: str | None, stream: bool
) -> None:
    say(chats, "too long")
    if stream:
        with create(chats, stream=True, **fields) as events:
            (end,) = [event.delta for event in events if event.type == "message_delta"]
    else:
        end = create(chats, **fields)
    assert (end.stop_reason, end.stop_sequence) == (reason, sequence)


def test_models_are_listed_page_by_page_with_anthropics_fields(chats: Site) -> None:
    with chats.http("all-scopes") as http:
        key = http.post("/admin/tenants/acme/keys", json={"scopes": ["read"]}).json()["key"]
    models = client(chats, key).models
    [one] = models.list(limit=5)
    assert (one.id, one.type, one.display_name, one.lifecycle) == ("tiny", "model", "tiny", "active")
    assert one.max_input_tokens == 4096
    assert abs((one.created_at - datetime.now(UTC)).total_seconds()) < 3600
    assert models.retrieve("tiny").display_name == "tiny"
    for page in (models.list(limit=1, after_id="tiny"), models.list(limit=1, before_id="tiny")):
        assert (page.data, page.has_more) == ([], False)
    assert [one.id for one in models.list(lifecycle=["active", "deprecated"])] == ["tiny"]
    assert models.list(lifecycle=["retired"]).data == []
    with pytest.raises(anthropic.BadRequestError, match="two directions"):
        models.list(before_id="tiny", after_id="tiny")


def test_more_tokens_than_the_context_holds_are_no_error(chats: Site) -> None:
    chats.engine.script = lambda _: [65] * 5000
    message = create(chats, max_tokens=32_000, messages=[{"role": "user", "content": "x" * 3900}])
    assert message.stop_reason == "model_context_window_exceeded"
    assert message.usage.input_tokens + message.usage.output_tokens == 4096


def test_assistants_last_turn_is_continued(chats: Site) -> None:
    say(chats, "day")
    message = create(chats, messages=[*HELLO, {"role": "assistant", "content": "Good"}])
    assert prompts(chats) == ["user: helloassistant: Good"]
    assert message.content[0].text == "day"


def test_tool_choices_constrain_the_answer(chats: Site) -> None:
    say(chats, "x")
    create(chats, tools=TOOLS, tool_choice={"type": "tool", "name": "now"})
    create(chats, tools=TOOLS, tool_choice={"type": "any", "disable_parallel_tool_use": True})
    create(chats, tools=TOOLS, tool_choice={"type": "none"})
    named, some, none = chats.engine.requests
    assert "get_weather" not in named.constraint.grammar
    assert "get_weather" in some.constraint.grammar
    assert none.constraint is None


def test_thinking_is_switched_where_the_template_can(chats: Site) -> None:
    say(chats, "x")
    create(chats, thinking={"type": "disabled"})
    create(chats, thinking={"type": "enabled", "budget_tokens": 1024})
    create(chats)
    disabled, enabled, left_out = prompts(chats)
    assert disabled.endswith("<think></think>")
    assert enabled == left_out
    assert not enabled.endswith("<think></think>")


@pytest.mark.parametrize("header", ["x-api-key", "authorization"])
def test_key_comes_in_either_header(chats: Site, header: str) -> None:
    say(chats, "fine")
    key = chats.keys["acme"] if header == "x-api-key" else f"Bearer {chats.keys['acme']}"
    body = {"model": "tiny", "max_tokens": 9, "messages": HELLO}
    headers = {header: key, "anthropic-version": "2023-06-01"}
    assert httpx.post(f"{chats.url}/v1/messages", json=body, headers=headers).json()["content"][0]["text"] == "fine"


@pytest.mark.parametrize(
    ("key", "fields", "error", "type"),
    [
        ("sk-lm-wrong", {}, anthropic.AuthenticationError, "authentication_error"),
        ("no-scopes", {}, anthropic.PermissionDeniedError, "permission_error"),
        ("acme", {"model": "acme/absent"}, anthropic.NotFoundError, "not_found_error"),
        ("acme", {"extra_body": {"temperature": 9}}, anthropic.BadRequestError, "invalid_request_error"),
    ],
)
def test_error_has_anthropics_shape(
    chats: Site, key: str, fields: dict[str, Any], error: type[anthropic.APIStatusError], type: str
) -> None:
    asked = {"model": "tiny", "messages": HELLO, "max_tokens": 9} | fields
    with pytest.raises(error) as refused:
        client(chats, chats.keys.get(key, key)).messages.create(**asked)
    body = refused.value.body
    assert (body["type"], body["error"]["type"]) == ("error", type)
    assert body["error"]["message"]
    assert refused.value.request_id == body["request_id"]


def test_error_in_the_middle_of_a_stream_is_an_event(chats: Site) -> None:
    chats.engine.script = lambda _: [65, 66, EngineFault("internal_error", "it broke")]
    with pytest.raises(anthropic.APIStatusError, match="api_error"), create(chats, stream=True) as stream:
        list(stream)


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        (
            {
                "messages": [
                    *HELLO,
                    {"role": "assistant", "content": [{"type": "tool_use", "id": "a", "name": "b", "input": {}}]},
                ]
            },
            "messages",
        ),
        ({"messages": [*HELLO, {"role": "assistant", "content": " "}]}, "messages"),
        ({"messages": [{"role": "robot", "content": "x"}]}, "messages[0].role"),
        ({"messages": [{"role": "user", "content": [IMAGE]}]}, "messages[0].content[0]"),
        ({"messages": [{"role": "user", "content": [IMAGE | {"source": {}}]}]}, "messages[0].content[0].source"),
        ({"messages": [{"role": "assistant", "content": [IMAGE]}]}, "messages[0].content[0]"),
        ({"messages": [{"role": "user", "content": [{"type": "tool_result"}]}]}, "messages[0].content[0].tool_use_id"),
        ({"messages": []}, "messages"),
        ({"messages": [{"role": "user", "content": "x" * 300_000}]}, "messages"),
        ({"tools": [{"type": "custm", "name": "f"}]}, "tools[0].type"),
        ({"tools": [{"name": "a b", "input_schema": {}}]}, "tools[0].name"),
        ({"tools": [{"name": "x" * 129, "input_schema": {}}]}, "tools[0].name"),
        ({"tools": TOOLS, "tool_choice": {"type": "tool", "name": "gone"}}, "tool_choice"),
        ({"stop_sequences": [""]}, "stop_sequences[0]"),
        ({"extra_body": {"mcp_servers": [{}]}}, "mcp_servers"),
        ({"extra_body": {"n": 2}}, "n"),
        ({"output_config": {"format": {"type": "json_schema", "schema": {"not": {}}}}}, "output_config.format"),
        ({"output_config": {"format": {"type": "xml"}}}, "output_config.format.type"),
    ],
)
def test_request_that_cannot_be_served_is_refused_by_name(chats: Site, fields: dict[str, Any], param: str) -> None:
    with pytest.raises(anthropic.BadRequestError) as refused:
        create(chats, **fields)
    assert refused.value.body["error"]["param"] == param


def test_tokens_are_counted_as_the_prompt_would_have_them(chats: Site) -> None:
    say(chats, "x")
    asked = {"model": "tiny", "messages": HELLO, "system": "S", "tools": TOOLS}
    counted = client(chats).messages.count_tokens(**asked).input_tokens
    assert not chats.engine.requests
    assert counted == create(chats, **asked).usage.input_tokens


def test_counting_needs_a_scope_a_model_and_a_request_left(chats: Site) -> None:
    body = {"model": "tiny", "messages": HELLO}
    with chats.http("no-scopes") as http:
        assert http.post("/v1/messages/count_tokens", json=body).status_code == 403
    with chats.http() as http:
        assert http.post("/v1/messages/count_tokens", json=body | {"model": "acme/absent"}).status_code == 404
    with chats.http("all-scopes") as http:
        http.put("/admin/tenants/globex/limits/requests_per_minute", json={"value": 0}).raise_for_status()
    with chats.http("globex") as http:
        refused = http.post("/v1/messages/count_tokens", json=body)
    assert (refused.status_code, refused.json()["error"]["type"]) == (429, "rate_limit_error")


class City(BaseModel):
    name: Literal["Rome", "Oslo"]
    is_capital: bool


def test_parse_gives_the_clients_model_on_a_real_engine(tmp_path_factory: pytest.TempPathFactory) -> None:
    with constrained_site(tmp_path_factory.mktemp("parse"), adapters=1) as site:
        asked = {"model": "acme/a0", "messages": HELLO, "max_tokens": 200, "output_format": City}
        message = client(site).messages.parse(**asked)
        assert isinstance(message.parsed_output, City)
        schema = City.model_json_schema() | {"additionalProperties": False}
        config = {"format": {"type": "json_schema", "schema": schema}}
        text = client(site).messages.create(model="acme/a0", messages=HELLO, max_tokens=200, output_config=config)
        City.model_validate(json.loads(text.content[0].text))
