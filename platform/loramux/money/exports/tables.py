"""Tables as files (CSV, JSON lines, Parquet), written completely or not at all, each with a manifest. Also the ledger
as a table.

ExportError is the error of every export, including invoices and sinks.
"""

from __future__ import annotations

import csv
import hashlib
import os
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from datetime import datetime
from decimal import Decimal
from http import HTTPStatus
from pathlib import Path
from typing import Any, Literal

import msgspec

from loramux.common.errors import LoramuxError
from loramux.data.records.database import Database
from loramux.data.records.ledger import PAGE, LedgerEntry, LedgerRepository
from loramux.data.records.usage import Span


class ExportError(LoramuxError):
    """An export has failed; the message has the way out."""

    code = "export_failed"
    status = HTTPStatus.INTERNAL_SERVER_ERROR


Kind = Literal["text", "integer", "decimal", "time"]
"""Type of a column: integers have 64 bits, decimals 9 digits after the point, times are UTC to the microsecond."""

Row = dict[str, Any]
"""Values by column: str, int, decimal.Decimal, datetime or None."""


class Column(msgspec.Struct, frozen=True):
    """One column."""

    name: str
    kind: Kind


FORMULA_STARTS = (
    "=",
    "+",
    "-",
    "@",
    "\t",
    "\r",
    "\N{FULLWIDTH EQUALS SIGN}",
    "\N{FULLWIDTH PLUS SIGN}",
    "\N{FULLWIDTH HYPHEN-MINUS}",
    "\N{FULLWIDTH COMMERCIAL AT}",
)
"""First characters with which a spreadsheet computes a field instead of showing it (CWE-1236)."""

Write = Callable[[Sequence[Row]], None]
OpenWriter = Callable[[Path, Sequence[Column]], AbstractContextManager[Write]]


class ExportedFile(msgspec.Struct, frozen=True, kw_only=True):
    """A file, and the facts that verify it. The facts are also in NAME.manifest.json next to the file."""

    file: str
    rows: int
    bytes: int
    sha256: str


@contextmanager
def csv_writer(path: Path, columns: Sequence[Column]) -> Iterator[Write]:
    """Write CSV: RFC 4180, UTF-8, with a header; null is an empty field.

    Callers choose some texts, such as the end user of a request. A text that a spreadsheet would take for a formula
    begins with an apostrophe, as OWASP recommends. The other formats have it unchanged.
    """
    with path.open("w", encoding="utf-8", newline="") as file:
        writer = csv.writer(file)
        writer.writerow([column.name for column in columns])

        def write(rows: Sequence[Row]) -> None:
            writer.writerows([_field(row.get(column.name)) for column in columns] for row in rows)

        yield write


@contextmanager
def jsonl_writer(path: Path, columns: Sequence[Column]) -> Iterator[Write]:
    """Write one JSON object per line. Decimals are numbers with all their digits; times have the form of RFC 3339."""
    encoder = msgspec.json.Encoder(decimal_format="number")
    with path.open("wb") as file:

        def write(rows: Sequence[Row]) -> None:
            ordered = ({column.name: row.get(column.name) for column in columns} for row in rows)
            file.write(encoder.encode_lines(ordered))

        yield write


@contextmanager
def parquet_writer(path: Path, columns: Sequence[Column]) -> Iterator[Write]:
    """Write Parquet with zstd; decimals are decimal128(38, 9)."""
    try:
        import pyarrow
        from pyarrow import parquet
    except ImportError:
        raise ExportError("Parquet needs pyarrow: pip install 'loramux[finance]'") from None
    kinds = {
        "text": pyarrow.string(),
        "integer": pyarrow.int64(),
        "decimal": pyarrow.decimal128(38, 9),
        "time": pyarrow.timestamp("us", tz="UTC"),
    }
    schema = pyarrow.schema([(column.name, kinds[column.kind]) for column in columns])
    with parquet.ParquetWriter(path, schema, compression="zstd") as writer:

        def write(rows: Sequence[Row]) -> None:
            ordered = [{column.name: row.get(column.name) for column in columns} for row in rows]
            writer.write_table(pyarrow.Table.from_pylist(ordered, schema))

        yield write


FORMATS: dict[str, OpenWriter] = {
    "csv": csv_writer,
    "jsonl": jsonl_writer,
    "parquet": parquet_writer,
}


async def write_table(
    folder: Path, stem: str, format: str, columns: Sequence[Column], pages: AsyncIterator[Sequence[Row]]
) -> ExportedFile:
    """Write `stem`.`format` and its manifest into `folder`; the file appears complete or not at all.

    The same rows give the same name and, from the same release of the libraries, the same bytes.
    """
    target, draft = _places(folder, f"{stem}.{format}")
    rows = 0
    try:
        with FORMATS[format](draft, columns) as write:
            async for page in pages:
                write(page)
                rows += len(page)
        exported = ExportedFile(file=target.name, rows=rows, bytes=draft.stat().st_size, sha256=_sha256(draft))
        draft.replace(target)
    finally:
        draft.unlink(missing_ok=True)
    manifest = folder / f"{target.name}.manifest.json"
    manifest.write_bytes(msgspec.json.format(msgspec.json.encode(exported)) + b"\n")
    return exported


def _places(folder: Path, name: str) -> tuple[Path, Path]:
    folder.mkdir(parents=True, exist_ok=True)
    return folder / name, folder / f".{name}.{os.getpid()}"


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _field(value: Any) -> Any:
    if isinstance(value, str):
        return f"'{value}" if value.startswith(FORMULA_STARTS) else value
    if isinstance(value, Decimal):
        text = format(value, "f")
        return text if "." in text else text + ".0"  # readers that guess types then see decimals
    return value.isoformat().replace("+00:00", "Z") if isinstance(value, datetime) else value


INTEGERS = frozenset(one.name for one in msgspec.structs.fields(LedgerEntry) if one.type in (int, int | None))
"""Integer columns; times are integer microseconds here, as in the hash."""
FIRST = ("sequence", "event_id", "kind")
LEDGER_COLUMNS = tuple(
    Column(name, "integer" if name in INTEGERS else "text")
    for name in (*FIRST, *(name for name in LedgerEntry.__struct_fields__ if name not in FIRST))
)


async def ledger_pages(database: Database, span: Span) -> AsyncIterator[list[Row]]:
    """Yield the entries of a span of sequence numbers. No entry is skipped or repeated, even if entries are appended at
    the same time.
    """
    after = span.first - 1
    while True:
        async with database.read() as session:
            entries = await LedgerRepository(session).after(after, PAGE, span.last)
        if not entries:
            return
        yield [msgspec.structs.asdict(entry) for entry in entries]
        after = entries[-1].sequence
