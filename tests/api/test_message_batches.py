"""/v1/messages/batches through Anthropic's client: the batches of /v1/batches in another shape, with the same bill."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Iterator
from typing import Any

import anthropic
import pytest
from anthropic.types.messages import MessageBatch
from scripted_engine import EOS
from site_fixture import Site

from loramux.engine.messages import ServiceClass
from loramux.server.platform import open_tenants

HELLO = [{"role": "user", "content": "hello"}]
PATIENCE = 120
OTHER_LINE = b'{"custom_id": "a", "url": "/v1/completions", "body": {}}'


@pytest.fixture
def client(site: Site) -> Iterator[anthropic.Anthropic]:
    """The client of a new tenant, which has no other test's batches."""
    name = f"messenger{time.monotonic_ns()}"

    async def make() -> str:
        async with open_tenants(site.settings) as tenants:
            await tenants.create(name)
            return (await tenants.create_key(name))[1]

    site.keys[name] = asyncio.run(make())
    with anthropic.Anthropic(base_url=site.url, api_key=site.keys[name], max_retries=0, timeout=PATIENCE) as made:
        made.tenant_name = name
        yield made


def request(number: int, **params: Any) -> Any:
    given = {"model": "tiny", "max_tokens": 100, "messages": [{"role": "user", "content": f"line {number}"}]}
    return {"custom_id": f"id-{number}", "params": given | params}


def ended(client: anthropic.Anthropic, id: str) -> MessageBatch:
    deadline = time.monotonic() + PATIENCE
    while (batch := client.messages.batches.retrieve(id)).processing_status != "ended":
        assert time.monotonic() < deadline, batch
        time.sleep(0.05)
    return batch


def run(client: anthropic.Anthropic, *requests: Any) -> tuple[MessageBatch, dict[str, Any]]:
    batch = ended(client, client.messages.batches.create(requests=requests).id)
    found = list(client.messages.batches.results(batch.id))
    results = {one.custom_id: one.result for one in found}
    assert len(results) == len(found), "a custom_id is there twice"
    return batch, results


def counts(batch: MessageBatch) -> dict[str, int]:
    return {name: count for name, count in batch.request_counts.model_dump().items() if count}


def test_batch_answers_every_request_and_bills_it_as_a_batch(site: Site, client: anthropic.Anthropic) -> None:
    since, before = int(time.time()), len(site.engine.requests)
    made = client.messages.batches.create(requests=[request(number) for number in range(300)])
    assert (made.type, made.processing_status, made.results_url) == ("message_batch", "in_progress", None)
    assert counts(made) == {"processing": 300}
    assert (made.expires_at - made.created_at).total_seconds() == 24 * 3600
    batch = ended(client, made.id)
    assert counts(batch) == {"succeeded": 300}
    assert batch.ended_at
    results = {one.custom_id: one.result for one in client.messages.batches.results(batch.id)}
    assert sorted(results) == sorted(f"id-{number}" for number in range(300))
    for number in range(300):
        result = results[f"id-{number}"]
        assert result.type == "succeeded"
        assert f"line {number}" in result.message.content[0].text
        assert (result.message.stop_reason, result.message.usage.service_tier) == ("end_turn", "batch")
    assert {one.service_class for one in site.engine.requests[before:]} == {ServiceClass.BATCH}
    with site.http(client.tenant_name) as http:
        ask = {"start_time": since - 10, "group_by": "batch"}
        page = http.get("/v1/organization/usage/completions", params=ask).json()
    [usage] = [one for bucket in page["data"] for one in bucket["results"]]
    tokens = sum(one.message.usage.output_tokens for one in results.values())
    assert (usage["batch"], usage["num_model_requests"], usage["output_tokens"]) == (True, 300, tokens)


def test_batch_of_messages_is_one_of_the_batches_and_its_result_that_of_messages(
    site: Site, client: anthropic.Anthropic
) -> None:
    batch, results = run(client, request(1, system="be brief"))
    whole = client.messages.create(**request(1, system="be brief")["params"])
    assert results["id-1"].message.content == whole.content
    with site.openai(client.tenant_name) as http:
        same = http.batches.retrieve(batch.id)
        assert (same.endpoint, same.status, same.request_counts.completed) == ("/v1/messages", "completed", 1)
        [line] = http.files.content(same.output_file_id).text.splitlines()
    assert json.loads(line)["response"]["body"]["content"] == [whole.content[0].model_dump(include={"type", "text"})]


@pytest.mark.parametrize(
    ("params", "kind", "code", "param"),
    [
        ({"temperature": 3}, "invalid_request_error", "invalid_value", "temperature"),
        ({"temprature": 1}, "invalid_request_error", "unknown_parameter", "temprature"),
        ({"stream": True}, "invalid_request_error", "invalid_value", "stream"),
        ({"service_tier": "flex"}, "invalid_request_error", "invalid_value", "service_tier"),
        ({"max_tokens": "many"}, "invalid_request_error", "invalid_value", "max_tokens"),
        ({"messages": []}, "invalid_request_error", "invalid_value", "messages"),
        ({"model": "absent"}, "not_found_error", "model_not_found", "model"),
        ({"model": "globex/theirs"}, "not_found_error", "model_not_found", "model"),
    ],
)
@pytest.mark.parametrize("alone", [False, True])
def test_request_that_cannot_be_answered_has_its_error_in_the_results_and_the_others_run(
    client: anthropic.Anthropic, params: dict[str, Any], kind: str, code: str, param: str, alone: bool
) -> None:
    batch, results = run(client, request(1, **params), *([] if alone else [request(2)]))
    assert counts(batch) == {"errored": 1} | ({} if alone else {"succeeded": 1})
    result = results["id-1"]
    assert (result.type, result.error.type, result.error.error.type) == ("errored", "error", kind)
    error = result.error.error.model_dump()
    assert (error["code"], error["param"]) == (code, param)
    assert alone or results["id-2"].type == "succeeded"


def test_prompt_that_is_too_long_is_said_in_anthropics_words(client: anthropic.Anthropic) -> None:
    _, results = run(client, request(1, messages=[{"role": "user", "content": "x" * 9000}]))
    assert results["id-1"].error.error.message.startswith("prompt is too long: ")


@pytest.mark.parametrize(
    ("requests", "param"),
    [
        ([], "requests"),
        ([request(1), request(1)], "requests[1].custom_id"),
        ([{"custom_id": "", "params": {}}], "requests[0].custom_id"),
        ([{"custom_id": "a"}], "requests[0].params"),
        ([{"custom_id": "a", "params": "x"}], "requests[0].params"),
    ],
)
def test_faulty_batch_is_refused_before_it_is_made(
    site: Site, client: anthropic.Anthropic, requests: list[Any], param: str
) -> None:
    with pytest.raises(anthropic.BadRequestError) as caught:
        client.messages.batches.create(requests=requests)
    error = caught.value.body["error"]
    assert (error["type"], error["param"]) == ("invalid_request_error", param)
    assert not client.messages.batches.list().data
    with site.openai(client.tenant_name) as http:
        assert not http.files.list().data, "the file of its requests is left"


def test_list_is_read_page_by_page_in_both_directions(site: Site, client: anthropic.Anthropic) -> None:
    ids = [client.messages.batches.create(requests=[request(number)]).id for number in range(5)][::-1]
    with site.openai(client.tenant_name) as http:
        file = http.files.create(file=("a", OTHER_LINE), purpose="batch")
        http.batches.create(input_file_id=file.id, endpoint="/v1/completions", completion_window="24h")
    assert [one.id for one in client.messages.batches.list(limit=2)] == ids, "the client follows has_more"
    page = client.messages.batches.list(limit=2, after_id=ids[1])
    assert ([one.id for one in page.data], page.has_more) == (ids[2:4], True)
    assert (page.first_id, page.last_id) == (ids[2], ids[3])
    back = client.messages.batches.list(limit=2, before_id=ids[3])
    assert ([one.id for one in back.data], back.has_more) == (ids[1:3], True)
    assert not client.messages.batches.list(limit=9, before_id=ids[3]).has_more
    with pytest.raises(anthropic.BadRequestError):
        client.messages.batches.list(before_id=ids[0], after_id=ids[1])


def test_cancelled_batch_gives_the_answers_so_far_and_says_canceled_of_the_others(
    site: Site, client: anthropic.Anthropic
) -> None:
    site.engine.pause = 0.2  # so that most lines are left, on a slow machine too
    before = len(site.engine.requests)
    made = client.messages.batches.create(requests=[request(number) for number in range(500)])
    deadline = time.monotonic() + PATIENCE
    while len(site.engine.requests) < before + 5:
        assert time.monotonic() < deadline, "no line runs"
        time.sleep(0.01)
    with pytest.raises(anthropic.BadRequestError, match="is in_progress"):
        client.messages.batches.delete(made.id)
    with pytest.raises(anthropic.BadRequestError, match="is in_progress"):
        list(read_results(client, made.id))
    canceled = client.messages.batches.cancel(made.id)
    assert (canceled.processing_status, bool(canceled.cancel_initiated_at)) == ("canceling", True)
    batch = ended(client, made.id)
    found = counts(batch)
    assert set(found) <= {"succeeded", "canceled"}
    assert sum(found.values()) == 500
    assert found["canceled"] > 0
    kinds = [one.result.type for one in client.messages.batches.results(made.id)]
    assert {kind: kinds.count(kind) for kind in set(kinds)} == found


def read_results(client: anthropic.Anthropic, id: str) -> Any:
    """The results' lines, asked for by their path: the client's own method refuses first."""
    return client.get(f"/v1/messages/batches/{id}/results", cast_to=str).splitlines()


def test_deleted_batch_is_gone_with_its_requests_and_results(site: Site, client: anthropic.Anthropic) -> None:
    batch, _ = run(client, request(1), request(2, temperature=3))
    deleted = client.messages.batches.delete(batch.id)
    assert (deleted.id, deleted.type) == (batch.id, "message_batch_deleted")
    with pytest.raises(anthropic.NotFoundError):
        client.messages.batches.retrieve(batch.id)
    with site.openai(client.tenant_name) as http:
        assert not http.files.list().data


def test_file_that_a_caller_uploaded_outlives_the_batch_that_is_deleted(
    site: Site, client: anthropic.Anthropic
) -> None:
    line = {"custom_id": "a", "url": "/v1/messages", "body": request(1)["params"]}
    with site.openai(client.tenant_name) as http:
        file = http.files.create(file=("a", json.dumps(line).encode()), purpose="batch")
        batch = http.batches.create(input_file_id=file.id, endpoint="/v1/messages", completion_window="24h")
        ended(client, batch.id)
        assert [one.result.type for one in client.messages.batches.results(batch.id)] == ["succeeded"]
        client.messages.batches.delete(batch.id)
        assert [one.id for one in http.files.list().data] == [file.id]


def test_batch_of_another_tenant_or_endpoint_is_not_found(site: Site, client: anthropic.Anthropic) -> None:
    batch, _ = run(client, request(1))
    with site.openai(client.tenant_name) as http:
        file = http.files.create(file=("a", OTHER_LINE), purpose="batch")
        other = http.batches.create(input_file_id=file.id, endpoint="/v1/completions", completion_window="24h")
    stranger = anthropic.Anthropic(base_url=site.url, api_key=site.keys["globex"], max_retries=0)
    for asker, id in ((stranger, batch.id), (client, other.id), (client, "batch_absent")):
        for ask in (asker.messages.batches.retrieve, asker.messages.batches.cancel, asker.messages.batches.delete):
            with pytest.raises(anthropic.NotFoundError) as caught:
                ask(id)
            assert caught.value.body["error"]["type"] == "not_found_error"


def test_params_with_line_breaks_stay_one_line(site: Site, client: anthropic.Anthropic) -> None:
    body = json.dumps({"requests": [request(1, system="a\nb")]}, indent=2).replace("\n", "\r\n")
    with site.http(client.tenant_name, content_type="application/json") as http:
        made = http.post("/v1/messages/batches", content=body).raise_for_status().json()
    assert counts(ended(client, made["id"])) == {"succeeded": 1}


def test_answer_that_is_larger_than_a_piece_of_a_file_is_read_whole(site: Site, client: anthropic.Anthropic) -> None:
    site.engine.script = lambda _: [*("\u00e9\n" * 30).encode(), EOS]
    _, results = run(client, *(request(number) for number in range(1500)))
    assert {one.message.content[0].text for one in results.values()} == {"\u00e9\n" * 30}
