"""Reconciliation against a forger with write access to the database: rehashed entries, periods, invoices, prices."""

from __future__ import annotations

import logging
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path

import msgspec
import pytest
import sqlalchemy as sa
from billing_harness import DECEMBER, NOVEMBER, Clock, give_plan, use

from loramux.common.identity import Principal
from loramux.data.records.billing import InvoiceRow, PeriodRow, PriceRow
from loramux.data.records.database import Database, parse_url
from loramux.data.records.ledger import LedgerEntry, LedgerHeadRow, LedgerRow, chain_hash
from loramux.data.storage.errors import StorageUnavailable
from loramux.data.storage.objects import Objects, open_objects
from loramux.money.billing.errors import LedgerAltered
from loramux.money.billing.invoices import digest, document, read_invoice
from loramux.money.billing.reconcile import FOLDER, Checkpoint, Checkpoints, reconcile
from loramux.money.billing.service import BillingService
from loramux.money.usage.service import UsageService

pytestmark = pytest.mark.anyio

PEPPER = b"p" * 32
TABLES = {
    "ledger_entries": ("no_update", "no_delete"),
    "periods": ("no_update",),
    "invoices": ("no_update",),
    "prices": ("no_update",),
}


class Forger:
    """Drops the triggers and rewrites rows; computes every hash again."""

    def __init__(self, url: str) -> None:
        self.engine = sa.create_engine(parse_url(url), poolclass=sa.NullPool)
        with self.engine.begin() as connection:
            for table, triggers in TABLES.items():
                if connection.dialect.name == "postgresql":
                    connection.execute(sa.text(f"ALTER TABLE {table} DISABLE TRIGGER USER"))
                else:
                    for trigger in triggers:
                        connection.execute(sa.text(f"DROP TRIGGER {table}_{trigger}"))

    def waive_output(self, sequence: int) -> str:
        """Move an entry's output from billed to waived, which no count of tokens notices; the chain's new last hash."""
        columns = [getattr(LedgerRow, name) for name in LedgerEntry.__struct_fields__]
        with self.engine.begin() as connection:
            rows = connection.execute(sa.select(*columns).order_by(LedgerRow.sequence)).all()
            last = ""
            for row in rows:
                entry = LedgerEntry(**row._mapping)
                if entry.sequence == sequence:
                    moved = {"output_tokens": 0, "waived_output_tokens": entry.output_tokens}
                    entry = msgspec.structs.replace(entry, **moved)
                if entry.sequence > sequence:
                    entry = msgspec.structs.replace(entry, prev_hash=last)
                entry = msgspec.structs.replace(entry, hash=chain_hash(entry))
                last = entry.hash
                facts = msgspec.structs.asdict(entry)
                connection.execute(sa.update(LedgerRow).where(LedgerRow.sequence == entry.sequence).values(**facts))
            connection.execute(sa.update(LedgerHeadRow).values(hash=last))
        return last

    def cut(self, sequence: int) -> None:
        """Remove every entry after that one."""
        with self.engine.begin() as connection:
            connection.execute(sa.delete(LedgerRow).where(LedgerRow.sequence > sequence))
            last = connection.execute(sa.select(LedgerRow.hash).where(LedgerRow.sequence == sequence)).scalar_one()
            connection.execute(sa.update(LedgerHeadRow).values(sequence=sequence, hash=last))

    def set(self, row: type, **values: object) -> None:
        with self.engine.begin() as connection:
            connection.execute(sa.update(row).values(**values))

    def hash_at(self, sequence: int) -> str:
        with self.engine.begin() as connection:
            return connection.execute(sa.select(LedgerRow.hash).where(LedgerRow.sequence == sequence)).scalar_one()

    def document(self) -> str:
        with self.engine.begin() as connection:
            return connection.execute(sa.select(InvoiceRow.document)).scalar_one()


@pytest.fixture
def objects(tmp_path: Path) -> Objects:
    return open_objects(str(tmp_path / "objects"), {})


@pytest.fixture
async def checkpoints(database: Database, objects: Objects) -> Checkpoints:
    return Checkpoints(database, objects, PEPPER)


@pytest.fixture
async def closed(
    database: Database,
    tmp_path: Path,
    checkpoints: Checkpoints,
    enrol: Callable[[str], Awaitable[Principal]],
) -> AsyncIterator[UsageService]:
    """Three entries in a closed November and two in an open December, with a checkpoint of each month's last."""
    acme, clock, usage = await enrol("acme"), Clock(), UsageService(database)
    database.now = clock
    await give_plan(database, tmp_path)
    await usage.start()
    for number in range(3):
        await use(usage, acme, f"n{number}", 100_000, 100, 50_000)
    clock.now = DECEMBER.starts_at + 1
    await BillingService(database).close(NOVEMBER)
    assert await checkpoints.write() is not None
    for number in range(2):
        await use(usage, acme, f"d{number}", 100_000, 100, 50_000)
    assert await checkpoints.write() is not None
    yield usage
    await usage.stop()


async def problems(database: Database, checkpoints: Checkpoints | None) -> str:
    with pytest.raises(LedgerAltered) as altered:
        await reconcile(database, checkpoints)
    return altered.value.message


async def test_reconcile_of_an_honest_ledger_says_what_it_verified(
    database: Database, closed: UsageService, checkpoints: Checkpoints
) -> None:
    found = await reconcile(database, checkpoints)
    assert (found.entries, found.periods, found.invoices, found.checkpoints, found.drift_tokens) == (5, 1, 1, 2, 0)
    assert await checkpoints.write() is None


async def test_reconcile_finds_a_rehash_inside_a_closed_month(
    url: str, database: Database, closed: UsageService
) -> None:
    Forger(url).waive_output(2)
    assert await closed.verify_chain() == 5
    found = await problems(database, None)
    assert "the entries of 2026-11, a closed month, are not what it was closed with" in found
    assert "invoice INV-2026-11-acme does not follow from the ledger" in found


async def test_reconcile_finds_a_closed_month_whose_digest_was_changed_too(
    url: str, database: Database, closed: UsageService
) -> None:
    forger = Forger(url)
    forger.waive_output(2)
    forger.set(PeriodRow, digest=forger.hash_at(3))
    assert "invoice INV-2026-11-acme is of other entries than its month" in await problems(database, None)


async def test_reconcile_finds_a_changed_invoice(url: str, database: Database, closed: UsageService) -> None:
    forger = Forger(url)
    text = forger.document().replace("acme", "acne")
    forger.set(InvoiceRow, document=text)
    assert "is not what was frozen" in await problems(database, None)


async def test_reconcile_finds_a_changed_price(url: str, database: Database, closed: UsageService) -> None:
    Forger(url).set(PriceRow, steps="[[0, 1]]")
    assert "does not follow from the ledger and the prices" in await problems(database, None)


async def test_reconcile_finds_a_perfect_forgery_by_its_checkpoint(
    url: str, database: Database, closed: UsageService, checkpoints: Checkpoints
) -> None:
    """Entries, chain, period and invoice are rewritten so that they agree with each other."""
    forger = Forger(url)
    forger.waive_output(2)
    period = forger.hash_at(3)
    forger.set(PeriodRow, digest=period)
    billing = BillingService(database)
    [november, _] = await billing.periods()
    kept = read_invoice(forger.document())
    async with database.read() as session:
        from loramux.data.records.usage import QuantityRepository
        from loramux.money.billing.catalog import subscriptions_of
        from loramux.money.billing.invoices import bill, invoice

        quantities = await QuantityRepository(session, kept.tenant_id).daily(november.span)
        made = bill(november, await subscriptions_of(session, kept.tenant_id), quantities)
    text = document(invoice(made, kept.tenant_id, kept.tenant_name, kept.terms))
    forger.set(InvoiceRow, document=text, digest=digest(text), total=made.total)
    await reconcile(database)
    found = await problems(database, checkpoints)
    assert "entry 3 or one before it is not what its checkpoint says" in found
    assert "entry 5 or one before it is not what its checkpoint says" in found


async def test_reconcile_finds_a_rehash_inside_the_open_month_by_its_checkpoint(
    url: str, database: Database, closed: UsageService, checkpoints: Checkpoints
) -> None:
    Forger(url).waive_output(4)
    await reconcile(database)
    assert "entry 5 or one before it" in await problems(database, checkpoints)


async def test_reconcile_finds_a_ledger_that_was_cut(
    url: str, database: Database, closed: UsageService, checkpoints: Checkpoints
) -> None:
    Forger(url).cut(4)
    found = await problems(database, checkpoints)
    assert found.endswith("entry 5, which has a checkpoint, is not in the ledger any more")


async def test_checkpoint_is_not_written_over_an_altered_ledger(
    url: str,
    database: Database,
    closed: UsageService,
    checkpoints: Checkpoints,
    enrol: Callable[[str], Awaitable[Principal]],
    caplog: pytest.LogCaptureFixture,
) -> None:
    Forger(url).waive_output(4)
    await use(closed, await enrol("globex"), "more", 1, 0, 1)
    with caplog.at_level(logging.ERROR):
        assert await checkpoints.write() is None
    assert "contradicts its checkpoint 5" in caplog.text


async def test_checkpoint_of_another_key_neither_counts_nor_hides_a_signed_one(
    url: str, database: Database, closed: UsageService, checkpoints: Checkpoints, objects: Objects
) -> None:
    last = Forger(url).waive_output(4)
    forged = Checkpoint(sequence=5, hash=last, created_at=2**60, signature="0" * 64)
    objects.put(f"{FOLDER}/{forged.name}", b"{}")
    assert [one.sequence for one in await checkpoints.all()] == [3, 5]
    assert "entry 5 or one before it" in await problems(database, checkpoints)


async def test_checkpoint_goes_to_every_listener(database: Database, closed: UsageService, objects: Objects) -> None:
    class Listener:
        def __init__(self) -> None:
            self.received: list[int] = []

        async def receive_checkpoint(self, checkpoint: Checkpoint, now: int) -> None:
            self.received.append(checkpoint.sequence)

    objects.delete_under(FOLDER)
    listener = Listener()
    anchored = Checkpoints(database, objects, PEPPER, [listener])
    assert await anchored.write() is not None
    assert await anchored.write() is None
    assert listener.received == [5]


async def test_checkpoint_that_the_storage_refuses_is_logged_and_stops_nothing(
    database: Database, closed: UsageService, caplog: pytest.LogCaptureFixture
) -> None:
    class Down(Objects):
        def __init__(self) -> None:
            pass

        def names(self, prefix: str) -> list[str]:
            raise StorageUnavailable("the object store does not answer")

    with caplog.at_level(logging.WARNING):
        assert await Checkpoints(database, Down(), PEPPER).write() is None
    assert "does not answer" in caplog.text
