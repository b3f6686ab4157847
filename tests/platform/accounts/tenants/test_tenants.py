"""Tenants and keys: secrets are shown once, stored as MACs, and end when they are revoked."""

import asyncio
import os
import stat
from collections.abc import Callable
from pathlib import Path

import pytest
import sqlalchemy as sa

from loramux.accounts.tenants.authority import CUSTOMER_SCOPES
from loramux.accounts.tenants.errors import (
    InvalidKey,
    InvalidTenant,
    KeyNotFound,
    PepperError,
    TenantExists,
    TenantNotFound,
)
from loramux.accounts.tenants.secrets import open_pepper, replace_pepper
from loramux.accounts.tenants.tenants import Tenants
from loramux.data.records.credentials import KeyRow
from loramux.data.records.database import Database

PEPPER = b"p" * 32

pytestmark = pytest.mark.anyio


async def test_key_authenticates_as_its_tenant(tenants: Tenants) -> None:
    acme = await tenants.create("acme")
    key, secret = await tenants.create_key("acme", name="ci", scopes={"inference", "usage"})
    principal = await tenants.authenticator.authenticate(secret)
    assert (principal.tenant, principal.tenant_name, principal.key_id) == (acme.id, "acme", key.id)
    assert key.scopes == {"inference", "usage"}
    assert principal.scopes == {"inference", "usage", "read"}
    assert secret.startswith("sk-lm-")
    assert secret.endswith(key.hint)
    assert len(secret) > 40


async def test_key_has_customer_scopes_by_default(tenants: Tenants) -> None:
    await tenants.create("acme")
    key, _ = await tenants.create_key("acme")
    assert key.scopes == CUSTOMER_SCOPES
    assert "operator" not in key.scopes


async def test_secret_is_nowhere_in_the_database(tenants: Tenants, database: Database) -> None:
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
async def test_other_secrets_are_invalid(tenants: Tenants, alter: Callable[[str], str]) -> None:
    await tenants.create("acme")
    _, secret = await tenants.create_key("acme")
    with pytest.raises(InvalidKey, match="unknown or was revoked"):
        await tenants.authenticator.authenticate(alter(secret))


async def test_other_pepper_makes_every_key_invalid(tenants: Tenants, database: Database) -> None:
    await tenants.create("acme")
    _, secret = await tenants.create_key("acme")
    with pytest.raises(InvalidKey):
        await Tenants(database, b"q" * 32).authenticator.authenticate(secret)


async def test_revoked_key_ends_at_once_and_alone(tenants: Tenants) -> None:
    await tenants.create("acme")
    first, first_secret = await tenants.create_key("acme")
    _, second_secret = await tenants.create_key("acme")
    revoked = await tenants.revoke_key(first.id)
    assert revoked.revoked_at is not None
    assert await tenants.revoke_key(first.id) == revoked
    with pytest.raises(InvalidKey) as refusal:
        await tenants.authenticator.authenticate(first_secret)
    with pytest.raises(InvalidKey) as unknown:
        await tenants.authenticator.authenticate("sk-lm-never")
    assert str(refusal.value) == str(unknown.value)
    await tenants.authenticator.authenticate(second_secret)


async def test_tenants_and_keys_are_listed(tenants: Tenants) -> None:
    globex, acme = await tenants.create("globex"), await tenants.create("acme")
    key, _ = await tenants.create_key("acme")
    await tenants.create_key("globex")
    assert await tenants.list_tenants() == [acme, globex]
    assert await (await tenants.account("acme")).keys.all() == [key]


@pytest.mark.parametrize("name", ["", "Acme", "-acme", "a/b", "a b", "ä", "a" * 64, "acme\n", ".a", "a:b", "a@1"])
async def test_malformed_tenant_name_is_refused_with_the_grammar(tenants: Tenants, name: str) -> None:
    with pytest.raises(InvalidTenant, match="1 to 63 of a-z") as refusal:
        await tenants.create(name)
    assert refusal.value.field == "name"
    assert await tenants.list_tenants() == []


@pytest.mark.parametrize("name", ["a", "0", "a" * 63, "a.b_c-d", "9lives"])
async def test_wellformed_tenant_name_is_accepted(tenants: Tenants, name: str) -> None:
    assert (await tenants.create(name)).name == name


async def test_tenant_name_is_unique_under_concurrency(tenants: Tenants) -> None:
    acme = await tenants.create("acme")
    with pytest.raises(TenantExists, match="acme"):
        await tenants.create("acme")
    assert await tenants.list_tenants() == [acme]


async def test_refusals_name_the_field_and_the_way_out(tenants: Tenants) -> None:
    for nobody in ("nobody", "no\0body"):
        with pytest.raises(TenantNotFound, match="create it first"):
            await tenants.create_key(nobody)
    await tenants.create("acme")
    with pytest.raises(InvalidTenant, match=r"operator, projects, push, read, usage, webhooks; unknown: root"):
        await tenants.create_key("acme", scopes=["usage", "root"])
    with pytest.raises(InvalidTenant, match="none given"):
        await tenants.create_key("acme", scopes=[])
    with pytest.raises(InvalidTenant, match="1 to 128"):
        await tenants.create_key("acme", name="x" * 129)
    for unknown in ("key_none", "key\0none"):
        with pytest.raises(KeyNotFound):
            await tenants.revoke_key(unknown)


async def test_pepper_is_made_once_for_a_new_database_and_only_its_owner_reads_it(
    tmp_path: Path, database: Database
) -> None:
    file = tmp_path / "var" / "pepper"
    pepper = await open_pepper(database, file)
    assert len(pepper) == 32
    assert await open_pepper(database, file) == pepper
    assert stat.S_IMODE(file.stat().st_mode) == 0o600
    assert os.listdir(file.parent) == ["pepper"]
    file.chmod(0o644)
    await open_pepper(database, file)
    assert stat.S_IMODE(file.stat().st_mode) == 0o600


async def test_short_pepper_is_refused(tmp_path: Path, database: Database) -> None:
    file = tmp_path / "pepper"
    file.write_bytes(b"short")
    with pytest.raises(PepperError, match=r"5 bytes.*at least 32"):
        await open_pepper(database, file)


async def test_missing_or_other_pepper_is_refused_with_the_way_out(tmp_path: Path, database: Database) -> None:
    file = tmp_path / "pepper"
    pepper = await open_pepper(database, file)
    file.rename(tmp_path / "backup")
    with pytest.raises(PepperError, match=r"is missing.*no API key is valid.*backup\.md.*replace-pepper"):
        await open_pepper(database, file)
    assert not file.exists(), "a refused start leaves no new pepper behind"
    file.write_bytes(b"q" * 32)
    with pytest.raises(PepperError, match=r"is not the one of this database.*backup\.md"):
        await open_pepper(database, file)
    (tmp_path / "backup").rename(file)
    assert await open_pepper(database, file) == pepper


async def test_keys_of_an_older_release_without_their_pepper_are_refused(
    tmp_path: Path, database: Database, tenants: Tenants
) -> None:
    """Such a database has keys and no check value yet."""
    await tenants.create("acme")
    await tenants.create_key("acme")
    with pytest.raises(PepperError, match="is missing"):
        await open_pepper(database, tmp_path / "pepper")
    (tmp_path / "pepper").write_bytes(PEPPER)
    assert await open_pepper(database, tmp_path / "pepper") == PEPPER


async def test_servers_that_start_together_agree_on_one_pepper(tmp_path: Path, database: Database) -> None:
    peppers = await asyncio.gather(*(open_pepper(database, tmp_path / "pepper") for _ in range(4)))
    assert len(set(peppers)) == 1


async def test_replacing_a_lost_pepper_revokes_every_key(tmp_path: Path, database: Database, tenants: Tenants) -> None:
    await tenants.create("acme")
    await tenants.create_key("acme")
    file = tmp_path / "pepper"
    assert await replace_pepper(tenants.changes, file) == 1
    renewed = Tenants(database, await open_pepper(database, file))
    _, secret = await renewed.create_key("acme")
    await renewed.authenticator.authenticate(secret)
    actions = [entry.action for entry in await tenants.audit.read(limit=2)]
    assert actions == ["key.create", "pepper.replace"]
