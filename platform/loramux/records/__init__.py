"""Rows: the schema, its migrations, and the repositories that hold every SQL statement.

One aggregate, one module (`tenants`, `keys`, `limits`, ...): first its rows (`...Row`, subclasses of `base.Base`), then
its plain structs, then its repositories, which take a session and never commit. A module that declares tables is listed
in `schema.TABLE_MODULES`. `statements` holds what several repositories' SQL shares, `identity` needs no SQL at all.
"""

from loramux.records.database import Database
from loramux.records.errors import (
    RecordsError,
    RecordsUnavailable,
    RowRefused,
    SchemaOutOfDate,
    SchemaTooNew,
    UnsupportedUrl,
    ValueRefused,
)
from loramux.records.identity import Origin, Principal, ProjectId, TenantId
from loramux.records.schema import METADATA, check, current_revision, head_revision, migrate

__all__ = [
    "METADATA",
    "Database",
    "Origin",
    "Principal",
    "ProjectId",
    "RecordsError",
    "RecordsUnavailable",
    "RowRefused",
    "SchemaOutOfDate",
    "SchemaTooNew",
    "TenantId",
    "UnsupportedUrl",
    "ValueRefused",
    "check",
    "current_revision",
    "head_revision",
    "migrate",
]
