"""Why an upload that was complete did not become a revision."""

from __future__ import annotations


class UploadRejected(Exception):
    """A stable code, the file or field at fault where there is one, and a sentence; written into the upload."""

    def __init__(self, code: str, field: str | None, message: str) -> None:
        super().__init__(message)
        self.code = code
        self.field = field
        self.message = message
