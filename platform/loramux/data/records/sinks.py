"""Sinks: the cursor of each sink into the ledger, the lease of the server that delivers, and parked events."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import msgspec
from sqlalchemy import ColumnElement, func, or_, select, update
from sqlalchemy.ext.asyncio import AsyncSession
from sqlalchemy.orm import Mapped, mapped_column

from loramux.data.entities import ParkedEvent
from loramux.data.records.base import Base, Repository, insert_new, to_struct


class SinkRow(Base):
    """A sink's cursor and lease."""

    __tablename__ = "sinks"

    name: Mapped[str] = mapped_column(primary_key=True)
    cursor: Mapped[int]
    """Every entry up to this sequence was delivered or parked."""
    trying_until: Mapped[int | None]
    """The last sequence of the batch that is being sent. The batch is sent again with the same entries until the sink
    has accepted it.
    """
    trying_since: Mapped[int | None]
    """The time of the batch's first attempt. After the sink's window, another attempt could be counted twice."""
    lease_holder: Mapped[str | None]
    lease_until: Mapped[int]


class ParkedRow(Base):
    """An event that a sink refused, or that the sink may have accepted without answering."""

    __tablename__ = "parked_events"

    sink: Mapped[str] = mapped_column(primary_key=True)
    event_id: Mapped[str] = mapped_column(primary_key=True)
    sequence: Mapped[int]
    reason: Mapped[str]
    parked_at: Mapped[int]


class SinkState(msgspec.Struct, frozen=True, kw_only=True):
    """A sink's cursor and the batch that is under way."""

    cursor: int
    trying_until: int | None
    trying_since: int | None


class SinkRepository(Repository):
    """One sink, as the server that holds its lease sees it."""

    def __init__(self, session: AsyncSession, name: str, holder: str) -> None:
        super().__init__(session)
        self._name = name
        self._holder = holder

    async def lease(self, now: int, until: int) -> SinkState | None:
        """Lease the sink until `until`; None while another server has the lease."""
        fresh = {
            "name": self._name,
            "cursor": 0,
            "trying_until": None,
            "trying_since": None,
            "lease_holder": None,
            "lease_until": 0,
        }
        await insert_new(self._session, SinkRow, [fresh])
        free = or_(SinkRow.lease_until < now, SinkRow.lease_holder == self._holder)
        statement = (
            update(SinkRow)
            .where(SinkRow.name == self._name, free)
            .values(lease_holder=self._holder, lease_until=until)
            .returning(SinkRow.cursor, SinkRow.trying_until, SinkRow.trying_since)
        )
        row = (await self._session.execute(statement)).one_or_none()
        if row is None:
            return None
        return SinkState(cursor=row.cursor, trying_until=row.trying_until, trying_since=row.trying_since)

    async def trying(self, until: int, since: int | None) -> bool:
        """Record the batch to be sent; If `since` is None, the batch did not arrive. Return False if this server does
        not have the lease.
        """
        values = {"trying_until": until if since is not None else None, "trying_since": since}
        return await self._update(values)

    async def advance(self, cursor: int) -> bool:
        """Move the cursor after every entry up to it was delivered or parked. Return False if this server does not have
        the lease.
        """
        return await self._update({"cursor": cursor, "trying_until": None, "trying_since": None})

    async def release(self) -> None:
        """Give the lease up."""
        await self._update({"lease_holder": None, "lease_until": 0})

    async def park(self, parked: Sequence[ParkedEvent]) -> None:
        """Keep undelivered events for an operator, each once."""
        await insert_new(self._session, ParkedRow, [msgspec.structs.asdict(one) for one in parked])

    async def parked(self) -> list[ParkedEvent]:
        """List the parked events in the ledger's order."""
        statement = (
            select(ParkedRow).where(ParkedRow.sink == self._name).order_by(ParkedRow.sequence, ParkedRow.event_id)
        )
        rows = await self._session.scalars(statement)
        return [to_struct(ParkedEvent, row) for row in rows]

    async def _update(self, values: Mapping[str, object]) -> bool:
        mine: tuple[ColumnElement[bool], ...] = (SinkRow.name == self._name, SinkRow.lease_holder == self._holder)
        updated = await self._session.scalars(update(SinkRow).where(*mine).values(**values).returning(SinkRow.name))
        return bool(updated.all())


class SinkProgress(msgspec.Struct, frozen=True, kw_only=True):
    """The progress of a sink, as operators see it."""

    name: str
    cursor: int
    trying_since: int | None
    parked: int
    """Events that an operator must decide about."""


async def sink_progress(session: AsyncSession) -> list[SinkProgress]:
    """Return the progress of every sink, by name."""
    parked = select(func.count()).where(ParkedRow.sink == SinkRow.name).scalar_subquery()
    columns = (SinkRow.name, SinkRow.cursor, SinkRow.trying_since, parked)
    rows = await session.execute(select(*columns).order_by(SinkRow.name))
    return [SinkProgress(name=row[0], cursor=row[1], trying_since=row[2], parked=row[3]) for row in rows]


async def newest_parked(session: AsyncSession, limit: int) -> list[ParkedEvent]:
    """Return the latest parked events of all sinks, the newest first."""
    rows = await session.scalars(
        select(ParkedRow).order_by(ParkedRow.parked_at.desc(), ParkedRow.event_id).limit(limit)
    )
    return [to_struct(ParkedEvent, row) for row in rows]
