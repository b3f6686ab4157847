"""Errors of files and batches.

BatchesError
├── InvalidFile          an upload that cannot be a file: 400
├── FileTooLarge         413
├── StorageQuotaReached  the tenant's files take all the storage that they may: 403
├── FileNotFound         404
├── FileInUse            an unfinished batch or fine-tuning job reads it: 409
├── InvalidBatch         400
├── BatchUnfinished      the batch has not ended: 400, because clients repeat a request after 409 at once
├── BatchNotFound        404
└── TooManyBatches       429
"""

from __future__ import annotations

from http import HTTPStatus

from loramux.common.errors import LoramuxError


class BatchesError(LoramuxError):
    """Base of the errors of files and batches."""


class InvalidFile(BatchesError):
    """An upload cannot be a file; the message names the change to make."""

    code = "invalid_file"


class FileTooLarge(BatchesError):
    """The file is larger than the limit, which the message says."""

    code = "file_too_large"
    status = HTTPStatus.REQUEST_ENTITY_TOO_LARGE

    def __init__(self, limit: int) -> None:
        super().__init__(f"A file has at most {limit} bytes; divide the lines among several files.", "file")


class StorageQuotaReached(BatchesError):
    """The tenant's files take all their storage; the message has the limit and the current use."""

    code = "storage_quota_reached"
    status = HTTPStatus.FORBIDDEN


class FileNotFound(BatchesError):
    """The file does not exist, or belongs to another project or tenant."""

    code = "file_not_found"
    status = HTTPStatus.NOT_FOUND

    def __init__(self, id: str, field: str = "file_id") -> None:
        super().__init__(f"No such file: '{id[:80]}'.", field)


class FileInUse(BatchesError):
    """An unfinished batch or fine-tuning job reads the file."""

    code = "file_in_use"
    status = HTTPStatus.CONFLICT


class InvalidBatch(BatchesError):
    """The request for a batch is not valid; the message names the change to make."""

    code = "invalid_batch"


class BatchUnfinished(BatchesError):
    """The batch has no results yet and cannot be deleted. The status is 400: clients repeat at once after 409."""

    code = "batch_unfinished"

    def __init__(self, id: str, state: str) -> None:
        super().__init__(f"The batch '{id}' is {state}; wait until it has ended, or cancel it first.", "batch_id")


class BatchNotFound(BatchesError):
    """The batch does not exist, or belongs to another project or tenant."""

    code = "batch_not_found"
    status = HTTPStatus.NOT_FOUND

    def __init__(self, id: str) -> None:
        super().__init__(f"No such batch: '{id[:80]}'.", "batch_id")


class TooManyBatches(BatchesError):
    """The tenant has too many unfinished batches."""

    code = "too_many_batches"
    status = HTTPStatus.TOO_MANY_REQUESTS
    retry_after = 60
