"""No repository call with one tenant's id ever answers another tenant's row; the tables themselves forbid a mixture."""

import asyncio
from collections.abc import Callable, Iterable
from itertools import count

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from loramux.common.identity import ProjectId, TenantId, new_id
from loramux.data.records.access import AccessRepository, GrantRow
from loramux.data.records.adapters import AdapterRepository, AdapterRow, RevisionContent, RevisionRow, Stamp
from loramux.data.records.aliases import AliasRepository, AliasRow, AliasTargetRow
from loramux.data.records.contents import register_revision
from loramux.data.records.credentials import KeyRepository, KeyRow
from loramux.data.records.database import Database
from loramux.data.records.errors import RowRefused
from loramux.data.records.ledger import EntryContent, LedgerRepository
from loramux.data.records.pins import PinRow
from loramux.data.records.tenants import ProjectRepository, ProjectRow, TenantRow
from loramux.data.records.usage import UsageRepository, UsageWindow

NAMES = ("upper", "json", "terse")
fresh = count()

operations = st.lists(
    st.tuples(
        st.sampled_from([0, 1]),
        st.sampled_from(["register", "delete", "use"]),
        st.sampled_from(NAMES),
        st.integers(1, 3),
    ),
    max_size=20,
)


def content(number: int) -> RevisionContent:
    return RevisionContent(digest=f"sha256:{number:064}", rank=number, size_bytes=number, base="base")


def project_of(tenant: TenantId) -> ProjectRow:
    return ProjectRow(id=ProjectId(f"project-{tenant}"), tenant_id=tenant, name="default", created_at=1)


def key_of(tenant: TenantId, project: str) -> KeyRow:
    return KeyRow(
        id=new_id("key"),
        tenant_id=tenant,
        project_id=ProjectId(project),
        name="k",
        scopes="",
        mac=tenant.encode(),
        hint="",
        created_by="",
        created_at=1,
        lineage="",
    )


def revision_of(tenant: str, adapter: str) -> RevisionRow:
    return RevisionRow(
        id=f"revision-{adapter}",
        tenant_id=TenantId(tenant),
        adapter_id=adapter,
        number=1,
        digest="d1",
        rank=1,
        size_bytes=1,
        base="base",
        state="ready",
        created_at=1,
    )


class TwoTenants:
    """A model of each tenant's changes, compared with the database."""

    def __init__(self, database: Database) -> None:
        self.database = database
        self.ids = [TenantId(new_id("tenant")) for _ in range(2)]
        self.names = [f"tenant-{next(fresh)}" for _ in range(2)]
        self.adapters: list[dict[str, set[str]]] = [{}, {}]
        self.used = [dict.fromkeys(NAMES, 0), dict.fromkeys(NAMES, 0)]

    async def enrol(self) -> None:
        async with self.database.begin() as session:
            for tenant, name in zip(self.ids, self.names, strict=True):
                session.add(TenantRow(id=tenant, name=name, tier="standard", created_at=1))
                await session.flush()
                await ProjectRepository(session, tenant).add(project_of(tenant))
                await KeyRepository(session, tenant).add(key_of(tenant, f"project-{tenant}"))

    async def act(self, tenant: int, operation: str, name: str, number: int) -> None:
        async with self.database.begin() as session:
            adapters = AdapterRepository(session, self.ids[tenant])
            if operation == "register":
                await register_revision(session, self.ids[tenant], name, content(number), Stamp(1, "k"))
                self.adapters[tenant].setdefault(name, set()).add(content(number).digest)
            elif operation == "delete":
                adapter = await adapters.lock(name)
                deleted = await adapters.delete(adapter, 2, 2) if adapter else []
                assert {revision.digest for revision in deleted} == self.adapters[tenant].pop(name, set())
            else:
                ledger = LedgerRepository(session)
                await ledger.append(await ledger.lock(), [self.draft(tenant, name, number)])
                self.used[tenant][name] += number

    def draft(self, tenant: int, name: str, number: int) -> EntryContent:
        return EntryContent(
            kind="usage",
            tenant_id=self.ids[tenant],
            key_id="k",
            request_id=new_id("request"),
            model=name,
            adapter_digest=None,
            input_tokens=number,
            cached_tokens=0,
            output_tokens=number,
            finish_reason=None,
            status="completed",
            created_at=5,
        )

    async def check(self, tenant: int) -> None:
        mine = self.ids[tenant]
        async with self.database.read() as session:
            adapters, usage = AdapterRepository(session, mine), UsageRepository(session, mine)
            listed = await adapters.page()
            assert [adapter.name for adapter in listed] == sorted(self.adapters[tenant])
            assert await adapters.count() == len(listed)
            aliases = await AliasRepository(session, mine).all(*(adapter.id for adapter in listed))
            reach = AccessRepository(session, mine, self.names[tenant])
            for adapter in listed:
                revisions = [row for row in await adapters.revisions(adapter.id) if row.state == "ready"]
                pointed = [target.revision for one in aliases[adapter.id] for target in one.targets]
                self.all_mine(tenant, [adapter, *revisions, *pointed])
                assert {row.digest for row in revisions} == self.adapters[tenant][adapter.name]
            for name in NAMES:
                there = self.adapters[tenant].get(name, set())
                assert await adapters.exists(name) == bool(there)
                found = [await reach.numbered(self.names[tenant], name, number) for number in range(1, 4)]
                assert {one.digest for one in found if one} == there
                assert {one.digest for one in await reach.aliased(self.names[tenant], name, "default")} <= there
                assert await reach.aliased(self.names[1 - tenant], name, "default") == []
                assert await reach.numbered(self.names[1 - tenant], name, 1) is None
            totals = {total.model: total.tokens.output for total in await usage.by_model()}
            window = UsageWindow(start=0, end=10, width=10)
            assert totals == {name: used for name, used in self.used[tenant].items() if used}
            assert sum(total.tokens.output for total in await usage.by_bucket(window, ())) == sum(totals.values())
            self.all_mine(tenant, await KeyRepository(session, mine).all())
            self.all_mine(tenant, await ProjectRepository(session, mine).all())

    def all_mine(self, tenant: int, rows: Iterable[AdapterRow | RevisionRow | KeyRow | ProjectRow]) -> None:
        assert all(row.tenant_id == self.ids[tenant] for row in rows)


@settings(
    max_examples=25, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow]
)
@given(operations=operations)
def test_repositories_never_return_another_tenants_row(url: str, operations: list[tuple[int, str, str, int]]) -> None:
    async def scenario() -> None:
        database = Database(url)
        tenants = TwoTenants(database)
        await tenants.enrol()
        for operation in operations:
            await tenants.act(*operation)
        await tenants.check(0)
        await tenants.check(1)
        await database.close()

    asyncio.run(scenario())


def target_for(revision: str) -> AliasTargetRow:
    return AliasTargetRow(adapter_id="of-a", alias="x", revision_id=revision, tenant_id=TenantId("a"), weight=1)


def pin_of(revision: str) -> PinRow:
    return PinRow(
        id="p",
        tenant_id=TenantId("a"),
        adapter_id="of-a",
        revision_id=revision,
        digest="d1",
        size_bytes=1,
        pinned_by="k",
        since=1,
        used_at=1,
    )


MIXTURES: dict[str, Callable[[], object]] = {
    "a revision of another's adapter": lambda: revision_of("b", "of-a3"),
    "an alias for another's revision": lambda: target_for("revision-of-b"),
    "a pin of another's revision": lambda: pin_of("revision-of-b"),
    "a grant of another's adapter": lambda: GrantRow(
        adapter_id="of-b", grantee="x", tenant_id=TenantId("a"), granted_by="k", granted_at=1
    ),
    "a key in another's project": lambda: key_of(TenantId("a"), "project-b"),
    "an alias across one's own adapters": lambda: target_for("revision-of-a2"),
}


@pytest.mark.anyio
@pytest.mark.parametrize("mixture", MIXTURES)
async def test_foreign_keys_refuse_rows_that_join_two_tenants(database: Database, mixture: str) -> None:
    async with database.begin() as session:
        for tenant, adapters in (("a", ("of-a", "of-a2", "of-a3")), ("b", ("of-b",))):
            session.add(TenantRow(id=TenantId(tenant), name=tenant, tier="standard", created_at=1))
            await session.flush()
            await ProjectRepository(session, TenantId(tenant)).add(project_of(TenantId(tenant)))
            for adapter in adapters:
                session.add(AdapterRow(id=adapter, tenant_id=TenantId(tenant), name=adapter, created_at=1))
                await session.flush()
                if adapter == "of-a":
                    session.add(
                        AliasRow(
                            adapter_id="of-a", name="x", id="alias", tenant_id=TenantId("a"), version=1, updated_at=1
                        )
                    )
                if adapter != "of-a3":
                    session.add(revision_of(tenant, adapter))
                await session.flush()
    with pytest.raises(RowRefused, match=r"(?i)foreign key"):
        await insert(database, mixture)


async def insert(database: Database, mixture: str) -> None:
    async with database.begin() as session:
        session.add(MIXTURES[mixture]())


@pytest.mark.anyio
@pytest.mark.parametrize("change", ["digest = 'other'", "number = 7", "rank = 2", "size_bytes = 0"])
async def test_revisions_are_immutable(database: Database, sql: Callable[[str], None], change: str) -> None:
    tenants = TwoTenants(database)
    await tenants.enrol()
    await tenants.act(0, "register", "upper", 1)
    with pytest.raises(Exception, match="revisions are immutable"):
        sql(f"UPDATE revisions SET {change}")
    sql("UPDATE revisions SET state = 'deleted'")
