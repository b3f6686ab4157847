"""Uploads: in parts, through any server, checked in the background; every adapter comes in this way."""

from loramux.records.uploads import Upload
from loramux.uploads.errors import (
    InvalidUpload,
    TooManyTransfers,
    TooManyUploads,
    UploadClosed,
    UploadNotFound,
    UploadRejected,
    UploadTooSlow,
    WrongOffset,
)
from loramux.uploads.imports import BucketSource, FolderSource, HubSource, Importer, Source
from loramux.uploads.ingest import Ingest, UploadWorker
from loramux.uploads.parts import paced
from loramux.uploads.sessions import AnnouncedFile, UploadRequest, UploadSessions, max_bytes

__all__ = [
    "AnnouncedFile",
    "BucketSource",
    "FolderSource",
    "HubSource",
    "Importer",
    "Ingest",
    "InvalidUpload",
    "Source",
    "TooManyTransfers",
    "TooManyUploads",
    "Upload",
    "UploadClosed",
    "UploadNotFound",
    "UploadRejected",
    "UploadRequest",
    "UploadSessions",
    "UploadTooSlow",
    "UploadWorker",
    "WrongOffset",
    "max_bytes",
    "paced",
]
