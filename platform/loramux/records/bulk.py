"""Many rows in one statement: what a settlement costs is mostly its round trips and their parsing."""

from __future__ import annotations

import json
from collections.abc import Collection, Sequence
from functools import cache
from typing import Any

import msgspec
from sqlalchemy import ColumnElement, SQLColumnExpression, Text, any_, func, literal, select
from sqlalchemy.dialects import postgresql
from sqlalchemy.dialects.postgresql import ARRAY
from sqlalchemy.ext.asyncio import AsyncSession
from sqlalchemy.orm import DeclarativeBase

from loramux.records.database import is_postgresql


async def insert_rows(session: AsyncSession, model: type[DeclarativeBase], rows: Sequence[dict[str, Any]]) -> None:
    """Insert `rows`, at least one, which all have the same keys; texts, integers and booleans only."""
    await _insert(session, model, rows, "")


async def insert_new(session: AsyncSession, model: type[DeclarativeBase], rows: Sequence[dict[str, Any]]) -> int:
    """Like insert_rows, but leaves out those whose key is there already; the number inserted."""
    return await _insert(session, model, rows, "ON CONFLICT DO NOTHING")


def among(session: AsyncSession, column: SQLColumnExpression[str], values: Collection[str]) -> ColumnElement[bool]:
    """`column IN values` with one parameter, so that it is compiled once whatever their number."""
    if is_postgresql(session):
        return column == any_(literal(list(values), ARRAY(Text)))
    return column.in_(select(func.json_each(literal(json.dumps(list(values)))).table_valued("value").c.value))


async def _insert(
    session: AsyncSession, model: type[DeclarativeBase], rows: Sequence[dict[str, Any]], conflict: str
) -> int:
    connection, names = await session.connection(), tuple(rows[0])
    if is_postgresql(session):
        document = msgspec.json.encode(rows).decode()
        result = await connection.exec_driver_sql(_records(model, names, conflict), (document,))
    else:
        values = [tuple(map(row.__getitem__, names)) for row in rows]
        result = await connection.exec_driver_sql(_placeholders(model, names, conflict), values)
    return result.rowcount


@cache
def _records(model: type[DeclarativeBase], names: tuple[str, ...], conflict: str) -> str:
    """Rows as one JSON text: the driver passes it on as it is, where it would look at every item of an array."""
    columns = model.__table__.c
    kinds = ", ".join(f"{name} {columns[name].type.compile(postgresql.dialect())}" for name in names)
    source = f"SELECT * FROM json_to_recordset(CAST(%s AS json)) AS one({kinds})"  # noqa: S608  our own names
    return f"{_into(model, names)} {source} {conflict}"


@cache
def _placeholders(model: type[DeclarativeBase], names: tuple[str, ...], conflict: str) -> str:
    return f"{_into(model, names)} VALUES ({', '.join('?' * len(names))}) {conflict}"


def _into(model: type[DeclarativeBase], names: tuple[str, ...]) -> str:
    return f"INSERT INTO {model.__tablename__} ({', '.join(names)})"
