"""Stored responses: a tenant's rows with an expiry, each of which may continue an earlier one.

Texts are encrypted before this module gets them. A tenant's rows are limited in number and bytes: adding a row deletes
the oldest rows above the limits.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping

import msgspec
from sqlalchemy import ColumnElement, ForeignKey, ForeignKeyConstraint, Index, delete, func, literal, or_, select
from sqlalchemy.ext.asyncio import AsyncSession
from sqlalchemy.orm import Mapped, aliased, mapped_column

from loramux.common.identity import ProjectId, TenantId
from loramux.data.entities import StoredResponse
from loramux.data.records.base import Base, TenantScoped, Viewpoint, among, to_struct


class ResponseRow(Base):
    """A stored response."""

    __tablename__ = "responses"
    __table_args__ = (
        ForeignKeyConstraint(["tenant_id", "project_id"], ["projects.tenant_id", "projects.id"]),
        Index("ix_responses_tenant_id_created_at_size", "tenant_id", "created_at", "size"),
        Index("ix_responses_expires_at", "expires_at"),
    )

    id: Mapped[str] = mapped_column(primary_key=True)
    tenant_id: Mapped[TenantId] = mapped_column(ForeignKey("tenants.id"))
    project_id: Mapped[ProjectId]
    owner: Mapped[str]
    """The first key of the chain of rotations that made the response, or the member."""
    previous_id: Mapped[str | None]
    """Id of the response that this response continues. That response may be deleted first, so this column is no foreign
    key.
    """
    items: Mapped[bytes]
    items_size: Mapped[int]
    content: Mapped[bytes]
    size: Mapped[int]
    created_at: Mapped[int]
    expires_at: Mapped[int]


class ResponseLink(msgspec.Struct, frozen=True):
    """A response in the chain of those that a response continues."""

    id: str
    previous_id: str | None
    items_size: int
    """Bytes."""


class ResponseRepository(TenantScoped):
    """One tenant's stored responses. Expired responses are not found."""

    async def add(self, response: StoredResponse, most: int, most_bytes: int) -> None:
        """Lock the tenant, insert the row, and delete the tenant's oldest rows above `most` rows or `most_bytes`."""
        await self._insert(ResponseRow(tenant_id=self._tenant, **msgspec.structs.asdict(response)))
        mine = ResponseRow.tenant_id == self._tenant
        totals = select(func.count(), func.coalesce(func.sum(ResponseRow.size), 0)).where(mine)
        count, size = (await self._session.execute(totals)).one()
        if count <= most and size <= most_bytes:
            return
        newest_first = (ResponseRow.created_at.desc(), ResponseRow.id.desc())
        numbered = (
            select(
                ResponseRow.id,
                func.row_number().over(order_by=newest_first).label("number"),
                func.sum(ResponseRow.size).over(order_by=newest_first).label("bytes"),
            )
            .where(mine)
            .subquery()
        )
        beyond = select(numbered.c.id).where(or_(numbered.c.number > most, numbered.c.bytes > most_bytes))
        await self._session.execute(delete(ResponseRow).where(ResponseRow.id.in_(beyond)))

    async def get(self, id: str, seen: Viewpoint, now: int) -> StoredResponse | None:
        """Find one of the responses that the caller sees."""
        row = await self._session.scalar(select(ResponseRow).where(*self._found(seen, now), ResponseRow.id == id))
        return None if row is None else to_struct(StoredResponse, row)

    async def chain(self, id: str, seen: Viewpoint, now: int, most: int) -> list[ResponseLink]:
        """Return the response and the responses that it continues, newest first, at most `most`.

        The chain ends at the first response without a predecessor, or before a response that was deleted.
        """
        columns = (ResponseRow.id, ResponseRow.previous_id, ResponseRow.items_size)
        first = select(*columns, literal(1).label("place")).where(*self._found(seen, now), ResponseRow.id == id)
        links = first.cte("links", recursive=True)
        earlier = aliased(ResponseRow)
        step = select(earlier.id, earlier.previous_id, earlier.items_size, links.c.place + 1).where(
            *self._found(seen, now, earlier), earlier.id == links.c.previous_id, links.c.place < most
        )
        links = links.union_all(step)
        found = await self._session.execute(
            select(links.c.id, links.c.previous_id, links.c.items_size).order_by(links.c.place)
        )
        return [ResponseLink(*row) for row in found]

    async def sizes(self, ids: Collection[str], seen: Viewpoint, now: int) -> Mapping[str, int]:
        """Return the bytes of the items of those of `ids` that the caller sees."""
        statement = select(ResponseRow.id, ResponseRow.items_size).where(
            *self._found(seen, now), among(self._session, ResponseRow.id, ids)
        )
        return {row.id: row.items_size for row in await self._session.execute(statement)}

    async def items(self, ids: Collection[str], seen: Viewpoint, now: int) -> Mapping[str, bytes]:
        """Return the items of those of `ids` that the caller sees."""
        statement = select(ResponseRow.id, ResponseRow.items).where(
            *self._found(seen, now), among(self._session, ResponseRow.id, ids)
        )
        return {row.id: row.items for row in await self._session.execute(statement)}

    async def remove(self, id: str, seen: Viewpoint, now: int) -> bool:
        """Delete a response that the caller sees; return whether it existed."""
        statement = delete(ResponseRow).where(*self._found(seen, now), ResponseRow.id == id).returning(ResponseRow.id)
        return await self._session.scalar(statement) is not None

    async def remove_all(self) -> None:
        """Delete every response of the tenant."""
        await self._session.execute(delete(ResponseRow).where(ResponseRow.tenant_id == self._tenant))

    def _found(
        self, seen: Viewpoint, now: int, row: type[ResponseRow] = ResponseRow
    ) -> tuple[ColumnElement[bool], ...]:
        return (row.tenant_id == self._tenant, *seen.conditions(row), row.expires_at > now)


async def remove_expired_responses(session: AsyncSession, now: int, limit: int) -> int:
    """Delete at most `limit` expired responses of all tenants; return their number."""
    due = select(ResponseRow.id).where(ResponseRow.expires_at <= now).limit(limit)
    statement = delete(ResponseRow).where(ResponseRow.id.in_(due)).returning(ResponseRow.id)
    return len(list(await session.scalars(statement)))
