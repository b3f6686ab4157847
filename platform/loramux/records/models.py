"""The tables. Times are integer microseconds since the epoch, UTC; tokens and bytes are integers.

Foreign keys carry the tenant along, so that the database itself refuses a row that joins two tenants.
"""

from __future__ import annotations

from typing import ClassVar

from sqlalchemy import (
    BigInteger,
    CheckConstraint,
    ForeignKey,
    ForeignKeyConstraint,
    Index,
    Integer,
    LargeBinary,
    MetaData,
    Text,
    UniqueConstraint,
    text,
)
from sqlalchemy.orm import DeclarativeBase, Mapped, mapped_column

from loramux.records.identity import ProjectId, TenantId

BigInt = BigInteger().with_variant(Integer(), "sqlite")
"""64 bits on both; SQLite calls every integer so, and makes an INTEGER primary key the row's own address."""


class Base(DeclarativeBase):
    """What every table shares: how its constraints are named and its types written."""

    metadata = MetaData(
        naming_convention={
            "ix": "ix_%(table_name)s_%(column_0_N_name)s",
            "uq": "uq_%(table_name)s_%(column_0_N_name)s",
            "ck": "ck_%(table_name)s_%(constraint_name)s",
            "fk": "fk_%(table_name)s_%(column_0_N_name)s",
            "pk": "pk_%(table_name)s",
        }
    )
    type_annotation_map: ClassVar = {
        str: Text(),
        TenantId: Text(),
        ProjectId: Text(),
        int: BigInt,
        bytes: LargeBinary(),
    }


class TenantRow(Base):
    """A customer: the boundary of isolation, fairness and billing."""

    __tablename__ = "tenants"

    id: Mapped[TenantId] = mapped_column(primary_key=True)
    name: Mapped[str] = mapped_column(unique=True)
    tier: Mapped[str] = mapped_column(ForeignKey("tiers.name"))
    created_at: Mapped[int]
    suspended_at: Mapped[int | None]


class KeyRow(Base):
    """A tenant's API key: its MAC and its last characters, never the key."""

    __tablename__ = "keys"
    __table_args__ = (
        UniqueConstraint("tenant_id", "id"),
        ForeignKeyConstraint(["tenant_id", "project_id"], ["projects.tenant_id", "projects.id"]),
    )

    id: Mapped[str] = mapped_column(primary_key=True)
    tenant_id: Mapped[TenantId] = mapped_column(ForeignKey("tenants.id"))
    name: Mapped[str]
    scopes: Mapped[str]
    """Sorted, separated by spaces."""
    mac: Mapped[bytes] = mapped_column(unique=True)
    hint: Mapped[str]
    project_id: Mapped[ProjectId]
    models: Mapped[str | None]
    """The allow-list, sorted, one a line; null allows every model of the tenant."""
    created_by: Mapped[str]
    created_at: Mapped[int]
    expires_at: Mapped[int | None]
    last_used_at: Mapped[int | None]
    replaced_by: Mapped[str | None]
    """The key that a rotation made of this one."""
    revoked_at: Mapped[int | None]


class AdapterRow(Base):
    """A name that a tenant owns; it survives deletion so that a revision number names one content for ever."""

    __tablename__ = "adapters"
    __table_args__ = (UniqueConstraint("tenant_id", "name"), UniqueConstraint("tenant_id", "id"))

    id: Mapped[str] = mapped_column(primary_key=True)
    tenant_id: Mapped[TenantId] = mapped_column(ForeignKey("tenants.id"))
    name: Mapped[str]
    created_at: Mapped[int]
    deleted_at: Mapped[int | None]


class RevisionRow(Base):
    """An adapter's immutable, content-addressed weights; `state` and `base` alone ever change."""

    __tablename__ = "revisions"
    __table_args__ = (
        ForeignKeyConstraint(["tenant_id", "adapter_id"], ["adapters.tenant_id", "adapters.id"]),
        UniqueConstraint("adapter_id", "number"),
        UniqueConstraint("adapter_id", "digest"),
        UniqueConstraint("tenant_id", "adapter_id", "id"),
        CheckConstraint("state IN ('ready', 'deleted')", name="state"),
        CheckConstraint("number >= 1 AND rank >= 1 AND size_bytes >= 0", name="quantities"),
        Index("ix_revisions_digest", "digest"),
    )

    id: Mapped[str] = mapped_column(primary_key=True)
    tenant_id: Mapped[TenantId]
    adapter_id: Mapped[str]
    number: Mapped[int]
    digest: Mapped[str]
    """`sha256:` and 64 hexadecimal digits, over both files (`loramux.storage`)."""
    rank: Mapped[int]
    size_bytes: Mapped[int]
    base: Mapped[str]
    """Fingerprint of the base model that it was last validated against."""
    state: Mapped[str]
    created_at: Mapped[int]


class AliasRow(Base):
    """A movable name for one of an adapter's revisions."""

    __tablename__ = "aliases"
    __table_args__ = (
        ForeignKeyConstraint(
            ["tenant_id", "adapter_id", "revision_id"],
            ["revisions.tenant_id", "revisions.adapter_id", "revisions.id"],
        ),
    )

    adapter_id: Mapped[str] = mapped_column(primary_key=True)
    name: Mapped[str] = mapped_column(primary_key=True)
    tenant_id: Mapped[TenantId]
    revision_id: Mapped[str]
    updated_at: Mapped[int]


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
    prompt_tokens: Mapped[int]
    max_tokens: Mapped[int]
    status: Mapped[str]
    created_at: Mapped[int]
    settled_at: Mapped[int | None]


class LedgerRow(Base):
    """One line of the bill. Triggers refuse every UPDATE, DELETE and gap; corrections are new rows."""

    __tablename__ = "ledger_entries"
    __table_args__ = (
        CheckConstraint("kind IN ('usage', 'interrupted')", name="kind"),
        CheckConstraint("input_tokens >= 0 AND output_tokens >= 0", name="quantities"),
        CheckConstraint("cached_tokens BETWEEN 0 AND input_tokens", name="cached"),
        Index("ix_ledger_entries_tenant_id_created_at", "tenant_id", "created_at"),
    )

    sequence: Mapped[int] = mapped_column(primary_key=True, autoincrement=False)
    event_id: Mapped[str] = mapped_column(unique=True)
    kind: Mapped[str]
    tenant_id: Mapped[TenantId] = mapped_column(ForeignKey("tenants.id"))
    key_id: Mapped[str]
    request_id: Mapped[str]
    model: Mapped[str]
    adapter_digest: Mapped[str | None]
    input_tokens: Mapped[int]
    cached_tokens: Mapped[int]
    output_tokens: Mapped[int]
    finish_reason: Mapped[str | None]
    status: Mapped[str]
    created_at: Mapped[int]
    prev_hash: Mapped[str]
    hash: Mapped[str]


class LedgerHeadRow(Base):
    """The ledger's last sequence and hash: one row, locked by whoever appends."""

    __tablename__ = "ledger_head"
    __table_args__ = (CheckConstraint("id = 1", name="single"),)

    id: Mapped[int] = mapped_column(primary_key=True, autoincrement=False)
    sequence: Mapped[int]
    hash: Mapped[str]
