"""Why an upload is refused at once. What is wrong with its *files* is written into it instead.

RegistryError(code, field, message)
└── UploadError
    ├── UploadNotFound     no such upload, or another tenant's: 404
    ├── InvalidUpload      what was announced, or named to be fetched, cannot be taken: 400
    ├── TooManyUploads     the tenant has too much under way: 400
    ├── WrongOffset        the file goes on elsewhere; `received` says where: 409
    ├── UploadIncomplete   bytes are missing: 409
    └── UploadClosed       it takes no more bytes, or cannot be given up now: 409
"""

from __future__ import annotations

from loramux.registry.errors import SHOWN, RegistryError


class UploadError(RegistryError):
    """Base of what uploads raise."""


class UploadNotFound(UploadError):
    """The same for an upload that does not exist and one that is another tenant's."""

    code = "upload_not_found"

    def __init__(self, id: str) -> None:
        super().__init__(f"The upload `{id[:SHOWN]}` does not exist or you do not have access to it.", "id")


class InvalidUpload(UploadError):
    """The message says what would be taken."""

    code = "invalid_upload"


class TooManyUploads(UploadError):
    """The message names the limit."""

    code = "too_many_uploads"


class WrongOffset(UploadError):
    """Bytes are taken in order, each once."""

    code = "wrong_offset"

    def __init__(self, name: str, offset: int, received: int) -> None:
        super().__init__(
            f"'{name}' goes on at offset={received}; what you sent begins at {offset}",
            "offset",
        )
        self.received = received


class UploadIncomplete(UploadError):
    """The message says which file goes on from where."""

    code = "upload_incomplete"


class UploadClosed(UploadError):
    """The message names the upload's state."""

    code = "upload_closed"
