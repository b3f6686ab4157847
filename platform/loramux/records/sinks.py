"""Statements about sinks: whose turn it is, how far the sink has come, and what it did not take."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import msgspec
from sqlalchemy import ColumnElement, or_, select, update
from sqlalchemy.ext.asyncio import AsyncSession

from loramux.records.billing_models import ParkedRow, SinkRow
from loramux.records.bulk import insert_new


class SinkState(msgspec.Struct, frozen=True, kw_only=True):
    """A sink, as whoever holds its lease finds it."""

    cursor: int
    trying_until: int | None
    trying_since: int | None


class Parked(msgspec.Struct, frozen=True, kw_only=True):
    """An event that needs a person."""

    sink: str
    event_id: str
    sequence: int
    reason: str
    parked_at: int


class SinkRepository:
    """One sink, for one holder of its lease."""

    def __init__(self, session: AsyncSession, name: str, holder: str) -> None:
        self._session = session
        self._name = name
        self._holder = holder

    async def lease(self, now: int, until: int) -> SinkState | None:
        """Have the sink to oneself until then; None while somebody else has it."""
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
        """Note the batch that is to be sent; with no `since`, that it did not arrive. False without the lease."""
        values = {"trying_until": until if since is not None else None, "trying_since": since}
        return await self._update(values)

    async def advance(self, cursor: int) -> bool:
        """Everything up to there is delivered or parked; False without lease, and then nothing is noted."""
        return await self._update({"cursor": cursor, "trying_until": None, "trying_since": None})

    async def release(self) -> None:
        """Let others have it."""
        await self._update({"lease_holder": None, "lease_until": 0})

    async def park(self, parked: Sequence[Parked]) -> None:
        """Keep what was not delivered for a person to look at; once."""
        if parked:
            await insert_new(self._session, ParkedRow, [msgspec.structs.asdict(one) for one in parked])

    async def parked(self) -> list[Parked]:
        """What waits for a person, in the ledger's order."""
        statement = (
            select(ParkedRow).where(ParkedRow.sink == self._name).order_by(ParkedRow.sequence, ParkedRow.event_id)
        )
        rows = await self._session.scalars(statement)
        return [Parked(**{name: getattr(row, name) for name in Parked.__struct_fields__}) for row in rows]

    async def _update(self, values: Mapping[str, object]) -> bool:
        mine: tuple[ColumnElement[bool], ...] = (SinkRow.name == self._name, SinkRow.lease_holder == self._holder)
        updated = await self._session.scalars(update(SinkRow).where(*mine).values(**values).returning(SinkRow.name))
        return bool(updated.all())
