"""Answers that are sent back as history: every one of ours, cut at each token, and what other clients make of them."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import anthropic
import pytest
from chat_site import chat_site, prompts, say
from site_fixture import Site

STRICT_TEMPLATE = (
    "{% if tools %}tools in <tool_call></tool_call>, thoughts in <think></think>\n{% endif %}"
    "{% set ns = namespace(user=true) %}"
    "{% for m in messages %}"
    "{% if m.role == 'system' and not loop.first %}{{ raise_exception('system first') }}{% endif %}"
    "{% if m.role in ('user', 'assistant') and not m.tool_calls %}"
    "{% if (m.role == 'user') != ns.user %}{{ raise_exception('roles must alternate') }}{% endif %}"
    "{% set ns.user = not ns.user %}"
    "{% if m.role == 'assistant' and not m.content %}{{ raise_exception('an answer is empty') }}{% endif %}"
    "{% elif m.tool_calls %}{% set ns.user = true %}{% endif %}"
    "{{ m.role }}: {{ m.content }}{% if m.reasoning_content %}({{ m.reasoning_content }}){% endif %}"
    "{% for c in m.tool_calls or [] %}[{{ c.function.name }}"
    "{% for key, value in c.function.arguments.items() %} {{ key }}={{ value }}{% endfor %}]{% endfor %}|"
    "{% endfor %}{% if add_generation_prompt %}assistant:{% endif %}"
)
"""Refuses what strict templates refuse: late instructions, turns that do not alternate, empty answers, arguments that
are no object."""
CALL = '<tool_call>{"name": "now", "arguments": {"z": [1]}}</tool_call>'
ANSWERS = ["é\\", f"<think>hm</think>\n\nSo {CALL}", f"<think>s</think>{CALL}"]
PARAMETERS = {"type": "object", "properties": {"zone": {"type": "string"}}}
HELLO = {"role": "user", "content": "hello"}
NEXT = {"role": "user", "content": "and?"}
CHAT_TOOLS = [{"type": "function", "function": {"name": name, "parameters": PARAMETERS}} for name in ("now", "weather")]
RESPONSE_TOOLS = [{"type": "function", "name": name, "parameters": PARAMETERS} for name in ("now", "weather")]
MESSAGE_TOOLS = [{"name": name, "input_schema": PARAMETERS} for name in ("now", "weather")]


@pytest.fixture(scope="module")
def strict(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Site]:
    with chat_site(tmp_path_factory.mktemp("strict"), STRICT_TEMPLATE, thinks=True) as made:
        yield made


def cuts(answer: str) -> range:
    return range(1, len(answer.encode()) + 2)


@pytest.mark.parametrize("answer", ANSWERS)
def test_chat_answer_cut_at_each_token_is_taken_back(strict: Site, answer: str) -> None:
    api = strict.openai().chat.completions
    for max_tokens in cuts(answer):
        say(strict, answer)
        asked: dict[str, Any] = {"model": "tiny", "tools": CHAT_TOOLS, "messages": [HELLO], "max_tokens": max_tokens}
        message = api.create(**asked).choices[0].message.model_dump()
        results = [
            {"role": "tool", "tool_call_id": call["id"], "content": "not run"} for call in message["tool_calls"] or []
        ]
        api.create(**asked | {"messages": [HELLO, message, *results, NEXT]})
        assert prompts(strict)[-1].endswith("and?|assistant:")


@pytest.mark.parametrize("answer", ANSWERS)
def test_streamed_chat_answer_cut_at_each_token_is_taken_back(strict: Site, answer: str) -> None:
    """Put together as openai's client does it, fields of the stream among them."""
    api = strict.openai().chat.completions
    for max_tokens in cuts(answer)[::3]:
        say(strict, answer)
        asked: dict[str, Any] = {"model": "tiny", "tools": CHAT_TOOLS, "messages": [HELLO], "max_tokens": max_tokens}
        message: dict[str, Any] = {"role": "assistant", "content": "", "tool_calls": {}}
        for choice in (choice for chunk in api.create(**asked, stream=True) for choice in chunk.choices):
            message["content"] += choice.delta.content or ""
            for call in choice.delta.tool_calls or []:
                made = message["tool_calls"].setdefault(
                    call.index, {"index": call.index, "id": call.id, "type": call.type, "function": {"arguments": ""}}
                )
                made["function"]["name"] = made["function"].get("name") or call.function.name
                made["function"]["arguments"] += call.function.arguments or ""
        message["tool_calls"] = list(message["tool_calls"].values()) or None
        api.create(**asked | {"messages": [HELLO, message, NEXT]})


@pytest.mark.parametrize("answer", ANSWERS)
def test_response_cut_at_each_token_is_taken_back(strict: Site, answer: str) -> None:
    api = strict.openai().responses
    for max_tokens in cuts(answer):
        say(strict, answer)
        asked: dict[str, Any] = {"model": "tiny", "tools": RESPONSE_TOOLS, "max_output_tokens": max_tokens}
        stream = max_tokens % 3 == 0
        made = api.create(**asked, input=[HELLO], stream=stream)
        output = ([event for event in made][-1].response if stream else made).output
        results = [
            {"type": "function_call_output", "call_id": item.call_id, "output": "not run"}
            for item in output
            if item.type == "function_call"
        ]
        api.create(**asked, input=[HELLO, *output, *results, NEXT])
        assert prompts(strict)[-1].endswith("and?|assistant:")


@pytest.mark.parametrize("answer", ANSWERS)
def test_message_cut_at_each_token_is_taken_back(strict: Site, answer: str) -> None:
    api = anthropic.Anthropic(base_url=strict.url, api_key=strict.keys["acme"], max_retries=0, timeout=60).messages
    for max_tokens in cuts(answer):
        say(strict, answer)
        asked: dict[str, Any] = {"model": "tiny", "tools": MESSAGE_TOOLS, "max_tokens": max_tokens}
        if max_tokens % 3:
            content = api.create(**asked, messages=[HELLO]).content
        else:
            with api.stream(**asked, messages=[HELLO]) as events:
                content = events.get_final_message().content
        results = [
            {"type": "tool_result", "tool_use_id": block.id, "content": [{"type": "text", "text": "not run"}]}
            for block in content
            if block.type == "tool_use"
        ]
        asked["messages"] = [HELLO, {"role": "assistant", "content": content}]
        asked["messages"].append({"role": "user", "content": [*results, {"type": "text", "text": "and?"}]})
        api.create(**asked)
        assert prompts(strict)[-1].endswith("and?|assistant:")


def after(site: Site, path: str, **body: Any) -> str:
    """The prompt that a body makes."""
    say(site, "ok")
    with site.http() as http:
        length = "max_output_tokens" if path == "/v1/responses" else "max_tokens"
        answer = http.post(path, json={"model": "tiny", length: 3} | body)
    assert answer.status_code == 200, answer.text
    (prompt,) = prompts(site)
    return prompt.removesuffix("assistant:")


WRITTEN = {"type": "text", "text": "x"}
CALLED = {"id": "a", "type": "function", "function": {"name": "f", "arguments": '{"v": 1}'}}


@pytest.mark.parametrize(
    ("message", "shown"),
    [
        ({"content": "x", "reasoning": "t"}, "x(t)"),
        ({"content": "x", "thinking": "t"}, "x(t)"),
        ({"content": "x", "reasoning_content": "t", "reasoning": {"effort": "low"}}, "x(t)"),
        ({"content": "x", "thinking_blocks": [{"type": "thinking", "thinking": "t", "signature": ""}]}, "x(t)"),
        ({"content": "x", "reasoning": None, "thinking": {"type": "enabled"}, "thinking_blocks": []}, "x"),
        ({"content": [{"type": "thinking", "thinking": "t"}, {"type": "text", "text": "x"}]}, "x(t)"),
        ({"content": [{"type": "thinking", "thinking": [{"type": "text", "text": "t"}]}, WRITTEN]}, "x(t)"),
        ({"content": [{"type": "output_text", "text": "x", "annotations": []}]}, "x"),
        ({"content": None, "refusal": "no"}, "no"),
        ({"content": [{"type": "refusal", "refusal": "no"}]}, "no"),
        ({"content": None, "tool_calls": [CALLED]}, "[f v=1]"),
        ({"tool_calls": [CALLED], "function_call": None, "audio": None, "annotations": []}, "[f v=1]"),
        ({"tool_calls": [{"id": "a", "type": None, "function": {"name": "f", "arguments": {"v": 1}}}]}, "[f v=1]"),
        ({"tool_calls": [{"index": 0, "function": {"name": "f", "arguments": None}}]}, "[f]"),
        ({"tool_calls": [{"id": "a", "type": "function", "function": {"name": "f", "arguments": '{"v": '}}]}, "[f]"),
        ({"tool_calls": [{"id": "a", "type": "function", "function": {"name": "f", "arguments": "[1]"}}]}, "[f]"),
        ({"tool_calls": [{"id": "a", "type": "function", "function": {"name": "f", "arguments": '"\\ud83d"'}}]}, "[f]"),
        ({"tool_calls": [{"id": "a", "type": "custom", "custom": {"name": "f", "input": "1 + 1"}}]}, "[f input=1 + 1]"),
    ],
)  # fmt: skip
def test_assistants_message_of_a_chat_is_read_as_other_clients_write_it(
    strict: Site, message: dict[str, Any], shown: str
) -> None:
    history = [HELLO, {"role": "assistant"} | message, NEXT]
    assert after(strict, "/v1/chat/completions", messages=history) == f"user: hello|assistant: {shown}|user: and?|"


def test_calls_and_results_without_ids_are_read_as_trainers_write_them(strict: Site) -> None:
    say(strict, "x")
    call = {"type": "function", "function": {"name": "now", "arguments": {"z": 1}}}
    turns: Any = [HELLO, {"role": "assistant", "content": "", "tool_calls": [call]}]
    turns.append({"role": "tool", "name": "now", "content": "noon"})
    strict.openai().chat.completions.create(model="tiny", tools=CHAT_TOOLS, messages=turns)  # type: ignore[arg-type]
    assert prompts(strict)[0].endswith("user: hello|assistant: [now z=1]|tool: noon|assistant:")


def test_calls_and_results_with_empty_ids_are_read_in_their_order(strict: Site) -> None:
    call = {"id": "", "type": "function", "function": {"name": "now", "arguments": "{}"}}
    turns = [
        HELLO,
        {"role": "assistant", "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "", "content": "noon"},
    ]
    assert after(strict, "/v1/chat/completions", messages=turns) == "user: hello|assistant: [now]|tool: noon|"


def test_more_calls_than_tools_can_be_offered_are_taken_back(strict: Site) -> None:
    calls = [CALLED | {"id": f"a{i}"} for i in range(300)]
    prompt = after(strict, "/v1/chat/completions", messages=[HELLO, {"role": "assistant", "tool_calls": calls}, NEXT])
    assert prompt.count("[f v=1]") == 300


@pytest.mark.parametrize(
    ("item", "shown"),
    [
        ({"type": "function_call", "call_id": "a", "name": "f", "arguments": '{"v": '}, "[f]"),
        ({"type": "function_call", "call_id": "a", "name": "f"}, "[f]"),
        ({"type": "custom_tool_call", "call_id": "a", "name": "f", "input": "1 + 1"}, "[f input=1 + 1]"),
        ({"role": "assistant", "content": [{"type": "refusal", "refusal": "no"}]}, "no"),
    ],
)
def test_item_of_a_response_is_taken_back(strict: Site, item: dict[str, Any], shown: str) -> None:
    history = [HELLO, {"type": "reasoning", "id": "rs_1", "summary": [], "encrypted_content": "xyz"}, item, NEXT]
    assert after(strict, "/v1/responses", input=history) == f"user: hello|assistant: {shown}|user: and?|"


def test_output_of_a_custom_tool_is_the_result_of_its_call(strict: Site) -> None:
    called = {"type": "custom_tool_call", "call_id": "a", "name": "f", "input": "1"}
    output = {"type": "custom_tool_call_output", "call_id": "a", "output": [{"type": "input_text", "text": "2"}]}
    assert "[f input=1]|tool: 2|" in after(strict, "/v1/responses", input=[HELLO, called, output])


@pytest.mark.parametrize(
    ("content", "shown"),
    [
        ([], ""),
        ([{"type": "text", "text": "", "citations": None}], ""),
        ([{"type": "thinking", "thinking": "", "signature": "s"}, {"type": "text", "text": "x"}], "assistant: x|"),
        ([{"type": "redacted_thinking", "data": "z"}, {"type": "text", "text": "x"}], "assistant: x|"),
        ([{"type": "tool_use", "id": "a", "name": "f", "input": ""}], "assistant: [f]|"),
        ([{"type": "tool_use", "id": "a", "name": "f", "input": {"v": 1}, "caller": None}], "assistant: [f v=1]|"),
    ],
)
def test_assistants_blocks_are_taken_back(strict: Site, content: list[dict[str, Any]], shown: str) -> None:
    history = [HELLO, {"role": "assistant", "content": content}, NEXT]
    joined = "user: hello\n\nand?|" if not shown else f"user: hello|{shown}user: and?|"
    assert after(strict, "/v1/messages", messages=history) == joined


HOSTED_ITEMS: list[dict[str, Any]] = [
    {"type": "web_search_call", "id": "w", "status": "completed", "action": {"type": "search", "query": "q"}},
    {"type": "mcp_list_tools", "id": "l", "server_label": "s", "tools": [{"name": "t", "input_schema": {}}]},
    {"type": "code_interpreter_call", "id": "c", "code": "1", "container_id": "k", "outputs": None},
]
HOSTED_BLOCKS: list[dict[str, Any]] = [
    {"type": "server_tool_use", "id": "s", "name": "web_search", "input": {"query": "q"}},
    {"type": "web_search_tool_result", "tool_use_id": "s", "content": {"type": "web_search_tool_result_error"}},
    {"type": "code_execution_tool_result", "tool_use_id": "s", "content": {"stdout": ""}},
    {"type": "mcp_tool_result", "tool_use_id": "s", "content": [{"type": "text", "text": "r"}]},
]


def test_calls_that_another_vendors_servers_have_run_are_left_out_and_named(strict: Site) -> None:
    answer = {"role": "assistant", "content": "x"}
    history = [HELLO, *HOSTED_ITEMS, answer, NEXT]
    assert after(strict, "/v1/responses", input=history) == "user: hello|assistant: x|user: and?|"
    with strict.http() as http:
        named = http.post("/v1/responses", json={"model": "tiny", "input": history}).headers["x-loramux-ignored-fields"]
    assert named == "input[1] (web_search_call), input[2] (mcp_list_tools), input[3] (code_interpreter_call)"
    for text, shown in ([[WRITTEN], "assistant: x|"], [[], ""]):
        turns = [HELLO, {"role": "assistant", "content": [*HOSTED_BLOCKS, *text]}, NEXT]
        joined = f"user: hello|{shown}user: and?|" if shown else "user: hello\n\nand?|"
        assert after(strict, "/v1/messages", messages=turns) == joined
    with strict.http() as http:
        asked = {"model": "tiny", "max_tokens": 3, "messages": turns}
        named = http.post("/v1/messages", json=asked).headers["x-loramux-ignored-fields"]
    assert named.startswith("messages[1].content[0] (server_tool_use), messages[1].content[1] (web_search_tool_result)")


def test_object_as_the_result_of_the_callers_own_tool_is_refused_by_its_place(strict: Site) -> None:
    call = {"type": "tool_use", "id": "a", "name": "f", "input": {}}
    results = [{"type": "tool_result", "tool_use_id": "a", "content": {"stdout": ""}}]
    turns = [HELLO, {"role": "assistant", "content": [call]}, {"role": "user", "content": results}]
    with strict.http() as http:
        refused = http.post("/v1/messages", json={"model": "tiny", "max_tokens": 3, "messages": turns})
    assert (refused.status_code, refused.json()["error"]["param"]) == (400, "messages[2].content[0].content")


def test_tool_reference_in_a_result_names_the_tool(strict: Site) -> None:
    """Claude Code's search for tools gives them back as its result."""
    call = {"type": "tool_use", "id": "a", "name": "search", "input": {}}
    found = [{"type": "tool_reference", "tool_name": "now"}]
    results = [{"type": "tool_result", "tool_use_id": "a", "content": found}]
    history = [HELLO, {"role": "assistant", "content": [call]}, {"role": "user", "content": results}]
    assert '[search]|tool: {"type":"tool_reference","tool_name":"now"}|' in after(
        strict, "/v1/messages", messages=history
    )


def test_last_turn_of_a_message_that_is_empty_is_answered_and_not_continued(strict: Site) -> None:
    history = [HELLO, {"role": "assistant", "content": [{"type": "thinking", "thinking": "t", "signature": ""}]}]
    assert after(strict, "/v1/messages", messages=history) == "user: hello|"


LATE = {"role": "system", "content": "s2"}
FOLDED = "system: s\n\ns2|user: x|assistant: a|user: y|"


def test_late_instructions_are_folded_into_the_first_where_the_template_refuses_them(strict: Site) -> None:
    first, turns = (
        {"role": "system", "content": "s"},
        [{"role": "user", "content": "x"}, {"role": "assistant", "content": "a"}],
    )
    last = {"role": "user", "content": "y"}
    assert after(strict, "/v1/chat/completions", messages=[first, *turns, LATE, last]) == FOLDED
    assert after(strict, "/v1/chat/completions", messages=[first, *turns, LATE | {"role": "developer"}, last]) == FOLDED
    assert after(strict, "/v1/messages", system="s", messages=[*turns, LATE, last]) == FOLDED
    developer = LATE | {"role": "developer"}
    assert after(strict, "/v1/responses", instructions="s", input=[*turns, developer, last]) == FOLDED
    assert after(strict, "/v1/chat/completions", messages=[*turns, LATE, last]) == FOLDED.replace("s\n\n", "")


def test_turns_of_one_role_are_joined_where_the_template_refuses_them(strict: Site) -> None:
    turns = [{"role": "user", "content": one} for one in "xyz"]
    assert after(strict, "/v1/chat/completions", messages=turns) == "user: x\n\ny\n\nz|"
    with_late = [turns[0], {"role": "developer", "content": "d"}, turns[1]]
    assert after(strict, "/v1/responses", instructions="i", input=with_late) == "system: i\n\nd|user: x\n\ny|"
