"""Versions of training adapters on both databases: their window, their series, their expiry, and their contents."""

from __future__ import annotations

from collections.abc import Awaitable, Callable

import pytest

from loramux.common.identity import Principal
from loramux.data.records.adapters import RevisionContent, Stamp
from loramux.data.records.contents import ContentRepository
from loramux.data.records.database import Database
from loramux.data.records.training_versions import (
    ExpiredVersions,
    TrainingVersionRepository,
    names_of_versions,
    series_of,
)

pytestmark = pytest.mark.anyio


@pytest.mark.parametrize(
    ("name", "series"),
    [
        ("policy", "policy"),
        ("policy-v12", "policy"),
        ("policy_12", "policy"),
        ("trl-policy-v0", "trl-policy"),
        ("step-10-7", "step-10"),
        ("qwen2.5", "qwen2.5"),
        ("v12", "v12"),
        ("llama3", "llama3"),
        ("policy-v", "policy-v"),
    ],
)
def test_series_is_the_name_without_the_number_at_its_end(name: str, series: str) -> None:
    assert series_of(name) == series


def content(number: int) -> RevisionContent:
    return RevisionContent(digest=f"sha256:{number:064}", rank=1, size_bytes=10, base="base", base_model="tiny")


async def push(database: Database, principal: Principal, name: str, number: int, keep: int = 2) -> list[str]:
    """Push a version, and return the removed versions."""
    async with database.begin() as session:
        versions = TrainingVersionRepository(session, principal.tenant)
        added = await versions.add(name, content(number), Stamp(number, "key"))
        return [f"{row.name}@{row.number}" for row in await versions.remove_older(added.series, keep)]


async def test_window_has_the_newest_versions_of_a_name_and_the_newest_names_of_a_series(
    database: Database, enrol: Callable[[str], Awaitable[Principal]]
) -> None:
    acme = await enrol("acme")
    assert [await push(database, acme, "policy", number) for number in (1, 2, 3)] == [[], [], ["policy@1"]]
    assert await push(database, acme, "policy-v1", 4) == []
    assert await push(database, acme, "policy-v2", 5) == ["policy@3", "policy@2"]
    assert await push(database, acme, "policy-v1", 6) == []
    assert await push(database, acme, "policy-v3", 7) == ["policy-v2@1"]
    assert await push(database, acme, "other", 8) == []
    async with database.read() as session:
        versions = TrainingVersionRepository(session, acme.tenant)
        left = [f"{row.name}@{row.number}" for row in await versions.all()]
        assert left == ["other@1", "policy-v3@1", "policy-v1@2", "policy-v1@1"]
        assert await versions.series() == {"other", "policy"}
        assert await versions.bytes_besides(content(8).digest) == 30
        newest = await versions.callable("policy-v1", None)
        assert newest is not None
        assert (newest.number, newest.digest, newest.series) == (2, content(6).digest, "policy")
        assert await versions.callable("policy-v1", 3) is None
        names = await names_of_versions(session, {content(6).digest, content(5).digest})
        assert names == {(content(6).digest, acme.tenant): "acme/policy-v1@2"}


async def test_versions_keep_their_contents_for_their_tenant_only(
    database: Database, enrol: Callable[[str], Awaitable[Principal]]
) -> None:
    acme, globex = await enrol("acme"), await enrol("globex")
    await push(database, acme, "policy", 1)
    digests = {content(1).digest, content(2).digest}
    async with database.read() as session:
        contents = ContentRepository(session)
        assert await contents.unused(digests) == {content(2).digest}
        assert await contents.uncallable(acme.tenant, digests) == {content(2).digest}
        assert await contents.uncallable(globex.tenant, digests) == digests
        assert await TrainingVersionRepository(session, globex.tenant).all() == []
        assert await TrainingVersionRepository(session, globex.tenant).callable("policy", None) is None
    async with database.begin() as session:
        assert await TrainingVersionRepository(session, globex.tenant).remove("policy") == []


async def test_series_expires_after_its_last_push(
    database: Database, enrol: Callable[[str], Awaitable[Principal]]
) -> None:
    acme = await enrol("acme")
    for name, number in (("policy-v1", 10), ("old", 11), ("policy-v2", 30)):
        await push(database, acme, name, number)
    async with database.begin() as session:
        assert await ExpiredVersions(session).remove_before(20) == [(acme.tenant, content(11).digest)]
    async with database.read() as session:
        rows = await TrainingVersionRepository(session, acme.tenant).all()
    assert {row.name for row in rows} == {"policy-v1", "policy-v2"}
    async with database.begin() as session:
        await ExpiredVersions(session).mark(rows[0].id, "failed", "why")
        await ExpiredVersions(session).mark("version_gone", "passed", "")
    async with database.read() as session:
        marked = await TrainingVersionRepository(session, acme.tenant).of_name(rows[0].name)
    assert [(row.parity, row.parity_detail) for row in marked] == [("failed", "why")]
