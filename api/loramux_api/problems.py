"""Every refusal and every failure, as OpenAI's clients expect them: one shape, all four keys, and a status."""

from __future__ import annotations

import logging
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from http import HTTPStatus
from typing import Any

from litestar import MediaType, Request, Response
from litestar.exceptions import HTTPException
from litestar.types import ExceptionHandlersMap

from loramux.billing import InvoiceNotFound
from loramux.exports import ExportError
from loramux.gateway import GatewayError, GenerationFailed, InvalidRequest, OverCapacity, Unavailable
from loramux.limits import LimitNotFound, LimitReached, LimitsError
from loramux.registry import (
    ChangeConflict,
    ModelNotFound,
    PreconditionFailed,
    RegistryError,
    RevisionUnavailable,
    ValidationUnavailable,
)
from loramux.storage import StorageError
from loramux.tenants import (
    AlreadyExists,
    InvalidKey,
    NotFound,
    NotPermitted,
    StillNeeded,
    TenantsError,
    TenantSuspended,
)
from loramux.uploads import UploadClosed, UploadIncomplete, UploadNotFound, WrongOffset
from loramux.usage import IdempotencyMismatch, InvalidQuery, StillRunning
from loramux.webhooks import EndpointNotFound, WebhookError
from loramux_api.rates import rate_headers
from loramux_api.request_ids import request_id
from loramux_api.schemas.problems import ErrorAnswer, ErrorObject, ProblemDetails

logger = logging.getLogger(__name__)

_missing_parameter = re.compile(r"Missing required \w+ parameter '(?P<name>\w+)'")
INVALID, SERVER, PERMISSION = "invalid_request_error", "server_error", "permission_error"
OVER_CAPACITY = "over_capacity_error"

OFFSET = "Upload-Offset"
"""Where a file goes on, for who sent something else."""

ADMIN = "/admin"

PlatformError = RegistryError | TenantsError | InvalidQuery | LimitsError | WebhookError | InvoiceNotFound


class Forbidden(GatewayError):
    """The key is valid, and does not allow this."""


@dataclass(frozen=True, slots=True)
class Problem:
    """An error and how it is sent."""

    status: int
    error: ErrorObject
    retry_after: int | None = None
    headers: Mapping[str, str] = field(default_factory=dict)

    def all_headers(self) -> dict[str, str]:
        """With those that follow from the status."""
        headers = dict(self.headers)
        if self.retry_after is not None:
            headers["Retry-After"] = str(self.retry_after)
        if self.status == 401:
            headers["WWW-Authenticate"] = "Bearer"
        return headers

    def response(self, request: Request[Any, Any, Any]) -> Response[Any]:
        """The whole response: OpenAI's shape, and RFC 9457's under /admin."""
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


def error_answer(error: GatewayError) -> ErrorAnswer:
    """An error in the middle of a stream, where no status can be sent any more."""
    return ErrorAnswer(_of_gateway(error).error)


def problem_of(error: GatewayError | PlatformError) -> Problem:
    """How a refusal is sent."""
    match error:
        case GatewayError():
            return _of_gateway(error)
        case LimitsError():
            return _of_limits(error)
        case _:
            return _of_platform(error)


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


def _of_limits(error: LimitsError | LimitReached) -> Problem:
    if not isinstance(error, LimitReached):
        return _of_platform(error)
    again = {} if error.retry_after is not None else {"x-should-retry": "false"}
    told = ErrorObject(message=error.message, type=error.kind, code=error.code)
    return Problem(429, told, error.retry_after, rate_headers(error.standing) | again)


def _of_claim(error: IdempotencyMismatch | StillRunning) -> Problem:
    status = 409 if isinstance(error, StillRunning) else 422
    told = ErrorObject(message=str(error), type=INVALID, param="Idempotency-Key", code=error.code)
    return Problem(status, told, retry_after=1 if status == 409 else None)


def _of_platform(error: PlatformError) -> Problem:
    match error:
        case InvalidKey():
            status = 401
        case ModelNotFound() | NotFound() | LimitNotFound() | EndpointNotFound() | UploadNotFound() | InvoiceNotFound():
            status = 404
        case NotPermitted() | TenantSuspended():
            status = 403
        case AlreadyExists() | StillNeeded() | ChangeConflict() | WrongOffset() | UploadIncomplete() | UploadClosed():
            status = 409
        case PreconditionFailed():
            status = 412
        case RevisionUnavailable() | ValidationUnavailable():
            status = 503
        case _:
            status = 400
    kind = {403: PERMISSION, 503: SERVER}.get(status, INVALID)
    told = ErrorObject(message=error.message, type=kind, param=error.field, code=error.code)
    headers = {OFFSET: str(error.received)} if isinstance(error, WrongOffset) else {}
    return Problem(status, told, retry_after=10 if status == 503 else None, headers=headers)


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


def _on_gateway(request: Request[Any, Any, Any], error: GatewayError) -> Response[Any]:
    return _of_gateway(error).response(request)


def _on_limits(request: Request[Any, Any, Any], error: LimitsError) -> Response[Any]:
    return _of_limits(error).response(request)


def _on_claim(request: Request[Any, Any, Any], error: IdempotencyMismatch | StillRunning) -> Response[Any]:
    return _of_claim(error).response(request)


def _on_platform(request: Request[Any, Any, Any], error: PlatformError) -> Response[Any]:
    return _of_platform(error).response(request)


def _on_storage(request: Request[Any, Any, Any], error: StorageError) -> Response[Any]:
    logger.error("request %s: the storage failed", request_id(request.scope), exc_info=error)
    told = "The storage of adapters does not answer; what was confirmed before is kept. Please retry."
    return _of_gateway(Unavailable(told, code="storage_unavailable")).response(request)


def _on_litestar(request: Request[Any, Any, Any], error: HTTPException) -> Response[Any]:
    if error.status_code >= 500:
        return _on_anything(request, error)
    return _of_litestar(request, error).response(request)


def _on_export(request: Request[Any, Any, Any], error: ExportError) -> Response[Any]:
    logger.error("request %s: %s", request_id(request.scope), error)
    return Problem(500, ErrorObject(message=str(error), type=SERVER, code="export_failed")).response(request)


def _on_anything(request: Request[Any, Any, Any], error: Exception) -> Response[Any]:
    """Our own fault: the log has the whole of it, the client the id to find it by."""
    id = request_id(request.scope)
    logger.error("request %s failed", id, exc_info=error)
    message = f"The server had an error while processing your request. Its id is {id}; please report it."
    return _of_gateway(GenerationFailed(message, code="internal_error")).response(request)


EXCEPTION_HANDLERS: ExceptionHandlersMap = {
    GatewayError: _on_gateway,
    RegistryError: _on_platform,
    TenantsError: _on_platform,
    InvalidQuery: _on_platform,
    WebhookError: _on_platform,
    StorageError: _on_storage,
    InvoiceNotFound: _on_platform,
    ExportError: _on_export,
    LimitsError: _on_limits,
    IdempotencyMismatch: _on_claim,
    StillRunning: _on_claim,
    HTTPException: _on_litestar,
    Exception: _on_anything,
}
