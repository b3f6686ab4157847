"""Exports, read back by other people's readers."""

import hashlib
import io
import json
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path

import duckdb
import msgspec
import pypdf
import pytest
from billed import NOVEMBER, Clock, give_plan, use

from loramux.billing import Billing
from loramux.exports import (
    LEDGER_COLUMNS,
    ExportedFile,
    ExportError,
    ledger_pages,
    write_invoice,
    write_table,
)
from loramux.records import Database, Principal
from loramux.records.ledger import LedgerRepository
from loramux.records.quantities import Span
from loramux.settings import BillingSettings
from loramux.usage import Usage

pytestmark = pytest.mark.anyio

NUM = 7


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
async def acme(database: Database, enrol: Callable[[str], Awaitable[Principal]], tmp_path: Path) -> Principal:
    """A customer with a plan and some usage."""
    acme = await enrol("acme")
    await give_plan(database, tmp_path)
    usage = Usage(database)
    await usage.start()
    for i in range(NUM):
        await use(usage, acme, f"r{i}", 1_000_003 * (i + 1), i, 4_001, tags='{"a":"x, \\"y\\"\\nz"}' if i % 2 else "")
    await usage.stop()
    return acme


async def written(database: Database, folder: Path, kind: str) -> ExportedFile:
    return await write_table(folder, "ledger", kind, LEDGER_COLUMNS, ledger_pages(database, Span(1, NUM)))


@pytest.mark.parametrize("kind", ["csv", "jsonl", "parquet"])
async def test_another_engine_reads_the_very_ledger(
    database: Database, acme: Principal, tmp_path: Path, kind: str
) -> None:
    made = await written(database, tmp_path, kind)
    reader = {"csv": "read_csv", "jsonl": "read_json", "parquet": "read_parquet"}[kind]
    options = {"csv": ", all_varchar=true", "jsonl": ", format='newline_delimited'", "parquet": ""}[kind]
    cursor = duckdb.sql(f"SELECT * FROM {reader}('{tmp_path / made.file}'{options}) ORDER BY CAST(sequence AS BIGINT)")
    names, rows = cursor.columns, cursor.fetchall()
    async with database.read() as session:
        entries = await LedgerRepository(session).after(0, 100)
    assert names == [column.name for column in LEDGER_COLUMNS]
    for row, entry in zip(rows, entries, strict=True):
        told = dict(zip(names, row, strict=True))
        for column in LEDGER_COLUMNS:
            wanted = getattr(entry, column.name)
            if kind == "parquet":
                assert told[column.name] == wanted
            else:
                assert (told[column.name] or None) in (wanted or None, str(wanted)), column.name


@pytest.mark.parametrize("kind", ["csv", "jsonl", "parquet"])
async def test_the_manifest_holds_and_the_same_rows_give_the_same_bytes(
    database: Database, acme: Principal, tmp_path: Path, kind: str
) -> None:
    first, second = await written(database, tmp_path / "a", kind), await written(database, tmp_path / "b", kind)
    assert first == second
    data = (tmp_path / "a" / first.file).read_bytes()
    manifest = json.loads((tmp_path / "a" / f"{first.file}.manifest.json").read_text())
    assert manifest == {
        "file": f"ledger.{kind}",
        "rows": NUM,
        "bytes": len(data),
        "sha256": hashlib.sha256(data).hexdigest(),
    }
    assert sorted(path.name for path in (tmp_path / "a").iterdir()) == [first.file, f"{first.file}.manifest.json"]


async def test_an_export_that_fails_leaves_no_file(tmp_path: Path) -> None:
    async def pages() -> AsyncIterator[list[dict[str, object]]]:
        yield [{"sequence": 1}]
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        await write_table(tmp_path / "out", "ledger", "csv", LEDGER_COLUMNS, pages())
    assert list((tmp_path / "out").iterdir()) == []


async def test_pages_neither_skip_nor_repeat_while_others_write(
    database: Database, acme: Principal, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("loramux.exports.ledger.PAGE", 2)
    usage = Usage(database)
    await usage.start()
    seen: list[int] = []
    async for page in ledger_pages(database, Span(1, None)):
        seen += [row["sequence"] for row in page]
        if len(seen) < 12:
            await use(usage, acme, f"more{len(seen)}", 1, 0, 1)
    await usage.stop()
    assert seen == list(range(1, len(seen) + 1))
    assert len(seen) > NUM


SMUGGLER = "<script>alert(1)</script>"


async def test_an_invoices_page_shows_its_lines_and_nothing_that_a_name_smuggles_in(
    database: Database, acme: Principal
) -> None:
    invoice = msgspec.structs.replace(await Billing(database).invoice("acme", NOVEMBER), tenant_name=SMUGGLER)
    page = write_invoice(invoice, "html", BillingSettings(issuer="Example & Co")).decode()
    assert "<script>" not in page
    assert "Example &amp; Co" in page
    assert all(str(line.amount) in page for line in invoice.lines)
    assert f">{invoice.total}<" in page


async def test_an_invoices_pdf_says_the_same_and_is_always_the_same(database: Database, acme: Principal) -> None:
    invoice, settings = await Billing(database).invoice("acme", NOVEMBER), BillingSettings(issuer="Müller & Söhne")
    document = write_invoice(invoice, "pdf", settings)
    [page] = pypdf.PdfReader(io.BytesIO(document)).pages
    told = " ".join(page.extract_text().split())
    assert all(text in told for text in (invoice.id, "Müller & Söhne", "acme", f"Total {invoice.total}"))
    for line in invoice.lines:
        assert f"{line.description} {line.quantity}" in told
        assert str(line.amount) in told
    assert "above 1000: 0.0137 per 1000" in told
    assert write_invoice(invoice, "pdf", settings) == document


async def test_a_letter_that_the_font_lacks_is_named(database: Database, acme: Principal, tmp_path: Path) -> None:
    invoice = await Billing(database).invoice("acme", NOVEMBER)
    with pytest.raises(ExportError, match=r"'Ł'.*billing\.font"):
        write_invoice(invoice, "pdf", BillingSettings(issuer="Łódź"))
    with pytest.raises(ExportError, match=r"billing\.font.*absent\.ttf"):
        write_invoice(invoice, "pdf", BillingSettings(font=str(tmp_path / "absent.ttf")))
