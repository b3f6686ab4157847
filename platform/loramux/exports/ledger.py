"""The ledger as a table, a page at a time: every column of every entry, in order."""

from __future__ import annotations

from collections.abc import AsyncIterator

import msgspec

from loramux.exports.columns import Column, Row
from loramux.records import Database
from loramux.records.ledger import PAGE, LedgerEntry, LedgerRepository
from loramux.records.quantities import Span

INTEGERS = frozenset(
    {
        "sequence",
        "input_tokens",
        "cached_tokens",
        "output_tokens",
        "waived_input_tokens",
        "waived_cached_tokens",
        "waived_output_tokens",
        "adapter_load",
        "adapter_byte_seconds",
        "adapter_resident_byte_seconds",
        "created_at",
        "occurred_at",
    }
)
"""Times are integer microseconds here, as they are hashed."""
FIRST = ("sequence", "event_id", "kind")
LEDGER_COLUMNS = tuple(
    Column(name, "integer" if name in INTEGERS else "text")
    for name in (*FIRST, *(name for name in LedgerEntry.__struct_fields__ if name not in FIRST))
)


async def ledger_pages(database: Database, span: Span) -> AsyncIterator[list[Row]]:
    """The entries of a span of sequences, neither skipped nor repeated, whoever writes meanwhile."""
    after = span.first - 1
    while True:
        async with database.read() as session:
            entries = await LedgerRepository(session).after(after, PAGE, span.last)
        if not entries:
            return
        yield [msgspec.structs.asdict(entry) for entry in entries]
        after = entries[-1].sequence
