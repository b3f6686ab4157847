"""Uploads that take their time: in pieces, through any server, validated in the background."""

from loramux.records.uploads import Upload, UploadFile
from loramux.uploads.errors import (
    InvalidUpload,
    TooManyUploads,
    UploadClosed,
    UploadError,
    UploadIncomplete,
    UploadNotFound,
    WrongOffset,
)
from loramux.uploads.reception import Reception
from loramux.uploads.sessions import AnnouncedFile, Sessions, UploadRequest
from loramux.uploads.sources import BucketSource, HubSource, Source
from loramux.uploads.uploads import Uploads
from loramux.uploads.workshop import Workshop

__all__ = [
    "AnnouncedFile",
    "BucketSource",
    "HubSource",
    "InvalidUpload",
    "Reception",
    "Sessions",
    "Source",
    "TooManyUploads",
    "Upload",
    "UploadClosed",
    "UploadError",
    "UploadFile",
    "UploadIncomplete",
    "UploadNotFound",
    "UploadRequest",
    "Uploads",
    "Workshop",
    "WrongOffset",
]
