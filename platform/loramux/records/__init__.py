"""Rows: the schema, its migrations, and the repositories that hold every SQL statement.

One aggregate, one module (`tenants`, `credentials`, `limits`, ...): first its rows (`...Row`, subclasses of
`base.Base`), then its plain structs, then its repositories (subclasses of `base.Repository`), which take a session and
never commit. `schema` imports every module that declares tables. `base` has the SQL that several repositories share,
`database` the transactions, locks and leases; `identity` needs no SQL at all.
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
from loramux.records.schema import check, current_revision, head_revision, migrate

__all__ = [
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
