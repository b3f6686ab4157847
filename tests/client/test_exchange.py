"""Calls that are tried again, calls that are not, and the fields of a refusal: the same for both clients."""

from __future__ import annotations

import asyncio
import subprocess
import sys
from collections.abc import Callable
from typing import Any

import httpx
import pytest

import loramux_client
from loramux_client import (
    ApiError,
    AsyncClient,
    Client,
    ClientError,
    Conflict,
    ConnectionFailed,
    InvalidRequest,
    LimitReached,
    NotAuthenticated,
    NotFound,
    NotPermitted,
    RetryPolicy,
    ServerFailed,
    UnexpectedResponse,
)
from loramux_client.adapters import get, list_adapters, promote
from loramux_client.client import create_webhook
from loramux_client.flow import AsyncRunner, Call, Runnable, SyncRunner, Wait

ADAPTER = {
    "id": "adapter_1",
    "name": "acme/a",
    "revision": 2,
    "digest": "sha256:0",
    "state": "ready",
    "rank": 4,
    "size_bytes": 1,
    "created_at": 1,
    "something_new": True,
}
Handler = Callable[[httpx.Request], httpx.Response]


class Script:
    """Answers one after the other; a class of exception is raised."""

    def __init__(self, *answers: Any) -> None:
        self.answers = list(answers)
        self.asked: list[httpx.Request] = []

    def __call__(self, request: httpx.Request) -> httpx.Response:
        self.asked.append(request)
        answer = self.answers.pop(0)
        if isinstance(answer, type):
            raise answer("broken", request=request)
        status, body, headers = (*answer, {})[:3]
        return httpx.Response(status, json=body, headers=headers)


def run_sync(script: Handler, flow: Callable[[], Runnable[Any]]) -> tuple[Any, list[float]]:
    waits: list[float] = []

    class Instant(SyncRunner):
        def _perform(self, step: Any) -> Any:
            return waits.append(step.seconds) if isinstance(step, Wait) else super()._perform(step)

    with httpx.Client(base_url="http://harness", transport=httpx.MockTransport(script)) as http:
        return Instant(http, RetryPolicy()).run(flow()), waits


def run_async(script: Handler, flow: Callable[[], Runnable[Any]]) -> tuple[Any, list[float]]:
    waits: list[float] = []

    class Instant(AsyncRunner):
        async def _perform(self, step: Any) -> Any:
            return waits.append(step.seconds) if isinstance(step, Wait) else await super()._perform(step)

    async def run() -> Any:
        async with httpx.AsyncClient(base_url="http://harness", transport=httpx.MockTransport(script)) as http:
            return await Instant(http, RetryPolicy()).run(flow())

    return asyncio.run(run()), waits


both = pytest.mark.parametrize("run", [run_sync, run_async], ids=["sync", "async"])
Run = Callable[[Handler, Callable[[], Runnable[Any]]], tuple[Any, list[float]]]


@both
def test_response_with_new_fields_is_decoded(run: Run) -> None:
    script = Script((200, {"data": [ADAPTER]}))
    (adapter,), waits = run(script, list_adapters)
    assert (adapter.name, adapter.revision, adapter.aliases, waits) == ("acme/a", 2, [], [])


@both
def test_retry_follows_retry_after_and_backs_off(run: Run) -> None:
    script = Script((429, {}, {"Retry-After": "7"}), (503, {}), httpx.ConnectError, httpx.ReadTimeout, (200, ADAPTER))
    adapter, waits = run(script, lambda: get("acme/a"))
    assert (adapter.id, waits) == ("adapter_1", [7.0, 1.0, 2.0, 4.0])
    assert {request.url.raw_path for request in script.asked} == {b"/v1/adapters/acme%2Fa"}


@both
def test_retry_of_a_change_keeps_its_idempotency_key(run: Run) -> None:
    script = Script(httpx.ReadError, (502, {}), (200, ADAPTER))
    run(script, lambda: promote("a", 2, if_match='"1"'))
    keys = {request.headers["idempotency-key"] for request in script.asked}
    assert (len(script.asked), len(keys)) == (3, 1)
    assert {request.headers["if-match"] for request in script.asked} == {'"1"'}
    other = Script((200, ADAPTER))
    run(other, lambda: promote("a", 2))
    assert other.asked[0].headers["idempotency-key"] not in keys


@both
def test_retry_is_not_tried_for_calls_that_are_not_repeatable(run: Run) -> None:
    for unknown, raised in ((httpx.ReadError, ConnectionFailed), ((500, {}), ServerFailed)):
        script = Script(unknown)
        with pytest.raises(raised):
            run(script, lambda: create_webhook("https://hook.example"))
        assert len(script.asked) == 1
    made = {"id": "w", "url": "u", "events": [], "enabled": True, "created_at": 1}
    script = Script(httpx.ConnectError, (429, {}, {"Retry-After": "1"}), (201, made))
    assert run(script, lambda: create_webhook("https://hook.example"))[0].id == "w"


@both
@pytest.mark.parametrize(
    ("status", "kind"),
    [
        (400, InvalidRequest),
        (401, NotAuthenticated),
        (403, NotPermitted),
        (404, NotFound),
        (409, Conflict),
        (412, Conflict),
        (422, InvalidRequest),
    ],
)
def test_api_error_carries_status_code_param_and_request_id(run: Run, status: int, kind: type[ApiError]) -> None:
    error = {"message": "`a` is no name", "type": "x", "param": "name", "code": "invalid_adapter_name"}
    script = Script((status, {"error": error}, {"x-request-id": "r1"}))
    with pytest.raises(kind, match="is no name") as told:
        run(script, lambda: get("a"))
    assert type(told.value) is kind
    assert (told.value.status, told.value.code, told.value.param) == (status, "invalid_adapter_name", "name")
    assert told.value.request_id == "r1"
    assert len(script.asked) == 1


@both
def test_api_error_of_an_operators_route_carries_its_detail(run: Run) -> None:
    problem = {"type": "about:blank", "title": "Conflict", "status": 409, "detail": "`a` is in use", "param": "name"}
    with pytest.raises(Conflict, match="`a` is in use") as told:
        run(Script((409, problem | {"code": "base_in_use"})), lambda: get("a"))
    assert (told.value.code, told.value.param) == ("base_in_use", "name")


@both
def test_retry_ends_when_it_cannot_help(run: Run) -> None:
    for headers in ({"x-should-retry": "false", "Retry-After": "1"}, {"Retry-After": "3600"}, {}):
        script = Script((429, {}, headers))
        with pytest.raises(LimitReached):
            run(script, lambda: get("a"))
        assert len(script.asked) == 1
    script = Script(*[(503, {})] * 5)
    with pytest.raises(ServerFailed):
        run(script, lambda: get("a"))
    assert len(script.asked) == 5
    with pytest.raises(ConnectionFailed, match="http://harness/"):
        run(Script(*[httpx.ConnectError] * 5), lambda: get("a"))


@both
def test_response_of_another_server_raises_unexpected_response(run: Run) -> None:
    with pytest.raises(UnexpectedResponse, match="/v1/adapters"):
        run(Script((200, ["hello"])), list_adapters)
    with pytest.raises(ServerFailed, match="500"):
        run(lambda _: httpx.Response(500, text="<html>"), lambda: Call(method="POST", path="/x", answer=int))


def test_client_reads_url_and_key_from_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LORAMUX_URL", "http://elsewhere:1/v1/")
    monkeypatch.setenv("LORAMUX_API_KEY", "sk-lm-x")
    script = Script((200, ADAPTER), (200, ADAPTER))
    with Client(transport=httpx.MockTransport(script)) as client:
        assert client.adapters.get("a").name == "acme/a"
    with Client("http://here", api_key="sk-lm-y", transport=httpx.MockTransport(script)) as client:
        client.adapters.get("a")
    assert [str(request.url) for request in script.asked] == [
        "http://elsewhere:1/v1/adapters/a",
        "http://here/v1/adapters/a",
    ]
    assert [request.headers["authorization"] for request in script.asked] == ["Bearer sk-lm-x", "Bearer sk-lm-y"]


def test_async_client_has_the_same_methods() -> None:
    async def ask() -> str:
        async with AsyncClient(transport=httpx.MockTransport(Script((200, ADAPTER)))) as client:
            return (await client.adapters.get("a")).name

    assert asyncio.run(ask()) == "acme/a"


def test_errors_are_all_exported() -> None:
    from loramux_client import errors

    kinds = {name for name, one in vars(errors).items() if isinstance(one, type) and issubclass(one, ClientError)}
    assert kinds <= set(loramux_client.__all__)
    assert all(hasattr(loramux_client, name) for name in loramux_client.__all__)


def test_client_imports_neither_torch_nor_sql() -> None:
    heavy = "{'torch', 'sqlalchemy', 'litestar', 'transformers'}"
    code = f"import sys, loramux_client; sys.exit(', '.join({heavy} & set(sys.modules)) or None)"
    ended = subprocess.run([sys.executable, "-c", code], check=False, capture_output=True, text=True)
    assert (ended.returncode, ended.stderr) == (0, "")


def test_retries_end_after_a_minute_of_pauses_although_attempts_are_left() -> None:
    refused = (503, {"error": {"message": "try again", "code": "validation_unavailable"}}, {"Retry-After": "25"})
    script = Script(*[refused] * 5)
    with pytest.raises(ServerFailed, match="try again"):
        run_sync(script, lambda: get("acme/a"))
    assert len(script.asked) == 3, "25 s twice, and a third pause would end after 75"
