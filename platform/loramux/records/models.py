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


def _where_set(table: str, moment: str) -> Index:
    """An index of the few rows that have this time."""
    is_set = text(f"{moment} IS NOT NULL")
    return Index(f"ix_{table}_{moment}", moment, sqlite_where=is_set, postgresql_where=is_set)


class AdapterRow(Base):
    """A name that a tenant owns; it survives deletion so that a revision number names one content for ever."""

    __tablename__ = "adapters"
    __table_args__ = (
        UniqueConstraint("tenant_id", "name"),
        UniqueConstraint("tenant_id", "id"),
        _where_set("adapters", "expires_at"),
    )

    id: Mapped[str] = mapped_column(primary_key=True)
    tenant_id: Mapped[TenantId] = mapped_column(ForeignKey("tenants.id"))
    name: Mapped[str]
    created_at: Mapped[int]
    deleted_at: Mapped[int | None]
    version: Mapped[int] = mapped_column(server_default=text("1"))
    """Counts every change of the adapter or of anything under its name: its ETag."""
    expires_at: Mapped[int | None]
    """When it deletes itself."""


class RevisionRow(Base):
    """An adapter's immutable, content-addressed weights; what is not its content may change."""

    __tablename__ = "revisions"
    __table_args__ = (
        ForeignKeyConstraint(["tenant_id", "adapter_id"], ["adapters.tenant_id", "adapters.id"]),
        UniqueConstraint("adapter_id", "number"),
        UniqueConstraint("adapter_id", "digest"),
        UniqueConstraint("tenant_id", "adapter_id", "id"),
        CheckConstraint("state IN ('ready', 'deleted')", name="state"),
        CheckConstraint("number >= 1 AND rank >= 0 AND size_bytes >= 0", name="quantities"),
        Index("ix_revisions_digest", "digest"),
        *(_where_set("revisions", moment) for moment in ("deleted_at", "purge_at", "expires_at")),
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
    deleted_at: Mapped[int | None]
    """When its storage ceased to be charged."""
    counted_until: Mapped[int | None]
    """Up to when its storage is on the bill; None: not at all yet."""
    purge_at: Mapped[int | None]
    """Of a deleted one, when its content goes; until then it can be undeleted. None: it is not deleted, or gone."""
    expires_at: Mapped[int | None]
    """When it deletes itself."""


class AliasRow(Base):
    """A movable name for an adapter's revisions; which ones, its targets say."""

    __tablename__ = "aliases"
    __table_args__ = (
        ForeignKeyConstraint(["tenant_id", "adapter_id"], ["adapters.tenant_id", "adapters.id"]),
        UniqueConstraint("tenant_id", "adapter_id", "name"),
    )

    adapter_id: Mapped[str] = mapped_column(primary_key=True)
    name: Mapped[str] = mapped_column(primary_key=True)
    id: Mapped[str] = mapped_column(unique=True)
    """Keys the choice between targets, so that two aliases choose independently."""
    tenant_id: Mapped[TenantId]
    version: Mapped[int]
    """The latest of its history."""
    updated_at: Mapped[int]
