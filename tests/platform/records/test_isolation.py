"""No repository call with one tenant's id ever answers another tenant's row; the tables themselves forbid a mixture."""

import asyncio
from collections.abc import Callable, Iterable
from itertools import count

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from loramux.records import Database, ProjectId, RowRefused, TenantId
from loramux.records.adapters import AdapterRepository, RevisionContent
from loramux.records.identity import new_id
from loramux.records.ledger import LedgerDraft, LedgerRepository
from loramux.records.models import AdapterRow, AliasRow, KeyRow, RevisionRow, TenantRow
from loramux.records.tenancy import ProjectRepository
from loramux.records.tenancy_models import ProjectRow
from loramux.records.tenants import KeyRepository
from loramux.records.usage import UsageRepository, UsageWindow

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
    """What each tenant did, beside what the database says."""

    def __init__(self, database: Database) -> None:
        self.database = database
        self.ids = [TenantId(new_id("tenant")) for _ in range(2)]
        self.adapters: list[dict[str, set[str]]] = [{}, {}]
        self.used = [dict.fromkeys(NAMES, 0), dict.fromkeys(NAMES, 0)]

    async def enrol(self) -> None:
        async with self.database.begin() as session:
            for tenant in self.ids:
                session.add(TenantRow(id=tenant, name=f"tenant-{next(fresh)}", tier="standard", created_at=1))
                await session.flush()
                await ProjectRepository(session, tenant).add(project_of(tenant))
                await KeyRepository(session, tenant).add(key_of(tenant, f"project-{tenant}"))

    async def act(self, tenant: int, operation: str, name: str, number: int) -> None:
        async with self.database.begin() as session:
            adapters = AdapterRepository(session, self.ids[tenant])
            if operation == "register":
                await adapters.register(name, content(number), 1)
                self.adapters[tenant].setdefault(name, set()).add(content(number).digest)
            elif operation == "delete":
                deleted = await adapters.delete(name, 2)
                assert set(deleted or ()) == self.adapters[tenant].pop(name, set())
            else:
                ledger = LedgerRepository(session)
                await ledger.append(await ledger.lock(), [self.draft(tenant, name, number)])
                self.used[tenant][name] += number

    def draft(self, tenant: int, name: str, number: int) -> LedgerDraft:
        return LedgerDraft(
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
            listed = await adapters.all()
            assert [adapter.name for adapter, _ in listed] == sorted(self.adapters[tenant])
            assert await adapters.count() == len(listed)
            for name in NAMES:
                found = [await adapters.default(name), await adapters.aliased(name, "default")]
                found += [await adapters.numbered(name, number) for number in range(1, 4)]
                rows = [row for row in found if row is not None]
                self.all_mine(tenant, [part for row in rows for part in row])
                assert {revision.digest for _, revision in rows} <= self.adapters[tenant].get(name, set())
                assert await adapters.exists(name) == (name in self.adapters[tenant])
            totals = {total.model: total.output_tokens for total in await usage.by_model()}
            window = UsageWindow(start=0, end=10, width=10)
            assert totals == {name: used for name, used in self.used[tenant].items() if used}
            assert sum(total.output_tokens for total in await usage.by_bucket(window, ())) == sum(totals.values())
            self.all_mine(tenant, await KeyRepository(session, mine).all())
            self.all_mine(tenant, await ProjectRepository(session, mine).all())

    def all_mine(self, tenant: int, rows: Iterable[AdapterRow | RevisionRow | KeyRow | ProjectRow]) -> None:
        assert all(row.tenant_id == self.ids[tenant] for row in rows)


@settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(operations=operations)
def test_tenants_never_meet(url: str, operations: list[tuple[int, str, str, int]]) -> None:
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


def alias_for(revision: str) -> AliasRow:
    return AliasRow(adapter_id="of-a", name="x", tenant_id=TenantId("a"), revision_id=revision, updated_at=1)


MIXTURES: dict[str, Callable[[], object]] = {
    "a revision of another's adapter": lambda: revision_of("b", "of-a3"),
    "an alias for another's revision": lambda: alias_for("revision-of-b"),
    "a key in another's project": lambda: key_of(TenantId("a"), "project-b"),
    "an alias across one's own adapters": lambda: alias_for("revision-of-a2"),
}


@pytest.mark.anyio
@pytest.mark.parametrize("mixture", MIXTURES)
async def test_the_tables_refuse_a_mixture(database: Database, mixture: str) -> None:
    async with database.begin() as session:
        for tenant, adapters in (("a", ("of-a", "of-a2", "of-a3")), ("b", ("of-b",))):
            session.add(TenantRow(id=TenantId(tenant), name=tenant, tier="standard", created_at=1))
            await session.flush()
            await ProjectRepository(session, TenantId(tenant)).add(project_of(TenantId(tenant)))
            for adapter in adapters:
                session.add(AdapterRow(id=adapter, tenant_id=TenantId(tenant), name=adapter, created_at=1))
                await session.flush()
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
