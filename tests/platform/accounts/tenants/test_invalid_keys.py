"""Invalid credentials cost no look-up, are throttled by address in bounded memory, and lock no valid key out."""

from __future__ import annotations

import base64
import json
import secrets
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import sqlalchemy as sa
from manual_clock import ManualClock

from loramux.accounts.tenants.account import KeyRequest
from loramux.accounts.tenants.authentication import Credential
from loramux.accounts.tenants.errors import InvalidKey, TooManyFailures
from loramux.accounts.tenants.secrets import (
    MAX_ADDRESSES,
    MAX_FAILURES,
    MAX_REVOKED,
    SECRET_PREFIX,
    FailedAttempts,
    KnownKeys,
    mac,
)
from loramux.accounts.tenants.tenants import Tenants
from loramux.common.identity import Origin
from loramux.common.units import SECOND
from loramux.data.records.credentials import KeyRow
from loramux.data.records.database import Database

pytestmark = pytest.mark.anyio

PEPPER = b"p" * 32


@contextmanager
def statements(database: Database) -> Iterator[list[str]]:
    """Yield the statements that run within the block."""
    seen: list[str] = []
    engine = database._finder.sync_engine  # the reader's too

    def note(_connection: object, _cursor: object, statement: str, *_: object) -> None:
        if statement.lstrip().upper().startswith("SELECT"):
            seen.append(statement)

    sa.event.listen(engine, "before_cursor_execute", note)
    yield seen
    sa.event.remove(engine, "before_cursor_execute", note)


async def refused(tenants: Tenants, secret: str, address: str = "192.0.2.1") -> type[Exception]:
    with pytest.raises((InvalidKey, TooManyFailures)) as refusal:
        await tenants.authenticator.authenticate(Credential(secret=secret, origin=Origin(address)))
    return refusal.type


def invented(length: int = 51) -> str:
    return SECRET_PREFIX + secrets.token_urlsafe(64)[:length]


async def make_untagged(database: Database, key_id: str) -> str:
    """Turn a key into one of an older release, whose secret has no tag."""
    secret = SECRET_PREFIX + secrets.token_urlsafe(32)
    async with database.begin() as session:
        await session.execute(sa.update(KeyRow).where(KeyRow.id == key_id).values(mac=mac(PEPPER, secret)))
    return secret


async def test_invented_secrets_reach_no_database(tenants: Tenants, database: Database) -> None:
    with statements(database) as seen:
        for number in range(500):
            await refused(tenants, invented(), f"192.0.2.{number % 250}")
    assert seen == []


async def test_invented_secrets_without_a_tag_cost_one_statement_a_second(
    tenants: Tenants, database: Database, clock: ManualClock[int]
) -> None:
    with statements(database) as seen:
        for _ in range(10):
            for _ in range(50):
                await refused(tenants, invented(43))
            clock.now += SECOND
    assert len(seen) == 10


async def test_revoked_key_is_looked_up_once(tenants: Tenants, database: Database) -> None:
    await tenants.create("acme")
    key, secret = await tenants.create_key("acme")
    await tenants.authenticator.authenticate(secret)
    await tenants.revoke_key(key.id)
    with statements(database) as seen:
        for _ in range(100):
            await refused(tenants, secret)
    assert len(seen) == 1


async def test_new_key_is_valid_at_once_on_every_server(tenants: Tenants, database: Database) -> None:
    other = Tenants(database, PEPPER)
    await tenants.create("acme")
    for _ in range(5):
        await refused(other, invented())
        await refused(other, invented(43))
        _, secret = await tenants.create_key("acme")
        assert (await other.authenticator.authenticate(secret)).tenant_name == "acme"


async def test_key_of_an_older_release_stays_valid(
    tenants: Tenants, database: Database, clock: ManualClock[int]
) -> None:
    await tenants.create("acme")
    account = await tenants.account("acme")
    first, later = [(await account.keys.create(KeyRequest()))[0] for _ in range(2)]
    secret = await make_untagged(database, first.id)
    server = Tenants(database, PEPPER)
    assert (await server.authenticator.authenticate(secret)).key_id == first.id
    made_meanwhile = await make_untagged(database, later.id)
    clock.now += SECOND
    assert (await server.authenticator.authenticate(made_meanwhile)).key_id == later.id
    await tenants.revoke_key(first.id)
    with pytest.raises(InvalidKey):
        await server.authenticator.authenticate(secret)


async def test_failures_are_throttled_by_address_and_valid_keys_are_not(
    tenants: Tenants, clock: ManualClock[int]
) -> None:
    await tenants.create("acme")
    _, secret = await tenants.create_key("acme")
    kinds = [await refused(tenants, invented()) for _ in range(MAX_FAILURES + 5)]
    assert kinds == [InvalidKey] * MAX_FAILURES + [TooManyFailures] * 5
    await tenants.authenticator.authenticate(Credential(secret=secret, origin=Origin("192.0.2.1")))
    assert await refused(tenants, invented(), "192.0.2.2") is InvalidKey
    clock.now += 16 * SECOND
    assert await refused(tenants, invented()) is InvalidKey


async def test_an_ipv6_network_is_one_address(tenants: Tenants) -> None:
    kinds = {await refused(tenants, invented(), f"2001:db8::{number:x}") for number in range(MAX_FAILURES + 2)}
    assert TooManyFailures in kinds
    assert await refused(tenants, invented(), "2001:db8:0:1::1") is InvalidKey


async def test_memory_is_bounded(database: Database) -> None:
    failures, known = FailedAttempts(), KnownKeys(database, PEPPER)
    for number in range(MAX_ADDRESSES + 100):
        failures.fail(f"host-{number}", number, InvalidKey("no"))
    for number in range(MAX_REVOKED + 100):
        known.remember_revoked(number.to_bytes(4, "big"))
    assert len(failures._free_at) == MAX_ADDRESSES
    assert len(known._revoked) == MAX_REVOKED


@pytest.mark.parametrize("depth", [10, 1_000, 100_000])
async def test_deeply_nested_token_is_an_invalid_credential(tenants: Tenants, depth: int) -> None:
    """Within the length of a header, and beyond the parser's recursion limit."""
    nested = ("[" * depth + "]" * depth)[:9_000].encode()
    for part in (nested, b'{"iss":' + nested, json.dumps({"iss": [1]}).encode()):
        text = base64.urlsafe_b64encode(part).decode()
        await refused(tenants, f"{text}.{text}.x")
