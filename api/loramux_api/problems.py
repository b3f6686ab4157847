"""Errors as responses: OpenAI's shape with all four keys, and RFC 9457's under /admin.

One handler serves the whole tree of `loramux.common.errors`: each class defines a code, a status, and the seconds after
which a retry may succeed. Litestar's own errors (routing, parameters, body size) get the same shape. Every other
exception is a bug: its traceback is in the log, and the response has the request id.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from http import HTTPStatus
from typing import Any

import msgspec
from litestar import MediaType, Response
from litestar.exceptions import HTTPException
from litestar.types import ExceptionHandlersMap

from loramux.catalog.uploads.errors import WrongOffset
from loramux.common.errors import LoramuxError
from loramux.money.limits.errors import LimitReached
from loramux.serving.errors import GenerationFailed
from loramux_api.bodies import AnyRequest, ClientDisconnected
from loramux_api.headers import rate_headers, request_id, traceable_id

logger = logging.getLogger(__name__)


class ErrorObject(msgspec.Struct, kw_only=True):
    """An error as OpenAI's clients expect it: all four keys are always present."""

    message: str
    type: str
    param: str | None = None
    code: str | None = None


class ProblemDetails(msgspec.Struct, kw_only=True):
    """RFC 9457's members, and our `code` and `param`."""

    type: str = "about:blank"
    title: str
    status: int
    detail: str
    instance: str
    """Id of the request, as in `x-request-id`."""
    code: str | None = None
    param: str | None = None


class ErrorAnswer(msgspec.Struct):
    """The body of an error."""

    error: ErrorObject


_missing_parameter = re.compile(r"Missing required \w+ parameter '(?P<name>\w+)'")

INVALID, SERVER = "invalid_request_error", "server_error"
TYPES = {403: "permission_error", 429: "over_capacity_error", 500: SERVER, 503: SERVER}
"""OpenAI's `type` by status. All other statuses are INVALID."""

RETRY = "x-should-retry"
"""Header by which OpenAI's and Anthropic's clients learn that a repetition is of no use."""

OFFSET = "Upload-Offset"
"""Header with the offset at which a file continues."""

CLIENT_CLOSED_REQUEST = 499
"""Status that nginx uses for a request whose client has disconnected."""

ADMIN = "/admin"


@dataclass(frozen=True, slots=True)
class Problem:
    """An error and the form in which it is sent."""

    status: int
    error: ErrorObject
    retry_after: int | None = None
    headers: Mapping[str, str] = field(default_factory=dict)

    def all_headers(self) -> dict[str, str]:
        """Return `headers` and the headers that the status requires."""
        headers = dict(self.headers)
        if self.retry_after is not None:
            headers["Retry-After"] = str(self.retry_after)
        if self.status == 401:
            headers["WWW-Authenticate"] = "Bearer"
            headers[RETRY] = "false"  # agents wait minutes for another key to be found, unless they are told
        return headers

    def response(self, request: AnyRequest) -> Response[Any]:
        """Return the whole response: OpenAI's shape, or RFC 9457's under /admin."""
        headers = self.all_headers()
        if not request.url.path.startswith(ADMIN):
            answer = ErrorAnswer(self.error)
            return Response(answer, status_code=self.status, headers=headers, media_type=MediaType.JSON)
        details = ProblemDetails(
            title=HTTPStatus(self.status).phrase,
            status=self.status,
            detail=self.error.message,
            instance=f"urn:request:{request_id(request.scope)}",
            code=self.error.code,
            param=self.error.param,
        )
        return Response(details, status_code=self.status, headers=headers, media_type="application/problem+json")


def error_answer(error: LoramuxError) -> ErrorAnswer:
    """Return the body for an error in the middle of a stream, when the status has already been sent."""
    return ErrorAnswer(_of_error(error).error)


def problem_of(request: AnyRequest, error: Exception) -> Problem:
    """Return the form in which an error is sent. If the client gets only a public message, the error is logged: one
    line, or a traceback for a bug.
    """
    if isinstance(error, HTTPException) and error.status_code < 500:
        return _of_litestar(request, error)
    if not isinstance(error, LoramuxError):
        return _of_bug(request, error)
    if error.public_message is None:
        return _of_error(error)
    if error.status == HTTPStatus.INTERNAL_SERVER_ERROR:
        return _of_bug(request, error)
    logger.error("request %s: %s: %s", traceable_id(request.scope), type(error).__name__, error)
    return _of_error(error)


def _of_error(error: LoramuxError) -> Problem:
    kind, headers = TYPES.get(error.status, INVALID), {}
    match error:
        case LimitReached():
            kind, headers = error.kind, rate_headers(error.rate_limits)
            if error.retry_after is None:
                headers[RETRY] = "false"
        case WrongOffset():
            headers = {OFFSET: str(error.received)}
        case LoramuxError(code="server_draining"):
            headers = {"Connection": "close"}  # the next request must reach another server
    content = ErrorObject(message=error.public_message or error.message, type=kind, param=error.field, code=error.code)
    return Problem(error.status, content, error.retry_after, headers)


def _of_bug(request: AnyRequest, error: Exception) -> Problem:
    """Log the whole error, and give the client the request id, by which the log entry can be found."""
    id = request_id(request.scope)
    logger.error("request %s failed", traceable_id(request.scope), exc_info=error)
    return _of_error(
        GenerationFailed(f"The server had an error while processing your request. Its id is {id}; please report it.")
    )


def _of_litestar(request: AnyRequest, error: HTTPException) -> Problem:
    where = f"{request.method} {request.url.path[:200]}"
    param: str | None = None
    match error.status_code:
        case 404:
            message, code = f"Unknown request URL: {where}. Please check the URL for typos.", "unknown_url"
        case 405:
            message, code = f"Method not allowed: {where}.", "method_not_allowed"
        case 400:
            message, param, code = *_of_validation(error), "invalid_value"
        case status:
            message, code = error.detail, f"http_{status}"
    content = ErrorObject(message=message, type=INVALID if error.status_code < 500 else SERVER, param=param, code=code)
    return Problem(error.status_code, content)


def _of_validation(error: HTTPException) -> tuple[str, str | None]:
    """Return the fault that Litestar found in query and path parameters, or a missing body, and the field."""
    found = error.extra[0] if isinstance(error.extra, list) and error.extra else {}
    key = found.get("key")
    if key and found.get("source") == "header":
        key = key.replace("_", "-")  # arguments of handlers are named after headers
    if key == "data":
        return "The body is empty; send a JSON object.", None
    if key:
        return f"Invalid value for '{key}': {found['message']}.", key
    missing = _missing_parameter.search(error.detail)
    return error.detail, missing["name"] if missing else None


def _on_error(request: AnyRequest, error: Exception) -> Response[Any]:
    return problem_of(request, error).response(request)


def _on_disconnect(request: AnyRequest, _: ClientDisconnected) -> Response[Any]:
    logger.debug("request %s: the client left before it was answered", request_id(request.scope))
    return Response(None, status_code=CLIENT_CLOSED_REQUEST)


EXCEPTION_HANDLERS: ExceptionHandlersMap = {
    ClientDisconnected: _on_disconnect,
    LoramuxError: _on_error,
    HTTPException: _on_error,
    Exception: _on_error,
}
