"""Upload sessions on the wire. Times in Unix seconds."""

from __future__ import annotations

from typing import Annotated, Literal

import msgspec
from msgspec import Meta

from loramux.gateway import InvalidRequest
from loramux.uploads import AnnouncedFile, BucketSource, HubSource, Source, Upload, UploadRequest
from loramux_api.schemas.strict import Body
from loramux_api.schemas.tenancy import SECOND


class FileBody(Body, forbid_unknown_fields=True):
    """A file that will be sent."""

    size: Annotated[int, Meta(ge=1)]
    """Bytes."""
    sha256: str
    """In hexadecimal, as sha256sum prints it."""


class SourceBody(Body, forbid_unknown_fields=True):
    """From where the server fetches the files: `url`, or `hub`, `repo` and `commit`; the operator lists the places."""

    url: str | None = None
    """s3://bucket/path/"""
    hub: str | None = None
    repo: str | None = None
    commit: str | None = None
    """All its 40 hexadecimal digits."""

    def source(self) -> Source:
        """As the platform has it. Raises InvalidRequest."""
        named = (self.hub, self.repo, self.commit)
        if self.url is not None and named == (None, None, None):
            return BucketSource(url=self.url)
        if self.url is None and self.hub is not None and self.repo is not None and self.commit is not None:
            return HubSource(hub=self.hub, repo=self.repo, commit=self.commit)
        raise InvalidRequest(
            "'source' has either 'url', or 'hub', 'repo' and 'commit'.", param="source", code="invalid_upload"
        )


class UploadBody(Body, forbid_unknown_fields=True):
    """What is going to be uploaded: `files` that will be sent, or a `source` that they are fetched from."""

    adapter: str
    files: dict[str, FileBody] | None = None
    """`adapter_config.json` and `adapter_model.safetensors`."""
    source: SourceBody | None = None
    promote: bool = True
    """Whether the adapter's default alias moves to the new revision; a first revision always is the default."""

    def request(self) -> UploadRequest:
        """As the platform has it."""
        announced = (
            None
            if self.files is None
            else {name: AnnouncedFile(file.size, file.sha256) for name, file in self.files.items()}
        )
        source = None if self.source is None else self.source.source()
        return UploadRequest(self.adapter, announced, source, self.promote)


class FileObject(msgspec.Struct, kw_only=True):
    """A file of an upload."""

    name: str
    size: int
    sha256: str
    received: int
    """Bytes that are stored: the offset at which it goes on."""


class UploadRefusal(msgspec.Struct, kw_only=True):
    """Why nothing became of it."""

    code: str
    message: str
    param: str | None


class UploadObject(msgspec.Struct, kw_only=True):
    """An upload, and what became of it."""

    id: str
    object: Literal["upload"] = "upload"
    adapter: str
    """`tenant/adapter`."""
    state: Literal["uploading", "validating", "ready", "rejected", "expired"]
    files: list[FileObject]
    promote: bool
    created_at: int
    expires_at: int
    """Until then the next bytes must come."""
    revision: str | None
    """`tenant/adapter@3`, once it is ready."""
    digest: str | None
    error: UploadRefusal | None
    """Why it was rejected."""
    report: msgspec.Raw | None
    """What validation found out."""


class UploadDeleted(msgspec.Struct, kw_only=True):
    """What is no more."""

    id: str
    object: Literal["upload.deleted"] = "upload.deleted"
    deleted: bool = True


class Received(msgspec.Struct, kw_only=True):
    """How much of a file is stored."""

    name: str
    object: Literal["upload.file"] = "upload.file"
    size: int
    received: int


def upload_object(upload: Upload, tenant_name: str) -> UploadObject:
    """The upload as its owner sees it."""
    adapter, outcome = f"{tenant_name}/{upload.adapter}", upload.outcome
    error = outcome.error
    return UploadObject(
        id=upload.id,
        adapter=adapter,
        state=upload.state,  # type: ignore[arg-type]  # the table has these states only
        files=[
            FileObject(name=file.name, size=file.size, sha256=file.sha256, received=file.received)
            for file in upload.files
        ],
        promote=upload.promote,
        created_at=upload.created_at // SECOND,
        expires_at=upload.expires_at // SECOND,
        revision=None if outcome.revision is None else f"{adapter}@{outcome.revision}",
        digest=outcome.digest,
        error=None if error is None else UploadRefusal(code=error.code, message=error.message, param=error.param),
        report=None if outcome.report is None else msgspec.Raw(outcome.report.encode()),
    )
