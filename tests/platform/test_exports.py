"""Exports, read back by other people's readers."""

import csv
import hashlib
import json
from collections.abc import AsyncIterator, Awaitable, Callable
from datetime import UTC, datetime
from decimal import Decimal
from pathlib import Path

import duckdb
import msgspec
import pytest
from billed import NOVEMBER, Clock, give_plan, use

from loramux.billing import Billing
from loramux.exports import (
    FOCUS_COLUMNS,
    LEDGER_COLUMNS,
    ExportedFile,
    focus_rows,
    invoice_html,
    ledger_pages,
    write_table,
)
from loramux.exports.focus import GROUP_BY, Seller
from loramux.records import Database, Principal
from loramux.records.ledger import LedgerRepository
from loramux.records.quantities import Span
from loramux.usage import Usage

pytestmark = pytest.mark.anyio

NUM = 7


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
async def database(url: str, clock: Clock, anyio_backend: str) -> AsyncIterator[Database]:
    database = Database(url, clock=clock)
    yield database
    await database.close()


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


# FOCUS 1.2, https://focus.finops.org/focus-specification/v1-2/: the columns that a provider must have, each with its
# type and whether null is allowed; then the values that are allowed where there are few.
MANDATORY = {
    "BilledCost": ("decimal", False),
    "BillingAccountId": ("text", False),
    "BillingAccountName": ("text", True),
    "BillingAccountType": ("text", False),
    "BillingCurrency": ("text", False),
    "BillingPeriodEnd": ("time", False),
    "BillingPeriodStart": ("time", False),
    "ChargeCategory": ("text", False),
    "ChargeClass": ("text", True),
    "ChargeDescription": ("text", True),
    "ChargePeriodEnd": ("time", False),
    "ChargePeriodStart": ("time", False),
    "ContractedCost": ("decimal", False),
    "EffectiveCost": ("decimal", False),
    "InvoiceId": ("text", True),
    "InvoiceIssuerName": ("text", False),
    "ListCost": ("decimal", False),
    "PricingQuantity": ("decimal", True),
    "PricingUnit": ("text", True),
    "ProviderName": ("text", False),
    "PublisherName": ("text", False),
    "ServiceCategory": ("text", False),
    "ServiceName": ("text", False),
    "ServiceSubcategory": ("text", False),
    "SkuId": ("text", True),
    "SkuPriceId": ("text", True),
}
ALLOWED = {
    "ChargeCategory": {"Usage", "Purchase", "Tax", "Credit", "Adjustment"},
    "ChargeClass": {None, "Correction"},
    "ChargeFrequency": {None, "One-Time", "Recurring", "Usage-Based"},
    "PricingCategory": {None, "Standard", "Dynamic", "Committed", "Other"},
    "ServiceCategory": {"AI and Machine Learning"},
    "ServiceSubcategory": {"Generative AI"},
    "CommitmentDiscountCategory": {None, "Spend", "Usage"},
    "CommitmentDiscountStatus": {None, "Used", "Unused"},
}
NOT_NULL_FOR_PRICED_USAGE = (
    "ConsumedQuantity",
    "ConsumedUnit",
    "ContractedUnitPrice",
    "ListUnitPrice",
    "PricingCategory",
    "PricingQuantity",
    "PricingUnit",
    "SkuId",
    "SkuMeter",
    "SkuPriceId",
)
KINDS = {"text": str, "decimal": Decimal, "time": datetime}


async def test_focus_rows_keep_the_published_rules_and_add_up_to_the_invoice(
    database: Database, acme: Principal, clock: Clock
) -> None:
    billing = Billing(database)
    clock.now = NOVEMBER.ends_at
    [invoice] = await billing.close(NOVEMBER)
    period = next(one for one in await billing.periods() if one.is_closed)
    bill = await billing.bill(acme.tenant, period, GROUP_BY)
    rows = focus_rows(bill, Seller(provider="Example GmbH", tenant_id=acme.tenant, tenant_name="acme"))
    columns = {column.name: column for column in FOCUS_COLUMNS}
    assert len(rows) >= 6
    assert set(MANDATORY) <= set(columns)
    assert all(name[0].isupper() or name.startswith("x_") for name in columns)
    for row in rows:
        assert set(row) <= set(columns)
        for name, (kind, nullable) in MANDATORY.items():
            assert columns[name].kind == kind
            assert (row.get(name) is None and nullable) or isinstance(row[name], KINDS[kind]), name
        for name, values in ALLOWED.items():
            assert row.get(name) in values, name
        check_row(row)
    assert sum(row["BilledCost"] for row in rows) == invoice.total
    assert {row["InvoiceId"] for row in rows} == {invoice.id}


def check_row(row: dict[str, object]) -> None:
    """The rules that join columns."""
    assert row["BillingPeriodStart"] <= row["ChargePeriodStart"] < row["ChargePeriodEnd"] <= row["BillingPeriodEnd"]
    assert all(row[name].tzinfo is UTC for name in ("ChargePeriodStart", "BillingPeriodEnd"))
    assert len(row["BillingCurrency"]) == 3
    assert isinstance(json.loads(row["Tags"]), dict)
    if row["ChargeCategory"] == "Usage" and row.get("SkuPriceId"):
        for name in NOT_NULL_FOR_PRICED_USAGE:
            assert row[name] is not None, name
        exact = row["ListUnitPrice"] * row["PricingQuantity"]
        assert abs(exact - row["ListCost"]) <= row["PricingQuantity"] * Decimal("5e-10")
        assert isinstance(json.loads(row["SkuPriceDetails"]), dict)
    if row.get("SubAccountId") is None:
        assert row.get("SubAccountName") is None
        assert row.get("SubAccountType") is None


async def test_focus_is_read_by_another_engine_with_its_types(
    database: Database, acme: Principal, clock: Clock, tmp_path: Path
) -> None:
    billing = Billing(database)
    clock.now = NOVEMBER.ends_at
    [invoice] = await billing.close(NOVEMBER)
    bill = await billing.bill(acme.tenant, (await billing.periods())[0], GROUP_BY)

    async def pages() -> AsyncIterator[list[dict[str, object]]]:
        yield focus_rows(bill, Seller(provider="x", tenant_id=acme.tenant, tenant_name="acme"))

    made = await write_table(tmp_path, "focus", "parquet", FOCUS_COLUMNS, pages())
    sums = duckdb.sql(
        "SELECT sum(BilledCost), epoch_us(min(BillingPeriodStart)), count(*)"
        f" FROM '{tmp_path / made.file}' GROUP BY InvoiceId"
    ).fetchall()
    assert sums[0] == (invoice.total, NOVEMBER.starts_at, made.rows)
    made = await write_table(tmp_path, "focus", "csv", FOCUS_COLUMNS, pages())
    with (tmp_path / made.file).open(newline="") as file:
        rows = list(csv.DictReader(file))
    assert sum(Decimal(row["BilledCost"]) for row in rows) == invoice.total
    assert rows[0]["BillingPeriodStart"] == "2026-11-01T00:00:00Z"


async def test_an_invoices_page_shows_its_lines_and_nothing_that_a_name_smuggles_in(
    database: Database, acme: Principal
) -> None:
    invoice = await Billing(database).invoice("acme", NOVEMBER)
    page = invoice_html(msgspec.structs.replace(invoice, tenant_name="<script>alert(1)</script>"), "Example & Co")
    assert "<script>" not in page
    assert "Example &amp; Co" in page
    assert all(str(line.amount) in page for line in invoice.lines)
    assert f">{invoice.total}<" in page
