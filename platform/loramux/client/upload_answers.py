"""What the server answers about uploads. Times in Unix seconds."""

from __future__ import annotations

from typing import Literal

import msgspec

from loramux.client.answers import Answer


class Received(Answer, frozen=True, kw_only=True):
    """How many bytes of a file the server has, from its start on."""

    received: int


class UploadFile(Answer, frozen=True, kw_only=True):
    """A file of an upload, and how much of it the server has."""

    name: str
    size: int
    sha256: str
    received: int


class UploadError(Answer, frozen=True, kw_only=True):
    """Why an upload was rejected."""

    code: str | None = None
    message: str
    param: str | None = None


class Check(Answer, frozen=True, kw_only=True):
    """One question that was asked of the files."""

    name: str
    outcome: str
    """passed, failed or not_run."""
    detail: str = ""
    figures: dict[str, float] = msgspec.field(default_factory=dict)


class Warned(Answer, frozen=True, kw_only=True):
    """Something that is no fault, and that its owner may not have meant."""

    code: str
    field: str | None = None
    message: str


class Found(Answer, frozen=True, kw_only=True):
    """What the files hold."""

    peft_type: str | None = None
    base_model_name_or_path: str | None = None
    """What the adapter says it was trained on."""
    rank: int | None = None
    """The largest."""
    targets: dict[str, int] = msgspec.field(default_factory=dict)
    """How many modules of which name."""
    layers: int | None = None
    tensors: int | None = None
    parameters: int | None = None
    weights_bytes: int | None = None
    ignored_fields: dict[str, str] = msgspec.field(default_factory=dict)
    """Fields of adapter_config.json that change nothing here, and why."""


class Report(Answer, frozen=True, kw_only=True):
    """What was checked, and how it went."""

    checks: list[Check] = msgspec.field(default_factory=list)
    found: Found | None = None
    converted: str | None = None
    """From what, and how, where what is served is not what was uploaded."""
    warnings: list[Warned] = msgspec.field(default_factory=list)


class Upload(Answer, frozen=True, kw_only=True):
    """An upload session."""

    id: str
    adapter: str
    state: Literal["uploading", "validating", "ready", "rejected", "expired"]
    files: list[UploadFile]
    created_at: int
    expires_at: int | None = None
    revision: str | None = None
    """What it became: `tenant/adapter@3`."""
    digest: str | None = None
    promote: bool = True
    error: UploadError | None = None
    report: Report | None = None
