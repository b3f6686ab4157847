"""Rows: the schema, its migrations, and the repositories that hold every SQL statement."""

from loramux.records.database import Database
from loramux.records.errors import (
    RecordsError,
    RecordsUnavailable,
    RowRefused,
    SchemaOutOfDate,
    SchemaTooNew,
    UnsupportedUrl,
)
from loramux.records.identity import Origin, Principal, ProjectId, TenantId
from loramux.records.metadata import METADATA
from loramux.records.schema import check, current_revision, head_revision, is_current, migrate

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
    "check",
    "current_revision",
    "head_revision",
    "is_current",
    "migrate",
]
