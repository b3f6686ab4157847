"""Adapters' files: content-addressed, in a folder or an object store, verified before they are served."""

from loramux.storage.blobs import (
    CONFIG_FILE,
    FILES,
    WEIGHTS_FILE,
    BlobCorrupt,
    BlobMissing,
    BlobStore,
    Cached,
    content_digest,
    digest_at,
    files_of,
    open_blobs,
)
from loramux.storage.objects import Objects, StorageError, StorageUnavailable, open_objects

__all__ = [
    "CONFIG_FILE",
    "FILES",
    "WEIGHTS_FILE",
    "BlobCorrupt",
    "BlobMissing",
    "BlobStore",
    "Cached",
    "Objects",
    "StorageError",
    "StorageUnavailable",
    "content_digest",
    "digest_at",
    "files_of",
    "open_blobs",
    "open_objects",
]
