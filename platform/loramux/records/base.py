"""The declarative base of every table, and the types that rows are made of.

Times are integer microseconds since the epoch, UTC; tokens and bytes are integers; money is in nano-units of the
tenant's currency. Foreign keys carry the tenant along, so the database itself refuses a row that joins two tenants.
"""

from __future__ import annotations

from typing import ClassVar

from sqlalchemy import BigInteger, Index, Integer, LargeBinary, MetaData, Text, text
from sqlalchemy.orm import DeclarativeBase

from loramux.records.identity import ProjectId, TenantId

BigInt = BigInteger().with_variant(Integer(), "sqlite")
"""64 bits on both; SQLite calls every integer so, and makes an INTEGER primary key the row's own address."""


class Base(DeclarativeBase):
    """Common to every table: the names of constraints and the types of columns."""

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
    """Index `column` over the few rows that have a value in it."""
    is_set = text(f"{column} IS NOT NULL")
    return Index(f"ix_{table}_{column}", column, sqlite_where=is_set, postgresql_where=is_set)
