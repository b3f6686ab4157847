"""Every refusal and every failure, as OpenAI's clients expect them: one shape, all four keys, and a status."""

from __future__ import annotations

import logging
import re
from dataclasses import dataclass
from typing import Any

from litestar import MediaType, Request, Response
from litestar.exceptions import HTTPException
from litestar.types import ExceptionHandlersMap

from loramux.gateway import GatewayError, GenerationFailed, InvalidRequest, OverCapacity, Unavailable
from loramux.registry import ModelNotFound, RegistryError, RevisionUnavailable
from loramux.tenants import (
    AlreadyExists,
    InvalidKey,
    NotFound,
    NotPermitted,
    StillNeeded,
    TenantsError,
    TenantSuspended,
)
from loramux.usage import InvalidQuery
from loramux_api.request_ids import request_id
from loramux_api.schemas.problems import ErrorAnswer, ErrorObject

logger = logging.getLogger(__name__)

_missing_parameter = re.compile(r"Missing required \w+ parameter '(?P<name>\w+)'")
INVALID, SERVER, PERMISSION = "invalid_request_error", "server_error", "permission_error"
OVER_CAPACITY = "over_capacity_error"


class Forbidden(GatewayError):
    """The key is valid, and does not allow this."""


@dataclass(frozen=True, slots=True)
class Problem:
    """An error and how it is sent."""

    status: int
    error: ErrorObject
    retry_after: int | None = None

    def response(self) -> Response[ErrorAnswer]:
        """The whole response."""
        headers = {"Retry-After": str(self.retry_after)} if self.retry_after is not None else {}
        if self.status == 401:
            headers["WWW-Authenticate"] = "Bearer"
        return Response(ErrorAnswer(self.error), status_code=self.status, headers=headers, media_type=MediaType.JSON)


def error_answer(error: GatewayError) -> ErrorAnswer:
    """An error in the middle of a stream, where no status can be sent any more."""
    return ErrorAnswer(_of_gateway(error).error)


def _of_gateway(error: GatewayError) -> Problem:
    match error:
        case Forbidden():
            status, kind = 403, PERMISSION
        case InvalidRequest():
            status, kind = 400, INVALID
        case OverCapacity():
            status, kind = 429, OVER_CAPACITY
        case Unavailable():
            status, kind = 503, SERVER
        case _:
            status, kind = 500, SERVER
    retry_after = error.retry_after if isinstance(error, Unavailable) else None
    told = ErrorObject(message=error.message, type=kind, param=error.param, code=error.code)
    return Problem(status, told, retry_after)


def _of_platform(error: RegistryError | TenantsError | InvalidQuery) -> Problem:
    match error:
        case InvalidKey():
            status = 401
        case ModelNotFound() | NotFound():
            status = 404
        case NotPermitted() | TenantSuspended():
            status = 403
        case AlreadyExists() | StillNeeded():
            status = 409
        case RevisionUnavailable():
            status = 503
        case _:
            status = 400
    kind = {403: PERMISSION, 503: SERVER}.get(status, INVALID)
    told = ErrorObject(message=error.message, type=kind, param=error.field, code=error.code)
    return Problem(status, told, retry_after=10 if status == 503 else None)


def _of_litestar(request: Request[Any, Any, Any], error: HTTPException) -> Problem:
    where = f"{request.method} {request.url.path[:200]}"
    param: str | None = None
    match error.status_code:
        case 404:
            message, code = f"Unknown request URL: {where}. Please check the URL for typos.", "unknown_url"
        case 405:
            message, code = f"Method not allowed: {where}.", "method_not_allowed"
        case 413:
            limit = request.route_handler.resolve_request_max_body_size()
            message, code = f"The body is larger than the {limit} bytes that this endpoint takes.", "request_too_large"
        case 400:
            message, param, code = *_of_validation(error), "invalid_value"
        case status:
            message, code = error.detail, f"http_{status}"
    told = ErrorObject(message=message, type=INVALID if error.status_code < 500 else SERVER, param=param, code=code)
    return Problem(error.status_code, told)


def _of_validation(error: HTTPException) -> tuple[str, str | None]:
    """What Litestar found wrong with query and path parameters, or with a body that is not there."""
    found = error.extra[0] if isinstance(error.extra, list) and error.extra else {}
    key = found.get("key")
    if key and found.get("source") == "header":
        key = key.replace("_", "-")  # handlers' arguments are named after them
    if key == "data":
        return "The body is empty; send a JSON object.", None
    if key:
        return f"Invalid value for '{key}': {found['message']}.", key
    missing = _missing_parameter.search(error.detail)
    return error.detail, missing["name"] if missing else None


def _on_gateway(_: Request[Any, Any, Any], error: GatewayError) -> Response[ErrorAnswer]:
    return _of_gateway(error).response()


def _on_platform(
    _: Request[Any, Any, Any], error: RegistryError | TenantsError | InvalidQuery
) -> Response[ErrorAnswer]:
    return _of_platform(error).response()


def _on_litestar(request: Request[Any, Any, Any], error: HTTPException) -> Response[ErrorAnswer]:
    if error.status_code >= 500:
        return _on_anything(request, error)
    return _of_litestar(request, error).response()


def _on_anything(request: Request[Any, Any, Any], error: Exception) -> Response[ErrorAnswer]:
    """Our own fault: the log has the whole of it, the client the id to find it by."""
    id = request_id(request.scope)
    logger.error("request %s failed", id, exc_info=error)
    message = f"The server had an error while processing your request. Its id is {id}; please report it."
    return _of_gateway(GenerationFailed(message, code="internal_error")).response()


EXCEPTION_HANDLERS: ExceptionHandlersMap = {
    GatewayError: _on_gateway,
    RegistryError: _on_platform,
    TenantsError: _on_platform,
    InvalidQuery: _on_platform,
    HTTPException: _on_litestar,
    Exception: _on_anything,
}
