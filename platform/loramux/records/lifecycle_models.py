"""The tables of an adapter's life: what its aliases point at, who keeps it in the pool, and who else may call it."""

from __future__ import annotations

from sqlalchemy import CheckConstraint, ForeignKeyConstraint, Index, text
from sqlalchemy.orm import Mapped, mapped_column

from loramux.records.identity import TenantId
from loramux.records.models import Base

STANDING = text("until IS NULL")


class AliasTargetRow(Base):
    """One of an alias's revisions, and its share."""

    __tablename__ = "alias_targets"
    __table_args__ = (
        ForeignKeyConstraint(
            ["tenant_id", "adapter_id", "alias"],
            ["aliases.tenant_id", "aliases.adapter_id", "aliases.name"],
            ondelete="CASCADE",
        ),
        ForeignKeyConstraint(
            ["tenant_id", "adapter_id", "revision_id"],
            ["revisions.tenant_id", "revisions.adapter_id", "revisions.id"],
        ),
        CheckConstraint("weight >= 1", name="weight"),
        Index("ix_alias_targets_revision_id", "revision_id"),
    )

    adapter_id: Mapped[str] = mapped_column(primary_key=True)
    alias: Mapped[str] = mapped_column(primary_key=True)
    revision_id: Mapped[str] = mapped_column(primary_key=True)
    tenant_id: Mapped[TenantId]
    weight: Mapped[int]


class AliasVersionRow(Base):
    """What an alias pointed at, from one change to the next; it outlives the alias."""

    __tablename__ = "alias_versions"
    __table_args__ = (ForeignKeyConstraint(["tenant_id", "adapter_id"], ["adapters.tenant_id", "adapters.id"]),)

    adapter_id: Mapped[str] = mapped_column(primary_key=True)
    alias: Mapped[str] = mapped_column(primary_key=True)
    version: Mapped[int] = mapped_column(primary_key=True, autoincrement=False)
    tenant_id: Mapped[TenantId]
    targets: Mapped[str]
    """JSON: revision numbers to weights; empty where the alias was removed."""
    restores: Mapped[int | None]
    """The version that a rollback went back to."""
    changed_by: Mapped[str]
    changed_at: Mapped[int]


class PinRow(Base):
    """A revision that its tenant keeps in the pool, from `since` to `until`: what residency is charged by."""

    __tablename__ = "adapter_pins"
    __table_args__ = (
        ForeignKeyConstraint(
            ["tenant_id", "adapter_id", "revision_id"],
            ["revisions.tenant_id", "revisions.adapter_id", "revisions.id"],
        ),
        CheckConstraint("size_bytes >= 0", name="size_bytes"),
        Index(
            "ix_adapter_pins_standing",
            "revision_id",
            unique=True,
            sqlite_where=STANDING,
            postgresql_where=STANDING,
        ),
    )

    id: Mapped[str] = mapped_column(primary_key=True)
    tenant_id: Mapped[TenantId]
    adapter_id: Mapped[str]
    revision_id: Mapped[str]
    digest: Mapped[str]
    size_bytes: Mapped[int]
    pinned_by: Mapped[str]
    """A key's or a member's id."""
    since: Mapped[int]
    used_at: Mapped[int]
    """About when a request last ran with it."""
    until: Mapped[int | None]
    """None while it stands."""
    counted_until: Mapped[int | None]
    """Up to when it is on the bill; None: from `since` on it is not."""
    ended_by: Mapped[str | None]
    """`unpinned`, `deleted`, `idle`, or the engine's code for why it cannot be kept."""


class GrantRow(Base):
    """A tenant that may call somebody else's adapter."""

    __tablename__ = "adapter_grants"
    __table_args__ = (
        ForeignKeyConstraint(["tenant_id", "adapter_id"], ["adapters.tenant_id", "adapters.id"]),
        Index("ix_adapter_grants_grantee", "grantee"),
    )

    adapter_id: Mapped[str] = mapped_column(primary_key=True)
    grantee: Mapped[str] = mapped_column(primary_key=True)
    """A tenant's name, which is its for ever. It need not exist: a grant tells nobody who is a customer here."""
    tenant_id: Mapped[TenantId]
    """The owner."""
    granted_by: Mapped[str]
    granted_at: Mapped[int]
