"""Adapters' files: content-addressed, in a folder or an object store, verified before they are served."""

from loramux.storage.blobs import BlobStore, Cached, open_blobs
from loramux.storage.contents import (
    CONFIG_FILE,
    FILES,
    WEIGHTS_FILE,
    BlobCorrupt,
    BlobMissing,
    StorageError,
    StorageUnavailable,
    content_digest,
    digest_at,
    digest_of,
    files_of,
)
from loramux.storage.objects import Folder, Objects, open_objects

__all__ = [
    "CONFIG_FILE",
    "FILES",
    "WEIGHTS_FILE",
    "BlobCorrupt",
    "BlobMissing",
    "BlobStore",
    "Cached",
    "Folder",
    "Objects",
    "StorageError",
    "StorageUnavailable",
    "content_digest",
    "digest_at",
    "digest_of",
    "files_of",
    "open_blobs",
    "open_objects",
]
