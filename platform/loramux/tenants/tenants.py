"""Customers, and the doors to what is theirs: by name for operators, by Principal for themselves."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from copy import copy

from loramux.records import Database, Principal, ProjectId, TenantId
from loramux.records.identity import new_id
from loramux.records.models import TenantRow
from loramux.records.names import GRAMMAR_IN_WORDS, is_name
from loramux.records.tenancy import ProjectRepository, TierRepository
from loramux.records.tenancy_models import ProjectRow
from loramux.records.tenants import TenantRepository, owner_of_key
from loramux.settings import IssuerSettings
from loramux.tenants.access import APPOINTS, CUSTOMER_SCOPES, SCOPES, Role
from loramux.tenants.audit import AuditLog, Change, Changes
from loramux.tenants.authentication import Authenticator, Credential
from loramux.tenants.entities import Key, Mandate, Tenant, project_of, tenant_of
from loramux.tenants.errors import InvalidTenant, KeyNotFound, TenantExists, TenantNotFound, TierNotFound
from loramux.tenants.keys import DEFAULT_PROJECT, KeyRequest, Keys
from loramux.tenants.last_use import LastUse
from loramux.tenants.members import Members
from loramux.tenants.oidc import TokenVerifier
from loramux.tenants.projects import Projects
from loramux.tenants.tiers import DEFAULT_TIER, Tiers


class Account:
    """One tenant's keys, projects and members, in the hands of one mandate."""

    def __init__(self, changes: Changes, tenant: TenantId, pepper: bytes) -> None:
        self.tenant = tenant
        self.keys = Keys(changes, tenant, pepper)
        self.projects = Projects(changes, tenant)
        self.members = Members(changes, tenant)


class Tenants:
    """Every customer in one database; `pepper` is the key that secrets are MACed with.

    Changes are made, and audited, in the name of whoever has the machine, unless `in_the_name_of` says otherwise.
    """

    def __init__(self, database: Database, pepper: bytes, issuers: Sequence[IssuerSettings] = ()) -> None:
        self.last_use = LastUse(database)
        self.audit = AuditLog(database)
        self._database = database
        self._pepper = pepper
        self._verifier = TokenVerifier(issuers)
        self._authenticator = Authenticator(database, pepper, self._verifier, self.last_use)
        self._changes = Changes.of_this_machine(database)

    async def aclose(self) -> None:
        """Write what was noted, and let go of the issuers."""
        await self.last_use.stop()
        await self._verifier.aclose()

    async def authenticate(self, secret: str | Credential) -> Principal:
        """Who shows this. Raises InvalidKey or TenantSuspended."""
        credential = Credential(secret=secret) if isinstance(secret, str) else secret
        return await self._authenticator.authenticate(credential)

    def in_the_name_of(self, principal: Principal) -> Tenants:
        """The same, with changes made and audited in the name of an operator's key."""
        assert "operator" in principal.scopes, "the route has no guard"
        other = copy(self)
        other._changes = Changes(self._database, Mandate(principal.key_id, principal.origin, SCOPES, frozenset(Role)))
        return other

    @property
    def changes(self) -> Changes:
        """For what is kept beside tenancy and audited with it."""
        return self._changes

    def changes_of(self, principal: Principal) -> Changes:
        """The same, in the name of a customer: it gives away no more than it has; a key appoints as an admin does."""
        role = Role.ADMIN if principal.role is None else Role(principal.role)
        appoints = APPOINTS.get(role, frozenset())
        return Changes(
            self._database, Mandate(principal.key_id, principal.origin, principal.scopes, appoints, principal.models)
        )

    @property
    def tiers(self) -> Tiers:
        """Levels of service."""
        return Tiers(self._changes)

    def account_of(self, principal: Principal) -> Account:
        """The caller's own tenant, within what the caller may do."""
        return Account(self.changes_of(principal), principal.tenant, self._pepper)

    async def account(self, tenant_name: str) -> Account:
        """A tenant by its name. Raises TenantNotFound."""
        return Account(self._changes, (await self.named(tenant_name)).id, self._pepper)

    async def create(self, name: str, tier: str = DEFAULT_TIER) -> Tenant:
        """A new customer with the project `default`. Raises InvalidTenant, TenantExists, TierNotFound."""
        if not is_name(name):
            raise InvalidTenant(f"a tenant's name is {GRAMMAR_IN_WORDS}; got {name[:80]!r}", "name")
        async with self._changes.begin() as change:
            await _demand_tier(change, tier)
            row = TenantRow(id=TenantId(new_id("tenant")), name=name, tier=tier, created_at=change.now)
            if not await TenantRepository(change.session).add(row):
                raise TenantExists(f"there is a tenant {name!r} already; choose another name", "name")
            await change.note("tenant.create", row.id, tenant=row.id, after=tenant_of(row))
            id = ProjectId(new_id("project"))
            project = ProjectRow(id=id, tenant_id=row.id, name=DEFAULT_PROJECT, created_at=change.now)
            await ProjectRepository(change.session, row.id).add(project)
            await change.note("project.create", id, tenant=row.id, after=project_of(project))
        return tenant_of(row)

    async def list_tenants(self) -> list[Tenant]:
        """Every customer, by name."""
        async with self._database.read() as session:
            return [tenant_of(row) for row in await TenantRepository(session).all()]

    async def named(self, name: str) -> Tenant:
        """The customer of that name. Raises TenantNotFound."""
        async with self._database.read() as session:
            row = await TenantRepository(session).named(name) if is_name(name) else None
        if row is None:
            raise _unknown(name)
        return tenant_of(row)

    async def representing(self, name: str) -> Principal:
        """The house in a tenant's place, by the tenant's name: see `house_of`. Raises TenantNotFound."""
        tenant = await self.named(name)
        return Principal(tenant.id, tenant.name, "house", frozenset(), ProjectId(""), tier=tenant.tier)

    async def move(self, name: str, tier: str) -> Tenant:
        """Give the tenant another tier, from its next request on. Raises TenantNotFound, TierNotFound."""
        async with self._changes.begin() as change:
            await _demand_tier(change, tier)
            row = await _locked(change, name)
            before = tenant_of(row)
            row.tier = tier
            await change.note("tenant.tier", row.id, tenant=row.id, before=before, after=tenant_of(row))
        return tenant_of(row)

    async def suspend(self, name: str) -> Tenant:
        """Refuse every request of the tenant from now on; nothing is deleted. Raises TenantNotFound."""
        return await self._set_suspended("tenant.suspend", name, self._database.now())

    async def resume(self, name: str) -> Tenant:
        """Serve a suspended tenant again. Raises TenantNotFound."""
        return await self._set_suspended("tenant.resume", name, None)

    async def create_key(
        self, tenant_name: str, *, name: str = "default", scopes: Iterable[str] = CUSTOMER_SCOPES
    ) -> tuple[Key, str]:
        """A key of a tenant by its name: see `Keys.create`. Raises also TenantNotFound."""
        account = await self.account(tenant_name)
        return await account.keys.create(KeyRequest(name=name, scopes=frozenset(scopes)))

    async def revoke_key(self, key_id: str) -> Key:
        """End any tenant's key: see `Keys.revoke`."""
        async with self._database.read() as session:
            owner = await owner_of_key(session, key_id) if is_name(key_id) else None
        if owner is None:
            raise KeyNotFound(f"there is no key {key_id[:80]!r}", "key_id")
        return await Keys(self._changes, owner.id, self._pepper).revoke(key_id)

    async def _set_suspended(self, action: str, name: str, at: int | None) -> Tenant:
        async with self._changes.begin() as change:
            row = await _locked(change, name)
            before = tenant_of(row)
            if (row.suspended_at is None) != (at is None):
                row.suspended_at = at
                await change.note(action, row.id, tenant=row.id, before=before, after=tenant_of(row))
        return tenant_of(row)


def house_of(tenant: TenantId, name: str) -> Principal:
    """What the house itself does in a tenant's place: no key, no scopes."""
    return Principal(tenant, name, "house", frozenset(), ProjectId(""))


async def _locked(change: Change, name: str) -> TenantRow:
    row = await TenantRepository(change.session).locked(name) if is_name(name) else None
    if row is None:
        raise _unknown(name)
    return row


async def _demand_tier(change: Change, tier: str) -> None:
    if not is_name(tier) or await TierRepository(change.session).named(tier) is None:
        raise TierNotFound(f"there is no tier {tier[:80]!r}; make it first", "tier")


def _unknown(name: str) -> TenantNotFound:
    return TenantNotFound(f"there is no tenant {name[:80]!r}; create it first", "tenant")
