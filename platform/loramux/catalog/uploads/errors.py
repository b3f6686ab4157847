"""Refusals of uploads. A fault of an upload's *files* is written into the upload instead, as a `Refusal`.

RegistryError(message, field)
├── UploadError
│   ├── InvalidUpload      400  the announced files, or the source to fetch from, cannot be accepted
│   ├── TooManyUploads     400  a limit on the tenant's open uploads is reached
│   ├── UploadTooSlow      408  the client's bytes came too slowly; the bytes received so far are kept
│   ├── TooManyTransfers   429  the tenant sends too many bodies at a time
│   ├── UploadNotFound     404  no such upload, or it is another tenant's
│   ├── WrongOffset        409  the file continues at another offset, which `received` gives
│   ├── UploadIncomplete   409  bytes are missing
│   └── UploadClosed       409  the upload accepts no more bytes, or cannot be cancelled now
└── UploadRejected         400  the files did not become a revision; it has the Rejection

UploadSuperseded is not a refusal: it ends the work on an upload that was cancelled or taken over by another server.
"""

from __future__ import annotations

from http import HTTPStatus

from loramux.catalog.registry.errors import SHOWN, RegistryError
from loramux.common.errors import Rejection


class UploadError(RegistryError):
    """Base of the refusals of upload sessions."""


class UploadNotFound(UploadError):
    """The upload does not exist, or it belongs to another tenant. The answer is the same in both cases."""

    code = "upload_not_found"
    status = HTTPStatus.NOT_FOUND

    def __init__(self, id: str) -> None:
        super().__init__(f"The upload `{id[:SHOWN]}` does not exist or you do not have access to it.", "id")


class InvalidUpload(UploadError):
    """The announced files or the source cannot be accepted. The message states what is accepted."""

    code = "invalid_upload"


class TooManyUploads(UploadError):
    """A limit on the tenant's open uploads is reached. The message names it."""

    code = "too_many_uploads"


class UploadTooSlow(UploadError):
    """The client's bytes came too slowly. A client that sends nothing must not hold a connection open."""

    code = "upload_too_slow"
    status = HTTPStatus.REQUEST_TIMEOUT


class TooManyTransfers(UploadError):
    """The tenant sends too many bodies at a time. The message names the limit."""

    code = "too_many_transfers"
    status = HTTPStatus.TOO_MANY_REQUESTS
    retry_after = 1


class WrongOffset(UploadError):
    """The file continues at another offset. Bytes are accepted in order, each byte once."""

    code = "wrong_offset"
    status = HTTPStatus.CONFLICT

    def __init__(self, name: str, offset: int, received: int) -> None:
        super().__init__(f"'{name}' goes on at offset={received}; what you sent begins at {offset}", "offset")
        self.received = received


class UploadIncomplete(UploadError):
    """Bytes are missing. The message names the file and the offset at which it continues."""

    code = "upload_incomplete"
    status = HTTPStatus.CONFLICT


class UploadClosed(UploadError):
    """The upload accepts no bytes in its state, which the message names."""

    code = "upload_closed"
    status = HTTPStatus.CONFLICT


class UploadRejected(RegistryError):
    """The checks refused the files, or they could not be fetched."""

    def __init__(self, refusal: Rejection) -> None:
        super().__init__(refusal.message, refusal.field)
        self.code = refusal.code
        self.refusal = refusal


def rejected(code: str, field: str | None, message: str) -> UploadRejected:
    """Build the exception for a refusal that arises here."""
    return UploadRejected(Rejection(code=code, field=field, message=message))


class UploadSuperseded(Exception):
    """The upload was cancelled, or another server has finished it; the message names the case."""
