"""Statements about tenants, their keys and members in person: how a tenant id comes to be verified."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from sqlalchemy import bindparam, select, update
from sqlalchemy.dialects import postgresql, sqlite
from sqlalchemy.engine import Row
from sqlalchemy.ext.asyncio import AsyncSession

from loramux.records.identity import TenantId
from loramux.records.models import KeyRow, TenantRow
from loramux.records.tenancy_models import MemberRow, ProjectRow, TierRow


class TenantRepository:
    """Customers."""

    def __init__(self, session: AsyncSession) -> None:
        self._session = session

    async def add(self, row: TenantRow) -> bool:
        """Insert the row; False when the name is taken (also by somebody who took it just now)."""
        values = {"id": row.id, "name": row.name, "tier": row.tier, "created_at": row.created_at}
        is_sqlite = self._session.get_bind().dialect.name == "sqlite"
        insert = sqlite.insert(TenantRow) if is_sqlite else postgresql.insert(TenantRow)
        statement = insert.values(values).on_conflict_do_nothing(index_elements=["name"]).returning(TenantRow.id)
        return await self._session.scalar(statement) is not None

    async def named(self, name: str) -> TenantRow | None:
        """The tenant of that name."""
        return await self._session.scalar(select(TenantRow).where(TenantRow.name == name))

    async def locked(self, name: str) -> TenantRow | None:
        """The tenant of that name, held until this transaction ends."""
        return await self._session.scalar(select(TenantRow).where(TenantRow.name == name).with_for_update())

    async def all(self) -> Sequence[TenantRow]:
        """Every tenant, by name."""
        return (await self._session.scalars(select(TenantRow).order_by(TenantRow.name))).all()


class CredentialRepository:
    """From a secret's MAC or a person's identity to a tenant, in one statement."""

    def __init__(self, session: AsyncSession) -> None:
        self._session = session

    async def key(self, mac: bytes) -> Row[KeyRow, TenantRow, TierRow] | None:
        """The key with this MAC that was not revoked, its tenant and its tier."""
        statement = (
            select(KeyRow, TenantRow, TierRow)
            .join(TenantRow, TenantRow.id == KeyRow.tenant_id)
            .join(TierRow, TierRow.name == TenantRow.tier)
            .where(KeyRow.mac == mac, KeyRow.revoked_at.is_(None))
        )
        return (await self._session.execute(statement)).one_or_none()

    async def person(
        self, issuer: str, subject: str, project: str
    ) -> Sequence[Row[MemberRow, TenantRow, TierRow, ProjectRow]]:
        """Everything that this person is a member of and that has a live project of that name."""
        statement = (
            select(MemberRow, TenantRow, TierRow, ProjectRow)
            .join(TenantRow, TenantRow.id == MemberRow.tenant_id)
            .join(TierRow, TierRow.name == TenantRow.tier)
            .join(ProjectRow, ProjectRow.tenant_id == TenantRow.id)
            .where(MemberRow.issuer == issuer, MemberRow.subject == subject)
            .where(ProjectRow.name == project, ProjectRow.archived_at.is_(None))
            .order_by(TenantRow.name)
        )
        return (await self._session.execute(statement)).all()

    async def touch(self, used: Mapping[str, int]) -> None:
        """Note when keys were last used, by id; never earlier than was noted already."""
        statement = (
            update(KeyRow.__table__)  # type: ignore[arg-type]
            .where(
                KeyRow.id == bindparam("key"), (KeyRow.last_used_at.is_(None)) | (KeyRow.last_used_at < bindparam("at"))
            )
            .values(last_used_at=bindparam("at"))
        )
        rows: list[dict[str, Any]] = [{"key": key, "at": used[key]} for key in sorted(used)]
        await (await self._session.connection()).execute(statement, rows)


class KeyRepository:
    """One tenant's keys."""

    def __init__(self, session: AsyncSession, tenant: TenantId) -> None:
        self._session = session
        self._tenant = tenant

    async def add(self, row: KeyRow) -> None:
        """Insert the row."""
        self._session.add(row)
        await self._session.flush()

    async def all(self) -> Sequence[KeyRow]:
        """The tenant's keys, revoked ones too, oldest first."""
        statement = select(KeyRow).where(KeyRow.tenant_id == self._tenant).order_by(KeyRow.created_at, KeyRow.id)
        return (await self._session.scalars(statement)).all()

    async def locked(self, key_id: str) -> KeyRow | None:
        """The tenant's key of that id, held until this transaction ends."""
        statement = select(KeyRow).where(KeyRow.tenant_id == self._tenant, KeyRow.id == key_id)
        return await self._session.scalar(statement.with_for_update())


async def owner_of_key(session: AsyncSession, key_id: str) -> TenantRow | None:
    """The tenant that has the key: for operators, who name keys by their ids alone."""
    statement = select(TenantRow).join(KeyRow, KeyRow.tenant_id == TenantRow.id).where(KeyRow.id == key_id)
    return await session.scalar(statement)
