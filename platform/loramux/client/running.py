"""Who runs flows: the same steps, performed one after the other or awaited."""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import Callable, Coroutine
from functools import update_wrapper
from importlib.metadata import version
from typing import Any, Generic, ParamSpec, TypeVar, overload

import httpx
import msgspec

from loramux.client.exchange import Patience, exchange
from loramux.client.flow import Call, Do, Runnable, Send, Step, Wait

P = ParamSpec("P")
T = TypeVar("T")
R = TypeVar("R", "SyncRunner", "AsyncRunner")

DEFAULT_URL = "http://127.0.0.1:8000"
TIMEOUT = httpx.Timeout(30, read=120)


class SyncRunner:
    """Performs every step before the next."""

    def __init__(self, http: httpx.Client, patience: Patience) -> None:
        self._http = http
        self._patience = patience

    def run(self, flow: Runnable[T]) -> T:
        """The flow's result. Raises what its steps raise."""
        steps = iter(flow)
        try:
            step = next(steps)
            while True:
                try:
                    result = self._perform(step)
                except Exception as error:  # whatever it is, the flow may know what to do
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
                return self.run(exchange(step, self._patience))
            case Send():
                return self._http.request(**request_of(step.call))
            case Wait():
                return time.sleep(step.seconds)
            case Do():
                return step.act()


class AsyncRunner:
    """Awaits every step; what blocks runs on a thread."""

    def __init__(self, http: httpx.AsyncClient, patience: Patience) -> None:
        self._http = http
        self._patience = patience

    async def run(self, flow: Runnable[T]) -> T:
        """The flow's result. Raises what its steps raise."""
        steps = iter(flow)
        try:
            step = next(steps)
            while True:
                try:
                    result = await self._perform(step)
                except Exception as error:  # whatever it is, the flow may know what to do
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
                return await self.run(exchange(step, self._patience))
            case Send():
                return await self._http.request(**request_of(step.call))
            case Wait():
                return await asyncio.sleep(step.seconds)
            case Do():
                return await asyncio.to_thread(step.act)


class Resource(Generic[R]):
    """A part of the API, in the hands of a runner."""

    def __init__(self, runner: R) -> None:
        self._runner: R = runner


class method(Generic[P, T]):  # noqa: N801  used like a decorator
    """A flow as a method: of a SyncRunner's resource it returns a T, of an AsyncRunner's an awaitable of one."""

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
    """httpx's arguments."""
    request: dict[str, Any] = {"method": call.method, "url": call.path, "headers": dict(call.headers)}
    if params := {name: value for name, value in call.params.items() if value is not None}:
        request["params"] = params
    if call.content is not None:
        request["content"] = call.content
    elif call.body is not None:
        request["content"] = msgspec.json.encode(call.body)
        request["headers"]["Content-Type"] = "application/json"
    return request


def connection(url: str | None, api_key: str | None) -> dict[str, Any]:
    """httpx's arguments for a client; what is not given is taken from LORAMUX_URL and LORAMUX_API_KEY."""
    url = url or os.environ.get("LORAMUX_URL") or DEFAULT_URL
    key = api_key or os.environ.get("LORAMUX_API_KEY") or ""
    headers = {"User-Agent": f"loramux-client/{version('loramux')}"}
    if key:
        headers["Authorization"] = f"Bearer {key}"
    return {"base_url": url.rstrip("/").removesuffix("/v1"), "headers": headers, "timeout": TIMEOUT}
