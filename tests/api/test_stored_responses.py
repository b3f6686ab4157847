"""Responses with a memory, through the official client: later requests continue and read what is stored."""

from __future__ import annotations

import asyncio
import http.client
import json
import os
import shutil
import subprocess
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import openai
import pytest
from chat_site import chat_site, prompts, say
from listening import until_true
from live_folders import files_under
from scripted_engine import EOS
from site_fixture import PATIENCE, Site

from loramux.serving.stored_responses import ResponseStore

CALL = '<think>hm</think>Look: <tool_call>{"name": "now", "arguments": {"zone": "UTC"}}</tool_call>'
TOOLS = [{"type": "function", "name": "now", "parameters": {"type": "object", "properties": {}}}]
ASKED = f"user: hello{'assistant: '}"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("stored")


@pytest.fixture(scope="module")
def chats(folder: Path) -> Iterator[Site]:
    with chat_site(folder, response_seconds=3600) as made:
        yield made


def create(site: Site, tenant: str = "acme", **fields: Any) -> Any:
    return site.openai(tenant).responses.create(**{"model": "tiny", "input": "hello"} | fields)


def last_of(site: Site, **fields: Any) -> Any:
    """The response of a stream's last event."""
    with create(site, stream=True, **fields) as stream:
        return list(stream)[-1].response


def readers(client: openai.OpenAI) -> list[Callable[[str], Any]]:
    """The client's calls for a stored response."""
    responses = client.responses
    return [responses.retrieve, responses.delete, lambda id: list(responses.input_items.list(id))]


def refusal(error: openai.APIStatusError) -> tuple[int, str | None, str | None]:
    return error.status_code, error.param, error.code


@pytest.mark.parametrize("stream", [False, True])
def test_next_turn_has_the_stored_conversation_before_its_input(chats: Site, stream: bool) -> None:
    ask = last_of if stream else create
    say(chats, "one")
    first = ask(chats, instructions="Be kind.")
    assert (first.store, first.previous_response_id) == (True, None)
    say(chats, "two")
    second = ask(chats, previous_response_id=first.id, input="more", instructions="Be brief.")
    assert (second.output_text, second.previous_response_id) == ("two", first.id)
    assert prompts(chats) == ["system: Be brief.user: helloassistant: oneuser: moreassistant:"]
    say(chats, "three")
    ask(chats, previous_response_id=second.id, input=[{"role": "user", "content": "again"}])
    assert prompts(chats) == ["user: helloassistant: oneuser: moreassistant: twouser: againassistant:"]


def test_deadline_ends_the_wait_for_the_history(chats: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    say(chats, "one")
    body = {"model": "tiny", "input": "more", "previous_response_id": create(chats).id}
    chats.engine.requests.clear()
    began, ended = threading.Event(), threading.Event()

    async def stuck(*_: object) -> None:
        began.set()
        try:
            await asyncio.sleep(PATIENCE)
        finally:
            ended.set()

    monkeypatch.setattr(ResponseStore, "history", stuck)
    deadline_ms = 100
    while not began.is_set():  # on a busy machine a deadline may pass before the history is read
        deadline_ms *= 2
        with chats.http() as client:
            answer = client.post("/v1/responses", json=body, headers={"x-loramux-deadline-ms": str(deadline_ms)})
        assert (answer.status_code, answer.json()["error"]["code"]) == (429, "deadline_exceeded")
    assert ended.wait(PATIENCE)
    assert not chats.engine.requests


def test_deadline_counts_the_wait_for_the_history(chats: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    say(chats, "one")
    previous, history = create(chats).id, ResponseStore.history
    chats.engine.requests.clear()

    async def slow(*asked: Any) -> Any:
        await asyncio.sleep(0.2)
        return await history(*asked)

    monkeypatch.setattr(ResponseStore, "history", slow)
    create(chats, previous_response_id=previous, extra_headers={"x-loramux-deadline-ms": "60000"})
    (request,) = chats.engine.requests
    assert request.deadline_ms is not None
    assert 0 < request.deadline_ms <= 59_850


def test_disconnect_ends_the_wait_for_the_history(chats: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    say(chats, "one")
    body = {"model": "tiny", "input": "more", "previous_response_id": create(chats).id}
    began, ended = threading.Event(), threading.Event()

    async def stuck(*_: object) -> None:
        began.set()
        try:
            await asyncio.sleep(PATIENCE)
        finally:
            ended.set()

    monkeypatch.setattr(ResponseStore, "history", stuck)
    connection = http.client.HTTPConnection(urlsplit(chats.url).netloc)
    headers = {"authorization": f"Bearer {chats.keys['acme']}", "content-type": "application/json"}
    connection.request("POST", "/v1/responses", json.dumps(body), headers)
    assert began.wait(PATIENCE)
    connection.close()
    assert ended.wait(PATIENCE / 2), "long before the wait itself ends"


def test_conversation_can_be_continued_twice_from_one_response(chats: Site) -> None:
    say(chats, "one")
    first = create(chats)
    say(chats, "two")
    for text in ("left", "right"):
        create(chats, previous_response_id=first.id, input=text)
    assert prompts(chats) == [f"user: helloassistant: oneuser: {text}assistant:" for text in ("left", "right")]


@pytest.mark.parametrize("stream", [False, True])
def test_result_of_a_call_continues_the_response_that_called(chats: Site, stream: bool) -> None:
    say(chats, CALL)
    first = last_of(chats, tools=TOOLS) if stream else create(chats, tools=TOOLS)
    call = first.output[-1]
    say(chats, "noon")
    result = {"type": "function_call_output", "call_id": call.call_id, "output": "12:00"}
    create(chats, previous_response_id=first.id, input=[result], tools=TOOLS)
    (by_id,) = prompts(chats)
    say(chats, "noon")
    sent = [{"role": "user", "content": "hello"}, *first.output, result]
    create(chats, input=sent, tools=TOOLS, store=False)
    assert prompts(chats) == [by_id]
    assert "tool: 12:00" in by_id


def test_references_to_items_stand_for_them_as_the_ai_sdk_sends_them(chats: Site) -> None:
    """The second turn of `@ai-sdk/openai`: the user's turns whole, the assistant's items as references."""
    say(chats, CALL)
    first = last_of(chats, tools=TOOLS)
    assert [item.type for item in first.output] == ["reasoning", "message", "function_call"]
    turn = {"role": "user", "content": [{"type": "input_text", "text": "hello"}]}
    result = {"type": "function_call_output", "call_id": first.output[2].call_id, "output": "12:00"}
    references = [{"type": "item_reference", "id": item.id} for item in first.output]
    say(chats, "noon")
    second = last_of(chats, input=[turn, *references, result], tools=TOOLS)
    (by_reference,) = prompts(chats)
    say(chats, "noon")
    create(chats, input=[turn, *first.output, result], tools=TOOLS, store=False)
    assert prompts(chats) == [by_reference]
    say(chats, "bye")
    short = [{"id": item.id} for item in (*first.output, *second.output) if item.type == "message"]
    create(chats, input=[turn, *short, {"role": "user", "content": "thanks"}])
    assert prompts(chats) == ["user: helloassistant: Look: assistant: noonuser: thanksassistant:"]


def test_item_that_is_referred_to_twice_is_refused_as_openai_does(chats: Site) -> None:
    say(chats, "one")
    first = create(chats)
    reference = {"type": "item_reference", "id": first.output[0].id}
    with pytest.raises(openai.BadRequestError) as error:
        create(chats, input=[reference, {"role": "user", "content": "x"}, reference])
    assert refusal(error.value) == (400, "input[2].id", "duplicate_item")


def test_items_of_a_request_with_references_are_stored_themselves(chats: Site) -> None:
    say(chats, "one")
    first = create(chats)
    second = create(
        chats, input=[{"type": "item_reference", "id": first.output[0].id}, {"role": "user", "content": "b"}]
    )
    chats.openai().responses.delete(first.id)
    say(chats, "three")
    create(chats, previous_response_id=second.id, input="c")
    assert prompts(chats) == ["assistant: oneuser: bassistant: oneuser: cassistant:"]


@pytest.mark.parametrize("stream", [False, True])
def test_stored_response_is_the_one_that_was_sent(chats: Site, stream: bool) -> None:
    say(chats, CALL)
    fields: dict[str, Any] = {
        "tools": TOOLS,
        "temperature": 0.5,
        "metadata": {"a": "b"},
        "text": {"format": {"type": "text"}},
        "include": ["message.output_text.logprobs"],
    }
    sent = last_of(chats, **fields) if stream else create(chats, **fields)
    found = chats.openai().responses.retrieve(sent.id)
    assert sent.output[1].content[0].logprobs
    assert found.output[1].content[0].logprobs == []
    sent.output[1].content[0].logprobs = []
    assert found.model_dump() == sent.model_dump()


def test_answer_cut_by_its_length_is_stored_as_incomplete(chats: Site) -> None:
    say(chats, "too long")
    sent = last_of(chats, max_output_tokens=3)
    found = chats.openai().responses.retrieve(sent.id)
    assert (found.status, found.output_text) == ("incomplete", "too")


def test_deleted_response_is_gone(chats: Site) -> None:
    say(chats, "one")
    first = create(chats)
    second = create(chats, previous_response_id=first.id)
    with chats.http() as http:
        deleted = http.delete(f"/v1/responses/{first.id}")
    assert deleted.json() == {"id": first.id, "object": "response", "deleted": True}
    client = chats.openai()
    for read in (
        client.responses.retrieve,
        client.responses.delete,
        lambda id: list(client.responses.input_items.list(id)),
    ):
        with pytest.raises(openai.NotFoundError) as gone:
            read(first.id)
        assert refusal(gone.value) == (404, "response_id", "response_not_found")
    for previous in (first, second):
        with pytest.raises(
            openai.BadRequestError, match=f"Previous response with id '{first.id}' not found"
        ) as refused:
            create(chats, previous_response_id=previous.id)
        assert refusal(refused.value) == (400, "previous_response_id", "previous_response_not_found")
    reference = {"type": "item_reference", "id": first.output[0].id}
    with pytest.raises(openai.NotFoundError, match=f"Item with id '{first.output[0].id}' not found") as missing:
        create(chats, input=[{"role": "user", "content": "x"}, reference])
    assert refusal(missing.value) == (404, "input[1].id", "item_not_found")
    assert client.responses.retrieve(second.id).output_text == "one"


@pytest.mark.parametrize(
    "id", ["", "resp_1", "msg_1", "msg_" + "0" * 32 + "0", "x" * 5000, "msg_" + "0" * 32 + "i99999"]
)
def test_reference_to_nothing_is_refused_as_openai_does(chats: Site, id: str) -> None:
    with pytest.raises(openai.NotFoundError) as missing:
        create(chats, input=[{"type": "item_reference", "id": id}])
    assert refusal(missing.value) == (404, "input[0].id", "item_not_found")


def test_input_items_are_listed_in_pages(chats: Site) -> None:
    say(chats, "one")
    turns = [{"role": "user", "content": f"turn {i}"} for i in range(5)]
    sent = create(chats, input=[*turns, {"type": "function_call", "call_id": "c", "name": "f", "arguments": "{}"}])
    items = chats.openai().responses.input_items
    pages = list(items.list(sent.id, limit=2, order="asc"))
    assert [getattr(item, "content", None) and item.content[0].text for item in pages][:5] == [
        f"turn {i}" for i in range(5)
    ]
    assert (pages[5].type, pages[5].name, pages[5].call_id) == ("function_call", "f", "c")
    assert list(items.list(sent.id)) == pages[::-1]
    assert len({item.id for item in pages}) == 6
    second = create(chats, previous_response_id=sent.id, input="only this")
    assert [item.content[0].text for item in items.list(second.id)] == ["only this"]
    say(chats, "two")
    create(chats, input=[{"type": "item_reference", "id": pages[3].id}])
    assert prompts(chats) == ["user: turn 3assistant:"]


def test_response_that_is_not_to_be_stored_is_not(chats: Site) -> None:
    say(chats, "one")
    for sent in (create(chats, store=False), last_of(chats, store=False)):
        assert sent.store is False
        with pytest.raises(openai.NotFoundError):
            chats.openai().responses.retrieve(sent.id)
        with pytest.raises(openai.NotFoundError):
            create(chats, input=[{"type": "item_reference", "id": sent.output[0].id}])


def test_stream_that_its_client_leaves_is_not_stored(chats: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    say(chats, "word " * 8)
    monkeypatch.setattr(chats.engine, "pause", 0.05)  # two seconds in all
    with create(chats, stream=True) as stream:
        id = next(iter(stream)).response.id
    deadline = time.monotonic() + 4
    while time.monotonic() < deadline:
        with pytest.raises(openai.NotFoundError):
            chats.openai().responses.retrieve(id)
        time.sleep(0.2)


@pytest.mark.parametrize("store", [True, False])
def test_body_of_a_stream_counts_as_waiting_memory_as_long_as_it_is_to_be_stored(
    chats: Site, monkeypatch: pytest.MonkeyPatch, store: bool
) -> None:
    """With the items that its references stand for; what it continues is needed until it begins."""

    def held() -> int:
        memory = chats.server.app.state.platform.memory
        return memory._held.total()

    say(chats, "one")
    earlier = create(chats, input=[{"role": "user", "content": "x" * 900}])
    until_true(lambda: not held())
    say(chats, "word " * 100)
    monkeypatch.setattr(chats.engine, "pause", 0.05)
    reference: Any = {"type": "item_reference", "id": earlier.output[0].id}
    sent: Any = [reference, {"role": "user", "content": "y" * 700}]
    with create(chats, stream=True, store=store, input=sent, previous_response_id=earlier.id) as stream:
        next(iter(stream))
        size = len(json.dumps(sent))
        if store:
            assert size + 900 < held() < 2 * size + 900
        else:
            assert not held()
    until_true(lambda: not held())


def test_anothers_response_is_not_there(chats: Site) -> None:
    say(chats, "one")
    sent = create(chats)
    for read in readers(chats.openai("globex")):
        with pytest.raises(openai.NotFoundError):
            read(sent.id)
    with pytest.raises(openai.BadRequestError):
        create(chats, "globex", previous_response_id=sent.id)
    with pytest.raises(openai.NotFoundError):
        create(chats, "globex", input=[{"type": "item_reference", "id": sent.output[0].id}])
    with chats.http("no-scopes") as http:
        assert http.get(f"/v1/responses/{sent.id}").status_code == 403
    assert chats.openai().responses.retrieve(sent.id).output_text == "one"


def test_repeated_request_does_not_store_a_deleted_response_again(chats: Site) -> None:
    say(chats, "one")
    headers = {"Idempotency-Key": "stored"}
    first = create(chats, extra_headers=headers)
    again = create(chats, extra_headers=headers)
    assert first == again
    assert again.store is True
    chats.openai().responses.delete(first.id)
    create(chats, extra_headers=headers)
    with pytest.raises(openai.NotFoundError):
        chats.openai().responses.retrieve(first.id)


def test_counted_tokens_include_the_stored_conversation(chats: Site) -> None:
    say(chats, "one")
    sent = create(chats, input="first")
    asked = {"model": "tiny", "input": "second", "previous_response_id": sent.id}
    counted = chats.openai().responses.input_tokens.count(**asked).input_tokens
    assert counted == create(chats, **asked).usage.input_tokens


def test_conversation_that_outgrows_the_context_is_refused_as_a_long_input_is(chats: Site) -> None:
    say(chats, "one")
    sent = create(chats, input="x" * 2500)
    with pytest.raises(openai.BadRequestError) as refused:
        create(chats, previous_response_id=sent.id, input="x" * 2500)
    assert refusal(refused.value) == (400, "input", "context_length_exceeded")


def test_thoughts_summaries_and_other_fields_without_effect_are_not_stored(chats: Site) -> None:
    say(chats, "one")
    thought = {"type": "reasoning", "id": "rs_1", "summary": [{"type": "summary_text", "text": "x" * 9000}]}
    sent = create(chats, input=[{"role": "user", "content": "hello"}, thought, {"role": "user", "content": "more"}])
    items = list(chats.openai().responses.input_items.list(sent.id, order="asc"))
    assert [item.type for item in items] == ["message", "reasoning", "message"]
    assert (items[1].id, items[1].summary) == ("rs_1", [])


def test_stored_text_is_encrypted_at_rest(chats: Site, folder: Path) -> None:
    say(chats, "a secret answer")
    create(chats, input="a secret question", metadata={"a": "b"})
    files = [file for file in files_under(folder) if file.name.startswith("records")]
    assert files
    for file in files:
        assert b"a secret" not in file.read_bytes()


def test_tenant_with_zero_retention_has_no_memory(chats: Site) -> None:
    say(chats, "one")
    stored = create(chats, "globex")
    with chats.http("all-scopes") as operator:
        operator.patch("/admin/tenants/globex", json={"zero_retention": True}).raise_for_status()
        try:
            with pytest.raises(openai.NotFoundError):
                chats.openai("globex").responses.retrieve(stored.id)
            left_out = create(chats, "globex")
            assert (left_out.output_text, left_out.store) == ("one", False)
            with pytest.raises(openai.NotFoundError):
                chats.openai("globex").responses.retrieve(left_out.id)
            with pytest.raises(openai.PermissionDeniedError) as refused:
                create(chats, "globex", store=True)
            assert refusal(refused.value) == (403, "store", "zero_retention")
            with pytest.raises(openai.BadRequestError):
                create(chats, "globex", previous_response_id=stored.id)
        finally:
            operator.patch("/admin/tenants/globex", json={"zero_retention": False}).raise_for_status()


def test_stored_response_is_not_streamed_again(chats: Site) -> None:
    say(chats, "one")
    sent = create(chats)
    with chats.http() as http:
        refused = http.get(f"/v1/responses/{sent.id}", params={"stream": "true"})
    assert (refused.status_code, refused.json()["error"]["param"]) == (400, "stream")


def test_line_of_a_batch_has_no_memory(chats: Site) -> None:
    say(chats, "one")
    previous = create(chats)
    bodies = [{}, {"previous_response_id": previous.id}, {"store": True}, {"store": False}]
    lines = [
        {
            "custom_id": str(i),
            "method": "POST",
            "url": "/v1/responses",
            "body": {"model": "tiny", "input": "hello"} | body,
        }
        for i, body in enumerate(bodies)
    ]
    client = chats.openai()
    text = "\n".join(map(json.dumps, lines)).encode()
    file = client.files.create(file=("b.jsonl", text), purpose="batch")
    batch = client.batches.create(input_file_id=file.id, endpoint="/v1/responses", completion_window="24h")
    deadline = time.monotonic() + 120
    while batch.status not in ("completed", "failed") and time.monotonic() < deadline:
        time.sleep(0.3)
        batch = client.batches.retrieve(batch.id)
    assert (batch.status, batch.request_counts.completed, batch.request_counts.failed) == ("completed", 2, 2)
    answers = [json.loads(line) for line in client.files.content(batch.output_file_id).text.splitlines()]
    assert [one["response"]["body"]["store"] for one in answers] == [False, False]
    errors = [json.loads(line) for line in client.files.content(batch.error_file_id).text.splitlines()]
    params = [one["response"]["body"]["error"]["param"] for one in errors]
    assert params == ["previous_response_id", "store"]


@pytest.mark.slow
def test_vercels_ai_sdk_takes_its_second_turn_with_references(chats: Site, tmp_path: Path) -> None:
    """The engine calls the tool, and repeats the tool's result as soon as its prompt has it."""
    script = Path(__file__).parent / "real_clients" / "use_ai_sdk_responses.mjs"
    if shutil.which("npm") is None:
        pytest.skip("npm is not installed")
    install = ["npm", "install", "--no-fund", "--no-audit", "--prefix", str(tmp_path), "ai", "@ai-sdk/openai", "zod"]
    installed = subprocess.run(install, capture_output=True, text=True, timeout=300, check=False)
    if installed.returncode:
        pytest.skip(f"npm cannot install @ai-sdk/openai: {installed.stderr[-400:]}")
    shutil.copy(script, tmp_path)

    def answer(prompt: list[int]) -> str:
        seen = bytes(token for token in prompt if token < EOS)
        return "<think>hm</think>It is halkodel-4711." if b"halkodel-4711" in seen else CALL

    chats.engine.script = lambda request: [*answer(request.prompt_token_ids).encode(), EOS]
    environment = os.environ | {"URL": chats.url, "ACME": chats.keys["acme"], "NO_PROXY": "127.0.0.1"}
    ran = subprocess.run(
        ["node", str(tmp_path / script.name)],
        env=environment, capture_output=True, text=True, timeout=300, check=False,
    )  # fmt: skip
    assert ran.returncode == 0, (ran.stdout + ran.stderr)[-4000:]
