"""Plans, periods and invoices over a real ledger, whose totals are computed again in SQL and in decimal."""

import asyncio
import datetime
from collections.abc import AsyncIterator, Awaitable, Callable
from decimal import ROUND_HALF_UP, Decimal
from pathlib import Path

import msgspec
import pytest
import sqlalchemy as sa
from billing_harness import DAY, DECEMBER, NOVEMBER, PLANS, SECOND, Clock, give_plan, use

from loramux.accounts.tenants.tenants import Tenants
from loramux.common.identity import Principal
from loramux.common.settings.server import BillingSettings
from loramux.common.units import TokenCounts
from loramux.data.records.database import Database, parse_url
from loramux.data.records.ledger import LedgerRepository
from loramux.data.records.requests import OpenedRequest
from loramux.money.billing.catalog import Catalog, read_plans
from loramux.money.billing.costs import CostsQuery
from loramux.money.billing.errors import (
    BillingError,
    InvalidCorrection,
    InvalidPeriod,
    InvalidPlan,
    MissingCurrency,
    PeriodNotOpen,
    UnknownEntry,
)
from loramux.money.billing.invoices import Invoice, InvoiceParty
from loramux.money.billing.periods import Month
from loramux.money.billing.reconcile import reconcile
from loramux.money.billing.service import BillingService
from loramux.money.exports.invoice_render import print_invoice
from loramux.money.usage.errors import InvalidQuery
from loramux.money.usage.query import UsageQuery, UsageResult
from loramux.money.usage.service import UsageService
from loramux.money.usage.settlement import Settlement

pytestmark = pytest.mark.anyio


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
async def usage(database: Database) -> AsyncIterator[UsageService]:
    usage = UsageService(database)
    await usage.start()
    yield usage
    await usage.stop()


@pytest.fixture
async def acme(enrol: Callable[[str], Awaitable[Principal]]) -> Principal:
    return await enrol("acme")


@pytest.fixture
async def priced(database: Database, acme: Principal, tmp_path: Path) -> BillingService:
    await give_plan(database, tmp_path)
    return BillingService(database)


AMOUNTS = [(1_000_003, 17, 4_001), (999_999, 400_000, 9_500), (123, 0, 77)]


async def busy_november(usage: UsageService, acme: Principal) -> list[str]:
    return [await use(usage, acme, f"r{i}", *amount) for i, amount in enumerate(AMOUNTS)]


async def test_invoice_equals_sql_and_decimal_over_the_ledger(
    url: str, usage: UsageService, acme: Principal, priced: BillingService, clock: Clock
) -> None:
    await busy_november(usage, acme)
    clock.now = DECEMBER.starts_at
    [invoice] = await priced.close(NOVEMBER)
    engine = sa.create_engine(parse_url(url), poolclass=sa.NullPool)
    sums = sa.text(
        "SELECT sum(input_tokens - cached_tokens), sum(cached_tokens), sum(output_tokens) FROM ledger_entries"
        " WHERE tenant_id = :tenant AND sequence BETWEEN :first AND :last"
    )
    with engine.connect() as connection:
        span = {"tenant": acme.tenant, "first": invoice.first_sequence, "last": invoice.last_sequence}
        uncached, cached, output = (Decimal(int(value)) for value in connection.execute(sums, span).one())
    engine.dispose()
    over = output - 1_000  # the free quota
    exact = [
        uncached * Decimal("0.20") / 1_000_000,
        cached * Decimal("0.02") / 1_000_000,
        (Decimal(10_000) * Decimal("0.0137") + (over - 10_000) * Decimal("0.0091")) / 1_000,
    ]
    cents = [amount.quantize(Decimal("0.01"), ROUND_HALF_UP) for amount in exact]
    assert [line.amount for line in invoice.lines[:3]] == cents
    assert invoice.lines[3].amount == Decimal("0.50") - sum(cents)
    assert invoice.total == Decimal("0.50")


async def test_closed_period_never_changes_and_late_entries_are_in_the_next(
    usage: UsageService, acme: Principal, priced: BillingService, clock: Clock
) -> None:
    [first, *_] = await busy_november(usage, acme)
    draft = await priced.invoice("acme", NOVEMBER)
    assert draft.status == "draft"
    clock.now = DECEMBER.starts_at
    [final] = await priced.close(NOVEMBER)
    assert (final.status, final.lines) == ("final", draft.lines)
    clock.now -= 5 * SECOND  # a server whose clock is late
    await use(usage, acme, "late", 1_000_000, 0, 0)
    await priced.correct(first, {"output_tokens": -4_001}, "refund")
    again = await priced.correct(first, {"output_tokens": -4_001}, "refund")
    assert again.corrects == first
    assert again.entry is not None
    clock.now = DECEMBER.ends_at
    assert await priced.invoice("acme", NOVEMBER) == final
    [december] = await priced.close(DECEMBER)
    assert (december.first_sequence, december.last_sequence) == (4, 5)
    assert [(line.meter, line.quantity) for line in december.lines[:2]] == [
        ("input_uncached", 1_000_000),
        ("output", -4_001),
    ]
    assert december.lines[1].amount < 0
    assert await usage.verify_chain() == 5


async def test_own_invoice_does_not_tell_how_many_entries_all_tenants_made(
    usage: UsageService, acme: Principal, priced: BillingService, clock: Clock
) -> None:
    await busy_november(usage, acme)
    clock.now = DECEMBER.starts_at
    [final] = await priced.close(NOVEMBER)
    for month, digest in ((NOVEMBER, final.ledger_digest), (DECEMBER, None)):
        own = await priced.own_invoice(acme, str(month))
        assert (own.first_sequence, own.last_sequence, own.ledger_digest) == (None, None, digest)
    printed = print_invoice(final, BillingSettings())
    assert printed.proof == f"Ledger digest {final.ledger_digest}."


async def test_images_are_a_line_of_the_ledger_the_usage_and_the_invoice(
    usage: UsageService, acme: Principal, priced: BillingService, database: Database
) -> None:
    await use(usage, acme, "a", 3_000_000, 500_000, 0, image=2_000_000)
    async with database.read() as session:
        (entry,) = await LedgerRepository(session).after(0, 10)
    assert (entry.input_tokens, entry.cached_tokens, entry.image_tokens) == (3_000_000, 500_000, 2_000_000)
    invoice = await priced.invoice("acme", NOVEMBER)
    assert [(line.description, line.quantity, line.amount) for line in invoice.lines] == [
        ("Input tokens", 500_000, Decimal("0.10")),
        ("Input tokens found in the cache", 500_000, Decimal("0.01")),
        ("Input tokens of images", 2_000_000, Decimal("0.40")),
    ]
    assert await usage.verify_chain() == 1
    with pytest.raises(InvalidCorrection, match="cached_tokens and image_tokens are part of input_tokens"):
        await priced.correct(entry.event_id, {"input_tokens": -600_000}, "refund")


async def test_draft_invoice_shows_what_is_missing_to_the_plans_minimum(
    usage: UsageService, acme: Principal, priced: BillingService
) -> None:
    assert [(line.meter, line.amount) for line in (await priced.invoice("acme", NOVEMBER)).lines] == [
        ("minimum_commitment", Decimal("0.50"))
    ]
    await use(usage, acme, "most", 1_000_000, 0, 0)
    draft = await priced.invoice("acme", NOVEMBER)
    assert [(line.meter, line.amount) for line in draft.lines] == [
        ("input_uncached", Decimal("0.20")),
        ("minimum_commitment", Decimal("0.30")),
    ]
    assert (draft.status, draft.total) == ("draft", Decimal("0.50"))
    await use(usage, acme, "more", 2_000_000, 0, 0)
    assert [line.meter for line in (await priced.invoice("acme", NOVEMBER)).lines] == ["input_uncached"]


async def test_dry_run_of_a_close_previews_a_month_that_still_runs_and_freezes_nothing(
    usage: UsageService, acme: Principal, priced: BillingService, clock: Clock
) -> None:
    await use(usage, acme, "r", 5_000_000, 0, 0)
    [preview] = await priced.close(NOVEMBER, dry_run=True)
    assert (preview.total, preview.last_sequence) == (Decimal("1.00"), 1)
    assert [period.is_closed for period in await priced.periods()] == [False]
    with pytest.raises(PeriodNotOpen, match="has not begun"):
        await priced.close(DECEMBER, dry_run=True)
    with pytest.raises(PeriodNotOpen, match="not over yet"):
        await priced.close(NOVEMBER)
    await use(usage, acme, "s", 5_000_000, 0, 0)
    clock.now = DECEMBER.starts_at
    [final] = await priced.close(NOVEMBER)
    assert final.total == Decimal("2.00")
    with pytest.raises(PeriodNotOpen, match="closed already"):
        await priced.close(NOVEMBER, dry_run=True)
    [of_december] = await priced.close(DECEMBER, dry_run=True)
    assert (of_december.total, of_december.first_sequence) == (Decimal("0.50"), 3)


async def test_period_closes_once_in_order_after_its_end(priced: BillingService, clock: Clock) -> None:
    with pytest.raises(PeriodNotOpen, match="not over yet"):
        await priced.close(NOVEMBER)
    clock.now = DECEMBER.ends_at
    [invoice] = await priced.close(NOVEMBER)
    assert (invoice.first_sequence, invoice.last_sequence, invoice.ledger_digest) == (1, 0, "0" * 64)
    for month, told in ((NOVEMBER, "closed already"), (Month(2027, 1), "2026-12 is still open")):
        with pytest.raises(PeriodNotOpen, match=told):
            await priced.close(month)


async def test_period_closed_concurrently_closes_once(priced: BillingService, clock: Clock) -> None:
    clock.now = DECEMBER.starts_at
    ends = await asyncio.gather(*(priced.close(NOVEMBER) for _ in range(4)), return_exceptions=True)
    assert sorted(type(end).__name__ for end in ends) == ["PeriodNotOpen", "PeriodNotOpen", "PeriodNotOpen", "list"]


@pytest.mark.parametrize("table", ["plans", "prices", "subscriptions", "periods", "invoices"])
async def test_billing_rows_refuse_updates_and_deletes(
    priced: BillingService, clock: Clock, sql: Callable[[str], None], table: str
) -> None:
    clock.now = DECEMBER.starts_at
    await priced.close(NOVEMBER)
    for statement in (
        f"DELETE FROM {table}",
        f"UPDATE {table} SET {'created_at' if table != 'periods' else 'closed_at'} = 0",
    ):
        with pytest.raises(sa.exc.DBAPIError, match="append-only"):
            sql(statement)


def test_mistake_in_a_price_file_names_the_field_and_what_it_takes(tmp_path: Path) -> None:
    file = tmp_path / "plans.toml"
    file.write_text(PLANS.replace('price = "', "price = 1 #", 1))
    with pytest.raises(InvalidPlan, match=r'plans\[0\]\.prices\[0\]\.price must be text in quotes.*, not 1; write "1"'):
        read_plans(file)
    file.write_text(PLANS.replace("currency =", "curency =", 1))
    with pytest.raises(InvalidPlan, match=r"plans\[0\] has no setting `curency`; did you mean `currency`"):
        read_plans(file)


async def test_prices_are_only_added_and_never_to_a_closed_period(
    database: Database, priced: BillingService, clock: Clock, tmp_path: Path
) -> None:
    catalog, file = Catalog(database), tmp_path / "plans.toml"
    assert await catalog.apply(read_plans(file)) == 0
    for changed, told in (("0.20", "later valid_from"), ("USD", "another currency")):
        file.write_text(PLANS.replace(changed, {"0.20": "0.30", "USD": "EUR"}[changed]))
        with pytest.raises(InvalidPlan, match=told):
            await catalog.apply(read_plans(file))
    clock.now = DECEMBER.starts_at
    await priced.close(NOVEMBER)
    file.write_text(PLANS.replace('"input_cached"\nvalid_from = 2026-11-01', '"input_cached"\nvalid_from = 2026-11-20'))
    with pytest.raises(InvalidPlan, match="the first open day is 2026-12-01"):
        await catalog.apply(read_plans(file))
    with pytest.raises(InvalidPlan, match="2026-11 is closed"):
        await catalog.subscribe("acme", "standard", NOVEMBER)
    [plan] = await catalog.plans()
    assert len(plan.prices) == 3


async def test_plan_of_an_open_month_is_replaced_or_taken_back_and_the_bill_follows(
    database: Database, priced: BillingService, usage: UsageService, acme: Principal, clock: Clock, tmp_path: Path
) -> None:
    catalog = Catalog(database)
    dearer = PLANS.replace('"standard"', '"dearer"').replace('"0.20"', '"2000.00"').replace('"USD"', '"EUR"')
    (tmp_path / "dearer.toml").write_text(dearer)
    await catalog.apply(read_plans(tmp_path / "dearer.toml"))
    await use(usage, acme, "r", 1_000_000, 0, 0)
    draft = await priced.invoice("acme", NOVEMBER)
    assert [line.amount for line in draft.lines] == [Decimal("0.20"), Decimal("0.30")]
    with pytest.raises(InvalidPlan, match="--replace"):
        await catalog.subscribe("acme", "dearer", NOVEMBER)
    await catalog.subscribe("acme", "dearer", NOVEMBER, replace=True)
    replaced = await priced.invoice("acme", NOVEMBER)
    assert (replaced.total, replaced.currency) == (Decimal(2000), "EUR")
    await catalog.unsubscribe("acme", NOVEMBER)
    assert (await priced.invoice("acme", NOVEMBER)).total == 0
    with pytest.raises(InvalidPlan, match="no plan that begins in 2026-11"):
        await catalog.unsubscribe("acme", NOVEMBER)
    await catalog.subscribe("acme", "standard", NOVEMBER)
    clock.now = DECEMBER.starts_at
    await priced.close(NOVEMBER)
    for change in (
        catalog.subscribe("acme", "dearer", NOVEMBER, replace=True),
        catalog.unsubscribe("acme", NOVEMBER),
    ):
        with pytest.raises(InvalidPlan, match="2026-11 is closed"):
            await change
    await catalog.subscribe("acme", "standard", DECEMBER)
    with pytest.raises(InvalidPlan, match="billed in USD and stays so"):
        await catalog.subscribe("acme", "dearer", DECEMBER, replace=True)
    log = [entry for entry in await Tenants(database, b"p" * 32).audit.read() if entry.object_id.startswith("plan")]
    changes = [entry for entry in reversed(log) if entry.action in ("plan.replace", "plan.unassign")]
    assert [(one.action, one.before and bytes(one.before), one.after and bytes(one.after)) for one in changes] == [
        ("plan.replace", b'{"month":"2026-11","plan":"standard"}', b'{"month":"2026-11","plan":"dearer"}'),
        ("plan.unassign", b'{"month":"2026-11","plan":"dearer"}', None),
    ]


@pytest.mark.parametrize(
    ("old", "new", "told"),
    [
        ('currency = "USD"', 'currency = "XAU"', "ISO 4217"),
        ('price = "0.20"', "price = 0.20", "must be text in quotes"),
        ('price = "0.20"', 'price = "0.0000000001"', "at most 9 digits"),
        ('meter = "output"', 'meter = "waived_output"', "meter is one of"),
        ('minimum = "0.50"', 'minimum = "0.505"', "at most 2 digits"),
        ("above = 10_000", "above = 0", "begin above 0 and rise"),
        ("free = 1_000", "fre = 1_000", "has no setting `fre`; did you mean `free`"),
        ('name = "standard"', 'name = "No Spaces"', "a plan's name"),
    ],
)
def test_plan_that_is_invalid_is_refused_with_its_field(tmp_path: Path, old: str, new: str, told: str) -> None:
    (tmp_path / "plans.toml").write_text(PLANS.replace(old, new))
    with pytest.raises(InvalidPlan, match=told):
        read_plans(tmp_path / "plans.toml")


async def test_billing_changes_are_audited(
    database: Database, priced: BillingService, usage: UsageService, acme: Principal, clock: Clock
) -> None:
    [first, *_] = await busy_november(usage, acme)
    for _ in range(2):
        await priced.correct(first, {"output_tokens": -1}, "x")
    await Catalog(database).subscribe("acme", "standard", DECEMBER)
    clock.now = NOVEMBER.ends_at
    await priced.close(NOVEMBER)
    with pytest.raises(PeriodNotOpen):
        await priced.close(NOVEMBER)
    log = list(reversed(await Tenants(database, b"p" * 32).audit.read()))
    told = [entry for entry in log if entry.action.split(".")[0] in ("plan", "price", "period", "ledger")]
    assert [entry.action for entry in told] == [
        "plan.create",
        *["price.create"] * 3,
        "plan.give",
        "ledger.correct",
        "plan.give",
        "period.close",
    ]
    assert all(entry.actor.startswith("local:") for entry in told)
    given, corrected, again, closed = told[4:]
    assert (given.tenant, given.before) == (acme.tenant, None)
    assert msgspec.json.decode(again.before) == {"plan": "standard", "month": "2026-11"}
    assert msgspec.json.decode(again.after) == {"plan": "standard", "month": "2026-12"}
    assert msgspec.json.decode(corrected.after)["corrects"] == first
    assert closed.object_id == "2026-11"


async def test_correction_of_an_unknown_entry_or_quantity_is_refused(
    priced: BillingService, usage: UsageService, acme: Principal
) -> None:
    [first, *_] = await busy_november(usage, acme)
    with pytest.raises(UnknownEntry):
        await priced.correct("evt_none", {"output_tokens": 1}, "x")
    for changes in ({"sequence": 1}, {"output_tokens": 0}, {}):
        with pytest.raises(BillingError, match="a correction changes"):
            await priced.correct(first, changes, "x")


async def test_correction_below_zero_is_refused_and_a_dry_run_writes_nothing(
    priced: BillingService, usage: UsageService, acme: Principal
) -> None:
    """The first entry has 1,000,003 prompt tokens, 17 of them cached, and 4,001 output tokens."""
    [first, *_] = await busy_november(usage, acme)
    entries = await usage.verify_chain()
    tried = await priced.correct(first, {"output_tokens": -4_000}, "a", dry_run=True)
    assert (tried.entry, tried.before["output_tokens"], tried.after["output_tokens"]) == (None, 4_001, 1)
    assert await usage.verify_chain() == entries
    with pytest.raises(InvalidCorrection, match=r"output_tokens of this entry is 4001.*would be -1; take off 4001"):
        await priced.correct(first, {"output_tokens": -4_002}, "a")
    made = await priced.correct(first, {"output_tokens": -4_000}, "a")
    assert made.after["output_tokens"] == 1
    assert (await priced.correct(first, {"output_tokens": -4_000}, "a")).entry == made.entry
    with pytest.raises(InvalidCorrection, match="is 1, earlier corrections included"):
        await priced.correct(first, {"output_tokens": -2}, "b")
    with pytest.raises(InvalidCorrection, match="cached_tokens is part of input_tokens"):
        await priced.correct(first, {"input_tokens": -1_000_000}, "c")
    await priced.correct(first, {"input_tokens": -1_000_000, "cached_tokens": -14}, "c")
    assert made.entry is not None
    with pytest.raises(InvalidCorrection, match=first):
        await priced.correct(made.entry.event_id, {"output_tokens": 5}, "d")
    assert (await priced.invoice("acme", NOVEMBER)).total >= 0


async def test_corrections_at_once_never_take_off_more_than_there_is(
    priced: BillingService, usage: UsageService, acme: Principal
) -> None:
    [first, *_] = await busy_november(usage, acme)
    corrections = [priced.correct(first, {"output_tokens": -1_500}, f"reason {number}") for number in range(5)]
    ends = await asyncio.gather(*corrections, return_exceptions=True)
    assert sum(isinstance(end, InvalidCorrection) for end in ends) == 3
    invoice = await priced.invoice("acme", NOVEMBER)
    [output] = [line for line in invoice.lines if line.meter == "output"]
    assert output.quantity == sum(amount[2] for amount in AMOUNTS) - 3_000


async def test_close_dry_run_shows_invoices_and_freezes_nothing(
    priced: BillingService, usage: UsageService, acme: Principal, clock: Clock
) -> None:
    await busy_november(usage, acme)
    clock.now = DECEMBER.starts_at
    [tried] = await priced.close(NOVEMBER, dry_run=True)
    assert [period.is_closed for period in await priced.periods()] == [False]
    assert [tried] == await priced.close(NOVEMBER)


async def test_costs_by_day_and_group_add_up_to_the_invoice(
    usage: UsageService, acme: Principal, priced: BillingService, clock: Clock
) -> None:
    await use(usage, acme, "a", 2_000_000, 0, 3_000, project_id=acme.project, tags='{"team":"red"}')
    clock.now += DAY * SECOND
    await use(usage, acme, "b", 1_000_000, 500_000, 7_000)
    start = NOVEMBER.starts_at // SECOND
    query = CostsQuery(start_time=start, group_by=("project_id", "line_item"), limit=31)
    page = await priced.costs(acme, query)
    assert (len(page.data), page.has_more) == (16, False)
    results = [(bucket.start_time, result) for bucket in page.data for result in bucket.results]
    by_project = {result.project_id for _, result in results}
    assert by_project == {acme.project, None}
    total = sum(result.amount.value for _, result in results)
    assert total == (await priced.invoice("acme", NOVEMBER)).total > 0
    assert {result.amount.currency for _, result in results} == {"usd"}
    only = await priced.costs(acme, CostsQuery(start_time=start, project_ids=(acme.project,), limit=31))
    assert sum(r.amount.value for b in only.data for r in b.results) == sum(
        r.amount.value for _, r in results if r.project_id == acme.project
    )


async def test_costs_come_in_pages(priced: BillingService, usage: UsageService, acme: Principal) -> None:
    await busy_november(usage, acme)
    start, seen, page = NOVEMBER.starts_at // SECOND, [], None
    while True:
        got = await priced.costs(acme, CostsQuery(start_time=start, limit=4, page=page))
        seen += [bucket.start_time for bucket in got.data]
        if not got.has_more:
            break
        page = got.next_page
    assert seen == [start + DAY * day for day in range(15)]


async def test_costs_and_usage_with_too_many_groups_are_refused(
    priced: BillingService, usage: UsageService, acme: Principal, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Tags are the caller's: a group for each of a million requests must not keep the server busy."""
    for number in range(4):
        await use(usage, acme, f"r{number}", 1, 0, 1, tags=f'{{"n":"{number}"}}', model=f"acme/a@{number}")
    monkeypatch.setattr("loramux.money.billing.service.MAX_ROWS", 3)
    monkeypatch.setattr("loramux.money.usage.service.MAX_ROWS", 3)
    start = NOVEMBER.starts_at // SECOND
    with pytest.raises(InvalidQuery, match="more than 3 groups"):
        await priced.costs(acme, CostsQuery(start_time=start, group_by=("tags",), limit=31))
    assert (await priced.costs(acme, CostsQuery(start_time=start))).data
    with pytest.raises(InvalidQuery, match="more than 3 sums"):
        await usage.completions(acme, UsageQuery(start_time=start, group_by=("model",), limit=31))
    assert (await usage.completions(acme, UsageQuery(start_time=start, limit=31))).data


@pytest.mark.parametrize(
    ("wrong", "field"),
    [
        ({"group_by": ("tags", "tags")}, "group_by"),
        ({"group_by": ("user_id",)}, "group_by"),
        ({"project_ids": ("p",) * 101}, "project_ids"),
        ({"limit": 181}, "limit"),
    ],
)
def test_costs_query_with_a_bad_field_is_refused_by_its_name(wrong: dict[str, object], field: str) -> None:
    with pytest.raises(InvalidQuery) as refused:
        CostsQuery(start_time=0, **wrong)
    assert refused.value.field == field


@pytest.mark.parametrize(
    "party",
    [
        InvoiceParty(name=" "),
        InvoiceParty(name="a\nb"),
        InvoiceParty(name="a", address=("x" * 201,)),
        InvoiceParty(name="a", address=("",)),
        InvoiceParty(name="a", address=("x",) * 9),
        InvoiceParty(name="a", tax_id="\x00"),
    ],
)
async def test_billing_address_that_is_malformed_is_refused(priced: BillingService, party: InvoiceParty) -> None:
    with pytest.raises(BillingError, match="a billing address has"):
        await priced.set_profile("acme", party)


async def test_costs_of_another_tenant_are_not_visible(
    priced: BillingService, usage: UsageService, acme: Principal, enrol: Callable[[str], Awaitable[Principal]]
) -> None:
    await busy_november(usage, acme)
    page = await priced.costs(await enrol("globex"), CostsQuery(start_time=NOVEMBER.starts_at // SECOND, limit=31))
    assert all(bucket.results == () for bucket in page.data)


async def test_key_with_an_allow_list_sees_the_usage_and_costs_of_its_models_only(
    priced: BillingService, usage: UsageService, acme: Principal
) -> None:
    await use(usage, acme, "a", 1_000_000, 0, 500, model="acme/a@1")
    await use(usage, acme, "b", 2_000_000, 0, 700, model="acme/a@2")
    await use(usage, acme, "c", 4_000_000, 0, 900, model="acme/ab@1")
    start = NOVEMBER.starts_at // SECOND
    narrow = msgspec.structs.replace(acme, models=frozenset({"acme/a"}))

    async def seen(query: UsageQuery) -> list[UsageResult]:
        return [result for bucket in (await usage.completions(narrow, query)).data for result in bucket.results]

    query = UsageQuery(start_time=start, group_by=("model",), limit=31)
    results = await seen(query)
    assert {result.model: result.output_tokens for result in results} == {"acme/a@1": 500, "acme/a@2": 700}
    query = UsageQuery(start_time=start, models=("acme/ab@1",), limit=31)
    assert await seen(query) == []

    async def costs(who: Principal, *group_by: str) -> dict[str | None, int]:
        page = await priced.costs(who, CostsQuery(start_time=start, group_by=group_by, limit=31))
        return {result.model: result.amount.value for bucket in page.data for result in bucket.results}

    everything = await costs(acme, "model")
    assert await costs(narrow, "model") == {name: everything[name] for name in ("acme/a@1", "acme/a@2")}
    assert (await costs(narrow))[None] == everything["acme/a@1"] + everything["acme/a@2"] > 0


async def test_margins_divide_the_whole_cost_over_what_ran(
    priced: BillingService, usage: UsageService, acme: Principal
) -> None:
    await use(usage, acme, "a", 1000, 0, 500, model="acme/a@1")
    await use(usage, acme, "b", 2000, 1000, 1500, model="acme/b@1")
    found = await priced.margins(NOVEMBER, 6 * 10**9)
    assert [(one.model, one.units, one.cost) for one in found] == [
        ("acme/a@1", 2000, Decimal(2)),
        ("acme/b@1", 4000, Decimal(4)),
    ]
    assert all(one.margin == one.price - one.cost for one in found)


async def test_margins_of_two_currencies_are_never_mixed(
    priced: BillingService,
    usage: UsageService,
    acme: Principal,
    enrol: Callable[[str], Awaitable[Principal]],
    database: Database,
    tmp_path: Path,
) -> None:
    yen = PLANS.replace('"standard"', '"yen"').replace('"USD"', '"JPY"').replace('"0.50"', '"0"')
    (tmp_path / "yen.toml").write_text(yen.replace('"0.20"', '"30"'))
    await Catalog(database).apply(read_plans(tmp_path / "yen.toml"))
    tokyo, free = await enrol("tokyo"), await enrol("free")
    await Catalog(database).subscribe("tokyo", "yen", NOVEMBER)
    for who, prompt in ((acme, 1_000_000), (tokyo, 2_000_000), (free, 1_000_000)):
        await use(usage, who, f"r-{who.tenant_name}", prompt, 0, 0, model=f"{who.tenant_name}/a@1")
    for cost in (4 * 10**9, {"USD": 4 * 10**9}, {"JPY": 1, "EUR": 1}):
        with pytest.raises(MissingCurrency, match="in JPY, USD"):
            await priced.margins(NOVEMBER, cost)
    found = await priced.margins(NOVEMBER, {"USD": 4 * 10**9, "JPY": 600 * 10**9})
    assert [(one.tenant_name, one.currency, one.price, one.cost, one.margin) for one in found] == [
        ("acme", "USD", Decimal("0.20"), Decimal(1), Decimal("-0.80")),
        ("free", "USD", Decimal(0), Decimal(1), Decimal(-1)),
        ("tokyo", "JPY", Decimal(60), Decimal(300), Decimal(-240)),
    ]


async def test_reconcile_finds_a_single_lost_token(
    database: Database, usage: UsageService, acme: Principal, priced: BillingService
) -> None:
    await busy_november(usage, acme)
    assert (await reconcile(database)).drift_tokens == 0
    await usage.open(OpenedRequest(**opened("x", acme)))
    delivered, wrong = TokenCounts(prompt=12, output=7), TokenCounts(prompt=12, output=8)
    await usage.settle(
        Settlement(request_id="x", ended_by="completion", finish_reason="stop", delivered=delivered, engine_count=wrong)
    )
    found = await reconcile(database)
    assert (found.drift_tokens, usage.drift_tokens) == (1, 1)
    [drifted] = [one for one in found.weights if one.drift]
    assert drifted.adapter_digest == "sha256:b"


async def test_reconcile_ignores_corrections(
    database: Database, usage: UsageService, acme: Principal, priced: BillingService
) -> None:
    [first, *_] = await busy_november(usage, acme)
    await priced.correct(first, {"output_tokens": -1}, "goodwill")
    assert (await reconcile(database)).drift_tokens == 0


async def test_quantities_larger_than_64_bits_are_exact(
    database: Database, acme: Principal, priced: BillingService
) -> None:
    from loramux.data.records.ledger import EntryContent

    huge = 2**62 + 12_345
    drafts = [
        EntryContent(
            kind="storage",
            tenant_id=acme.tenant,
            key_id="",
            request_id=f"revision:{i}",
            model="acme/a@1",
            adapter_digest=None,
            input_tokens=0,
            cached_tokens=0,
            output_tokens=0,
            adapter_byte_seconds=huge,
            finish_reason=None,
            status="stored",
            created_at=database.now(),
        )
        for i in range(5)
    ]
    async with database.begin() as session:
        ledger = LedgerRepository(session)
        await ledger.append(await ledger.lock(), drafts)
    invoice = await priced.invoice("acme", NOVEMBER)
    assert [line.quantity for line in invoice.lines[:-1]] == [5 * huge]


@pytest.mark.parametrize(
    "text", ["2026-13", "2026-1", "26-11", "", "2026-11-01", "1969-12", "9999-12", "\u0662\u0660\u0662\u0666-11"]
)
def test_month_that_is_malformed_is_refused(text: str) -> None:
    with pytest.raises(InvalidPeriod, match="such as 2026-11"):
        Month.parse(text)


def test_months_follow_each_other() -> None:
    assert str(DECEMBER.next) == "2027-01"
    assert (
        NOVEMBER.ends_at
        == DECEMBER.starts_at
        == int(datetime.datetime(2026, 12, 1, tzinfo=datetime.UTC).timestamp()) * SECOND
    )
    assert Month.at(DECEMBER.starts_at - 1) == NOVEMBER


async def test_invoice_document_is_the_invoice(
    priced: BillingService, usage: UsageService, acme: Principal, clock: Clock
) -> None:
    await busy_november(usage, acme)
    clock.now = DECEMBER.starts_at
    [made] = await priced.close(NOVEMBER)
    assert (
        msgspec.json.decode(msgspec.json.encode(made), type=Invoice) == made == await priced.invoice("acme", NOVEMBER)
    )


def opened(id: str, who: Principal) -> dict[str, object]:
    return {
        "id": id,
        "tenant_id": who.tenant,
        "key_id": who.key_id,
        "model": "acme/b@1",
        "adapter_digest": "sha256:b",
        "base_model": "base",
        "prompt_tokens": 12,
        "max_tokens": 8,
    }
