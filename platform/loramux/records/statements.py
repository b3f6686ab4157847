"""Parts that several repositories' statements share: many rows in one statement, and exact sums.

A settlement's cost is mostly its round trips and their parsing, so rows are written in bulk. A terabyte held for four
months is 10^19 byte-seconds, more than a 64-bit column holds, so a sum is taken in two halves.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Sequence
from functools import cache
from typing import Any

import msgspec
from sqlalchemy import ColumnElement, SQLColumnExpression, Text, any_, cast, func, literal, select
from sqlalchemy.dialects import postgresql
from sqlalchemy.dialects.postgresql import ARRAY
from sqlalchemy.ext.asyncio import AsyncSession
from sqlalchemy.orm import DeclarativeBase

from loramux.records.base import BigInt
from loramux.records.database import is_postgresql

HALF = 1 << 31


async def insert_rows(session: AsyncSession, model: type[DeclarativeBase], rows: Sequence[dict[str, Any]]) -> None:
    """Insert `rows`, at least one, which all have the same keys; texts, integers and booleans only."""
    await _insert(session, model, rows, "")


async def insert_new(session: AsyncSession, model: type[DeclarativeBase], rows: Sequence[dict[str, Any]]) -> int:
    """Insert the rows whose keys are not there already; return their number."""
    return await _insert(session, model, rows, "ON CONFLICT DO NOTHING")


def among(session: AsyncSession, column: SQLColumnExpression[str], values: Collection[str]) -> ColumnElement[bool]:
    """Return `column IN values` with one parameter, so that it is compiled once whatever their number."""
    if is_postgresql(session):
        return column == any_(literal(list(values), ARRAY(Text)))
    return column.in_(select(func.json_each(literal(json.dumps(list(values)))).table_valued("value").c.value))


def model_name(session: AsyncSession, column: SQLColumnExpression[str]) -> SQLColumnExpression[str]:
    """Return a resolved model without its revision: `tenant/adapter` of `tenant/adapter@3`."""
    if is_postgresql(session):
        return func.split_part(column, "@", 1)
    return func.substr(column, 1, func.instr(column + "@", "@") - 1)


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
    """Pass the rows as one JSON text: the driver would look at every item of an array."""
    columns = model.__table__.c
    kinds = ", ".join(f"{name} {columns[name].type.compile(postgresql.dialect())}" for name in names)
    source = f"SELECT * FROM json_to_recordset(CAST(%s AS json)) AS one({kinds})"  # noqa: S608  our own names
    return f"{_into(model, names)} {source} {conflict}"


@cache
def _placeholders(model: type[DeclarativeBase], names: tuple[str, ...], conflict: str) -> str:
    return f"{_into(model, names)} VALUES ({', '.join('?' * len(names))}) {conflict}"


def _into(model: type[DeclarativeBase], names: tuple[str, ...]) -> str:
    return f"INSERT INTO {model.__tablename__} ({', '.join(names)})"


def exact_sum(column: SQLColumnExpression[int]) -> tuple[ColumnElement[int], ColumnElement[int]]:
    """Return two columns for a SELECT, whose values `exact_value` puts together; both 0 over no rows."""
    high, low = func.sum(column // HALF), func.sum(column % HALF)
    return cast(func.coalesce(high, 0), BigInt), cast(func.coalesce(low, 0), BigInt)


def exact_value(high: Any, low: Any) -> int:
    """Return the sum."""
    return int(high) * HALF + int(low)
