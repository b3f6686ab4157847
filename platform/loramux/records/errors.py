"""What can be wrong with the records as a whole.

RecordsError
├── UnsupportedUrl       the address names no database that loramux speaks
├── SchemaOutOfDate      the tables are older than this release: migrate
├── SchemaTooNew         the tables are newer than this release: upgrade loramux
├── RowRefused           a row breaks a constraint or a trigger
├── RecordsUnavailable   the database cannot be reached or used, or is locked
└── ChainBroken          a ledger entry is not what was once written
"""

from __future__ import annotations


class RecordsError(Exception):
    """Base of everything that this package raises."""


class UnsupportedUrl(RecordsError):
    """The message names the address (without its password) and the two forms that work."""


class SchemaOutOfDate(RecordsError):
    """The message names both revisions and the command to run."""


class SchemaTooNew(RecordsError):
    """The database was migrated by a newer release; the message names the revision."""


class RowRefused(RecordsError):
    """The message is the database's own and names the constraint."""


class RecordsUnavailable(RecordsError):
    """Whether the transaction was committed is unknown when the connection broke during the commit."""


class ChainBroken(RecordsError):
    """The ledger was altered: `sequence` is the first entry that does not follow from the one before."""

    def __init__(self, sequence: int, reason: str) -> None:
        super().__init__(f"ledger entry {sequence}: {reason}")
        self.sequence = sequence
        self.reason = reason
