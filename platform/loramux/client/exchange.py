"""A call and its answer: tried again where that is safe and helps, decoded, or raised as the server's own error."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, TypeVar

import httpx
import msgspec

from loramux.client.errors import ConnectionFailed, WrongAnswer, error_of
from loramux.client.flow import Call, Flow, Send, Wait

T = TypeVar("T")

NOT_SENT = (httpx.ConnectError, httpx.ConnectTimeout, httpx.PoolTimeout)
"""The server has not seen the request."""
NOT_NOW = frozenset({429, 503})
"""The server has seen the request and done nothing of it; of a 429, only Retry-After says that waiting helps."""
PASSING = frozenset({500, 502, 504})


@dataclass(frozen=True, slots=True)
class Patience:
    """How often and how long."""

    retries: int = 4
    first: float = 0.5
    """Seconds before the second attempt; twice as many before each further one, unless the server says how many."""
    longest: float = 30.0
    """A server that wants more is not waited for."""

    def pause(self, retried: int) -> float:
        """Seconds before the next attempt."""
        return min(self.first * 2.0**retried, self.longest)


def exchange(call: Call[T], patience: Patience) -> Flow[T]:
    """Send the call until it is answered for good. Raises ApiError, ConnectionFailed, WrongAnswer."""
    for retried in range(patience.retries + 1):
        last = retried == patience.retries
        try:
            response: httpx.Response = yield Send(call)
        except httpx.TransportError as error:
            if last or not (call.repeatable or isinstance(error, NOT_SENT)):
                raise ConnectionFailed(_unreachable(error)) from error
            yield Wait(patience.pause(retried))
            continue
        if response.is_success:
            return _decoded(response, call.answer)
        pause = _pause(response, call, patience.pause(retried))
        if last or pause is None or pause > patience.longest:
            raise error_of(response)
        yield Wait(pause)
    raise AssertionError("the last attempt ends in an answer or an error")


def _pause(response: httpx.Response, call: Call[Any], otherwise: float) -> float | None:
    """Seconds to wait before trying again; None where that does not help."""
    status, told = response.status_code, response.headers.get("retry-after")
    passes = status in NOT_NOW or (call.repeatable and status in PASSING)
    if not passes or response.headers.get("x-should-retry") == "false" or (status == 429 and told is None):
        return None
    try:
        return otherwise if told is None else max(0.0, float(told))
    except ValueError:
        return otherwise


def _decoded(response: httpx.Response, answer: type[T]) -> T:
    try:
        return msgspec.json.decode(response.content, type=answer)
    except msgspec.DecodeError as error:
        where = f"{response.request.method} {response.request.url}"
        raise WrongAnswer(f"{where} did not answer as a loramux server does: {error}") from error


def _unreachable(error: httpx.TransportError) -> str:
    url = error.request.url.copy_with(path="/", query=None)
    return f"no loramux server answers at {url}: {str(error) or type(error).__name__}"
