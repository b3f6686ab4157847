"""The tables that the bill is made of. Units as in `records.models`; byte-seconds are bytes times whole seconds."""

from __future__ import annotations

from sqlalchemy import CheckConstraint, ForeignKey, ForeignKeyConstraint, Index, text, true
from sqlalchemy.orm import Mapped, mapped_column

from loramux.records.identity import ProjectId, TenantId
from loramux.records.models import Base


class RequestRow(Base):
    """What was asked, written before the engine sees it, with the most it can come to cost."""

    __tablename__ = "requests"
    __table_args__ = (
        ForeignKeyConstraint(["tenant_id", "project_id"], ["projects.tenant_id", "projects.id"]),
        CheckConstraint("status IN ('open', 'settled', 'interrupted')", name="status"),
        CheckConstraint("prompt_tokens >= 0 AND max_tokens >= 0", name="quantities"),
        Index(
            "ix_requests_open",
            "server_id",
            sqlite_where=text("status = 'open'"),
            postgresql_where=text("status = 'open'"),
        ),
        Index(
            "ix_requests_adapter_digest_created_at",
            "adapter_digest",
            "created_at",
            sqlite_where=text("adapter_digest IS NOT NULL"),
            postgresql_where=text("adapter_digest IS NOT NULL"),
        ),
    )

    id: Mapped[str] = mapped_column(primary_key=True)
    tenant_id: Mapped[TenantId]
    key_id: Mapped[str]
    """The key that asked, or the member who did in person."""
    project_id: Mapped[ProjectId | None]
    server_id: Mapped[str]
    """The server process that runs it; when that one is gone, nobody else will settle the request."""
    model: Mapped[str]
    adapter_digest: Mapped[str | None]
    base_model: Mapped[str] = mapped_column(server_default=text("''"))
    tier: Mapped[str] = mapped_column(server_default=text("''"))
    tags: Mapped[str] = mapped_column(server_default=text("''"))
    prompt_tokens: Mapped[int]
    max_tokens: Mapped[int]
    has_holds: Mapped[bool] = mapped_column(server_default=true())
    """Whether it may hold something of limits or budgets; where not, nobody looks."""
    has_claim: Mapped[bool] = mapped_column(server_default=true())
    """Whether it may have an idempotency key."""
    status: Mapped[str]
    created_at: Mapped[int]
    settled_at: Mapped[int | None]


class LedgerRow(Base):
    """One line of the bill. Triggers refuse every UPDATE, DELETE and gap; corrections are new rows."""

    __tablename__ = "ledger_entries"
    __table_args__ = (
        CheckConstraint("kind IN ('usage', 'interrupted', 'storage', 'residency', 'correction')", name="kind"),
        CheckConstraint("(corrects IS NOT NULL) = (kind = 'correction')", name="correction"),
        CheckConstraint(
            "kind = 'correction' OR (input_tokens >= 0 AND output_tokens >= 0"
            " AND waived_input_tokens >= 0 AND waived_output_tokens >= 0 AND adapter_load >= 0"
            " AND adapter_byte_seconds >= 0 AND adapter_resident_byte_seconds >= 0)",
            name="quantities",
        ),
        CheckConstraint(
            "kind = 'correction' OR (cached_tokens BETWEEN 0 AND input_tokens"
            " AND waived_cached_tokens BETWEEN 0 AND waived_input_tokens)",
            name="cached",
        ),
        Index("ix_ledger_entries_tenant_id_created_at", "tenant_id", "created_at"),
    )

    sequence: Mapped[int] = mapped_column(primary_key=True, autoincrement=False)
    event_id: Mapped[str] = mapped_column(unique=True)
    kind: Mapped[str]
    tenant_id: Mapped[TenantId] = mapped_column(ForeignKey("tenants.id"))
    key_id: Mapped[str]
    project_id: Mapped[ProjectId | None]
    request_id: Mapped[str]
    model: Mapped[str]
    adapter_digest: Mapped[str | None]
    base_model: Mapped[str] = mapped_column(server_default=text("''"))
    tier: Mapped[str] = mapped_column(server_default=text("''"))
    tags: Mapped[str] = mapped_column(server_default=text("''"))
    input_tokens: Mapped[int]
    cached_tokens: Mapped[int]
    output_tokens: Mapped[int]
    waived_input_tokens: Mapped[int] = mapped_column(server_default="0")
    waived_cached_tokens: Mapped[int] = mapped_column(server_default="0")
    waived_output_tokens: Mapped[int] = mapped_column(server_default="0")
    adapter_load: Mapped[int] = mapped_column(server_default="0")
    adapter_byte_seconds: Mapped[int] = mapped_column(server_default="0")
    adapter_resident_byte_seconds: Mapped[int] = mapped_column(server_default="0")
    finish_reason: Mapped[str | None]
    status: Mapped[str]
    created_at: Mapped[int]
    occurred_at: Mapped[int | None]
    corrects: Mapped[str | None]
    prev_hash: Mapped[str]
    hash: Mapped[str]


class LedgerHeadRow(Base):
    """The ledger's last sequence and hash: one row, locked by whoever appends."""

    __tablename__ = "ledger_head"
    __table_args__ = (CheckConstraint("id = 1", name="single"),)

    id: Mapped[int] = mapped_column(primary_key=True, autoincrement=False)
    sequence: Mapped[int]
    hash: Mapped[str]


class EngineCountRow(Base):
    """What one server's engine counted by itself for the requests that are settled, by revision.

    `adapter_digest` is empty for the base model. Each row is written by its server alone, in the transactions that
    settle.
    """

    __tablename__ = "engine_counts"

    server_id: Mapped[str] = mapped_column(primary_key=True)
    base_model: Mapped[str] = mapped_column(primary_key=True)
    adapter_digest: Mapped[str] = mapped_column(primary_key=True)
    prompt_tokens: Mapped[int]
    cached_tokens: Mapped[int]
    output_tokens: Mapped[int]
