"""Answers to a prompt that opens a thought, through each API's official client, whole and as a stream."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import anthropic
import pytest
from chat_site import chat_site, say
from constrained_site import TOOLS_TEMPLATE
from site_fixture import Site

OPENS_A_THOUGHT = TOOLS_TEMPLATE.replace("assistant:", "assistant:<think>\n")
CALL = '<tool_call>{"name": "now", "arguments": {"zone": "UTC"}}</tool_call>'
PARAMETERS = {"type": "object", "properties": {"zone": {"type": "string"}}}
HELLO = [{"role": "user", "content": "hello"}]


@pytest.fixture(scope="module")
def thinker(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Site]:
    with chat_site(tmp_path_factory.mktemp("thinker"), OPENS_A_THOUGHT, thinks=True) as made:
        yield made


@dataclass(frozen=True)
class Got:
    text: str
    thought: str
    calls: list[tuple[str, Any]]
    reason: str
    thought_tokens: int | None = None
    """None: the API does not tell them."""


def chat(site: Site, *, stream: bool, tools: bool, stop: list[str], max_tokens: int) -> Got:
    asked: dict[str, Any] = {"model": "tiny", "messages": HELLO, "max_tokens": max_tokens}
    if tools:
        asked["tools"] = [{"type": "function", "function": {"name": "now", "parameters": PARAMETERS}}]
    if stop:
        asked["stop"] = stop
    api = site.openai().chat.completions
    if not stream:
        answer = api.create(**asked)
        message, usage, reason = answer.choices[0].message, answer.usage, answer.choices[0].finish_reason
        calls = [(call.function.name, call.function.arguments) for call in message.tool_calls or []]
        thought = getattr(message, "reasoning_content", None) or ""
        return Got(message.content or "", thought, calls, reason, usage.completion_tokens_details.reasoning_tokens)
    chunks = list(api.create(**asked, stream=True, stream_options={"include_usage": True}))
    choices = [choice for chunk in chunks for choice in chunk.choices]
    called: dict[int, tuple[str, str]] = {}
    for call in (call for choice in choices for call in choice.delta.tool_calls or []):
        name, arguments = called.get(call.index, ("", ""))
        called[call.index] = (name + (call.function.name or ""), arguments + (call.function.arguments or ""))
    return Got(
        "".join(choice.delta.content or "" for choice in choices),
        "".join(getattr(choice.delta, "reasoning_content", None) or "" for choice in choices),
        list(called.values()),
        next(choice.finish_reason for choice in choices if choice.finish_reason),
        chunks[-1].usage.completion_tokens_details.reasoning_tokens,
    )


def responses(site: Site, *, stream: bool, tools: bool, stop: list[str], max_tokens: int) -> Got:
    asked: dict[str, Any] = {"model": "tiny", "input": "hello", "max_output_tokens": max_tokens}
    if tools:
        asked["tools"] = [{"type": "function", "name": "now", "parameters": PARAMETERS, "strict": False}]
    if stop:
        asked["extra_body"] = {"stop": stop}
    made = site.openai().responses.create(**asked, stream=stream)
    answer = [event for event in made][-1].response if stream else made
    thought = "".join(part.text for item in answer.output if item.type == "reasoning" for part in item.content)
    calls = [(item.name, item.arguments) for item in answer.output if item.type == "function_call"]
    reason = {"completed": "tool_calls" if calls else "stop", "incomplete": "length"}[answer.status]
    return Got(answer.output_text, thought, calls, reason, answer.usage.output_tokens_details.reasoning_tokens)


def messages(site: Site, *, stream: bool, tools: bool, stop: list[str], max_tokens: int) -> Got:
    asked: dict[str, Any] = {"model": "tiny", "messages": HELLO, "max_tokens": max_tokens, "stop_sequences": stop}
    if tools:
        asked["tools"] = [{"name": "now", "input_schema": PARAMETERS}]
    api = anthropic.Anthropic(base_url=site.url, api_key=site.keys["acme"], max_retries=0, timeout=60).messages
    if stream:
        with api.stream(**asked) as events:
            answer = events.get_final_message()
    else:
        answer = api.create(**asked)
    of = {kind: [block for block in answer.content if block.type == kind] for kind in ("text", "thinking", "tool_use")}
    reasons = {"end_turn": "stop", "stop_sequence": "stop", "tool_use": "tool_calls", "max_tokens": "length"}
    assert (answer.stop_reason == "stop_sequence") == (answer.stop_sequence is not None)
    return Got(
        "".join(block.text for block in of["text"]),
        "".join(block.thinking for block in of["thinking"]),
        [(block.name, block.input) for block in of["tool_use"]],
        reasons[answer.stop_reason],
    )


APIS = pytest.mark.parametrize("ask", [chat, responses, messages])
WAYS = pytest.mark.parametrize("stream", [False, True])


def expect(got: Got, text: str, thought: str, reason: str, thought_tokens: int, *, calls: bool = False) -> None:
    assert (got.text.strip(), got.thought.strip(), got.reason) == (text, thought, reason)
    assert got.thought_tokens in (None, thought_tokens)
    assert got.calls in ([], [("now", '{"zone": "UTC"}')], [("now", {"zone": "UTC"})])
    assert bool(got.calls) == calls


@APIS
@WAYS
@pytest.mark.parametrize("tools", [False, True])
def test_answer_without_an_end_of_its_thought_is_the_text(thinker: Site, ask: Any, stream: bool, tools: bool) -> None:
    """A stream has shown it as a thought before; a whole answer has no thought."""
    say(thinker, "42")
    got = ask(thinker, stream=stream, tools=tools, stop=[], max_tokens=99)
    expect(got, "42", "42" if stream else "", "stop", 0)


@APIS
@WAYS
def test_stop_string_ends_a_text_that_was_taken_for_a_thought(thinker: Site, ask: Any, stream: bool) -> None:
    say(thinker, "42 Question: b")
    got = ask(thinker, stream=stream, tools=False, stop=["Question:"], max_tokens=99)
    expect(got, "42", "42 Question: b" if stream else "", "stop", 0)


@APIS
@WAYS
@pytest.mark.parametrize("stop", ["Question:", "<", "think>", "a"])
def test_stop_string_is_not_looked_for_in_a_thought_or_its_end(
    thinker: Site, ask: Any, stream: bool, stop: str
) -> None:
    say(thinker, "a Question: b</think>42")
    got = ask(thinker, stream=stream, tools=False, stop=[stop], max_tokens=99)
    expect(got, "42", "a Question: b", "stop", 21)


@APIS
@WAYS
def test_call_within_a_thought_is_a_call(thinker: Site, ask: Any, stream: bool) -> None:
    say(thinker, f"hm {CALL}")
    got = ask(thinker, stream=stream, tools=True, stop=[], max_tokens=99)
    expect(got, "", "hm", "tool_calls", 3, calls=True)


@APIS
@WAYS
def test_thought_cut_by_its_length_is_a_thought(thinker: Site, ask: Any, stream: bool) -> None:
    say(thinker, "because</think>42")
    got = ask(thinker, stream=stream, tools=False, stop=[], max_tokens=4)
    expect(got, "", "beca", "length", 4)


@WAYS
def test_logprobs_of_a_response_are_those_of_its_text_even_if_it_was_taken_for_a_thought(
    thinker: Site, stream: bool
) -> None:
    say(thinker, "\n42 Q: b")
    asked = {"include": ["message.output_text.logprobs"], "extra_body": {"stop": ["Q:"]}}
    made = thinker.openai().responses.create(model="tiny", input="hello", stream=stream, **asked)
    answer = [event for event in made][-1].response if stream else made
    (content,) = next(item for item in answer.output if item.type == "message").content
    assert content.text == "42 "
    assert [one.token for one in content.logprobs] == ["4", "2", " "]


def test_answer_kept_for_an_idempotency_key_is_repeated_without_the_thought(thinker: Site) -> None:
    say(thinker, "42")
    with thinker.http(idempotency_key="k1") as http:
        asked = {"model": "tiny", "messages": HELLO, "max_tokens": 9}
        first, again = (http.post("/v1/chat/completions", json=asked) for _ in range(2))
    assert again.headers["idempotent-replayed"] == "true"
    assert first.json() == again.json()
    assert first.json()["choices"][0]["message"] == {"role": "assistant", "content": "42", "refusal": None}


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/completions"])
@WAYS
@pytest.mark.parametrize("stop", [None, "x", "nowhere"])
def test_every_token_id_has_its_log_probability(thinker: Site, path: str, stream: bool, stop: str | None) -> None:
    say(thinker, "é</think>a x b")
    chat = path.startswith("/v1/chat")
    asked = {"model": "tiny", "max_tokens": 99, "stop": stop, "return_token_ids": True, "stream": stream}
    asked |= {"messages": HELLO, "logprobs": True} if chat else {"prompt": "hello", "logprobs": 1}
    with thinker.http() as http:
        answer = http.post(path, json=asked)
    lines = [line[6:] for line in answer.text.splitlines() if line.startswith("data: {")] if stream else [answer.text]
    choices = [choice for line in lines for choice in json.loads(line)["choices"]]
    num_tokens = 0
    for choice in choices:
        logprobs = choice["logprobs"] or {}
        ids = choice.get("token_ids") or []
        assert len(logprobs.get("content" if chat else "tokens") or []) == len(ids)
        num_tokens += len(ids)
    written = "é</think>a x b"
    assert num_tokens == (len(written[: written.index("x") + 1].encode()) if stop == "x" else len(written.encode()) + 1)
