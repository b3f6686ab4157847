"""JSON objects of upload sessions. Times are Unix seconds."""

from __future__ import annotations

from typing import Annotated, Literal

import msgspec
from msgspec import Meta

from loramux.catalog.uploads.imports import BucketSource, HubSource, Source
from loramux.catalog.uploads.sessions import MAX_FILES, AnnouncedFile, UploadRequest
from loramux.common.units import SECOND
from loramux.data.entities import Upload
from loramux.serving.errors import InvalidRequest
from loramux_api.bodies import Body
from loramux_api.schemas.bounds import Name, Path, Url


class FileBody(Body, forbid_unknown_fields=True):
    """A file that the client will send."""

    size: Annotated[int, Meta(ge=1)]
    """Size in bytes."""
    sha256: Name
    """sha256 of the file in hexadecimal, as sha256sum prints it."""


class SourceBody(Body, forbid_unknown_fields=True):
    """Place to fetch the files from: `url`, or `hub`, `repo`, `commit` and perhaps `subfolder`. The operator lists the
    allowed places.
    """

    url: Url | None = None
    """s3://bucket/path/"""
    hub: Name | None = None
    repo: Name | None = None
    commit: Name | None = None
    """The commit's 40 hexadecimal digits."""
    subfolder: Path | None = None
    """The adapter's folder in the repository; left out: its root."""

    def source(self) -> Source:
        """Convert it to the platform's type. Raises InvalidRequest."""
        named = {self.hub, self.repo, self.commit, self.subfolder}
        if self.url is not None and named == {None}:
            return BucketSource(url=self.url)
        if self.url is None and self.hub is not None and self.repo is not None and self.commit is not None:
            return HubSource(hub=self.hub, repo=self.repo, commit=self.commit, subfolder=self.subfolder or "")
        raise InvalidRequest(
            "'source' has either 'url', or 'hub', 'repo' and 'commit'.", field="source", code="invalid_upload"
        )


class UploadBody(Body, forbid_unknown_fields=True):
    """The body that opens an upload: `files` that the client will send, or a `source` to fetch them from."""

    adapter: Name
    files: Annotated[dict[Path, FileBody], Meta(max_length=MAX_FILES)] | None = None
    """`adapter_config.json`, `adapter_model.safetensors`, and the files that a trainer saved with them."""
    source: SourceBody | None = None
    promote: bool = True
    """Move the adapter's default alias to the new revision. A first revision is always the default."""
    base_model: Name | None = None
    """The base model that the adapter was trained on. Without this field the files decide, if they name a base."""

    def request(self) -> UploadRequest:
        """Convert it to the platform's type."""
        announced = (
            None
            if self.files is None
            else {name: AnnouncedFile(file.size, file.sha256) for name, file in self.files.items()}
        )
        source = None if self.source is None else self.source.source()
        return UploadRequest(self.adapter, announced, source, self.promote, self.base_model)


class UploadFileObject(msgspec.Struct, kw_only=True):
    """A file of an upload."""

    name: str
    size: int
    sha256: str
    received: int
    """Number of bytes that are stored, which is the offset of the next bytes."""


class UploadRefusal(msgspec.Struct, kw_only=True):
    """Reason of a rejection."""

    code: str
    message: str
    param: str | None


class UploadObject(msgspec.Struct, kw_only=True):
    """An upload and its result."""

    id: str
    object: Literal["upload"] = "upload"
    adapter: str
    """Name `tenant/adapter`."""
    state: Literal["uploading", "validating", "ready", "rejected", "expired"]
    files: list[UploadFileObject]
    """Files to send."""
    ignored: list[str]
    """Announced files that serving does not need and the server does not accept."""
    promote: bool
    base_model: str | None
    """Base model that the upload's owner has named."""
    created_at: int
    expires_at: int
    """Time by which the next bytes must come. For a complete upload: time by which the checks must end."""
    revision: str | None
    """The new revision, `tenant/adapter@3`; null until the upload is ready."""
    digest: str | None
    error: UploadRefusal | None
    """Reason of the rejection if the upload was rejected."""
    report: msgspec.Raw | None
    """The validation report; null until the checks have ended."""


class UploadDeleted(msgspec.Struct, kw_only=True):
    """The confirmation of an upload's deletion."""

    id: str
    object: Literal["upload.deleted"] = "upload.deleted"
    deleted: bool = True


class Received(msgspec.Struct, kw_only=True):
    """Progress of one file: the bytes stored so far."""

    name: str
    object: Literal["upload.file"] = "upload.file"
    size: int
    received: int


def upload_object(upload: Upload, tenant_name: str) -> UploadObject:
    """Return the upload as a JSON object."""
    adapter, outcome = f"{tenant_name}/{upload.adapter}", upload.outcome
    error = outcome.error
    return UploadObject(
        id=upload.id,
        adapter=adapter,
        state=upload.state,  # type: ignore[arg-type]  # the table has these states only
        files=[
            UploadFileObject(name=file.name, size=file.size, sha256=file.sha256, received=file.received)
            for file in upload.files
        ],
        ignored=list(upload.ignored),
        promote=upload.promote,
        base_model=upload.base_model,
        created_at=upload.created_at // SECOND,
        expires_at=upload.expires_at // SECOND,
        revision=None if outcome.revision is None else f"{adapter}@{outcome.revision}",
        digest=outcome.digest,
        error=None if error is None else UploadRefusal(code=error.code, message=error.message, param=error.param),
        report=None if outcome.report is None else msgspec.Raw(outcome.report.encode()),
    )
