"""FOCUS: the published rules of each column, those that join columns, and the foundation's own validator."""

import asyncio
import csv
import io
import json
import shutil
import subprocess
from collections.abc import AsyncIterator, Awaitable, Callable
from datetime import UTC, datetime
from decimal import Decimal
from pathlib import Path

import duckdb
import pytest
from billing_harness import DAY, DECEMBER, NOVEMBER, SECOND, Clock, give_plan, use

from loramux.common.identity import Principal
from loramux.data.records.database import Database
from loramux.money.billing.service import BillingService
from loramux.money.exports.focus import FOCUS_COLUMNS, GROUP_BY, Seller, focus_rows
from loramux.money.exports.tables import Row, write_table
from loramux.money.usage.service import UsageService

pytestmark = pytest.mark.anyio


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
async def acme(
    database: Database, enrol: Callable[[str], Awaitable[Principal]], clock: Clock, tmp_path: Path
) -> Principal:
    """A customer with a plan, usage in two months, and a correction of the first in the second."""
    acme = await enrol("acme")
    await give_plan(database, tmp_path)
    usage = UsageService(database)
    await usage.start()
    for i in range(7):
        project = {"project_id": acme.project} if i % 3 else {}
        event = await use(
            usage, acme, f"r{i}", 1_000_003 * (i + 1), i, 4_001, tags='{"a":"x"}' if i % 2 else "", **project
        )
    clock.now = NOVEMBER.ends_at
    await BillingService(database).close(NOVEMBER)
    clock.now += 5 * DAY * SECOND
    await use(usage, acme, "later", 2_000_000, 0, 9_000)
    await BillingService(database).correct(event, {"output_tokens": -100}, "ticket-1")
    clock.now = DECEMBER.ends_at
    await BillingService(database).close(DECEMBER)
    await usage.stop()
    return acme


async def rows_of(database: Database, acme: Principal) -> list[Row]:
    seller, billing = (
        Seller(provider="Example GmbH", tenant_id=acme.tenant, tenant_name="acme"),
        BillingService(database),
    )
    bills = [
        await billing.bill(acme.tenant, period, GROUP_BY) for period in await billing.periods() if period.is_closed
    ]
    return [row for bill in bills for row in focus_rows(bill, seller)]


# FOCUS 1.2, https://focus.finops.org/focus-specification/v1-2/: the columns that a provider must have, each with its
# type, and True if null is allowed; then the allowed values, if there are few.
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


async def test_focus_rows_keep_the_published_rules_and_add_up_to_invoices(database: Database, acme: Principal) -> None:
    rows = await rows_of(database, acme)
    columns = {column.name: column for column in FOCUS_COLUMNS}
    assert len(rows) >= 6
    assert set(MANDATORY) <= set(columns)
    assert all(name[0].isupper() or name.startswith("x_") for name in columns)
    for row in rows:
        assert set(row) <= set(columns)
        assert "" not in row.values()
        for name, (kind, nullable) in MANDATORY.items():
            assert columns[name].kind == kind
            assert (row.get(name) is None and nullable) or isinstance(row[name], KINDS[kind]), name
        for name, values in ALLOWED.items():
            assert row.get(name) in values, name
        check_row(row)
    assert "Correction" in {row.get("ChargeClass") for row in rows}
    for month in (NOVEMBER, DECEMBER):
        invoice = await BillingService(database).invoice("acme", month)
        assert sum(row["BilledCost"] for row in rows if row["InvoiceId"] == invoice.id) == invoice.total


def flat(text: str | None) -> dict[str, object]:
    """KeyValueFormat: an object whose values are neither objects nor arrays; null if there is no value."""
    values = {} if text is None else json.loads(text)
    assert text is None or values
    assert not any(isinstance(value, dict | list) for value in values.values())
    return values


def check_row(row: dict[str, object]) -> None:
    """The rules that join columns."""
    assert row["ChargePeriodStart"] < row["ChargePeriodEnd"] <= row["BillingPeriodEnd"]
    assert all(row[name].tzinfo is UTC for name in ("ChargePeriodStart", "BillingPeriodEnd"))
    assert len(row["BillingCurrency"]) == 3
    flat(row.get("Tags"))
    earlier = row["ChargePeriodStart"] < row["BillingPeriodStart"]
    assert row.get("ChargeClass") == ("Correction" if earlier else None)
    if row["ChargeCategory"] == "Usage" and row.get("SkuPriceId"):
        for name in NOT_NULL_FOR_PRICED_USAGE:
            assert row[name] is not None, name
        exact = row["ListUnitPrice"] * row["PricingQuantity"]
        assert abs(exact - row["ListCost"]) <= abs(row["PricingQuantity"]) * Decimal("5e-10")
        assert all(name.startswith("x_") for name in flat(row["SkuPriceDetails"]))
    if row.get("SubAccountId") is None:
        assert row.get("SubAccountName") is None
        assert row.get("SubAccountType") is None


async def test_focus_export_is_read_by_another_engine_with_its_types(
    database: Database, acme: Principal, tmp_path: Path
) -> None:
    total = sum([(await BillingService(database).invoice("acme", month)).total for month in (NOVEMBER, DECEMBER)])
    made = await written(database, acme, tmp_path, "parquet")
    [sums] = duckdb.sql(
        f"SELECT sum(BilledCost), epoch_us(min(BillingPeriodStart)), count(*) FROM '{tmp_path / made}'"
    ).fetchall()
    rows = list(csv.DictReader(io.StringIO((tmp_path / await written(database, acme, tmp_path, "csv")).read_text())))
    assert sums == (total, NOVEMBER.starts_at, len(rows))
    assert sum(Decimal(row["BilledCost"]) for row in rows) == total
    assert rows[0]["BillingPeriodStart"] == "2026-11-01T00:00:00Z"


async def written(database: Database, acme: Principal, folder: Path, kind: str) -> str:
    rows = await rows_of(database, acme)

    async def pages() -> AsyncIterator[list[Row]]:
        yield rows

    return (await write_table(folder, "focus", kind, FOCUS_COLUMNS, pages())).file


SUPPORTED = (
    "ACCOUNT_NAMING_SUPPORTED",
    "MULTIPLE_BILLING_ACCOUNT_TYPES_SUPPORTED",
    "MULTIPLE_SUB_ACCOUNT_TYPES_SUPPORTED",
    "PRICING_BILLING_CURRENCY_DIFFERENCES_SUPPORTED",
    "PUBLIC_PRICE_LIST_SUPPORTED",
    "RESOURCE_TYPE_ASSIGNMENT_SUPPORTED",
    "SUB_ACCOUNT_SUPPORTED",
    "TAGGING_SUPPORTED",
    "UNIT_PRICING_SUPPORTED",
    "USAGE_MEASUREMENT_SUPPORTED",
)
UNDECIDABLE = {"InvoiceId-C-004-C"}
"""Null for a charge without an invoice: the validator cannot know of which, and expects it of all."""


@pytest.mark.parametrize("kind", ["csv", "parquet"])
@pytest.mark.parametrize("backend", ["sqlite"], indirect=True)
async def test_focus_export_passes_the_foundations_validator(
    database: Database, acme: Principal, tmp_path: Path, kind: str
) -> None:
    """Its libraries are older than ours: it runs from a separate environment, if there is one."""
    validator = shutil.which("focus-validator")
    if validator is None:
        pytest.skip("pipx install focus-validator==2.2.1 (Python 3.12, with pyarrow<20)")
    file = tmp_path / await written(database, acme, tmp_path, kind)
    told = await asyncio.to_thread(judged, validator, file)
    failed = {line.split()[1].rstrip(":") for line in told.splitlines() if ": FAIL" in line}
    assert told.count(": PASS") > 200
    assert failed <= UNDECIDABLE


def judged(validator: str, file: Path) -> str:
    """Return the validator's output; it runs in its own folder, because it looks for its rules below the current
    one."""
    rules = next(Path(validator).resolve().parents[1].glob("lib/python*/site-packages/focus_validator/rules"))
    command = [validator, "--data-file", file, "--validate-version", "1.2.0.1", "--block-download", "--show-violations"]
    command += ["--applicability-criteria", ",".join(SUPPORTED)]
    return subprocess.run(command, capture_output=True, text=True, cwd=rules.parents[1], env={}, check=False).stdout
