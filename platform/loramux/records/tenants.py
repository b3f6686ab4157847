"""Statements about tenants and their keys. These are the operator's: they are how a tenant id comes to be verified."""

from __future__ import annotations

from collections.abc import Sequence

from sqlalchemy import select, update
from sqlalchemy.dialects import postgresql, sqlite
from sqlalchemy.ext.asyncio import AsyncSession

from loramux.records.identity import TenantId
from loramux.records.models import KeyRow, TenantRow


class TenantRepository:
    """Customers."""

    def __init__(self, session: AsyncSession) -> None:
        self._session = session

    async def add(self, row: TenantRow) -> bool:
        """Insert the row; False when the name is taken (also by somebody who took it just now)."""
        values = {"id": row.id, "name": row.name, "created_at": row.created_at}
        is_sqlite = self._session.get_bind().dialect.name == "sqlite"
        insert = sqlite.insert(TenantRow) if is_sqlite else postgresql.insert(TenantRow)
        statement = insert.values(values).on_conflict_do_nothing(index_elements=["name"]).returning(TenantRow.id)
        return await self._session.scalar(statement) is not None

    async def named(self, name: str) -> TenantRow | None:
        """The tenant of that name."""
        return await self._session.scalar(select(TenantRow).where(TenantRow.name == name))

    async def all(self) -> Sequence[TenantRow]:
        """Every tenant, by name."""
        return (await self._session.scalars(select(TenantRow).order_by(TenantRow.name))).all()


class KeyRepository:
    """Keys."""

    def __init__(self, session: AsyncSession) -> None:
        self._session = session

    def add(self, row: KeyRow) -> None:
        """Insert the row when the transaction commits."""
        self._session.add(row)

    async def with_mac(self, mac: bytes) -> tuple[KeyRow, TenantRow] | None:
        """The live key with this MAC, and its tenant."""
        statement = (
            select(KeyRow, TenantRow)
            .join(TenantRow, TenantRow.id == KeyRow.tenant_id)
            .where(KeyRow.mac == mac, KeyRow.revoked_at.is_(None))
        )
        found = (await self._session.execute(statement)).one_or_none()
        return None if found is None else (found[0], found[1])

    async def of(self, tenant: TenantId) -> Sequence[KeyRow]:
        """The tenant's keys, revoked ones too, oldest first."""
        statement = select(KeyRow).where(KeyRow.tenant_id == tenant).order_by(KeyRow.created_at, KeyRow.id)
        return (await self._session.scalars(statement)).all()

    async def revoke(self, key_id: str, at: int) -> KeyRow | None:
        """Revoke the key, once; None when there is none of that id."""
        revoke = update(KeyRow).where(KeyRow.id == key_id, KeyRow.revoked_at.is_(None)).values(revoked_at=at)
        await self._session.execute(revoke)
        return await self._session.get(KeyRow, key_id)
