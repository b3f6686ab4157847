"""Many rows in one statement: what a settlement costs is mostly its round trips and their parsing."""

from __future__ import annotations

import json
from collections.abc import Collection, Sequence
from functools import cache
from typing import Any, cast

from sqlalchemy import (
    BigInteger,
    ColumnElement,
    CursorResult,
    SQLColumnExpression,
    Table,
    Text,
    any_,
    func,
    insert,
    literal,
    select,
    text,
)
from sqlalchemy.dialects import sqlite
from sqlalchemy.dialects.postgresql import ARRAY
from sqlalchemy.ext.asyncio import AsyncSession
from sqlalchemy.orm import DeclarativeBase

from loramux.records.database import is_postgresql


async def insert_rows(session: AsyncSession, model: type[DeclarativeBase], rows: Sequence[dict[str, Any]]) -> None:
    """Insert `rows`, at least one, which all have the same keys; texts and integers only."""
    table = cast(Table, model.__table__)
    if is_postgresql(session):
        await session.execute(text(_unnest(table, tuple(rows[0]))), _columns(rows))
    else:
        await session.execute(insert(table), rows)


async def insert_new(session: AsyncSession, model: type[DeclarativeBase], rows: Sequence[dict[str, Any]]) -> int:
    """Like insert_rows, but leaves out those whose key is there already; the number inserted."""
    table = cast(Table, model.__table__)
    if is_postgresql(session):
        statement = text(_unnest(table, tuple(rows[0])) + " ON CONFLICT DO NOTHING")
        result = await session.execute(statement, _columns(rows))
    else:
        result = await session.execute(sqlite.insert(table).on_conflict_do_nothing(), rows)
    return cast("CursorResult[Any]", result).rowcount


def among(session: AsyncSession, column: SQLColumnExpression[str], values: Collection[str]) -> ColumnElement[bool]:
    """`column IN values` with one parameter, so that it is compiled once whatever their number."""
    if is_postgresql(session):
        return column == any_(literal(list(values), ARRAY(Text)))
    return column.in_(select(func.json_each(literal(json.dumps(list(values)))).table_valued("value").c.value))


def _columns(rows: Sequence[dict[str, Any]]) -> dict[str, list[Any]]:
    return {name: [row[name] for row in rows] for name in rows[0]}


@cache
def _unnest(table: Table, names: tuple[str, ...]) -> str:
    kinds = ("bigint" if isinstance(table.c[name].type, BigInteger) else "text" for name in names)
    arrays = ", ".join(f"CAST(:{name} AS {kind}[])" for name, kind in zip(names, kinds, strict=True))
    return f"INSERT INTO {table.name} ({', '.join(names)}) SELECT * FROM unnest({arrays})"  # noqa: S608  our own names
