"""Tenants and tiers. Operators open accounts by name; a tenant opens its own account by its Principal."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from copy import copy

from loramux.accounts.tenants.account import DEFAULT_PROJECT, Account, KeyRequest, Keys
from loramux.accounts.tenants.authentication import Authenticator, LastUse, TokenVerifier
from loramux.accounts.tenants.authority import CUSTOMER_SCOPES, actor_of, operator_of
from loramux.accounts.tenants.entities import (
    AuditLog,
    Change,
    Changes,
    Key,
    Tenant,
    Tier,
    project_of,
    tenant_of,
    tier_of,
)
from loramux.accounts.tenants.errors import (
    InvalidTenant,
    KeyNotFound,
    StillNeeded,
    TenantExists,
    TenantNotFound,
    TierNotFound,
)
from loramux.accounts.tenants.sessions import Sessions, SignIns
from loramux.common.identity import GRAMMAR_IN_WORDS, Principal, ProjectId, TenantId, is_name, new_id
from loramux.common.settings.server import ConsoleSettings, IssuerSettings
from loramux.data.entities import ALLOWED_AT_FIRST, CHOSEN
from loramux.data.records.batches import BatchRepository, FileRepository
from loramux.data.records.credentials import owner_of_key
from loramux.data.records.database import Database
from loramux.data.records.requests import ClaimRepository
from loramux.data.records.responses import ResponseRepository
from loramux.data.records.tenants import (
    ProjectRepository,
    ProjectRow,
    TenantRepository,
    TenantRow,
    TierRepository,
    TierRow,
)
from loramux.data.records.training import TrainingRepository

SYSTEM_ACTOR = "system"
SERVICE_CLASSES = ("interactive", "standard", "batch")
"""The scheduler's classes (`engine.messages.ServiceClass`)."""
MAX_WEIGHT = 1000
DEFAULT_TIER = "standard"


class Tiers:
    """Tiers, as one actor may change them."""

    def __init__(self, changes: Changes) -> None:
        self._changes = changes

    async def put(
        self, name: str, service_class: str, weight: int, service_tiers: Iterable[str] = ALLOWED_AT_FIRST
    ) -> Tier:
        """Create or change a tier. The change applies from its tenants' next requests. Raises InvalidTenant."""
        if not is_name(name):
            raise InvalidTenant(f"a tier's name is {GRAMMAR_IN_WORDS}; got {name[:80]!r}", "name")
        if service_class not in SERVICE_CLASSES:
            raise InvalidTenant(f"service_class is one of {', '.join(SERVICE_CLASSES)}", "service_class")
        if not 1 <= weight <= MAX_WEIGHT:
            raise InvalidTenant(f"weight is 1 to {MAX_WEIGHT}", "weight")
        allowed = sorted(set(service_tiers))
        if not set(allowed) <= set(CHOSEN):
            raise InvalidTenant(f"service_tiers are some of {', '.join(CHOSEN)}", "service_tiers")
        async with self._changes.begin() as change:
            tiers = TierRepository(change.session)
            old = await tiers.named(name)
            before = None if old is None else tier_of(old)
            created_at = change.now if old is None else old.created_at
            row = TierRow(
                name=name,
                service_class=service_class,
                weight=weight,
                service_tiers=" ".join(allowed),
                created_at=created_at,
            )
            await tiers.put(row)
            await change.note("tier.put", name, tenant=None, before=before, after=tier_of(row))
        return tier_of(row)

    async def all(self) -> list[Tier]:
        """Return every tier, by name."""
        async with self._changes.database.read() as session:
            return [tier_of(row) for row in await TierRepository(session).all()]

    async def remove(self, name: str) -> Tier:
        """Delete a tier that no tenant has. Raises TierNotFound, StillNeeded."""
        async with self._changes.begin() as change:
            tiers = TierRepository(change.session)
            row = await tiers.named(name) if is_name(name) else None
            if row is None:
                raise TierNotFound(f"there is no tier {name[:80]!r}", "tier")
            users = await tiers.used(name)
            if users or name == DEFAULT_TIER:
                why = f"{users} tenants have it" if users else "new tenants get it"
                raise StillNeeded(f"the tier {name!r} is needed: {why}", "tier")
            await tiers.remove(row)
            await change.note("tier.remove", name, tenant=None, before=tier_of(row))
        return tier_of(row)


class Tenants:
    """Every tenant in one database; `pepper` is the key for the MACs of keys' secrets.

    The author of changes is the local user, unless `as_operator` names another author.
    """

    def __init__(
        self,
        database: Database,
        pepper: bytes,
        issuers: Sequence[IssuerSettings] = (),
        console: ConsoleSettings | None = None,
    ) -> None:
        self.last_use = LastUse(database)
        self.audit = AuditLog(database)
        self._database = database
        self.pepper = pepper
        self._verifier = TokenVerifier(issuers)
        self.authenticator = Authenticator(database, pepper, self._verifier, self.last_use)
        self._changes = Changes.local(database)
        self._own: TenantId | None = None
        """Tenant of the author of changes; None: the local user."""
        console = console or ConsoleSettings()
        self.sessions = Sessions(database, pepper, console)
        self.sign_ins = SignIns(database, pepper, self._verifier, issuers, console.url or "")

    async def aclose(self) -> None:
        """Write the times of the keys' last use, and close the connections to issuers."""
        await self.last_use.stop()
        await self._verifier.aclose()
        await self.sign_ins.aclose()

    def as_operator(self, principal: Principal) -> Tenants:
        """Return the same tenants with an operator as the author of changes."""
        other = copy(self)
        other._changes = Changes(self._database, operator_of(principal))
        other._own = principal.tenant
        return other

    @property
    def changes(self) -> Changes:
        """Return changes of this author, which other packages with audited changes use."""
        return self._changes

    def changes_by(self, principal: Principal) -> Changes:
        """Return changes of a tenant's key or member, within its authority."""
        return Changes(self._database, actor_of(principal))

    @property
    def tiers(self) -> Tiers:
        """Return the tiers, with the same author of changes."""
        return Tiers(self._changes)

    def account_of(self, principal: Principal) -> Account:
        """Return the caller's own tenant, within the caller's authority."""
        return Account(self.changes_by(principal), principal.tenant, self.pepper)

    async def account(self, tenant_name: str) -> Account:
        """Return the account of the tenant of that name. Raises TenantNotFound."""
        return Account(self._changes, (await self.named(tenant_name)).id, self.pepper)

    async def create(self, name: str, tier: str = DEFAULT_TIER) -> Tenant:
        """Create a tenant with the project `default`. Raises InvalidTenant, TenantExists, TierNotFound."""
        if not is_name(name):
            raise InvalidTenant(f"a tenant's name is {GRAMMAR_IN_WORDS}; got {name[:80]!r}", "name")
        async with self._changes.begin() as change:
            await _ensure_tier(change, tier)
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
        """Return every tenant, by name."""
        async with self._database.read() as session:
            return [tenant_of(row) for row in await TenantRepository(session).all()]

    async def named(self, name: str) -> Tenant:
        """Return the tenant of that name. Raises TenantNotFound."""
        async with self._database.read() as session:
            row = await TenantRepository(session).named(name) if is_name(name) else None
        if row is None:
            raise _unknown(name)
        return tenant_of(row)

    async def system_principal(self, name: str) -> Principal:
        """Return the platform as a caller that acts for the tenant of that name. Raises TenantNotFound."""
        tenant = await self.named(name)
        return system_principal(tenant.id, tenant.name, tenant.tier)

    async def move(self, name: str, tier: str) -> Tenant:
        """Give the tenant another tier, from its next request on. Raises TenantNotFound, TierNotFound."""
        async with self._changes.begin() as change:
            await _ensure_tier(change, tier)
            row = await _locked(change, name)
            before = tenant_of(row)
            row.tier = tier
            await change.note("tenant.tier", row.id, tenant=row.id, before=before, after=tenant_of(row))
        return tenant_of(row)

    async def suspend(self, name: str) -> Tenant:
        """Refuse every request of the tenant from now on; nothing is deleted. Raises TenantNotFound, StillNeeded."""
        return await self._set_suspended("tenant.suspend", name, self._database.now())

    async def resume(self, name: str) -> Tenant:
        """Serve a suspended tenant again. Raises TenantNotFound."""
        return await self._set_suspended("tenant.resume", name, None)

    async def set_zero_retention(self, name: str, zero_retention: bool) -> Tenant:
        """Begin or end zero retention: store no prompts and answers of the tenant's requests. Raises TenantNotFound.

        Stored data is deleted: answers and responses immediately, files within an hour. Batches are cancelled without
        files, and fine-tuning jobs are cancelled.
        """
        async with self._changes.begin() as change:
            row = await _locked(change, name)
            before = tenant_of(row)
            row.zero_retention = zero_retention
            if zero_retention:
                await ClaimRepository(change.session).remove_all(row.id)
                await ResponseRepository(change.session, row.id).remove_all()
                await BatchRepository(change.session, row.id).cancel_all(change.now)
                await TrainingRepository(change.session, row.id).cancel_all()
                await FileRepository(change.session, row.id).expire_all(change.now)
            await change.note("tenant.zero_retention", row.id, tenant=row.id, before=before, after=tenant_of(row))
        return tenant_of(row)

    async def set_allow_judges(self, name: str, allow_judges: bool) -> Tenant:
        """Allow or forbid that the tenant's evaluations show prompts and answers to judges. Raises TenantNotFound."""
        async with self._changes.begin() as change:
            row = await _locked(change, name)
            before = tenant_of(row)
            row.allow_judges = allow_judges
            await change.note("tenant.allow_judges", row.id, tenant=row.id, before=before, after=tenant_of(row))
        return tenant_of(row)

    async def create_key(
        self, tenant_name: str, *, name: str = "default", scopes: Iterable[str] = CUSTOMER_SCOPES
    ) -> tuple[Key, str]:
        """Make a key of the tenant of that name, as `Keys.create` does. Also raises TenantNotFound."""
        account = await self.account(tenant_name)
        return await account.keys.create(KeyRequest(name=name, scopes=frozenset(scopes)))

    async def revoke_key(self, key_id: str) -> Key:
        """End a key of any tenant, as `Keys.revoke` does."""
        async with self._database.read() as session:
            owner = await owner_of_key(session, key_id) if is_name(key_id) else None
        if owner is None:
            raise KeyNotFound(f"there is no key {key_id[:80]!r}", "key_id")
        return await Keys(self._changes, owner.id, self.pepper).revoke(key_id)

    async def _set_suspended(self, action: str, name: str, at: int | None) -> Tenant:
        async with self._changes.begin() as change:
            row = await _locked(change, name)
            before = tenant_of(row)
            if at is not None and row.id == self._own:
                message = f"{name!r} is your own tenant: suspended, it would lock you out; use a key of another tenant"
                raise StillNeeded(message, "suspended")
            if (row.suspended_at is None) != (at is None):
                row.suspended_at = at
                await change.note(action, row.id, tenant=row.id, before=before, after=tenant_of(row))
        return tenant_of(row)


def system_principal(tenant: TenantId, name: str, tier: str = DEFAULT_TIER) -> Principal:
    """Return the platform as a caller that acts for a tenant, without key and scopes; stored as the actor `system`."""
    return Principal(tenant, name, SYSTEM_ACTOR, frozenset(), ProjectId(""), tier=tier)


async def _locked(change: Change, name: str) -> TenantRow:
    row = await TenantRepository(change.session).locked(name) if is_name(name) else None
    if row is None:
        raise _unknown(name)
    return row


async def _ensure_tier(change: Change, tier: str) -> None:
    if not is_name(tier) or await TierRepository(change.session).named(tier) is None:
        raise TierNotFound(f"there is no tier {tier[:80]!r}; make it first", "tier")


def _unknown(name: str) -> TenantNotFound:
    return TenantNotFound(f"there is no tenant {name[:80]!r}; create it first", "tenant")
