"""Tenants and keys: secrets are shown once, stored as MACs, and end when they are revoked."""

import os
import stat
from collections.abc import Callable
from pathlib import Path

import pytest
import sqlalchemy as sa

from loramux.records import Database
from loramux.records.models import KeyRow
from loramux.tenants import (
    CUSTOMER_SCOPES,
    InvalidKey,
    InvalidTenant,
    KeyNotFound,
    PepperError,
    TenantExists,
    TenantNotFound,
    Tenants,
    load_or_create_pepper,
)

pytestmark = pytest.mark.anyio


async def test_a_key_says_who_holds_it(tenants: Tenants) -> None:
    acme = await tenants.create("acme")
    key, secret = await tenants.create_key("acme", name="ci", scopes={"inference", "usage"})
    principal = await tenants.authenticate(secret)
    assert (principal.tenant, principal.tenant_name, principal.key_id) == (acme.id, "acme", key.id)
    assert key.scopes == {"inference", "usage"}
    assert principal.scopes == {"inference", "usage", "read"}
    assert secret.startswith("sk-lm-")
    assert secret.endswith(key.hint)
    assert len(secret) > 40


async def test_customers_get_their_scopes_by_default(tenants: Tenants) -> None:
    await tenants.create("acme")
    key, _ = await tenants.create_key("acme")
    assert key.scopes == CUSTOMER_SCOPES
    assert "operator" not in key.scopes


async def test_the_secret_is_nowhere_in_the_database(tenants: Tenants, database: Database) -> None:
    await tenants.create("acme")
    _, secret = await tenants.create_key("acme")
    async with database.read() as session:
        row = (await session.execute(sa.select(KeyRow.__table__))).one()
    assert secret not in repr(tuple(row))
    assert secret.removeprefix("sk-lm-")[:20] not in repr(tuple(row))


ALTERATIONS = [
    lambda secret: secret + "x",
    lambda secret: secret[:-1],
    lambda secret: secret.upper(),
    lambda secret: "",
    lambda secret: secret * 9,
    lambda secret: secret + "\ud800",
]


@pytest.mark.parametrize("alter", ALTERATIONS)
async def test_any_other_secret_is_nobodys(tenants: Tenants, alter: Callable[[str], str]) -> None:
    await tenants.create("acme")
    _, secret = await tenants.create_key("acme")
    with pytest.raises(InvalidKey, match="unknown or was revoked"):
        await tenants.authenticate(alter(secret))


async def test_another_pepper_makes_every_key_unknown(tenants: Tenants, database: Database) -> None:
    await tenants.create("acme")
    _, secret = await tenants.create_key("acme")
    with pytest.raises(InvalidKey):
        await Tenants(database, b"q" * 32).authenticate(secret)


async def test_a_revoked_key_ends_at_once_and_alone(tenants: Tenants) -> None:
    await tenants.create("acme")
    first, first_secret = await tenants.create_key("acme")
    _, second_secret = await tenants.create_key("acme")
    revoked = await tenants.revoke_key(first.id)
    assert revoked.revoked_at is not None
    assert await tenants.revoke_key(first.id) == revoked
    with pytest.raises(InvalidKey) as refusal:
        await tenants.authenticate(first_secret)
    with pytest.raises(InvalidKey) as unknown:
        await tenants.authenticate("sk-lm-never")
    assert str(refusal.value) == str(unknown.value)
    await tenants.authenticate(second_secret)


async def test_lists(tenants: Tenants) -> None:
    globex, acme = await tenants.create("globex"), await tenants.create("acme")
    key, _ = await tenants.create_key("acme")
    await tenants.create_key("globex")
    assert await tenants.list_tenants() == [acme, globex]
    assert await (await tenants.account("acme")).keys.all() == [key]


@pytest.mark.parametrize("name", ["", "Acme", "-acme", "a/b", "a b", "ä", "a" * 64, "acme\n", ".a", "a:b", "a@1"])
async def test_a_malformed_name_is_refused_with_the_grammar(tenants: Tenants, name: str) -> None:
    with pytest.raises(InvalidTenant, match="1 to 63 of a-z") as refusal:
        await tenants.create(name)
    assert refusal.value.field == "name"
    assert await tenants.list_tenants() == []


@pytest.mark.parametrize("name", ["a", "0", "a" * 63, "a.b_c-d", "9lives"])
async def test_a_well_formed_name_is_taken(tenants: Tenants, name: str) -> None:
    assert (await tenants.create(name)).name == name


async def test_a_name_is_taken_once(tenants: Tenants) -> None:
    acme = await tenants.create("acme")
    with pytest.raises(TenantExists, match="acme"):
        await tenants.create("acme")
    assert await tenants.list_tenants() == [acme]


async def test_refusals_name_the_field_and_the_way_out(tenants: Tenants) -> None:
    for nobody in ("nobody", "no\0body"):
        with pytest.raises(TenantNotFound, match="create it first"):
            await tenants.create_key(nobody)
    await tenants.create("acme")
    with pytest.raises(InvalidTenant, match=r"operator, projects, read, usage, webhooks; unknown: root"):
        await tenants.create_key("acme", scopes=["usage", "root"])
    with pytest.raises(InvalidTenant, match="none given"):
        await tenants.create_key("acme", scopes=[])
    with pytest.raises(InvalidTenant, match="1 to 128"):
        await tenants.create_key("acme", name="x" * 129)
    for unknown in ("key_none", "key\0none"):
        with pytest.raises(KeyNotFound):
            await tenants.revoke_key(unknown)


async def test_a_pepper_is_made_once_and_only_its_owner_reads_it(tmp_path: Path) -> None:
    file = tmp_path / "var" / "pepper"
    pepper = load_or_create_pepper(file)
    assert len(pepper) == 32
    assert load_or_create_pepper(file) == pepper
    assert stat.S_IMODE(file.stat().st_mode) == 0o600
    assert os.listdir(file.parent) == ["pepper"]


async def test_a_short_pepper_is_refused(tmp_path: Path) -> None:
    file = tmp_path / "pepper"
    file.write_bytes(b"short")
    with pytest.raises(PepperError, match=r"5 bytes.*at least 32"):
        load_or_create_pepper(file)
