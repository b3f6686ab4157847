"""Uploads under way and what became of them. Units as in `records.models`."""

from __future__ import annotations

from sqlalchemy import CheckConstraint, ForeignKey, ForeignKeyConstraint, Index, UniqueConstraint
from sqlalchemy.orm import Mapped, mapped_column

from loramux.records.identity import TenantId
from loramux.records.models import Base


class UploadRow(Base):
    """Files on their way to become a revision. Nothing but this row knows of them until they are proved sound."""

    __tablename__ = "uploads"
    __table_args__ = (
        UniqueConstraint("tenant_id", "id"),
        CheckConstraint("state IN ('uploading', 'validating', 'ready', 'rejected', 'expired')", name="state"),
        CheckConstraint("(state = 'ready') = (revision IS NOT NULL)", name="revision"),
        Index("ix_uploads_tenant_id_created_at", "tenant_id", "created_at"),
        Index("ix_uploads_state_expires_at", "state", "expires_at"),
    )

    id: Mapped[str] = mapped_column(primary_key=True)
    tenant_id: Mapped[TenantId] = mapped_column(ForeignKey("tenants.id"))
    adapter: Mapped[str]
    """The adapter's own name; it need not exist."""
    promote: Mapped[bool]
    """Whether the default alias moves to the new revision."""
    source: Mapped[str | None]
    """JSON: where the server fetches the files itself; null where the client sends them."""
    state: Mapped[str]
    server_id: Mapped[str | None]
    """The server that validates it; when that one is gone, another one does."""
    attempts: Mapped[int]
    """How many servers have begun to."""
    revision: Mapped[int | None]
    digest: Mapped[str | None]
    error: Mapped[str | None]
    """JSON: a `records.events.Refusal`."""
    report: Mapped[str | None]
    """JSON: what validation found."""
    created_at: Mapped[int]
    expires_at: Mapped[int]
    finished_at: Mapped[int | None]


class UploadFileRow(Base):
    """A file as it was announced, and how much of it is stored."""

    __tablename__ = "upload_files"
    __table_args__ = (
        ForeignKeyConstraint(["tenant_id", "upload_id"], ["uploads.tenant_id", "uploads.id"], ondelete="CASCADE"),
        CheckConstraint("received BETWEEN 0 AND size", name="received"),
    )

    upload_id: Mapped[str] = mapped_column(primary_key=True)
    name: Mapped[str] = mapped_column(primary_key=True)
    tenant_id: Mapped[TenantId]
    size: Mapped[int]
    sha256: Mapped[str]
    """64 hexadecimal digits."""
    received: Mapped[int]
    """Bytes from the start on that are in pieces."""


class UploadPieceRow(Base):
    """A range of a file, stored as an object of its own."""

    __tablename__ = "upload_pieces"
    __table_args__ = (
        ForeignKeyConstraint(
            ["upload_id", "file"], ["upload_files.upload_id", "upload_files.name"], ondelete="CASCADE"
        ),
        CheckConstraint("size > 0", name="size"),
    )

    upload_id: Mapped[str] = mapped_column(primary_key=True)
    file: Mapped[str] = mapped_column(primary_key=True)
    start: Mapped[int] = mapped_column(primary_key=True, autoincrement=False)
    size: Mapped[int]
    object: Mapped[str]
    """Its name in the store."""
