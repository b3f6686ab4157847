"""Tools of every kind at the three chat endpoints: what the model sees, what is left out, and how calls come back."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import anthropic
import openai
import pytest
from chat_site import chat_site, prompts, say
from site_fixture import PATIENCE, Site

from loramux_api.custom_calls import InputReader, input_of

CHAT, MESSAGE, RESPONSE = "/v1/chat/completions", "/v1/messages", "/v1/responses"
IGNORED = "x-loramux-ignored-fields"
HELLO: list[Any] = [{"role": "user", "content": "x"}]
TEXT = 'a "quoted"\ntext \\ with 😀 and \t tabs'


@pytest.fixture(scope="module")
def chats(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Site]:
    with chat_site(tmp_path_factory.mktemp("offered")) as made:
        yield made


def called(name: str, arguments: dict[str, Any]) -> str:
    return f"<tool_call>{json.dumps({'name': name, 'arguments': arguments})}</tool_call>"


def function(name: str) -> dict[str, Any]:
    return {"type": "function", "name": name, "parameters": {"type": "object"}}


def chat_function(name: str) -> dict[str, Any]:
    return {"type": "function", "function": {"name": name, "parameters": {"type": "object"}}}


def custom(name: str, **fields: Any) -> dict[str, Any]:
    return {"type": "custom", "name": name} | fields


def post(site: Site, path: str, fields: dict[str, Any], status: int = 200) -> Any:
    asked = {"model": "tiny", "max_tokens": 999, "messages": HELLO}
    if path == RESPONSE:
        asked = {"model": "tiny", "input": "x"}
    with site.http() as http:
        response = http.post(path, json=asked | fields)
    assert response.status_code == status, response.text
    return response


HOSTED = {
    CHAT: {"type": "web_search"},
    RESPONSE: {"type": "code_interpreter", "container": {"type": "auto"}},
    MESSAGE: {"type": "web_search_20250305", "name": "web_search"},
}
OWN = {CHAT: chat_function("own"), RESPONSE: function("own"), MESSAGE: {"name": "own", "input_schema": {}}}


@pytest.mark.parametrize("path", HOSTED)
def test_hosted_tool_is_left_out_and_named_and_the_others_are_offered(chats: Site, path: str) -> None:
    say(chats, "fine")
    answer = post(chats, path, {"tools": [HOSTED[path], OWN[path]]})
    assert answer.headers[IGNORED] == f"tools[0] ({HOSTED[path]['type']})"
    assert prompts(chats)[0].startswith("tools: own in ")


@pytest.mark.parametrize("path", HOSTED)
def test_request_of_hosted_tools_alone_is_answered_without_tools(chats: Site, path: str) -> None:
    say(chats, "fine")
    answer = post(chats, path, {"tools": [HOSTED[path]] * 20})
    assert answer.headers[IGNORED].endswith("4 more")
    assert not prompts(chats)[0].startswith("tools:")


@pytest.mark.parametrize(
    ("path", "choice"),
    [
        (CHAT, "required"),
        (RESPONSE, "required"),
        (RESPONSE, {"type": "web_search"}),
        (RESPONSE, {"type": "mcp", "server_label": "x"}),
        (MESSAGE, {"type": "any"}),
        (MESSAGE, {"type": "tool", "name": "web_search"}),
    ],
)
def test_choice_of_a_tool_that_is_left_out_is_refused(chats: Site, path: str, choice: Any) -> None:
    error = post(chats, path, {"tools": [HOSTED[path]], "tool_choice": choice}, 400).json()["error"]
    assert error["param"] == "tool_choice"


@pytest.mark.parametrize("path", [CHAT, RESPONSE, MESSAGE])
def test_hundreds_of_tools_with_names_of_128_characters_are_offered(chats: Site, path: str) -> None:
    names = [f"mcp__{'x' * 119}{number:04}" for number in range(300)]
    assert {len(name) for name in names} == {128}
    tools: dict[str, Any] = {
        CHAT: [chat_function(name) for name in names],
        RESPONSE: [function(name) for name in names],
        MESSAGE: [{"name": name, "input_schema": {}} for name in names],
    }
    post(chats, path, {"tools": tools[path], "tool_choice": {"type": "none"} if path == MESSAGE else "none"})


@pytest.mark.parametrize("mode", ["auto", "required"])
def test_allowed_tools_of_a_chat_are_those_that_may_be_called(chats: Site, mode: str) -> None:
    say(chats, called("b", {}))
    allowed = {"mode": mode, "tools": [{"type": "function", "function": {"name": "b"}}]}
    choice = {"type": "allowed_tools", "allowed_tools": allowed}
    answer = post(chats, CHAT, {"tools": [chat_function("a"), chat_function("b")], "tool_choice": choice}).json()
    assert answer["choices"][0]["finish_reason"] == "tool_calls"
    grammar = chats.engine.requests[0].constraint.grammar
    assert "call_0" in grammar
    assert "call_1" not in grammar
    assert prompts(chats)[0].startswith("tools: a b in ")


def test_allowed_tool_that_is_not_there_is_refused(chats: Site) -> None:
    allowed = {"mode": "auto", "tools": [{"type": "function", "function": {"name": "gone"}}]}
    choice = {"type": "allowed_tools", "allowed_tools": allowed}
    error = post(chats, CHAT, {"tools": [chat_function("a")], "tool_choice": choice}, 400).json()["error"]
    assert (error["param"], "'gone'" in error["message"]) == ("tool_choice", True)


@pytest.mark.parametrize("stream", [False, True])
def test_custom_tool_of_a_chat_is_called_with_its_text_and_sent_back(chats: Site, stream: bool) -> None:
    say(chats, called("patch", {"input": TEXT}) + called("now", {}))
    tools: Any = [{"type": "custom", "custom": {"name": "patch", "format": {"type": "text"}}}, chat_function("now")]
    client = chats.openai().chat.completions
    if stream:
        calls: dict[int, dict[str, Any]] = {}
        for chunk in client.create(model="tiny", messages=HELLO, tools=tools, stream=True):
            entries = [entry.to_dict() for entry in chunk.choices[0].delta.tool_calls or []]
            assert len({one["index"] for one in entries}) == len(entries)
            for one in entries:
                if "id" in one:
                    calls[one["index"]] = one
                elif "custom" in one:
                    calls[one["index"]]["custom"]["input"] += one["custom"]["input"]
        first = calls[0]
    else:
        message = client.create(model="tiny", messages=HELLO, tools=tools).choices[0].message
        assert message.tool_calls
        first = message.tool_calls[0].to_dict()
        assert message.tool_calls[1].type == "function"
    assert (first["type"], first["custom"]) == ("custom", {"name": "patch", "input": TEXT})
    say(chats, "done")
    history: Any = [
        *HELLO,
        {"role": "assistant", "content": None, "tool_calls": [{k: first[k] for k in ("id", "type", "custom")}]},
        {"role": "tool", "tool_call_id": first["id"], "content": "ok"},
    ]
    client.create(model="tiny", messages=history, tools=tools)
    assert json.dumps({"input": TEXT}, ensure_ascii=False)[1:-1] in prompts(chats)[0].replace("\\u0027", "'")


def test_custom_tool_of_responses_streams_its_input_and_is_sent_back(chats: Site) -> None:
    say(chats, called("patch", {"input": TEXT}))
    client = chats.openai().responses
    tools: Any = [custom("patch")]
    deltas, done, final = "", None, None
    for event in client.create(model="tiny", input="x", tools=tools, stream=True):
        if event.type == "response.custom_tool_call_input.delta":
            deltas += event.delta
        elif event.type == "response.custom_tool_call_input.done":
            done = event.input
        elif event.type == "response.completed":
            final = event.response
    assert final
    [item] = final.output
    assert (item.type, item.name, item.input, deltas, done) == ("custom_tool_call", "patch", TEXT, TEXT, TEXT)
    say(chats, "done")
    result = {"type": "custom_tool_call_output", "call_id": item.call_id, "output": "ok"}
    client.create(model="tiny", input=[*HELLO, item.to_dict(), result], tools=tools)  # type: ignore[list-item]
    assert "tool: ok" in prompts(chats)[0]


def test_custom_tool_with_a_regex_holds_the_model_to_it(chats: Site) -> None:
    say(chats, called("patch", {"input": "ab"}))
    grammar = {"type": "grammar", "syntax": "regex", "definition": "[ab]+"}
    post(chats, RESPONSE, {"tools": [custom("patch", format=grammar)]})
    assert "[ab]+" in chats.engine.requests[0].constraint.grammar


@pytest.mark.parametrize("stream", [False, True])
def test_namespace_is_flattened_for_the_model_and_named_in_the_call(chats: Site, stream: bool) -> None:
    say(chats, called("mcp__git__log", {"n": 1}) + called("crm__find", {}) + called("crm__say", {"input": "hi"}))
    tools = [
        {"type": "namespace", "name": "mcp__git__", "description": "d", "tools": [function("log")]},
        {"type": "namespace", "name": "crm", "description": "d", "tools": [function("find"), custom("say")]},
        function("log"),
    ]
    answer = post(chats, RESPONSE, {"tools": tools, "stream": stream})
    assert prompts(chats)[0].startswith("tools: mcp__git__log crm__find crm__say log in ")
    if stream:
        [whole] = [line for line in answer.text.splitlines() if '"type":"response.completed"' in line]
        body = json.loads(whole.removeprefix("data: "))["response"]
    else:
        body = answer.json()
    calls = [(item["type"], item["namespace"], item["name"]) for item in body["output"]]
    assert calls == [
        ("function_call", "mcp__git__", "log"),
        ("function_call", "crm", "find"),
        ("custom_tool_call", "crm", "say"),
    ]
    say(chats, "done")
    results = [{"type": "function_call_output", "call_id": item["call_id"], "output": "ok"} for item in body["output"]]
    post(chats, RESPONSE, {"tools": tools, "input": [*HELLO, *body["output"], *results]})
    assert '"name": "mcp__git__log"' in prompts(chats)[0]


SEARCH = {
    "type": "tool_search",
    "execution": "client",
    "description": "Find tools.",
    "parameters": {"type": "object", "properties": {"query": {"type": "string"}}, "required": ["query"]},
}
FOUND = [{"type": "namespace", "name": "crm", "tools": [function("find") | {"description": "d"}]}, function("log")]


@pytest.mark.parametrize("stream", [False, True])
def test_search_for_tools_is_the_callers_and_what_it_finds_may_be_called(chats: Site, stream: bool) -> None:
    say(chats, called("tool_search", {"query": "crm"}))
    client, tools = chats.openai().responses, [SEARCH, function("log")]
    if stream:
        *_, last = client.create(model="tiny", input="x", tools=tools, stream=True)
        search = last.response.output[0].to_dict()
    else:
        search = client.create(model="tiny", input="x", tools=tools).output[0].to_dict()
    assert {name: search[name] for name in ("type", "execution", "arguments", "status")} == {
        "type": "tool_search_call",
        "execution": "client",
        "arguments": {"query": "crm"},
        "status": "completed",
    }
    assert prompts(chats)[0].startswith("tools: tool_search log in ")
    say(chats, called("crm__find", {"n": 1}))
    found = {"type": "tool_search_output", "call_id": search["call_id"], "execution": "client", "tools": FOUND}
    turns = [*HELLO, search, found | {"status": "completed"}]
    [call] = client.create(model="tiny", input=turns, tools=tools).output
    assert (call.type, call.namespace, call.name) == ("function_call", "crm", "find")
    assert prompts(chats)[0].startswith("tools: tool_search log crm__find in ")
    assert '[{"name":"crm__find","description":"d"},{"name":"log","description":null}]' in prompts(chats)[0]


def test_search_that_is_cut_off_can_be_sent_back(chats: Site) -> None:
    say(chats, called("tool_search", {"query": "crm"})[:-14])
    answer = post(chats, RESPONSE, {"tools": [SEARCH], "max_output_tokens": 60}).json()
    [search] = answer["output"]
    assert (search["status"], search["arguments"]) == ("incomplete", {})
    say(chats, "done")
    found = {"type": "tool_search_output", "call_id": search["call_id"], "tools": []}
    post(chats, RESPONSE, {"tools": [SEARCH], "input": [*HELLO, search, found]})


@pytest.mark.parametrize("added", [{"type": "additional_tools", "role": "developer"}, {"type": "tool_search_output"}])
def test_tools_of_another_servers_search_and_added_ones_are_offered(chats: Site, added: dict[str, Any]) -> None:
    say(chats, called("crm__find", {}))
    search = {"type": "tool_search_call", "execution": "server", "call_id": None, "arguments": {"paths": ["crm"]}}
    answer = post(chats, RESPONSE, {"input": [*HELLO, search, added | {"tools": FOUND}], "tools": [function("log")]})
    assert [(item["namespace"], item["name"]) for item in answer.json()["output"]] == [("crm", "find")]
    assert "paths" not in prompts(chats)[0]


def test_search_that_a_server_runs_is_left_out(chats: Site) -> None:
    say(chats, "x")
    tools = [{"type": "tool_search"}, function("log") | {"defer_loading": True}]
    assert post(chats, RESPONSE, {"tools": tools}).headers[IGNORED] == "tools[0] (tool_search)"
    assert prompts(chats)[0].startswith("tools: log in ")


@pytest.mark.parametrize("text", ["", TEXT, '"', "\\", "\x00\x1f", "\ud83d", "é" * 9])
def test_input_of_a_custom_call_is_read_the_same_cut_anywhere(text: str) -> None:
    for written in (json.dumps({"input": text}), json.dumps({"input": text}, ensure_ascii=False)):
        expected = "" if text == "\ud83d" and "\\u" in written else text
        assert input_of(written) == expected
        for width in (1, 2, 3, 7):
            reader = InputReader()
            pieces = [reader.push(written[at : at + width]) for at in range(0, len(written), width)]
            assert "".join(pieces) == expected


@pytest.mark.parametrize(
    ("block", "written"),
    [
        (
            {"type": "document", "source": {"type": "text", "media_type": "text/plain", "data": "facts"}, "title": "T"},
            "<document>\n<title>T</title>\nfacts\n</document>",
        ),
        (
            {"type": "document", "source": {"type": "content", "content": [{"type": "text", "text": "facts"}]},
             "context": "c", "citations": {"enabled": True}},
            "<document>\n<context>c</context>\nfacts\n</document>",
        ),
        (
            {"type": "search_result", "source": "https://x", "title": "T", "content": [{"type": "text", "text": "f"}]},
            "<search_result>\n<title>T</title>\n<source>https://x</source>\nf\n</search_result>",
        ),
    ],
)  # fmt: skip
@pytest.mark.parametrize("within", ["turn", "result"])
def test_documents_and_search_results_are_read_as_texts(
    chats: Site, block: dict[str, Any], written: str, within: str
) -> None:
    say(chats, "fine")
    content: Any = [block, {"type": "text", "text": "read"}]
    messages: Any = [{"role": "user", "content": content}]
    if within == "result":
        call = {"type": "tool_use", "id": "c", "name": "n", "input": {}}
        result = {"type": "tool_result", "tool_use_id": "c", "content": content}
        messages = [*HELLO, {"role": "assistant", "content": [call]}, {"role": "user", "content": [result]}]
    post(chats, MESSAGE, {"messages": messages})
    assert f"{written}\nread" in prompts(chats)[0]


@pytest.mark.parametrize(
    "source", [{"type": "base64", "media_type": "application/pdf", "data": "x"}, {"type": "url", "url": "https://x"}]
)
def test_document_that_is_no_text_is_refused_by_its_place(chats: Site, source: dict[str, str]) -> None:
    content = [{"type": "document", "source": source}]
    error = post(chats, MESSAGE, {"messages": [{"role": "user", "content": content}]}, 400).json()["error"]
    assert error["param"] == "messages[0].content[0].source"


@pytest.mark.parametrize("size", [4096, 300_000])
def test_prompt_that_is_too_long_is_refused_in_anthropics_words(chats: Site, size: int) -> None:
    client = anthropic.Anthropic(base_url=chats.url, api_key=chats.keys["acme"], max_retries=0, timeout=PATIENCE)
    long: Any = [{"role": "user", "content": "x" * size}]
    with pytest.raises(anthropic.BadRequestError, match=r"prompt is too long: \d+ tokens > 4095 maximum") as refused:
        client.messages.create(model="tiny", max_tokens=3, messages=long)
    assert refused.value.body["error"]["code"] == "context_length_exceeded"  # type: ignore[index]
    with pytest.raises(openai.BadRequestError, match="maximum context length is 4096 tokens"):
        chats.openai().chat.completions.create(model="tiny", messages=long)
