"""Files and batches by the official client, from the upload to the bill."""

from __future__ import annotations

import asyncio
import http.client
import json
import time
from collections.abc import Coroutine, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from select import select
from typing import Any

import httpx
import openai
import pytest
from openai.types import Batch
from peft_uploads import form, make_adapter
from scripted_engine import EOS
from site_fixture import Site

from loramux.accounts.tenants.account import KeyRequest
from loramux.engine.messages import EngineFault, ServiceClass
from loramux.server.platform import open_tenants

CHAT, TEXT = "/v1/chat/completions", "/v1/completions"
DEEP = b'{"custom_id":"d","url":"/v1/completions","body":' + b"[" * 100_000 + b"]" * 100_000 + b"}"


def line(number: int, /, url: str = TEXT, **body: Any) -> dict[str, Any]:
    given = {"model": "tiny", "prompt": f"line {number}"} if url == TEXT else {"model": "tiny"}
    return {"custom_id": f"id-{number}", "method": "POST", "url": url, "body": given | body}


def jsonl(*lines: dict[str, Any] | bytes) -> bytes:
    return b"".join(one + b"\n" if isinstance(one, bytes) else json.dumps(one).encode() + b"\n" for one in lines)


def submit(client: openai.OpenAI, data: bytes, endpoint: str = TEXT, **more: Any) -> Batch:
    file = client.files.create(file=("input.jsonl", data), purpose="batch")
    asked = {"completion_window": "24h"} | more
    return client.batches.create(input_file_id=file.id, endpoint=endpoint, **asked)


def until(client: openai.OpenAI, id: str, *states: str, seconds: float = 120) -> Batch:
    deadline = time.monotonic() + seconds
    while (batch := client.batches.retrieve(id)).status not in states:
        assert time.monotonic() < deadline, batch
        time.sleep(0.05)
    return batch


def until_begun(site: Site, before: int) -> None:
    """Wait until some lines have gone to the engine, which had `before` requests.

    The engine pauses between their tokens, so that most lines are left, on a slow machine too.
    """
    deadline = time.monotonic() + 120
    while len(site.engine.requests) < before + 5:
        assert time.monotonic() < deadline, "no line runs"
        time.sleep(0.01)


ENDS = ("completed", "failed", "expired", "cancelled")


def lines_of(client: openai.OpenAI, file_id: str | None) -> dict[str, dict[str, Any]]:
    if file_id is None:
        return {}
    found = [json.loads(one) for one in client.files.content(file_id).text.split("\n") if one]
    assert len({one["custom_id"] for one in found}) == len(found), "a custom_id is there twice"
    return {one["custom_id"]: one for one in found}


@pytest.fixture
def client(site: Site, newcomer: str) -> Iterator[openai.OpenAI]:
    """The client of a new tenant, which has no other test's files and usage."""
    with site.openai(newcomer) as made:
        made.tenant_name = newcomer
        yield made


def test_batch_answers_every_line_and_bills_it_as_a_batch(site: Site, client: openai.OpenAI) -> None:
    since = int(time.time())
    lines = [line(number, prompt=f"line {number}", max_tokens=100) for number in range(300)]
    batch = submit(client, jsonl(*lines), metadata={"job": "nightly"})
    assert (batch.object, batch.endpoint, batch.completion_window) == ("batch", TEXT, "24h")
    ended = until(client, batch.id, *ENDS)
    assert ended.status == "completed", ended
    assert (ended.request_counts.total, ended.request_counts.completed, ended.request_counts.failed) == (300, 300, 0)
    assert ended.error_file_id is None
    assert ended.metadata == {"job": "nightly"}
    assert ended.in_progress_at
    assert ended.finalizing_at
    assert ended.completed_at
    output = lines_of(client, ended.output_file_id)
    assert list(output) == [f"id-{number}" for number in range(300)]
    for number in range(300):
        answer = output[f"id-{number}"]
        assert (answer["response"]["status_code"], answer["error"]) == (200, None)
        assert answer["response"]["body"]["choices"][0]["text"] == f"line {number}"
        assert answer["response"]["body"]["service_tier"] == "batch"
    assert {request.service_class for request in site.engine.requests} == {ServiceClass.BATCH}
    with site.http(client.tenant_name) as session:
        ask = {"start_time": since - 10, "group_by": "batch"}
        page = session.get("/v1/organization/usage/completions", params=ask).json()
    [usage] = [one for bucket in page["data"] for one in bucket["results"]]
    tokens = sum(answer["response"]["body"]["usage"]["completion_tokens"] for answer in output.values())
    assert (usage["batch"], usage["num_model_requests"], usage["output_tokens"]) == (True, 300, tokens)
    assert client.batches.list(limit=1).data[0].id == batch.id


def test_batch_of_chats_has_errors_of_lines_in_the_error_file(site: Site, client: openai.OpenAI) -> None:
    messages = [{"role": "user", "content": "hello"}]
    long = [{"role": "user", "content": "x" * 100_000}]
    lines = [line(1, CHAT, messages=messages, n=2), line(2, CHAT, messages=long), line(3, CHAT, messages=messages)]
    ended = until(client, submit(client, jsonl(*lines), CHAT).id, *ENDS)
    assert (ended.status, ended.request_counts.completed, ended.request_counts.failed) == ("completed", 2, 1)
    output = lines_of(client, ended.output_file_id)
    assert [len(output[id]["response"]["body"]["choices"]) for id in ("id-1", "id-3")] == [2, 1]
    [refused] = lines_of(client, ended.error_file_id).values()
    assert (refused["custom_id"], refused["response"]["status_code"]) == ("id-2", 400)
    assert refused["response"]["body"]["error"]["code"] == "context_length_exceeded"


BAD_LINES = [
    ([line(1), b'{"custom_id": "x"'], "invalid_json_line", 2, None),
    ([line(1), b'{"custom_id": "\xff\xfe", "url": "/v1/completions", "body": {}}'], "invalid_json_line", 2, None),
    ([line(1), DEEP], "invalid_json_line", 2, None),
    ([line(1), b'["no object"]'], "invalid_line", 2, None),
    ([line(1), line(2), line(1)], "duplicate_custom_id", 3, "id-1"),
    ([line(1), line(2, CHAT)], "invalid_url", 2, "id-2"),
    ([line(1), line(2) | {"method": "GET"}], "invalid_method", 2, "id-2"),
    ([line(1), line(2) | {"custom_id": ""}], "invalid_custom_id", 2, ""),
    ([line(1), line(2) | {"custom_id": "x" * 999}], "invalid_custom_id", 2, "x" * 512),
    ([line(1), line(2) | {"other": 1}], "invalid_line", 2, "id-2"),
    ([line(1), b'{"custom_id": "x", "url": "/v1/completions", "body": {"prompt": "' + b"y" * (2 << 20) + b'"}}'],
     "line_too_large", 2, None),
]  # fmt: skip
BAD_BODIES = [
    (line(2, temperature=3), 400, "invalid_value", "temperature"),
    (line(2, temprature=1), 400, "unknown_parameter", "temprature"),
    (line(2, stream=True), 400, "invalid_value", "stream"),
    (line(2, service_tier="flex"), 400, "invalid_value", "service_tier"),
    (line(2, model="globex/theirs"), 404, "model_not_found", "model"),
    (line(2, model="absent"), 404, "model_not_found", "model"),
]


@pytest.mark.parametrize(("lines", "code", "number", "custom_id"), BAD_LINES)
def test_line_that_cannot_be_read_ends_in_the_error_file_and_the_others_run(
    client: openai.OpenAI, lines: list[dict[str, Any] | bytes], code: str, number: int, custom_id: str | None
) -> None:
    ended = until(client, submit(client, jsonl(*lines)).id, *ENDS)
    assert (ended.status, ended.errors) == ("completed", None)
    good = len(lines) - 1
    assert (ended.request_counts.completed, ended.request_counts.failed) == (good, 1)
    assert ended.output_file_id
    assert ended.error_file_id
    assert sorted(lines_of(client, ended.output_file_id)) == [f"id-{one}" for one in range(1, good + 1)]
    [bad] = [json.loads(one) for one in client.files.content(ended.error_file_id).text.splitlines()]
    assert (bad["custom_id"], bad["response"], bad["error"]["code"]) == (custom_id, None, code)
    assert bad["error"]["message"].startswith(f"Line {number}: ")


@pytest.mark.parametrize(("bad", "status", "code", "param"), BAD_BODIES)
def test_line_whose_body_is_refused_ends_in_the_error_file_and_the_others_run(
    client: openai.OpenAI, bad: dict[str, Any], status: int, code: str, param: str
) -> None:
    ended = until(client, submit(client, jsonl(line(1), bad, line(3))).id, *ENDS)
    assert (ended.status, ended.request_counts.completed, ended.request_counts.failed) == ("completed", 2, 1)
    assert ended.error_file_id
    [refused] = lines_of(client, ended.error_file_id).values()
    assert (refused["custom_id"], refused["response"]["status_code"]) == ("id-2", status)
    error = refused["response"]["body"]["error"]
    assert (error["code"], error["param"]) == (code, param)


@pytest.mark.parametrize(
    ("endpoint", "body"), [("/v1/embeddings", {"input": [99_999]}), ("/v1/responses", {"input": "x" * 9000})]
)
def test_refused_line_names_the_field_of_its_endpoint(
    client: openai.OpenAI, endpoint: str, body: dict[str, Any]
) -> None:
    line = {"custom_id": "a", "method": "POST", "url": endpoint, "body": {"model": "tiny"} | body}
    ended = until(client, submit(client, jsonl(line), endpoint).id, *ENDS)
    [refused] = lines_of(client, ended.error_file_id).values()
    assert refused["response"]["body"]["error"]["param"] == "input", refused


@pytest.mark.parametrize(
    ("lines", "code", "number", "param"),
    [
        ([b'{"custom_id": "x"', b"{"], "invalid_json_line", 1, None),
        ([b"\xff\xfe{\x00}\x00"], "invalid_json_line", 1, None),
        ([b"custom_id,method,url,body", b"a,POST,/v1/completions,{}"], "invalid_json_line", 1, None),
        ([line(1, CHAT), line(2, CHAT)], "invalid_url", 1, "url"),
        ([line(1, surprise=1, temperature=3)], "invalid_value", 1, "body.temperature"),
        ([line(1, model="absent"), line(2, model="globex/theirs")], "model_not_found", 1, "body.model"),
        ([b""], "empty_file", None, None),
        ([b"\xef\xbb\xbf", b"  \t", b"\r"], "empty_file", None, None),
    ],
)
def test_batch_without_a_line_that_can_run_fails_before_anything_runs(
    site: Site,
    client: openai.OpenAI,
    lines: list[dict[str, Any] | bytes],
    code: str,
    number: int | None,
    param: str | None,
) -> None:
    ended = until(client, submit(client, jsonl(*lines)).id, *ENDS)
    assert ended.status == "failed"
    assert ended.failed_at
    assert ended.errors
    assert ended.errors.data
    error = ended.errors.data[0]
    assert (error.line, error.param) == (number, param), error
    assert error.code == code, error
    assert not site.engine.requests


def test_file_with_a_byte_order_mark_and_lines_of_blanks_is_read(client: openai.OpenAI) -> None:
    data = b"\xef\xbb\xbf" + jsonl(b"", line(1), b"  \t\r", b"", line(2)).replace(b"\n", b"\r\n") + b"\n{"
    ended = until(client, submit(client, data).id, *ENDS)
    assert (ended.status, ended.request_counts.total, ended.request_counts.completed) == ("completed", 3, 2)
    assert ended.error_file_id
    assert '"Line 7: ' in client.files.content(ended.error_file_id).text


def test_output_files_are_kept_as_long_as_the_batch_says(client: openai.OpenAI) -> None:
    expiry = {"anchor": "created_at", "seconds": 7200}
    ended = until(client, submit(client, jsonl(line(1), line(1)), output_expires_after=expiry).id, *ENDS)
    for id in (ended.output_file_id, ended.error_file_id):
        assert id
        file = client.files.retrieve(id)
        assert file.expires_at
        assert file.expires_at - file.created_at == 7200


@pytest.mark.parametrize("one", [jsonl(line(1)), b"\n"])
def test_batch_with_too_many_lines_fails_and_names_the_limit(client: openai.OpenAI, one: bytes) -> None:
    ended = until(client, submit(client, one * 50_001).id, *ENDS)
    assert ended.errors
    assert ended.errors.data
    assert [(one.code, one.line) for one in ended.errors.data] == [("too_many_lines", 50_001)]


def test_file_announced_too_large_is_refused_before_it_is_sent(site: Site) -> None:
    connection = http.client.HTTPConnection(site.url.removeprefix("http://"), timeout=20)
    connection.putrequest("POST", "/v1/files")
    connection.putheader("Authorization", f"Bearer {site.keys['acme']}")
    connection.putheader("Content-Type", "multipart/form-data; boundary=x")
    connection.putheader("Content-Length", str(10 << 30))
    connection.endheaders()
    answer = connection.getresponse()
    assert answer.status == 413
    assert json.loads(answer.read())["error"]["code"] == "file_too_large"
    connection.close()


def test_file_sent_in_chunks_without_a_length_is_refused_once_it_is_too_large(site: Site) -> None:
    """Ten gibibytes would follow: the answer comes when the file is over its limit, and nothing of it is kept."""
    limit = site.settings.batches.max_file_bytes
    connection = http.client.HTTPConnection(site.url.removeprefix("http://"), timeout=60)
    connection.putrequest("POST", "/v1/files")
    connection.putheader("Authorization", f"Bearer {site.keys['acme']}")
    connection.putheader("Content-Type", "multipart/form-data; boundary=x")
    connection.putheader("Transfer-Encoding", "chunked")
    connection.endheaders()
    head = b'--x\r\nContent-Disposition: form-data; name="file"; filename="huge.jsonl"\r\n\r\n'
    connection.send(b"%x\r\n%s\r\n" % (len(head), head))
    block = b"%x\r\n%s\r\n" % (1 << 20, b"\n" * (1 << 20))
    sent = 0
    with suppress(ConnectionError):  # the server hangs up on the rest
        while sent < 10 << 30 and not select([connection.sock], [], [], 0)[0]:
            connection.send(block)
            sent += 1 << 20
    answer = connection.getresponse()
    assert answer.status == 413
    error = json.loads(answer.read())["error"]
    assert error["code"] == "file_too_large"
    assert str(limit) in error["message"]
    assert sent <= limit + (64 << 20), "beyond the limit lies only what was under way"
    connection.close()
    with site.http("acme") as session:
        assert "huge.jsonl" not in session.get("/v1/files").text


def test_batch_whose_adapter_is_deleted_in_its_midst_answers_every_line(
    site: Site, client: openai.OpenAI, base_dir: Path, tmp_path: Path
) -> None:
    """Lines of the adapter end with a clear error each from then on; those of the base go on, each billed once."""
    since = int(time.time())
    with site.http("all-scopes") as operator:
        made = operator.post(f"/admin/tenants/{client.tenant_name}/keys", json={"scopes": ["adapters", "inference"]})
        site.keys["owner"] = made.json()["key"]
    with site.http("owner") as http:
        assert http.post("/v1/adapters", **form(make_adapter(base_dir, tmp_path), "gone")).status_code == 201
        site.engine.pause, before = 0.2, len(site.engine.requests)
        models = ["gone" if number % 2 else "tiny" for number in range(200)]
        batch = submit(client, jsonl(*(line(number, model=model) for number, model in enumerate(models))))
        until_begun(site, before)
        assert http.delete("/v1/adapters/gone", params={"undo_s": 0}).status_code == 200
        site.engine.pause = 0.0
    ended = until(client, batch.id, *ENDS)
    assert ended.status == "completed"
    output, errors = lines_of(client, ended.output_file_id), lines_of(client, ended.error_file_id)
    assert sorted([*output, *errors]) == sorted(f"id-{number}" for number in range(200)), "each once"
    assert {id for id in errors if models[int(id[3:])] == "tiny"} == set(), "the others go on"
    assert len(errors) > 50
    assert {one["response"]["status_code"] for one in errors.values()} == {404}
    assert {one["response"]["body"]["error"]["code"] for one in errors.values()} == {"model_not_found"}
    assert (ended.request_counts.completed, ended.request_counts.failed) == (len(output), len(errors))
    with site.http(client.tenant_name) as session:
        page = session.get("/v1/organization/usage/completions", params={"start_time": since - 10}).json()
    used = [one for bucket in page["data"] for one in bucket["results"]]
    answered = [one["response"]["body"]["usage"] for one in output.values()]
    assert sum(one["output_tokens"] for one in used) == sum(one["completion_tokens"] for one in answered)
    assert sum(one["input_tokens"] for one in used) == sum(one["prompt_tokens"] for one in answered)


def test_batch_cancelled_keeps_answers_and_names_the_lines_that_did_not_run(site: Site, client: openai.OpenAI) -> None:
    site.engine.pause, before = 0.2, len(site.engine.requests)
    batch = submit(client, jsonl(*(line(number, prompt="abcdefgh") for number in range(400))))
    until(client, batch.id, "in_progress")
    until_begun(site, before)
    assert client.batches.cancel(batch.id).status == "cancelling"
    ended = until(client, batch.id, *ENDS)
    assert ended.status == "cancelled"
    assert ended.cancelled_at
    done, not_run = lines_of(client, ended.output_file_id), lines_of(client, ended.error_file_id)
    assert len(done) + len(not_run) == 400
    assert not done.keys() & not_run.keys()
    assert done
    assert {one["error"]["code"] for one in not_run.values()} == {"batch_cancelled"}
    assert {one["response"] for one in not_run.values()} == {None}
    assert client.batches.cancel(batch.id).status == "cancelled"


def test_batch_ends_with_the_rights_of_its_key(site: Site, client: openai.OpenAI) -> None:
    async def key_and_revoke(id: str | None = None) -> tuple[str, str]:
        async with open_tenants(site.settings) as tenants:
            account = await tenants.account(client.tenant_name)
            if id is not None:
                await account.keys.revoke(id)
                return id, ""
            made, secret = await account.keys.create(KeyRequest(scopes=frozenset({"inference"})))
            return made.id, secret

    id, secret = asyncio.run(key_and_revoke())
    site.engine.pause = 0.2
    with openai.OpenAI(base_url=f"{site.url}/v1", api_key=secret) as other:
        batch = submit(other, jsonl(*(line(number, prompt="abcdefgh") for number in range(400))))
        until(other, batch.id, "in_progress")
    asyncio.run(key_and_revoke(id))
    ended = until(client, batch.id, *ENDS)
    assert ended.status == "cancelled"
    assert ended.errors
    assert ended.errors.data
    assert ended.errors.data[0].code == "authority_ended"
    codes = {one["error"]["code"] for one in lines_of(client, ended.error_file_id).values()}
    assert codes == {"authority_ended"}


def test_batch_waits_where_a_line_cannot_run_now(site: Site, client: openai.OpenAI) -> None:
    asked: list[str] = []

    def overloaded_at_first(request: Any) -> list[int | EngineFault]:
        asked.append(request.id)
        if len(asked) <= 2:
            return [EngineFault("engine_overloaded", "busy", retry_after=1)]
        return [*b"well", EOS]

    site.engine.script = overloaded_at_first
    ended = until(client, submit(client, jsonl(line(1))).id, *ENDS)
    assert ended.status == "completed"
    assert len(asked) == 3
    [answer] = lines_of(client, ended.output_file_id).values()
    assert answer["response"]["body"]["choices"][0]["text"] == "well"


def test_files_are_the_tenants_alone(site: Site, client: openai.OpenAI) -> None:
    file = client.files.create(file=("mine.jsonl", jsonl(line(1))), purpose="batch")
    assert (file.bytes, file.filename, file.purpose) == (len(jsonl(line(1))), "mine.jsonl", "batch")
    assert client.files.retrieve(file.id).id == file.id
    assert [one.id for one in client.files.list()] == [file.id]
    batch = submit(client, jsonl(line(1)))
    with site.openai("globex") as other:
        for attempt in (other.files.retrieve, other.files.content, other.files.delete):
            with pytest.raises(openai.NotFoundError):
                attempt(file.id)
        with pytest.raises(openai.NotFoundError):
            other.batches.create(input_file_id=file.id, endpoint=TEXT, completion_window="24h")
        for of_batch in (other.batches.retrieve, other.batches.cancel):
            with pytest.raises(openai.NotFoundError):
                of_batch(batch.id)
        assert file.id not in [one.id for one in other.files.list()]
    assert client.files.delete(file.id).deleted
    with pytest.raises(openai.NotFoundError):
        client.files.content(file.id)
    until(client, batch.id, *ENDS)


def test_file_that_a_batch_reads_stays(site: Site, client: openai.OpenAI) -> None:
    site.engine.pause = 0.2
    batch = submit(client, jsonl(*(line(number, prompt="abcdefgh") for number in range(200))))
    until(client, batch.id, "in_progress")
    with pytest.raises(openai.ConflictError) as refused:
        client.files.delete(batch.input_file_id)
    assert refused.value.code == "file_in_use"
    client.batches.cancel(batch.id)
    until(client, batch.id, *ENDS)
    assert client.files.delete(batch.input_file_id).deleted


@pytest.mark.parametrize(
    ("changes", "field"),
    [({"endpoint": "/v1/moderations"}, "endpoint"), ({"completion_window": "99d"}, "completion_window")],
)
def test_batch_with_wrong_parameters_is_refused(client: openai.OpenAI, changes: dict[str, Any], field: str) -> None:
    with pytest.raises(openai.BadRequestError) as refused:
        submit(client, jsonl(line(1)), **changes)
    assert refused.value.param == field


def test_file_of_another_purpose_or_without_content_is_refused(site: Site, client: openai.OpenAI) -> None:
    with pytest.raises(openai.BadRequestError) as refused:
        client.files.create(file=("a.jsonl", b"{}"), purpose="assistants")
    assert refused.value.param == "purpose"
    with site.http(client.tenant_name) as session:
        damaged = session.post(
            "/v1/files", content=b"--x\r\n", headers={"Content-Type": "multipart/form-data; boundary=x"}
        )
        assert (damaged.status_code, damaged.json()["error"]["code"]) == (400, "invalid_form")
        absent = session.post("/v1/files", data={"purpose": "batch"}, files={"other": b"x"})
        assert (absent.status_code, absent.json()["error"]["code"]) == (400, "invalid_form")
    assert httpx.get(f"{site.url}/v1/files").status_code == 401


@contextmanager
def later(site: Site, seconds: int) -> Iterator[None]:
    """The server's clock, so much later."""
    database = site.server.app.state.platform.database
    now = database.now
    database.now = lambda: now() + seconds * 1_000_000
    try:
        yield
    finally:
        database.now = now


def on_loop(site: Site, work: Coroutine[Any, Any, Any]) -> Any:
    return asyncio.run_coroutine_threadsafe(work, site.server.loop).result(120)


def test_batch_whose_window_ends_names_the_lines_that_did_not_run(site: Site, client: openai.OpenAI) -> None:
    site.engine.pause, before = 0.2, len(site.engine.requests)
    lines = jsonl(*(line(number, prompt="abcdefgh") for number in range(300)))
    batch = submit(client, lines, completion_window="1h")
    until(client, batch.id, "in_progress")
    until_begun(site, before)
    with later(site, 3601):
        ended = until(client, batch.id, *ENDS)
    assert ended.status == "expired"
    assert ended.expired_at
    done, not_run = lines_of(client, ended.output_file_id), lines_of(client, ended.error_file_id)
    assert done
    assert len(done) + len(not_run) == 300
    assert {one["error"]["code"] for one in not_run.values()} == {"batch_expired"}


def test_batch_end_is_an_event_for_webhooks(site: Site, client: openai.OpenAI) -> None:
    batch = submit(client, jsonl(line(1)))
    until(client, batch.id, "completed")
    with site.http(client.tenant_name) as session:
        [event] = session.get("/v1/events").json()["data"]
    assert (event["type"], event["data"]) == ("batch.completed", {"id": batch.id})


def test_files_expire_and_count_against_a_quota(site: Site, client: openai.OpenAI) -> None:
    kept = client.files.create(file=("a.jsonl", b"x" * 100), purpose="batch")
    short = client.files.create(
        file=("b.jsonl", b"x" * 100), purpose="batch", expires_after={"anchor": "created_at", "seconds": 3600}
    )
    assert short.expires_at == short.created_at + 3600
    files = site.server.app.state.programs.files
    with later(site, 3601):
        on_loop(site, files.expire())
    assert [one.id for one in client.files.list()] == [kept.id]
    with pytest.raises(openai.NotFoundError):
        client.files.content(short.id)
    with site.http("all-scopes") as admin:
        limit = f"/admin/tenants/{client.tenant_name}/limits/file_bytes"
        assert admin.put(limit, json={"value": 150}).status_code == 200
    with pytest.raises(openai.PermissionDeniedError) as refused:
        client.files.create(file=("c.jsonl", b"x" * 100), purpose="batch")
    assert refused.value.code == "storage_quota_reached"
    client.files.delete(kept.id)
    client.files.create(file=("c.jsonl", b"x" * 100), purpose="batch")


def test_batch_of_a_suspended_tenant_waits_until_it_is_resumed(site: Site, client: openai.OpenAI) -> None:
    site.engine.pause = 0.1
    batch = submit(client, jsonl(*(line(number, prompt="abcdefgh") for number in range(200))))
    until(client, batch.id, "in_progress")
    with site.http("all-scopes") as admin:
        tenant = f"/admin/tenants/{client.tenant_name}"
        assert admin.patch(tenant, json={"suspended": True}).status_code == 200
        begun = -1
        while begun != len(site.engine.requests):  # the batch looks at its owner's rights now and then
            begun = len(site.engine.requests)
            time.sleep(1.5)
        assert begun < 200
        site.engine.pause = 0.0
        assert admin.patch(tenant, json={"suspended": False}).status_code == 200
    ended = until(client, batch.id, *ENDS)
    assert (ended.status, ended.request_counts and ended.request_counts.completed) == ("completed", 200)


def test_batch_of_responses_has_responses_as_answers(client: openai.OpenAI) -> None:
    lines = [{"custom_id": "a", "method": "POST", "url": "/v1/responses", "body": {"model": "tiny", "input": "hello"}}]
    done = until(client, submit(client, jsonl(*lines), "/v1/responses").id, *ENDS)
    assert done.status == "completed"
    answer = lines_of(client, done.output_file_id)["a"]["response"]["body"]
    assert (answer["object"], answer["status"], answer["service_tier"]) == ("response", "completed", "batch")
    assert answer["output"][0]["content"][0]["text"].startswith("user: hello")
