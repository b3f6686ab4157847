"""Errors of the client.

ClientError
├── ConnectionFailed     no server answered, retries included
├── UnexpectedResponse   the answer is not a loramux server's
├── FilesMissing         the folder has no adapter as `save_pretrained` writes it
├── UploadRejected       the server's checks failed: code, param and the upload's report give the reason
├── UploadUnfinished     the upload expired, or its checks took longer than the timeout
└── ApiError             the server refused: status, code, param, message, request_id
    ├── InvalidRequest       400, 413, 422: the request has to be changed; `param` names the field
    ├── NotAuthenticated     401
    ├── NotPermitted         403
    ├── NotFound             404: it does not exist, or it is another tenant's
    ├── Conflict             409, 412: it has changed, exists already, or is still needed
    ├── LimitReached         429: over a limit of the caller, or over capacity
    └── ServerFailed         5xx
"""

from __future__ import annotations

from contextlib import suppress

import httpx
import msgspec

from loramux_client.objects import Upload


class ClientError(Exception):
    """Base of all errors of the client."""


class ConnectionFailed(ClientError):
    """No server answered; the message contains the address."""


class UnexpectedResponse(ClientError):
    """The answer is not a loramux server's."""


class FilesMissing(ClientError):
    """Files of an adapter are missing, or have become shorter; the message names them."""


class UploadRejected(ClientError):
    """The upload failed the server's checks. The server has deleted its files."""

    def __init__(self, upload: Upload) -> None:
        error = upload.error
        super().__init__(error.message if error else f"the upload {upload.id} was rejected")
        self.upload = upload
        self.code = error.code if error else None
        self.param = error.param if error else None


class UploadUnfinished(ClientError):
    """The upload is not ready; `upload` is its latest known state."""

    def __init__(self, message: str, upload: Upload) -> None:
        super().__init__(message)
        self.upload = upload


class ApiError(ClientError):
    """An error response of the server, with the server's message."""

    def __init__(self, message: str, *, status: int, code: str | None, param: str | None, request_id: str) -> None:
        super().__init__(message)
        self.message = message
        self.status = status
        self.code = code
        self.param = param
        self.request_id = request_id
        """Id of the request, which helps the operator to find the error."""


class InvalidRequest(ApiError):
    """The request has to be changed."""


class NotAuthenticated(ApiError):
    """The key is missing, unknown, revoked or expired."""


class NotPermitted(ApiError):
    """The key lacks a scope, or the tenant is suspended."""


class NotFound(ApiError):
    """The object does not exist or belongs to another tenant."""


class Conflict(ApiError):
    """The object has changed; read it again before changing it."""


class LimitReached(ApiError):
    """A limit was reached, and still is after the retries that the server allowed."""


class ServerFailed(ApiError):
    """The server failed, or cannot serve the request now."""


_BY_STATUS: dict[int, type[ApiError]] = {
    401: NotAuthenticated,
    403: NotPermitted,
    404: NotFound,
    409: Conflict,
    412: Conflict,
    429: LimitReached,
}


class _ErrorObject(msgspec.Struct):
    message: str
    code: str | int | None = None
    param: str | None = None


class _ErrorBody(msgspec.Struct):
    error: _ErrorObject


class _ProblemDetails(msgspec.Struct):
    """An error of a route under /admin (RFC 9457)."""

    detail: str
    code: str | None = None
    param: str | None = None


def error_of(response: httpx.Response) -> ApiError:
    """Return the error of a response that is not a success."""
    status, found = response.status_code, _found(response)
    kind = _BY_STATUS.get(status, ServerFailed if status >= 500 else InvalidRequest)
    return kind(
        found.message,
        status=status,
        code=None if found.code is None else str(found.code),
        param=found.param,
        request_id=response.headers.get("x-request-id", ""),
    )


def _found(response: httpx.Response) -> _ErrorObject:
    """Return the error of the response body. If the body has no known form, use only the status."""
    with suppress(msgspec.DecodeError):
        return msgspec.json.decode(response.content, type=_ErrorBody).error
    with suppress(msgspec.DecodeError):
        problem = msgspec.json.decode(response.content, type=_ProblemDetails)
        return _ErrorObject(problem.detail, problem.code, problem.param)
    return _ErrorObject(f"{response.status_code} {response.reason_phrase}".strip())
