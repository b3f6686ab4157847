"""Uploads: in parts, through any server, checked in the background; every adapter comes in this way."""

from loramux.records.uploads import Upload, UploadFile
from loramux.uploads.errors import (
    InvalidUpload,
    TooManyTransfers,
    TooManyUploads,
    UploadClosed,
    UploadError,
    UploadIncomplete,
    UploadNotFound,
    UploadRejected,
    UploadTooSlow,
    WrongOffset,
)
from loramux.uploads.imports import BucketSource, FolderSource, HubSource, Importer, Source
from loramux.uploads.ingest import Ingest, UploadWorker
from loramux.uploads.parts import PartReceiver, paced
from loramux.uploads.sessions import AnnouncedFile, UploadRequest, UploadSessions, max_bytes, refused_file

__all__ = [
    "AnnouncedFile",
    "BucketSource",
    "FolderSource",
    "HubSource",
    "Importer",
    "Ingest",
    "InvalidUpload",
    "PartReceiver",
    "Source",
    "TooManyTransfers",
    "TooManyUploads",
    "Upload",
    "UploadClosed",
    "UploadError",
    "UploadFile",
    "UploadIncomplete",
    "UploadNotFound",
    "UploadRejected",
    "UploadRequest",
    "UploadSessions",
    "UploadTooSlow",
    "UploadWorker",
    "WrongOffset",
    "max_bytes",
    "paced",
    "refused_file",
]
