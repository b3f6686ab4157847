"""The errors of storage, by the cause that an operator has to repair.

    StorageError
    ├── BlobMissing            no such content is stored (`storage.blobs`)
    ├── BlobCorrupt            the stored files have another digest than their name (`storage.blobs`)
    └── StorageUnavailable     the store does not answer, or fails; the kinds are:
        ├── StorageFull        no space, or a quota is used up
        ├── StorageDenied      it refuses this server: permissions, credentials, a read-only disk
        ├── StorageAbsent      the folder, the disk or the bucket is not there
        └── StorageSlow        it does not answer in time

All these errors are answered with 503, because callers cannot cause them. Only `StorageFaults.translated` makes them
from the system's and obstore's errors. This function logs and counts each error with its cause and errno.
"""

from __future__ import annotations

import errno
import logging
import re
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from http import HTTPStatus
from typing import Literal

from obstore.exceptions import BaseError, PermissionDeniedError, UnauthenticatedError

from loramux.common.errors import LoramuxError

Cause = Literal["full", "denied", "absent", "slow", "unavailable"]

logger = logging.getLogger(__name__)


class StorageError(LoramuxError):
    """Base of storage's errors; the messages are for operators."""

    code = "storage_unavailable"
    status = HTTPStatus.SERVICE_UNAVAILABLE
    retry_after = 1
    public_message = "The storage of adapters does not answer; what was confirmed before is kept. Please retry."


class StorageUnavailable(StorageError):
    """The store does not answer, or refuses. The message has the store's answer, which only operators see."""

    cause: Cause = "unavailable"


class StorageFull(StorageUnavailable):
    """The store or the disk has no space left."""

    cause = "full"
    code = "storage_full"
    retry_after = 60
    public_message = (
        "The server's storage is full, and its operator has to make room; what was confirmed before is kept. Please "
        "retry later."
    )


class StorageDenied(StorageUnavailable):
    """The storage refuses this server."""

    cause = "denied"
    code = "storage_denied"
    retry_after = 60
    public_message = (
        "The server may not use its storage, and its operator has to mend that; what was confirmed before is kept. "
        "Please retry later."
    )


class StorageAbsent(StorageUnavailable):
    """The folder, the disk or the bucket is not there."""

    cause = "absent"
    code = "storage_absent"
    retry_after = 60
    public_message = "The server's storage is not there, and its operator has to bring it back. Please retry later."


class StorageSlow(StorageUnavailable):
    """The storage does not answer in time."""

    cause = "slow"
    code = "storage_slow"
    retry_after = 5
    public_message = "The server's storage answers too slowly; what was confirmed before is kept. Please retry."


BY_ERRNO: dict[int, type[StorageUnavailable]] = {
    **dict.fromkeys((errno.ENOSPC, errno.EDQUOT, errno.EFBIG), StorageFull),
    **dict.fromkeys((errno.EACCES, errno.EPERM, errno.EROFS), StorageDenied),
    **dict.fromkeys((errno.ENODEV, errno.ENXIO, errno.ESTALE, errno.ENOTCONN, errno.ENOTDIR), StorageAbsent),
    **dict.fromkeys((errno.ETIMEDOUT, errno.EAGAIN, errno.EBUSY), StorageSlow),
    **dict.fromkeys((errno.EIO, errno.EMFILE, errno.ENFILE), StorageUnavailable),
}
"""System errors that an operator repairs, by errno. ENOENT is not included, because an absent file is a valid answer.
"""

_BY_WORDS: tuple[tuple[re.Pattern[str], type[StorageUnavailable]], ...] = (
    (re.compile(r"InsufficientStorage|StorageFull|QuotaExceeded|\b507\b", re.IGNORECASE), StorageFull),
    (
        re.compile(r"AccessDenied|InvalidAccessKeyId|SignatureDoesNotMatch|ExpiredToken|\b40[13]\b", re.IGNORECASE),
        StorageDenied,
    ),
    (re.compile(r"NoSuchBucket|ContainerNotFound|bucket does not exist", re.IGNORECASE), StorageAbsent),
    (re.compile(r"timed? ?out|deadline|SlowDown|\b(408|429)\b", re.IGNORECASE), StorageSlow),
)
"""Words by which errors without a class in obstore are recognised, most specific first."""
_os_error = re.compile(r"os error (\d+)")


class StorageFaults:
    """Translates the faults of one store and its cache on this machine, and counts them by cause."""

    def __init__(self) -> None:
        self.counts: Counter[Cause] = Counter()

    @contextmanager
    def of_disk(self) -> Iterator[None]:
        """If a disk is full, refuses or fails, raise the StorageUnavailable of this cause. Other errors pass."""
        try:
            yield
        except OSError as error:
            kind = BY_ERRNO.get(error.errno or 0)
            if kind is None:
                raise
            raise self._noted(kind, f"this machine's disk: {error}", error.errno) from error

    @contextmanager
    def of_store(self, *, is_absence: bool = False) -> Iterator[None]:
        """Turn an object store's error into the StorageUnavailable of its cause.

        FileNotFoundError passes, unless `is_absence`: if the call needs no object, the bucket is absent.
        """
        try:
            yield
        except FileNotFoundError as error:
            if not is_absence and _kind_of(error) is not StorageAbsent:
                raise
            raise self._noted(StorageAbsent, f"the object store: {error}", error.errno) from error
        except (BaseError, ValueError) as error:
            found = _os_error.search(str(error))
            number = int(found[1]) if found else None
            raise self._noted(_kind_of(error), f"the object store: {error}", number) from error
        except BaseException as error:
            if (
                type(error).__name__ != "PanicException"
            ):  # raised in obstore's Rust code; this error derives from BaseException
                raise
            message = f"the object store: its options do not fit together: {error}"
            raise self._noted(StorageUnavailable, message, None) from error

    def absent(self, message: str) -> StorageAbsent:
        """Log and count that a place has disappeared; return the error."""
        error = self._noted(StorageAbsent, message, errno.ENOENT)
        assert isinstance(error, StorageAbsent)
        return error

    def _noted(self, kind: type[StorageUnavailable], message: str, number: int | None) -> StorageUnavailable:
        self.counts[kind.cause] += 1
        name = "none" if number is None else errno.errorcode.get(number, str(number))
        logger.error("storage fault: cause %s, errno %s: %s", kind.cause, name, message)
        return kind(message)


def _kind_of(error: Exception) -> type[StorageUnavailable]:
    """Return the class of storage error for an error of obstore."""
    if isinstance(error, PermissionDeniedError | UnauthenticatedError):
        return StorageDenied
    text = str(error)
    if (found := _os_error.search(text)) and (kind := BY_ERRNO.get(int(found[1]))) is not None:
        return kind
    return next((kind for words, kind in _BY_WORDS if words.search(text)), StorageUnavailable)
