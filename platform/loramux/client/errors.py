"""What can go wrong.

LoramuxError
├── ConnectionFailed     no server answered, however often it was tried
├── WrongAnswer          whoever answered is no loramux server
├── FilesMissing         the folder holds no adapter as `save_pretrained` writes it
├── UploadRejected       the server has checked the upload and will not serve it: code, param and report say why
├── UploadUnfinished     the upload was still being checked when the wait was over, or has expired
└── ApiError             the server said no: status, code, param, message, request_id
    ├── InvalidRequest       400, 413, 422: the request cannot be served as it stands; `param` names the field
    ├── NotAuthenticated     401
    ├── NotPermitted         403
    ├── NotFound             404: it does not exist, or it is another tenant's
    ├── Conflict             409, 412: it was changed meanwhile, exists already, or is still needed
    ├── LimitReached         429: over a limit of yours, or over capacity
    └── ServerFailed         5xx
"""

from __future__ import annotations

import httpx
import msgspec

from loramux.client.upload_answers import Upload


class LoramuxError(Exception):
    """Base of everything that the client raises."""


class ConnectionFailed(LoramuxError):
    """The message names the address."""


class WrongAnswer(LoramuxError):
    """The message says what was answered."""


class FilesMissing(LoramuxError):
    """The message names the files."""


class UploadRejected(LoramuxError):
    """Nothing of it is served or kept."""

    def __init__(self, upload: Upload) -> None:
        error = upload.error
        super().__init__(error.message if error else f"the upload {upload.id} was rejected")
        self.upload = upload
        self.code = error.code if error else None
        self.param = error.param if error else None


class UploadUnfinished(LoramuxError):
    """`upload` is how it was seen last."""

    def __init__(self, message: str, upload: Upload) -> None:
        super().__init__(message)
        self.upload = upload


class ApiError(LoramuxError):
    """The server's own sentence, and what identifies it."""

    def __init__(self, message: str, *, status: int, code: str | None, param: str | None, request_id: str) -> None:
        super().__init__(message)
        self.message = message
        self.status = status
        self.code = code
        self.param = param
        self.request_id = request_id
        """What to report it by."""


class InvalidRequest(ApiError):
    """The request has to be changed."""


class NotAuthenticated(ApiError):
    """The key is missing, unknown, revoked or expired."""


class NotPermitted(ApiError):
    """The key lacks a scope, or the tenant is suspended."""


class NotFound(ApiError):
    """The same for what is absent and what is another tenant's."""


class Conflict(ApiError):
    """Read it again, and decide again."""


class LimitReached(ApiError):
    """It was tried again for as long as the server said that this helps."""


class ServerFailed(ApiError):
    """The server's own fault, or not now."""


_BY_STATUS: dict[int, type[ApiError]] = {
    401: NotAuthenticated,
    403: NotPermitted,
    404: NotFound,
    409: Conflict,
    412: Conflict,
    429: LimitReached,
}


class _Told(msgspec.Struct):
    message: str
    code: str | int | None = None
    param: str | None = None


class _Body(msgspec.Struct):
    error: _Told


def error_of(response: httpx.Response) -> ApiError:
    """The server's refusal."""
    status = response.status_code
    try:
        told = msgspec.json.decode(response.content, type=_Body).error
    except msgspec.DecodeError:
        told = _Told(f"{status} {response.reason_phrase}".strip())
    kind = _BY_STATUS.get(status, ServerFailed if status >= 500 else InvalidRequest)
    return kind(
        told.message,
        status=status,
        code=None if told.code is None else str(told.code),
        param=told.param,
        request_id=response.headers.get("x-request-id", ""),
    )
