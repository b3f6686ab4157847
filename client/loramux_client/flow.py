"""Flows: the client's calls, written once for the synchronous and the asynchronous client.

A flow is a generator of steps: a call of the API, one attempt at a call, a pause, or a blocking function. A runner
performs the steps (`SyncRunner`) or awaits them (`AsyncRunner`) and sends each result back into the generator. Flows
compose with `yield from`:

def roll_out(name: str, revision: int) -> Flow[Adapter]:
    yield from canary(name, revision, percent=5)
    yield Wait(600)
    return (yield from promote(name, revision))

Client().run(roll_out("support", 4))
await AsyncClient().run(roll_out("support", 4))
"""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import Callable, Coroutine, Generator, Mapping
from dataclasses import dataclass, field
from functools import update_wrapper
from typing import Any, Generic, ParamSpec, Protocol, TypeVar, cast, overload
from urllib.parse import quote

import httpx
import msgspec

from loramux_client.errors import ClientError, ConnectionFailed, UnexpectedResponse, error_of
from loramux_client.objects import Listing

P = ParamSpec("P")
T = TypeVar("T")
T_co = TypeVar("T_co", covariant=True)
R = TypeVar("R", "SyncRunner", "AsyncRunner")

VERSION = "0.2.0"
DEFAULT_URL = "http://127.0.0.1:8000"
TIMEOUT = httpx.Timeout(30, read=120)
NOT_SENT = (httpx.ConnectError, httpx.ConnectTimeout, httpx.PoolTimeout)
"""Errors after which the server has certainly not received the request."""
NOT_PROCESSED = frozenset({429, 503})
"""Statuses of requests that the server has refused without an effect. A 429 is only retried if it has Retry-After."""
TRANSIENT = frozenset({500, 502, 504})


@dataclass(frozen=True, slots=True, kw_only=True)
class Call(Generic[T]):
    """One request of the API and the type of its answer. A call is also the shortest flow."""

    method: str
    path: str
    answer: type[T]
    """Type of the answer. `bytes`: the answer's body, unchanged."""
    params: Mapping[str, Any] = field(default_factory=dict)
    """Query parameters. Parameters that are None are left out."""
    body: object = None
    """Body that is sent as JSON."""
    content: bytes | None = None
    """Body that is sent unchanged."""
    headers: Mapping[str, str] = field(default_factory=dict)
    repeatable: bool = False
    """True if sending the call twice has the same effect as sending it once."""

    def __iter__(self) -> Generator[Step, Any, T]:
        """Yield the call, and return its answer."""
        return (yield self)


@dataclass(frozen=True, slots=True)
class Send:
    """One attempt at a call. The result is httpx's response, and the error httpx.TransportError."""

    call: Call[Any]


@dataclass(frozen=True, slots=True)
class Wait:
    """A pause of `seconds` seconds."""

    seconds: float


@dataclass(frozen=True, slots=True)
class Block:
    """A blocking function, such as reading a file."""

    function: Callable[[], Any]


Step = Call[Any] | Send | Wait | Block

Flow = Generator[Step, Any, T]
"""Steps of a flow that returns a T."""


class Runnable(Protocol[T_co]):
    """A flow or a call."""

    def __iter__(self) -> Generator[Step, Any, T_co]: ...


def read(path: str, answer: type[T], **params: Any) -> Call[T]:
    """Return a GET, which may be sent twice."""
    return Call(method="GET", path=path, answer=answer, params=params, repeatable=True)


def read_list(path: str, answer: type[Listing[T]], **params: Any) -> Flow[list[T]]:
    """Return the objects of a list, or of one page of a list."""
    return (yield from read(path, answer, **params)).data


def item_path(collection: str, id: str) -> str:
    """Return the path of one object of a collection."""
    return f"{collection}/{quote(id, safe='')}"


def poll(
    get: Callable[[], Runnable[T]], is_over: Callable[[T], bool], pause: float, longest_pause: float | None = None
) -> Flow[T]:
    """Poll until the answer is final, and return it. The pause doubles up to `longest`, if this is given."""
    while True:
        found = yield from get()
        if is_over(found):
            return found
        yield Wait(pause)
        pause = pause if longest_pause is None else min(2 * pause, longest_pause)


@dataclass(frozen=True, slots=True)
class RetryPolicy:
    """The number of retries of a call, and the waits between them."""

    retries: int = 4
    first_pause: float = 0.5
    """Seconds before the first retry. The pause doubles with each retry. A server's Retry-After has priority."""
    max_pause: float = 30.0
    """Longest pause, in seconds. If the server requires a longer pause, the call fails immediately."""
    max_total: float = 60.0
    """Seconds of failed attempts and pauses after which the call fails, even if retries are left."""

    def pause_before(self, retry: int) -> float:
        """Return the seconds before the retry number `retry`, counted from 0."""
        return min(self.first_pause * 2.0**retry, self.max_pause)


def send_with_retries(call: Call[T], policy: RetryPolicy) -> Flow[T]:
    """Send the call until it succeeds or a retry cannot help. Raises ApiError, ConnectionFailed, UnexpectedResponse."""
    spent = 0.0
    for retry in range(policy.retries + 1):
        last, began = retry == policy.retries, time.monotonic()
        pause: float | None = policy.pause_before(retry)
        failure: ClientError
        try:
            response: httpx.Response = yield Send(call)
        except httpx.TransportError as error:
            failure = ConnectionFailed(_unreachable(error))
            failure.__cause__ = error
            if not (call.repeatable or isinstance(error, NOT_SENT)):
                pause = None
        else:
            if response.is_success:
                return _decode(response, call.answer)
            failure = error_of(response)
            pause = _retry_pause(response, call, policy.pause_before(retry))
        if last or pause is None or pause > policy.max_pause:
            raise failure
        spent += time.monotonic() - began + pause
        if spent > policy.max_total:
            raise failure
        yield Wait(pause)
    raise AssertionError("the last attempt returns or raises")


class SyncRunner:
    """Performs the steps of a flow one after the other."""

    def __init__(self, http: httpx.Client, retry: RetryPolicy) -> None:
        self._http = http
        self._retry = retry

    def run(self, flow: Runnable[T]) -> T:
        """Return the flow's result. Raises the errors of its steps."""
        steps = iter(flow)
        try:
            step = next(steps)
            while True:
                try:
                    result = self._perform(step)
                except Exception as error:  # the flow decides which errors it handles
                    step = steps.throw(error)
                else:
                    step = steps.send(result)
        except StopIteration as end:
            return end.value

    def close(self) -> None:
        """Close every connection."""
        self._http.close()

    def _perform(self, step: Step) -> Any:
        match step:
            case Call():
                return self.run(send_with_retries(step, self._retry))
            case Send():
                return self._http.request(**request_of(step.call))
            case Wait():
                return time.sleep(step.seconds)
            case Block():
                return step.function()


class AsyncRunner:
    """Awaits the steps of a flow; blocking functions run on a thread."""

    def __init__(self, http: httpx.AsyncClient, retry: RetryPolicy) -> None:
        self._http = http
        self._retry = retry

    async def run(self, flow: Runnable[T]) -> T:
        """Return the flow's result. Raises the errors of its steps."""
        steps = iter(flow)
        try:
            step = next(steps)
            while True:
                try:
                    result = await self._perform(step)
                except Exception as error:  # the flow decides which errors it handles
                    step = steps.throw(error)
                else:
                    step = steps.send(result)
        except StopIteration as end:
            return end.value

    async def close(self) -> None:
        """Close every connection."""
        await self._http.aclose()

    async def _perform(self, step: Step) -> Any:
        match step:
            case Call():
                return await self.run(send_with_retries(step, self._retry))
            case Send():
                return await self._http.request(**request_of(step.call))
            case Wait():
                return await asyncio.sleep(step.seconds)
            case Block():
                return await asyncio.to_thread(step.function)


class Resource(Generic[R]):
    """A group of the API's routes, called through a runner."""

    def __init__(self, runner: R) -> None:
        self._runner: R = runner


class method(Generic[P, T]):  # noqa: N801  used like a decorator
    """A flow as a method. On the resource of a SyncRunner the method returns a T, on that of an AsyncRunner an
    awaitable of a T.
    """

    def __init__(self, flow: Callable[P, Runnable[T]]) -> None:
        self._flow = flow
        self.__doc__ = flow.__doc__

    @overload
    def __get__(self, resource: Resource[SyncRunner], owner: Any = None) -> Callable[P, T]: ...
    @overload
    def __get__(self, resource: Resource[AsyncRunner], owner: Any = None) -> Callable[P, Coroutine[Any, Any, T]]: ...
    def __get__(self, resource: Resource[Any], owner: Any = None) -> Callable[P, Any]:
        def call(*args: P.args, **kwargs: P.kwargs) -> Any:
            return resource._runner.run(self._flow(*args, **kwargs))

        return update_wrapper(call, self._flow)


def request_of(call: Call[Any]) -> dict[str, Any]:
    """Return the arguments of httpx's `request`."""
    request: dict[str, Any] = {"method": call.method, "url": call.path, "headers": dict(call.headers)}
    if params := {name: value for name, value in call.params.items() if value is not None}:
        request["params"] = params
    if call.content is not None:
        request["content"] = call.content
    elif call.body is not None:
        request["content"] = msgspec.json.encode(call.body)
        request["headers"]["Content-Type"] = "application/json"
    return request


def connection_options(url: str | None, api_key: str | None) -> dict[str, Any]:
    """Return the arguments of an httpx client; LORAMUX_URL and LORAMUX_API_KEY are the defaults."""
    url = url or os.environ.get("LORAMUX_URL") or DEFAULT_URL
    key = api_key or os.environ.get("LORAMUX_API_KEY") or ""
    headers = {"User-Agent": f"loramux-client/{VERSION}"}
    if key:
        headers["Authorization"] = f"Bearer {key}"
    return {"base_url": url.rstrip("/").removesuffix("/v1"), "headers": headers, "timeout": TIMEOUT}


def _retry_pause(response: httpx.Response, call: Call[Any], default: float) -> float | None:
    """Return the seconds before the next attempt, or None if a retry cannot help."""
    status, retry_after = response.status_code, response.headers.get("retry-after")
    retryable = status in NOT_PROCESSED or (call.repeatable and status in TRANSIENT)
    if not retryable or response.headers.get("x-should-retry") == "false" or (status == 429 and retry_after is None):
        return None
    try:
        return default if retry_after is None else max(0.0, float(retry_after))
    except ValueError:
        return default


def _decode(response: httpx.Response, answer: type[T]) -> T:
    if answer is bytes:
        return cast("T", response.content)
    try:
        return msgspec.json.decode(response.content, type=answer)
    except msgspec.DecodeError as error:
        where = f"{response.request.method} {response.request.url}"
        raise UnexpectedResponse(f"{where} did not answer as a loramux server does: {error}") from error


def _unreachable(error: httpx.TransportError) -> str:
    url = error.request.url.copy_with(path="/", query=None)
    return f"no loramux server answers at {url}: {str(error) or type(error).__name__}"
