"""A database that an older release wrote is migrated with its rows, forwards and (if a migration can) back."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import sqlalchemy as sa
from alembic import command
from alembic.config import Config

from loramux.accounts.tenants.errors import PepperError
from loramux.accounts.tenants.secrets import SECRET_PREFIX, mac, open_pepper
from loramux.accounts.tenants.tenants import Tenants
from loramux.data.records.base import BigInt
from loramux.data.records.database import Database, parse_url, sqlite_file
from loramux.data.records.ledger import GENESIS, EntryContent, LedgerRepository, event_id
from loramux.data.records.schema import migrate, migrations_folder

ENTRY: dict[str, Any] = {
    "kind": "usage", "tenant_id": "tenant_1", "key_id": "key_1", "model": "tiny", "adapter_digest": None,
    "input_tokens": 3, "cached_tokens": 0, "output_tokens": 2, "finish_reason": "stop", "status": "completed",
    "created_at": 1,
}  # fmt: skip

AUDIT = "SELECT actor, before, after FROM audit_entries ORDER BY sequence"


@contextmanager
def connected(url: str) -> Iterator[sa.Connection]:
    engine = sa.create_engine(parse_url(url), poolclass=sa.NullPool)
    with engine.begin() as connection:
        yield connection


def move(url: str, revision: str, *, down: bool = False) -> None:
    """Bring the database at `url` to `revision`, as the command does."""
    config = Config()
    config.set_main_option("script_location", str(migrations_folder()))
    if (file := sqlite_file(parse_url(url))) is not None:
        file.parent.mkdir(parents=True, exist_ok=True)
    with connected(url) as connection:
        config.attributes["connection"] = connection
        (command.downgrade if down else command.upgrade)(config, revision)


def insert(url: str, table: str, **values: object) -> None:
    columns = [sa.column(name, BigInt if isinstance(value, int) else None) for name, value in values.items()]
    with connected(url) as connection:
        connection.execute(sa.table(table, *columns).insert().values(values))


def rows(url: str, query: str) -> list[tuple[object, ...]]:
    with connected(url) as connection:
        return [tuple(row) for row in connection.execute(sa.text(query))]


def fill_release_0011(url: str) -> None:
    """A tenant with a key, one adapter with a revision, an alias history, a pin and a grant, as release 0011 wrote."""
    move(url, "0011")
    insert(url, "tenants", id="tenant_1", name="acme", tier="standard", created_at=1)
    insert(url, "projects", id="project_1", tenant_id="tenant_1", name="default", created_at=1)
    for name in ("key_1", "key_2"):
        insert(
            url, "keys", id=name, tenant_id="tenant_1", name="k", scopes="inference", mac=name.encode(), hint="abcd",
            project_id="project_1", created_by="local:me", created_at=1,
        )  # fmt: skip
    insert(url, "adapters", id="adapter_1", tenant_id="tenant_1", name="upper", created_at=1, version=1)
    insert(
        url, "revisions", id="revision_1", tenant_id="tenant_1", adapter_id="adapter_1", number=1, digest="sha256:0",
        rank=8, size_bytes=1, base="b", state="ready", created_at=1,
    )  # fmt: skip
    history = {"adapter_id": "adapter_1", "alias": "default", "tenant_id": "tenant_1", "targets": "{}", "changed_at": 1}
    insert(url, "alias_versions", **history, version=1, changed_by="house")
    insert(url, "alias_versions", **history, version=2, changed_by="key_1")
    insert(
        url, "adapter_pins", id="pin_1", tenant_id="tenant_1", adapter_id="adapter_1", revision_id="revision_1",
        digest="sha256:0", size_bytes=1, pinned_by="house", since=1, used_at=1,
    )  # fmt: skip
    insert(
        url, "adapter_grants", adapter_id="adapter_1", grantee="other", tenant_id="tenant_1", granted_by="house",
        granted_at=1,
    )  # fmt: skip
    note = {"at": 1, "tenant_id": "tenant_1", "source": "local", "request_id": "", "action": "a", "object_id": "o"}
    insert(url, "audit_entries", **note, actor="house", before='{"name":"house"}', after='{"pinned_by":"house"}')
    insert(url, "audit_entries", **note, actor="key_1", before=None, after='{"changed_by":"key_1"}')


def actors(url: str) -> list[object]:
    tables = (("alias_versions", "changed_by"), ("adapter_pins", "pinned_by"), ("adapter_grants", "granted_by"))
    return [row[0] for table, column in tables for row in rows(url, f"SELECT {column} FROM {table} ORDER BY 1")]


def test_house_actor_becomes_system_and_back(empty_url: str) -> None:
    fill_release_0011(empty_url)
    move(empty_url, "head")
    assert actors(empty_url) == ["key_1", "system", "system", "system"]
    audited = rows(empty_url, AUDIT)
    assert audited[0] == ("system", '{"name":"house"}', '{"pinned_by":"system"}')
    assert audited[1] == ("key_1", None, '{"changed_by":"key_1"}')
    move(empty_url, "0011", down=True)
    assert actors(empty_url) == ["house", "key_1", "house", "house"]
    assert rows(empty_url, AUDIT)[0] == ("house", '{"name":"house"}', '{"pinned_by":"house"}')


def test_audit_log_is_append_only_after_every_migration(empty_url: str) -> None:
    fill_release_0011(empty_url)
    move(empty_url, "head")
    for statement in ("UPDATE audit_entries SET actor = 'x'", "DELETE FROM audit_entries"):
        with pytest.raises(sa.exc.DBAPIError, match="append-only"), connected(empty_url) as connection:
            connection.execute(sa.text(statement))


@pytest.mark.anyio
async def test_keys_of_the_old_release_stay_valid_and_begin_their_own_lineage(empty_url: str, tmp_path: Path) -> None:
    pepper, secret = b"p" * 32, SECRET_PREFIX + "a" * 43
    fill_release_0011(empty_url)
    with connected(empty_url) as connection:
        connection.execute(sa.text("UPDATE keys SET mac = :mac WHERE id = 'key_1'"), {"mac": mac(pepper, secret)})
    migrate(empty_url)
    database = Database(empty_url)
    with pytest.raises(PepperError, match="is missing"):
        await open_pepper(database, tmp_path / "pepper")
    (tmp_path / "pepper").write_bytes(pepper)
    tenants = Tenants(database, await open_pepper(database, tmp_path / "pepper"))
    principal = await tenants.authenticator.authenticate(secret)
    assert (principal.key_id, principal.lineage) == ("key_1", ("key_1",))
    account = await tenants.account("acme")
    _, rotated = await account.keys.rotate("key_1", 0)
    assert (await tenants.authenticator.authenticate(rotated)).lineage == ("key_1",)
    await tenants.aclose()
    await database.close()


def test_key_lineage_and_pepper_check_can_be_taken_back(empty_url: str) -> None:
    fill_release_0011(empty_url)
    before = rows(empty_url, "SELECT * FROM keys ORDER BY id")
    move(empty_url, "head")
    assert rows(empty_url, "SELECT lineage FROM keys ORDER BY id") == [("key_1",), ("key_2",)]
    move(empty_url, "0011", down=True)
    assert rows(empty_url, "SELECT * FROM keys ORDER BY id") == before


@pytest.mark.anyio
async def test_ledger_of_a_release_without_users_stays_verifiable(empty_url: str) -> None:
    move(empty_url, "0011")
    insert(empty_url, "tenants", id="tenant_1", name="acme", tier="standard", created_at=1)
    event = event_id("usage", "cmpl-1")
    facts = ENTRY | {"request_id": "cmpl-1", "sequence": 1, "event_id": event, "prev_hash": GENESIS}
    hash = hashlib.sha256(json.dumps(facts, sort_keys=True, separators=(",", ":")).encode()).hexdigest()
    insert(empty_url, "ledger_entries", **{key: value for key, value in facts.items() if value is not None}, hash=hash)
    with connected(empty_url) as connection:
        connection.execute(sa.text("UPDATE ledger_head SET sequence = 1, hash = :hash"), {"hash": hash})
    migrate(empty_url)
    database = Database(empty_url)
    async with database.begin() as session:
        ledger = LedgerRepository(session)
        first = await ledger.entry(event)
        assert first is not None
        assert (first.hash, first.user_id) == (hash, None)
        await ledger.append(await ledger.lock(), [EntryContent(**ENTRY, request_id="cmpl-2", user_id="zoë")])
    async with database.read() as session:
        assert (await LedgerRepository(session).verify()).sequence == 2
    await database.close()
    with pytest.raises(RuntimeError, match="entries have users"):
        move(empty_url, "0011", down=True)


def test_counts_of_a_training_adapters_versions_are_summed_under_its_series(empty_url: str) -> None:
    move(empty_url, "0041")
    insert(empty_url, "tenants", id="tenant_1", name="lab", tier="standard", created_at=1)
    facts = {name: value for name, value in ENTRY.items() if value is not None}
    models = (("lab/policy", "sha256:1"), ("lab/policy", "sha256:2"), ("lab/kept@1", "sha256:3"))
    for number, (model, digest) in enumerate(models, 1):
        entry = facts | {"model": model, "adapter_digest": digest, "base_model": "tiny", "sequence": number}
        ids = {"request_id": f"r{number}", "event_id": f"e{number}", "prev_hash": "p", "hash": f"h{number}"}
        insert(empty_url, "ledger_entries", **entry, **ids)
    counts = {"base_model": "tiny", "prompt_tokens": 3, "cached_tokens": 1, "output_tokens": 2}
    for server, digest in (("a", "sha256:1"), ("a", "sha256:2"), ("b", "sha256:2"), ("a", "sha256:3"), ("a", "")):
        insert(empty_url, "engine_counts", **counts, server_id=server, adapter_digest=digest)
    move(empty_url, "0045")
    assert rows(empty_url, "SELECT * FROM engine_counts ORDER BY adapter_digest, server_id") == [
        ("a", "tiny", "", 3, 1, 2),
        ("a", "tiny", "lab/policy", 6, 2, 4),
        ("b", "tiny", "lab/policy", 3, 1, 2),
        ("a", "tiny", "sha256:3", 3, 1, 2),
    ]


RELEASED = "0011"
"""The last revision of release 0.1.0."""


def test_servers_of_the_release_before_can_write_into_the_migrated_tables(empty_url: str) -> None:
    """Their columns are all there, as they were, and what was added is filled in for them."""
    move(empty_url, RELEASED)
    before = columns(empty_url)
    move(empty_url, "head")
    after = columns(empty_url)
    assert [column for column in before if column not in after] == []
    for column in before:
        assert (after[column]["nullable"], str(after[column]["type"])) == (
            before[column]["nullable"], str(before[column]["type"]),
        ), column  # fmt: skip
    tables = {table for table, _ in before}
    added = {column: about for column, about in after.items() if column[0] in tables and column not in before}
    assert added
    assert [name for name, about in added.items() if not about["nullable"] and about["default"] is None] == []


def test_key_that_the_release_before_makes_begins_its_own_lineage(empty_url: str) -> None:
    fill_release_0011(empty_url)
    move(empty_url, "head")
    insert(
        empty_url, "keys", id="key_3", tenant_id="tenant_1", name="k", scopes="inference", mac=b"3", hint="abcd",
        project_id="project_1", created_by="local:me", created_at=1,
    )  # fmt: skip
    assert rows(empty_url, "SELECT id, lineage FROM keys WHERE id = 'key_3'") == [("key_3", "key_3")]


def columns(url: str) -> dict[tuple[str, str], dict[str, Any]]:
    with connected(url) as connection:
        inspector = sa.inspect(connection)
        return {
            (table, column["name"]): dict(column)
            for table in inspector.get_table_names()
            for column in inspector.get_columns(table)
        }
