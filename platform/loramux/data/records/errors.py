"""Errors of the database as a whole.

RecordsError
├── UnsupportedUrl       the address names no database that loramux supports
├── SchemaOutOfDate      the tables are older than this release: migrate
├── SchemaTooNew         the tables are newer than this release: upgrade loramux
├── RowRefused           a row breaks a constraint or a trigger
│   └── ValueRefused         a value that no column can hold: 400
├── RecordsUnavailable   the database cannot be reached or used, or is locked
└── ChainBroken          a ledger entry differs from the one that was written
"""

from __future__ import annotations

from http import HTTPStatus

from loramux.common.errors import LoramuxError


class RecordsError(LoramuxError):
    """Base of everything that this package raises; the messages are for operators."""

    code = "internal_error"
    status = HTTPStatus.INTERNAL_SERVER_ERROR
    public_message = "The server had an error with its database."


class UnsupportedUrl(RecordsError):
    """The URL names no supported database. The message has the URL without its password, and the two valid forms."""


class SchemaOutOfDate(RecordsError):
    """The tables are older than this release; the message names both revisions and the command to run."""


class SchemaTooNew(RecordsError):
    """The database was migrated by a newer release; the message names the revision."""


class RowRefused(RecordsError):
    """A row breaks a constraint or a trigger; the message is the database's own and names the constraint."""


class ValueRefused(RowRefused):
    """A caller's value that no column can hold, such as a text with a NUL on PostgreSQL, or an integer out of range."""

    code = "invalid_value"
    status = HTTPStatus.BAD_REQUEST
    public_message = "A value of this request cannot be stored or looked up: it holds a NUL character, or is too large."


class RecordsUnavailable(RecordsError):
    """The database does not answer. A transaction whose commit broke off may have been committed or not."""

    code = "database_unavailable"
    status = HTTPStatus.SERVICE_UNAVAILABLE
    retry_after = 5
    public_message = "The server's database does not answer at present. Please retry in a few seconds."


class ChainBroken(RecordsError):
    """The ledger has been altered: `sequence` is the first entry that does not follow from the entry before it."""

    def __init__(self, sequence: int, reason: str) -> None:
        super().__init__(f"ledger entry {sequence}: {reason}")
        self.sequence = sequence
        self.reason = reason
