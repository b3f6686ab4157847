"""Base classes of tables and repositories, the columns' types, and the SQL that several repositories share.

Times are integer microseconds since the epoch, UTC; tokens and bytes are integers; money is in nano-units of the
tenant's currency. Foreign keys include the tenant, so the database itself refuses a row that joins two tenants.

The cost of a settlement is mostly round trips and their parsing, so rows are written in bulk. SQLAlchemy needs more
time to build a statement than to execute it, so the statements of every request are built once, over tables
(`Repository._run`).

A terabyte that is stored for four months is 10^19 byte-seconds. A 64-bit column cannot hold that, so a sum is computed
in two halves.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Collection, Sequence
from functools import cache
from typing import Any, ClassVar, TypeVar

import msgspec
from sqlalchemy import (
    BigInteger,
    BindParameter,
    ColumnElement,
    Executable,
    Index,
    Integer,
    LargeBinary,
    MetaData,
    Result,
    Select,
    SQLColumnExpression,
    Table,
    Text,
    any_,
    bindparam,
    cast,
    func,
    literal,
    select,
    text,
    tuple_,
)
from sqlalchemy.dialects import postgresql, sqlite
from sqlalchemy.dialects.postgresql import ARRAY
from sqlalchemy.ext.asyncio import AsyncSession
from sqlalchemy.orm import DeclarativeBase
from sqlalchemy.types import TypeEngine

from loramux.common.identity import Principal, ProjectId, TenantId
from loramux.data.records.database import is_postgresql

Struct = TypeVar("Struct", bound=msgspec.Struct)
Found = TypeVar("Found", bound="Base")

BigInt = BigInteger().with_variant(Integer(), "sqlite")
"""A 64-bit integer on both databases. In SQLite every INTEGER has 64 bits, and an INTEGER primary key is the rowid."""


class Base(DeclarativeBase):
    """Base of every table: the names of constraints and the types of columns."""

    metadata = MetaData(
        naming_convention={
            "ix": "ix_%(table_name)s_%(column_0_N_name)s",
            "uq": "uq_%(table_name)s_%(column_0_N_name)s",
            "ck": "ck_%(table_name)s_%(constraint_name)s",
            "fk": "fk_%(table_name)s_%(column_0_N_name)s",
            "pk": "pk_%(table_name)s",
        }
    )
    type_annotation_map: ClassVar = {
        str: Text(),
        TenantId: Text(),
        ProjectId: Text(),
        int: BigInt,
        bytes: LargeBinary(),
    }


def index_where_set(table: str, column: str) -> Index:
    """Index `column` only over rows that have a value in it, which are few."""
    is_set = text(f"{column} IS NOT NULL")
    return Index(f"ix_{table}_{column}", column, sqlite_where=is_set, postgresql_where=is_set)


class Repository:
    """Statements over some tables in one session. The session's owner commits."""

    def __init__(self, session: AsyncSession) -> None:
        self._session = session

    async def _run(self, build: Callable[[bool], Executable], **parameters: Any) -> Result[Any]:
        """Execute the statement that `build`, a cached function, returns for PostgreSQL (True) or SQLite."""
        return await self._session.execute(build(is_postgresql(self._session)), parameters)

    async def _insert(self, row: Base) -> None:
        """Insert the row immediately, so that a violated constraint raises its error here."""
        self._session.add(row)
        await self._session.flush()

    async def _put(self, row: Base) -> None:
        """Insert the row, or replace the row with the same primary key."""
        await self._session.merge(row)
        await self._session.flush()

    async def _delete(self, row: Base) -> None:
        await self._session.delete(row)
        await self._session.flush()


class TenantScoped(Repository):
    """A repository that sees only the rows of one verified tenant."""

    def __init__(self, session: AsyncSession, tenant: TenantId) -> None:
        super().__init__(session)
        self._tenant = tenant


class Viewpoint(msgspec.Struct, frozen=True):
    """The rows of a tenant that a caller sees: its project's rows. With `owner`, only the caller's own rows."""

    project: ProjectId
    owner: str | None = None

    @classmethod
    def of(cls, principal: Principal) -> Viewpoint:
        """Return the viewpoint of the caller. A key that is limited to some models sees only the objects that it made
        itself.
        """
        return cls(principal.project, None if principal.models is None else principal.owner)

    def conditions(self, row: Any) -> tuple[ColumnElement[bool], ...]:
        """Return the conditions on a table with `project_id` and `owner`."""
        own = () if self.owner is None else (row.owner == self.owner,)
        return (row.project_id == self.project, *own)


def table_of(model: type[DeclarativeBase]) -> Table:
    """Return the table of a model. Statements over the table bypass the session, because the session's identity map
    keeps every row.
    """
    assert isinstance(model.__table__, Table)
    return model.__table__


def to_struct(kind: type[Struct], row: Any, **others: Any) -> Struct:
    """Return a struct filled from the row's columns of the same names; `others` are all other fields."""
    columns = {name: getattr(row, name) for name in kind.__struct_fields__ if name not in others}
    return kind(**columns, **others)


async def insert_rows(session: AsyncSession, model: type[DeclarativeBase], rows: Sequence[dict[str, Any]]) -> None:
    """Insert `rows`, which all have the same keys. Values are texts, integers and booleans only."""
    await _insert(session, model, rows, "")


async def insert_new(session: AsyncSession, model: type[DeclarativeBase], rows: Sequence[dict[str, Any]]) -> int:
    """Insert the rows whose keys do not exist yet; return their number."""
    return await _insert(session, model, rows, "ON CONFLICT DO NOTHING")


def insert_sums(on_postgresql: bool, table: Table, sums: Collection[str]) -> postgresql.Insert | sqlite.Insert:
    """Return an INSERT. If a row with the same primary key exists, the statement adds its columns `sums` to those of
    the row.
    """
    insert = (postgresql if on_postgresql else sqlite).insert(table)
    added = {name: table.c[name] + insert.excluded[name] for name in sums}
    return insert.on_conflict_do_update(index_elements=list(table.primary_key.columns), set_=added)


def newest_first(statement: Select[Found], row: Any, tenant: TenantId, before: str | None, limit: int) -> Select[Found]:
    """Return at most `limit` rows of the tenant, newest first, that are older than the one with the id `before`."""
    place = tuple_(row.created_at, row.id)
    if before is not None:
        last = select(row.created_at, row.id).where(row.tenant_id == tenant, row.id == before)
        statement = statement.where(place < last.scalar_subquery())
    return statement.where(row.tenant_id == tenant).order_by(row.created_at.desc(), row.id.desc()).limit(limit)


def oldest_first(statement: Select[Found], row: Any, tenant: TenantId, after: str, limit: int) -> Select[Found]:
    """Return at most `limit` rows of the tenant, oldest first, that are newer than the one with the id `after`."""
    last = select(row.created_at, row.id).where(row.tenant_id == tenant, row.id == after)
    newer = statement.where(tuple_(row.created_at, row.id) > last.scalar_subquery(), row.tenant_id == tenant)
    return newer.order_by(row.created_at, row.id).limit(limit)


def among(session: AsyncSession, column: SQLColumnExpression[str], values: Collection[str]) -> ColumnElement[bool]:
    """Return `column IN values` with one parameter, so that the statement is compiled once for any number of values."""
    on_postgresql = is_postgresql(session)
    return _is_in(on_postgresql, column, literal(text_list(session, values), _list_type(on_postgresql)))


def among_parameter(on_postgresql: bool, column: SQLColumnExpression[str], name: str) -> ColumnElement[bool]:
    """Return `column IN values`, whose values are the parameter `name`, as `text_list` writes them."""
    return _is_in(on_postgresql, column, bindparam(name, type_=_list_type(on_postgresql)))


def text_list(session: AsyncSession, values: Collection[str]) -> list[str] | str:
    """Return texts as one parameter: an array on PostgreSQL, or else a JSON text."""
    return list(values) if is_postgresql(session) else json.dumps(list(values))


def _list_type(on_postgresql: bool) -> TypeEngine[Any]:
    return ARRAY(Text) if on_postgresql else Text()


def _is_in(on_postgresql: bool, column: SQLColumnExpression[str], values: BindParameter[Any]) -> ColumnElement[bool]:
    if on_postgresql:
        return column == any_(values)
    return column.in_(select(func.json_each(values).table_valued("value").c.value))


def model_name(session: AsyncSession, column: SQLColumnExpression[str]) -> SQLColumnExpression[str]:
    """Return the resolved model of a column without the revision: `tenant/adapter` for `tenant/adapter@3`."""
    if is_postgresql(session):
        return func.split_part(column, "@", 1)
    return func.substr(column, 1, func.instr(column + "@", "@") - 1)


async def _insert(
    session: AsyncSession, model: type[DeclarativeBase], rows: Sequence[dict[str, Any]], conflict: str
) -> int:
    if not rows:
        return 0
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
    """Pass the rows as one JSON text, because the driver inspects every item of an array."""
    columns = model.__table__.c
    kinds = ", ".join(f"{name} {columns[name].type.compile(postgresql.dialect())}" for name in names)
    source = f"SELECT * FROM json_to_recordset(CAST(%s AS json)) AS one({kinds})"  # noqa: S608  our own names
    return f"{_into(model, names)} {source} {conflict}"


@cache
def _placeholders(model: type[DeclarativeBase], names: tuple[str, ...], conflict: str) -> str:
    return f"{_into(model, names)} VALUES ({', '.join('?' * len(names))}) {conflict}"


def _into(model: type[DeclarativeBase], names: tuple[str, ...]) -> str:
    return f"INSERT INTO {model.__tablename__} ({', '.join(names)})"


HALF = 1 << 31


def exact_sum(column: SQLColumnExpression[int]) -> tuple[ColumnElement[int], ColumnElement[int]]:
    """Return two columns for a SELECT, whose values `exact_value` combines. Both are 0 if there are no rows."""
    high, low = func.sum(column // HALF), func.sum(column % HALF)
    return cast(func.coalesce(high, 0), BigInt), cast(func.coalesce(low, 0), BigInt)


def exact_value(high: Any, low: Any) -> int:
    """Return the sum."""
    return int(high) * HALF + int(low)
