"""Exports, read back by other people's readers."""

import csv
import hashlib
import io
import json
import re
from collections.abc import AsyncIterator, Awaitable, Callable
from decimal import ROUND_HALF_UP, Decimal
from pathlib import Path

import duckdb
import msgspec
import pypdf
import pytest
from billing_harness import DECEMBER, NOVEMBER, PLANS, SECOND, Clock, give_plan, use

from loramux.common.identity import Principal
from loramux.common.settings.server import BillingSettings
from loramux.data.records.database import Database
from loramux.data.records.ledger import EntryContent, LedgerRepository
from loramux.data.records.usage import Span
from loramux.money.billing.catalog import Catalog, read_plans
from loramux.money.billing.costs import CostsQuery
from loramux.money.billing.invoices import Invoice, InvoiceParty
from loramux.money.billing.reconcile import reconcile
from loramux.money.billing.service import BillingService
from loramux.money.exports.focus import GROUP_BY, Seller, focus_rows
from loramux.money.exports.invoice_render import write_invoice
from loramux.money.exports.tables import LEDGER_COLUMNS, ExportedFile, ExportError, ledger_pages, write_table
from loramux.money.pricing import encode_money
from loramux.money.usage.service import UsageService

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
    usage = UsageService(database)
    await usage.start()
    for i in range(NUM):
        await use(usage, acme, f"r{i}", 1_000_003 * (i + 1), i, 4_001, tags='{"a":"x, \\"y\\"\\nz"}' if i % 2 else "")
    await usage.stop()
    return acme


async def written(database: Database, folder: Path, kind: str) -> ExportedFile:
    return await write_table(folder, "ledger", kind, LEDGER_COLUMNS, ledger_pages(database, Span(1, NUM)))


@pytest.mark.parametrize("kind", ["csv", "jsonl", "parquet"])
async def test_ledger_export_is_read_exactly_by_another_engine(
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
async def test_export_manifest_holds_and_bytes_are_reproducible(
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


@pytest.mark.parametrize("text", ["=1+1", "+1", "-1", "@sum(a)", "\t=1", "\r=1", "＝1", "－1"])
@pytest.mark.parametrize("kind", ["csv", "jsonl"])
async def test_text_that_a_spreadsheet_would_compute_is_a_text_in_csv(tmp_path: Path, kind: str, text: str) -> None:
    async def pages() -> AsyncIterator[list[dict[str, object]]]:
        yield [{"sequence": -1, "user_id": text, "model": "a=b"}]

    columns = [column for column in LEDGER_COLUMNS if column.name in ("sequence", "user_id", "model")]
    made = await write_table(tmp_path, "ledger", kind, columns, pages())
    with (tmp_path / made.file).open(encoding="utf-8", newline="") as file:
        (row,) = csv.DictReader(file) if kind == "csv" else map(json.loads, file)
    sent = f"'{text}" if kind == "csv" else text
    assert (str(row["sequence"]), row["user_id"], row["model"]) == ("-1", sent, "a=b")


async def test_export_that_fails_leaves_no_file(tmp_path: Path) -> None:
    async def pages() -> AsyncIterator[list[dict[str, object]]]:
        yield [{"sequence": 1}]
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        await write_table(tmp_path / "out", "ledger", "csv", LEDGER_COLUMNS, pages())
    assert list((tmp_path / "out").iterdir()) == []


async def test_ledger_pages_are_exact_during_writes(
    database: Database, acme: Principal, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("loramux.money.exports.tables.PAGE", 2)
    usage = UsageService(database)
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


SELLER = BillingSettings(
    issuer="Müller & Söhne",
    address=("Hauptstr. 1", "10115 Berlin"),
    tax_id="DE123456789",
    tax_name="VAT",
    tax_percent="19",
    payment_days=14,
    payment_note="IBAN DE00 1234",
)
BUYER = InvoiceParty(name="Acme GmbH", address=("Nebenweg 2", "20095 Hamburg"), tax_id="DE987654321")


async def closed_invoice(database: Database, acme: Principal, *, tax_exempt: bool = False) -> Invoice:
    """November, closed on the first of December, with 5,000,000,000 tokens more and 0.079 GiB-hours of storage."""
    billing = BillingService(database, SELLER)
    await billing.set_profile("acme", BUYER, tax_exempt=tax_exempt)
    usage = UsageService(database)
    await usage.start()
    await use(usage, acme, "large", 5_000_000_000, 0, 1)
    await usage.stop()
    stored = EntryContent(
        kind="storage", tenant_id=acme.tenant, key_id="", request_id="rev:1", model="acme/a@1", adapter_digest=None,
        input_tokens=0, cached_tokens=0, output_tokens=0, finish_reason=None, status="stored",
        created_at=database.now(), adapter_byte_seconds=305_027_457_408,
    )  # fmt: skip
    async with database.begin() as session:
        ledger = LedgerRepository(session)
        await ledger.append(await ledger.lock(), [stored])
    assert isinstance(database.now, Clock)
    database.now.now = DECEMBER.starts_at
    [made] = await billing.close(NOVEMBER)
    return made


async def test_invoice_html_shows_its_lines_and_escapes_names(database: Database, acme: Principal) -> None:
    settings = BillingSettings(issuer="Example & Co")
    invoice = msgspec.structs.replace(
        await BillingService(database, settings).invoice("acme", NOVEMBER), tenant_name=SMUGGLER
    )
    page = write_invoice(invoice, "html", settings).decode()
    assert "<script>" not in page
    assert "Example &amp; Co" in page
    assert all(f"{line.amount:,f}" in page for line in invoice.lines)
    assert f">{invoice.total:,f}<" in page


@pytest.mark.parametrize("backend", ["sqlite"], indirect=True)
async def test_invoice_shows_parties_dates_tax_and_units_that_people_read(database: Database, acme: Principal) -> None:
    invoice = await closed_invoice(database, acme)
    [page] = pypdf.PdfReader(io.BytesIO(write_invoice(invoice, "pdf", SELLER))).pages
    pdf = " ".join(page.extract_text().split())
    html = write_invoice(invoice, "html", SELLER).decode()
    for shown in (pdf, html):
        for text in (
            "Hauptstr. 1", "10115 Berlin", "DE123456789", "Acme GmbH", "Nebenweg 2", "20095 Hamburg", "DE987654321",
            "Date: 2026-12-01", "Due: 2026-12-15", "2026-11-01 to 2026-11-30", "VAT 19 %", "Subtotal",
            "0.078911 GiB-hours", "IBAN DE00 1234", "per 1,000,000 tokens",
        ):  # fmt: skip
            assert text in shown, text
        assert "byte-seconds" not in shown
        assert "305027457408" not in shown
        assert f"{invoice.total:,f}" in shown
        assert ",000,0" in shown
    assert invoice.subtotal is not None
    assert invoice.tax_amount == (invoice.subtotal * Decimal("0.19")).quantize(Decimal("0.01"), ROUND_HALF_UP)
    assert invoice.total == invoice.subtotal + invoice.tax_amount > 1000


@pytest.mark.parametrize("backend", ["sqlite"], indirect=True)
async def test_invoice_of_an_exempt_tenant_has_no_tax_and_says_why(database: Database, acme: Principal) -> None:
    invoice = await closed_invoice(database, acme, tax_exempt=True)
    assert (invoice.tax_amount, invoice.total) == (0, invoice.subtotal)
    page = write_invoice(invoice, "html", SELLER).decode()
    assert "VAT, exempt" in page
    assert "reverse charge" in page


@pytest.mark.parametrize("backend", ["sqlite"], indirect=True)
async def test_invoice_keeps_the_parties_and_the_tax_of_its_closing(database: Database, acme: Principal) -> None:
    invoice = await closed_invoice(database, acme)
    later = BillingService(database, BillingSettings(issuer="Somebody else", tax_percent="7"))
    await later.set_profile("acme", InvoiceParty(name="Acme SE"))
    assert await later.invoice("acme", NOVEMBER) == invoice
    november = (await later.periods())[0]
    bill = await later.bill(acme.tenant, november, GROUP_BY)
    assert bill.issuer == SELLER.issuer
    assert (await later.bill(acme.tenant, (await later.periods())[1], GROUP_BY)).issuer == "Somebody else"
    assert bill.total == int(invoice.total * 100)
    rows = focus_rows(bill, Seller(provider="x", tenant_id=acme.tenant, tenant_name="acme"))
    assert sum(row["BilledCost"] for row in rows) == invoice.total
    assert [row["ChargeDescription"] for row in rows if row["ChargeCategory"] == "Tax"] == ["VAT 19 %"]
    assert (await later.invoice("acme", DECEMBER)).terms.buyer == InvoiceParty(name="Acme SE")
    assert (await reconcile(database)).invoices == 1


async def test_invoice_pdf_shows_its_lines_and_is_reproducible(database: Database, acme: Principal) -> None:
    invoice = await BillingService(database, SELLER).invoice("acme", NOVEMBER)
    document = write_invoice(invoice, "pdf", SELLER)
    [page] = pypdf.PdfReader(io.BytesIO(document)).pages
    shown = " ".join(page.extract_text().split())
    assert all(text in shown for text in (invoice.id, "Müller & Söhne", "acme", f"Total {invoice.total}"))
    for line in invoice.lines:
        assert f"{line.description} {line.quantity:,} tokens" in shown
        assert str(line.amount) in shown
    assert "above 1,000 tokens: 0.0137 per 1,000 tokens" in shown
    assert write_invoice(invoice, "pdf", SELLER) == document


async def test_invoice_pdf_names_a_letter_that_its_font_lacks(
    database: Database, acme: Principal, tmp_path: Path
) -> None:
    settings = BillingSettings(issuer="Łódź")
    invoice = await BillingService(database, settings).invoice("acme", NOVEMBER)
    with pytest.raises(ExportError, match=r"'Ł'.*billing\.font"):
        write_invoice(invoice, "pdf", settings)
    with pytest.raises(ExportError, match=r"billing\.font.*absent\.ttf"):
        write_invoice(invoice, "pdf", BillingSettings(font=str(tmp_path / "absent.ttf")))


async def test_invoice_and_margin_json_have_no_exponents(database: Database, acme: Principal, tmp_path: Path) -> None:
    """A zero of nine decimal places was "0E-9", and a nano-unit "1E-9"."""
    (tmp_path / "cheap.toml").write_text(
        PLANS.replace('"standard"', '"cheap"').replace('"0.0137"', '"0.000000001"').replace('"0.50"', '"0.00"')
    )
    catalog = Catalog(database)
    await catalog.apply(read_plans(tmp_path / "cheap.toml"))
    await catalog.subscribe("acme", "cheap", NOVEMBER, replace=True)
    billing = BillingService(database)
    invoice = write_invoice(await billing.invoice("acme", NOVEMBER), "json", BillingSettings()).decode()
    assert '"price":"0"' in invoice
    assert '"price":"0.000000001"' in invoice
    margins = encode_money(await billing.margins(NOVEMBER, 0)).decode()
    costs = encode_money(
        await billing.costs(acme, CostsQuery(start_time=NOVEMBER.starts_at // SECOND, limit=31)), as_numbers=True
    ).decode()
    for text in (invoice, margins, costs):
        assert not re.search(r"\dE[+-]?\d", text), text
    assert json.loads(costs)["object"] == "page"


@pytest.mark.parametrize("percent", ["-1", "101", "abc", "1.00001", "NaN", "Infinity", ""])
def test_tax_percent_that_is_malformed_is_refused(percent: str) -> None:
    with pytest.raises(ValueError, match=r"billing\.tax_percent"):
        BillingSettings(tax_percent=percent)
