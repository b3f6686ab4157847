"""The cost of a request in the records: its transactions, its statements, those that are built, and calls to a
connection's thread.

The counts are ratchets: they may go down.
"""

from collections.abc import Awaitable, Callable, Iterator
from contextlib import ExitStack, contextmanager
from unittest import mock

import aiosqlite
import pytest
import sqlalchemy as sa
from sqlalchemy.sql.dml import Delete, Insert, Update
from sqlalchemy.sql.selectable import Select

from loramux.accounts.tenants.tenants import Tenants
from loramux.catalog.registry.registry import AdapterQueries
from loramux.common.identity import TenantId
from loramux.common.units import TokenCounts
from loramux.data.records.access import AccessRepository
from loramux.data.records.database import Database
from loramux.data.records.requests import OpenedRequest
from loramux.money.usage.service import UsageService
from loramux.money.usage.settlement import Settlement

pytestmark = pytest.mark.anyio

AUTHENTICATE = 1
OPEN, SETTLE = 3, 5
"""Statements of a request without limits, budgets and an idempotency key."""
TRANSACTIONS = 2
"""One opens and one settles. SQLite needs none for one statement that reads, such as the authentication's."""


def is_sqlite(database: Database) -> bool:
    return database.url.get_backend_name() == "sqlite"


class Counts:
    """Counts since the block began."""

    def __init__(self) -> None:
        self.transactions = self.statements = self.built = self.calls = 0


@contextmanager
def counted() -> Iterator[Counts]:
    counts = Counts()

    def execute(*_: object) -> None:
        counts.statements += 1

    def begin(connection: sa.Connection) -> None:
        is_begun = connection.dialect.name == "postgresql" or "begin" in connection.get_execution_options()
        counts.transactions += is_begun

    def built(made: Callable[..., None]) -> Callable[..., None]:
        def make(*arguments: object, **options: object) -> None:
            counts.built += 1
            made(*arguments, **options)

        return make

    run = aiosqlite.Connection._execute

    def call(*arguments: object, **options: object) -> Awaitable[object]:
        counts.calls += 1
        return run(*arguments, **options)

    with ExitStack() as patches:
        for name, listener in (("before_cursor_execute", execute), ("begin", begin)):
            sa.event.listen(sa.Engine, name, listener)
            patches.callback(sa.event.remove, sa.Engine, name, listener)
        for kind in (Select, Insert, Update, Delete):
            patches.enter_context(mock.patch.object(kind, "__init__", built(kind.__init__)))
        patches.enter_context(mock.patch.object(aiosqlite.Connection, "_execute", call))
        yield counts


async def serve(database: Database, tenants: Tenants, secret: str, usage: UsageService, id: str) -> None:
    """Do what a request does in the records."""
    caller = await tenants.authenticator.authenticate(secret)
    request = OpenedRequest(
        id=id,
        tenant_id=caller.tenant,
        key_id=caller.key_id,
        model="base",
        adapter_digest=None,
        prompt_tokens=5,
        max_tokens=5,
    )
    await usage.open(request)
    tokens = TokenCounts(prompt=5, cached=0, output=1)
    end = Settlement(request_id=id, ended_by="completion", finish_reason="stop", delivered=tokens, engine_count=tokens)
    await usage.settle(end)


async def test_request_has_few_statements_and_builds_none(database: Database, tenants: Tenants) -> None:
    await tenants.create("acme")
    _, secret = await tenants.create_key("acme")
    usage = UsageService(database)
    await usage.start()
    await serve(database, tenants, secret, usage, "chatcmpl-1")
    with counted() as counts:
        await serve(database, tenants, secret, usage, "chatcmpl-2")
    await usage.stop()
    statements = AUTHENTICATE + OPEN + SETTLE
    assert (counts.statements, counts.built) == (statements, 0)
    assert counts.transactions == TRANSACTIONS + (not is_sqlite(database))
    if is_sqlite(database):
        assert counts.calls == statements + 2, "one call for each statement, and one for each commit of the writer"


@pytest.mark.parametrize("owner", ["acme", "other"])
async def test_name_of_an_adapter_is_looked_up_without_building_a_statement(database: Database, owner: str) -> None:
    async def look_up() -> None:
        async with database.look_up() as session:
            access = AccessRepository(session, TenantId("tenant_acme"), "acme")
            assert await access.aliased(owner, "adapter", "latest") == []
            assert await access.numbered(owner, "adapter", 1) is None

    await look_up()
    with counted() as counts:
        await look_up()
    assert (counts.statements, counts.built) == (2, 0)
    assert counts.transactions == (not is_sqlite(database))


async def test_list_of_callable_adapters_is_read_in_one_transaction(database: Database, tenants: Tenants) -> None:
    await tenants.create("acme")
    _, secret = await tenants.create_key("acme")
    caller = await tenants.authenticator.authenticate(secret)
    with counted() as counts:
        assert await AdapterQueries(database).callable(caller) == []
    assert (counts.transactions, counts.statements) == (1, 3)
