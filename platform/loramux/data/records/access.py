"""Access to adapters: the grants of other tenants, and the revisions that a model's name means for one tenant.

A name is resolved among the tenant's own adapters and those that are granted to it.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from functools import cache
from typing import Any

import msgspec
from sqlalchemy import ColumnElement, Executable, ForeignKeyConstraint, Index, Row, Select, bindparam, literal, select
from sqlalchemy.ext.asyncio import AsyncSession
from sqlalchemy.orm import Mapped, mapped_column

from loramux.common.identity import TenantId
from loramux.data.records.adapters import READY, AdapterRow, RevisionRow, Stamp
from loramux.data.records.aliases import DEFAULT_ALIAS, AliasRow, AliasTargetRow
from loramux.data.records.base import Base, TenantScoped, among
from loramux.data.records.tenants import TenantRow


class GrantRow(Base):
    """A tenant that may call another tenant's adapter."""

    __tablename__ = "adapter_grants"
    __table_args__ = (
        ForeignKeyConstraint(["tenant_id", "adapter_id"], ["adapters.tenant_id", "adapters.id"]),
        Index("ix_adapter_grants_grantee", "grantee"),
    )

    adapter_id: Mapped[str] = mapped_column(primary_key=True)
    grantee: Mapped[str] = mapped_column(primary_key=True)
    """A tenant's name, which never changes. The tenant need not exist, so that a grant does not reveal the names of
    customers.
    """
    tenant_id: Mapped[TenantId]
    """The owner of the adapter."""
    granted_by: Mapped[str]
    granted_at: Mapped[int]


class GrantRepository(TenantScoped):
    """The grants of one tenant's adapters."""

    async def all(self, adapter_id: str) -> Sequence[GrantRow]:
        """List the adapter's grants by grantee."""
        statement = select(GrantRow).where(GrantRow.tenant_id == self._tenant, GrantRow.adapter_id == adapter_id)
        return (await self._session.scalars(statement.order_by(GrantRow.grantee))).all()

    async def add(self, adapter_id: str, grantee: str, stamp: Stamp) -> GrantRow:
        """Insert a grant that does not exist yet."""
        row = GrantRow(
            adapter_id=adapter_id,
            grantee=grantee,
            tenant_id=self._tenant,
            granted_by=stamp.by,
            granted_at=stamp.at,
        )
        await self._insert(row)
        return row

    async def remove(self, row: GrantRow) -> None:
        """Delete a grant."""
        await self._delete(row)


class AccessibleRevision(msgspec.Struct, frozen=True, kw_only=True):
    """A revision that the tenant may call under a name."""

    tenant_id: TenantId
    """The owner of the adapter."""
    adapter_id: str
    revision_id: str
    number: int
    digest: str
    base: str
    base_model: str
    key: str = ""
    """The alias's id, which keys the choice of one of its targets."""
    weight: int = 1
    series: str | None = None
    """The series of a training adapter; None: the adapter was uploaded."""


_FOUND = (
    AdapterRow.tenant_id,
    AdapterRow.id.label("adapter_id"),
    RevisionRow.id.label("revision_id"),
    RevisionRow.number,
    RevisionRow.digest,
    RevisionRow.base,
    RevisionRow.base_model,
)


class AccessRepository(TenantScoped):
    """The revisions and grants that one tenant may call, known by its id and name."""

    def __init__(self, session: AsyncSession, tenant: TenantId, tenant_name: str) -> None:
        super().__init__(session, tenant)
        self._name = tenant_name

    async def numbered(self, owner: str, adapter: str, number: int) -> AccessibleRevision | None:
        """Return the revision `owner/adapter@number`."""
        parameters = self._parameters(owner, adapter) | {"number": number}
        row = (await self._session.execute(_numbered(owner == self._name), parameters)).one_or_none()
        return None if row is None else AccessibleRevision(**row._mapping)

    async def aliased(self, owner: str, adapter: str, alias: str) -> list[AccessibleRevision]:
        """Return the targets of `owner/adapter:alias` by revision number; empty if the alias does not exist."""
        parameters = self._parameters(owner, adapter) | {"alias": alias}
        found = await self._session.execute(_aliased(owner == self._name), parameters)
        return [AccessibleRevision(**row._mapping) for row in found]

    async def own(
        self, names: Collection[str] | None = None, search: str | None = None, limit: int | None = None
    ) -> Sequence[Row[str, int, str]]:
        """Return the tenant's own adapters by name, in the form of `granted`. There may be ten thousand.

        `names` limits the list to these names, `search` to names that contain this text. The time is that of the main
        revision.
        """
        adapters = select(AdapterRow.id, AdapterRow.name).where(
            AdapterRow.tenant_id == self._tenant, AdapterRow.deleted_at.is_(None)
        )
        if names is not None:
            adapters = adapters.where(among(self._session, AdapterRow.name, names))
        if search is not None:
            adapters = adapters.where(AdapterRow.name.contains(search, autoescape=True))
        found = adapters.order_by(AdapterRow.name).limit(limit).subquery()
        name = literal(f"{self._name}/").concat(found.c.name).label("name")
        statement = (
            select(name, RevisionRow.created_at, RevisionRow.base_model)
            .join(AliasTargetRow, (AliasTargetRow.adapter_id == found.c.id) & (AliasTargetRow.alias == DEFAULT_ALIAS))
            .join(RevisionRow, RevisionRow.id == AliasTargetRow.revision_id)
            .order_by(found.c.name, AliasTargetRow.weight, RevisionRow.number)
        )
        # The dict keeps the last of an adapter's targets.
        mains = {row.name: row for row in await self._session.execute(statement)}
        return list(mains.values())

    async def granted(self) -> Sequence[Row[str, int, str]]:
        """Return other tenants' adapters that the tenant may call, by name, with the time of the grant and the base."""
        return (await self._session.execute(_GRANTED, {"caller": self._name})).all()

    def _parameters(self, owner: str, adapter: str) -> dict[str, Any]:
        """Return the parameters of `_callable`."""
        if owner == self._name:
            return {"adapter": adapter, "tenant": self._tenant}
        return {"adapter": adapter, "owner": owner, "caller": self._name}


@cache
def _numbered(is_own: bool) -> Executable:
    return _callable(select(*_FOUND), is_own).where(RevisionRow.number == bindparam("number"))


@cache
def _aliased(is_own: bool) -> Executable:
    statement = _callable(select(*_FOUND, AliasRow.id.label("key"), AliasTargetRow.weight), is_own)
    is_alias = (AliasRow.adapter_id == AliasTargetRow.adapter_id) & (AliasRow.name == AliasTargetRow.alias)
    statement = statement.join(AliasTargetRow, AliasTargetRow.revision_id == RevisionRow.id).join(AliasRow, is_alias)
    return statement.where(AliasRow.name == bindparam("alias")).order_by(RevisionRow.number)


def _callable(statement: Select[*tuple[Any, ...]], is_own: bool) -> Select[*tuple[Any, ...]]:
    """Limit a selection to the ready revisions of the `adapter` of the caller's own `tenant`, or of an `owner` that has
    granted the adapter to the `caller`.
    """
    granted = (
        select(GrantRow.adapter_id)
        .join(TenantRow, TenantRow.id == GrantRow.tenant_id)
        .where(TenantRow.name == bindparam("owner"), GrantRow.grantee == bindparam("caller"))
    )
    return (
        statement.select_from(AdapterRow)
        .join(RevisionRow, RevisionRow.adapter_id == AdapterRow.id)
        .where(
            AdapterRow.name == bindparam("adapter"),
            AdapterRow.deleted_at.is_(None),
            RevisionRow.state == READY,
            AdapterRow.tenant_id == bindparam("tenant") if is_own else AdapterRow.id.in_(granted),
        )
    )


async def same_content(
    session: AsyncSession, adapter_id: str, digest: str, base_models: Sequence[str]
) -> list[tuple[int, str]]:
    """List an adapter's callable revisions with this content for these bases by number, each with its base."""
    statement = (
        select(RevisionRow.number, RevisionRow.base_model)
        .where(
            RevisionRow.adapter_id == adapter_id,
            RevisionRow.digest == digest,
            RevisionRow.base_model.in_(base_models),
            RevisionRow.state == READY,
        )
        .order_by(RevisionRow.number)
    )
    return [(number, base_model) for number, base_model in await session.execute(statement)]


def _default_base() -> ColumnElement[str]:
    """Return the base of the revision with the largest share of an adapter's default alias."""
    return (
        select(RevisionRow.base_model)
        .join(AliasTargetRow, AliasTargetRow.revision_id == RevisionRow.id)
        .where(AliasTargetRow.adapter_id == AdapterRow.id, AliasTargetRow.alias == DEFAULT_ALIAS)
        .order_by(AliasTargetRow.weight.desc(), RevisionRow.number.desc())
        .limit(1)
        .scalar_subquery()
    )


_GRANTED = (
    select(
        (TenantRow.name + "/" + AdapterRow.name).label("name"),
        GrantRow.granted_at.label("created_at"),
        _default_base().label("base_model"),
    )
    .join(AdapterRow, AdapterRow.id == GrantRow.adapter_id)
    .join(TenantRow, TenantRow.id == AdapterRow.tenant_id)
    .where(GrantRow.grantee == bindparam("caller"), AdapterRow.deleted_at.is_(None))
    .order_by("name")
)
