"""One tenant's account: its keys, projects and members, as one actor may change them.

Each change is one transaction with its audit entry, within the actor's authority. If a key or a member ends, the keys
that it made end too.
"""

from __future__ import annotations

from collections.abc import Callable

import msgspec

from loramux.accounts.tenants.authority import (
    CUSTOMER_SCOPES,
    ROLE_SCOPES,
    Authority,
    KeyGrant,
    Role,
    check_role,
    check_scopes,
    closure,
)
from loramux.accounts.tenants.entities import Change, Changes, Key, Member, Project, key_of, member_of, project_of
from loramux.accounts.tenants.errors import (
    AlreadyExists,
    InvalidKey,
    InvalidTenant,
    KeyNotFound,
    MemberNotFound,
    ProjectNotFound,
    StillNeeded,
)
from loramux.accounts.tenants.secrets import mac, new_secret
from loramux.common.identity import GRAMMAR_IN_WORDS, ProjectId, TenantId, is_name, new_id
from loramux.common.units import SECOND, SECONDS_PER_DAY
from loramux.data.records.credentials import CredentialRepository, KeyRepository, KeyRow, keys_made_by
from loramux.data.records.tenants import MemberRepository, MemberRow, ProjectRepository, ProjectRow

MAX_LIVE_KEYS = 10_000
"""Maximum number of live keys of a tenant. The number is limited because lists show all keys, and every check of limits
names them.
"""
MAX_MODELS = 1000
MAX_MODEL_LENGTH = 200
MAX_OVERLAP_SECONDS = 30 * SECONDS_PER_DAY
MAX_LIFE_SECONDS = 10 * 366 * SECONDS_PER_DAY
DEFAULT_PROJECT = "default"

MAX_IDENTITY_LENGTH = 512
MAX_PROJECTS = 1_000
MAX_MEMBERS = 10_000


class KeyRequest(msgspec.Struct, frozen=True, kw_only=True):
    """Properties of a new key."""

    name: str = "default"
    scopes: frozenset[str] = CUSTOMER_SCOPES
    project: str | None = None
    """The project's name; None: the maker's project if the maker is bound to one, else `default`."""
    models: frozenset[str] | None = None
    """The only models that the key may name, as in a request's `model`; None: all models of the tenant."""
    expires_in: int | None = None
    """Seconds until the key expires; None: the key ends when its maker ends."""


class Keys:
    """The keys of one tenant, as one actor may change them."""

    def __init__(self, changes: Changes, tenant: TenantId, pepper: bytes) -> None:
        self._changes = changes
        self._tenant = tenant
        self._pepper = pepper

    async def create(self, wanted: KeyRequest) -> tuple[Key, str]:
        """Make a key and return it with its secret. The secret is returned only here and is not stored.

        Raises InvalidTenant, ProjectNotFound, and NotPermitted if the key could do more than its maker may pass on.
        """
        scopes = check_scopes(wanted.scopes)
        authority = self._changes.actor.authority.over(scopes)
        _check_label(wanted.name)
        models = _allow_list(wanted.models)
        if wanted.expires_in is not None and not 1 <= wanted.expires_in <= MAX_LIFE_SECONDS:
            raise InvalidTenant(f"expires_in is 1 to {MAX_LIFE_SECONDS} seconds, or absent", "expires_in")
        async with self._changes.begin() as change:
            ends = authority.expires_at if wanted.expires_in is None else change.now + wanted.expires_in * SECOND
            project = await self._project(change, wanted.project)
            if await KeyRepository(change.session, self._tenant).count_live(change.now) >= MAX_LIVE_KEYS:
                raise StillNeeded(f"a tenant has at most {MAX_LIVE_KEYS} keys that work; revoke those you do not use")
            authority.ensure_covers(KeyGrant(scopes=scopes, models=wanted.models, project=project.id, expires_at=ends))
            row = KeyRow(
                id=new_id("key"),
                name=wanted.name,
                scopes=" ".join(sorted(scopes)),
                project_id=project.id,
                models=models,
                expires_at=ends,
            )
            return await self._insert(change, row, authority, authority.lineage_of(row.id))

    async def all(self) -> list[Key]:
        """Return the tenant's keys that the actor may manage, including revoked ones, oldest first."""
        async with self._changes.database.read() as session:
            keys = [key_of(row) for row in await KeyRepository(session, self._tenant).all()]
        return [key for key in keys if self._changes.actor.authority.may_manage(_grant_of(key))]

    async def after(self, key_id: str | None, limit: int) -> list[Key]:
        """Return at most `limit` of the same keys, those after `key_id`."""
        found: list[Key] = []
        async with self._changes.database.read() as session:
            repository, more = KeyRepository(session, self._tenant), True
            while more and len(found) < limit:
                rows = await repository.after(key_id, limit)
                keys = [key for key in map(key_of, rows) if self._changes.actor.authority.may_manage(_grant_of(key))]
                found += keys[: limit - len(found)]
                more, key_id = len(rows) == limit, rows[-1].id if rows else key_id
        return found

    async def rotate(self, key_id: str, overlap: int) -> tuple[Key, str]:
        """Replace a key and return the new one with its secret; the old key ends after `overlap` seconds.

        Limits and budgets of the old key count the new key too. Raises KeyNotFound; InvalidTenant if the key has ended
        or the overlap is more than 30 days; NotPermitted if the actor could not make such a key.
        """
        if not 0 <= overlap <= MAX_OVERLAP_SECONDS:
            raise InvalidTenant(f"overlap is 0 to {MAX_OVERLAP_SECONDS} seconds", "overlap_seconds")
        async with self._changes.begin() as change:
            old = await self._live(change, key_id)
            before = key_of(old)
            authority = self._changes.actor.authority.over(before.scopes)
            authority.ensure_covers(_grant_of(before))
            row = KeyRow(
                id=new_id("key"),
                name=old.name,
                scopes=old.scopes,
                project_id=old.project_id,
                models=old.models,
                expires_at=old.expires_at,
            )
            lineage = authority.lineage_of_rotated(tuple(old.lineage.split()))
            made, secret = await self._insert(change, row, authority, lineage)
            ends = change.now + overlap * SECOND
            old.expires_at = ends if old.expires_at is None else min(ends, old.expires_at)
            old.replaced_by = made.id
            await change.note("key.rotate", old.id, tenant=self._tenant, before=before, after=key_of(old))
        return made, secret

    async def revoke(self, key_id: str) -> Key:
        """End a key. The keys that it made end too, unless a rotation has replaced the key by another key.

        The key ends immediately and permanently. A second call has no effect. Raises KeyNotFound.
        """
        async with self._changes.begin() as change:
            row = await self._named(change, key_id)
            if row.revoked_at is None:
                await revoke_row(change, row)
                keys, line = KeyRepository(change.session, self._tenant), row.lineage.split()[0]
                if not await keys.live_in_line(line, change.now):
                    await revoke_made_by(change, line)
        return key_of(row)

    async def _project(self, change: Change, name: str | None) -> ProjectRow:
        """Return the project of a new key. Raises ProjectNotFound."""
        projects, bound = ProjectRepository(change.session, self._tenant), self._changes.actor.authority.project
        if name is None and bound is not None:
            project = await projects.get(bound)
        else:
            name = name or DEFAULT_PROJECT
            project = await projects.named(name)
        if project is None or project.archived_at is not None:
            raise ProjectNotFound(f"there is no project {(name or str(bound))[:80]!r}; create it first", "project")
        return project

    async def _insert(
        self, change: Change, row: KeyRow, authority: Authority, lineage: tuple[str, ...]
    ) -> tuple[Key, str]:
        """Insert the row while its maker is locked, so that a revoked key cannot make one. Raises InvalidKey."""
        maker = self._changes.actor.name
        if authority.lineage and not await CredentialRepository(change.session).lock_maker(maker, change.now):
            raise InvalidKey("the API key was revoked or has expired", "authorization")
        secret = new_secret(self._pepper)
        row.tenant_id, row.created_at, row.lineage = self._tenant, change.now, " ".join(lineage)
        row.mac, row.hint, row.created_by = mac(self._pepper, secret), secret[-4:], self._changes.actor.name
        await KeyRepository(change.session, self._tenant).add(row)
        await change.note("key.create", row.id, tenant=self._tenant, after=key_of(row))
        return key_of(row), secret

    async def _live(self, change: Change, key_id: str) -> KeyRow:
        row = await self._named(change, key_id)
        if row.revoked_at is not None or (row.expires_at is not None and row.expires_at <= change.now):
            raise InvalidTenant(f"key {key_id!r} has ended; create a new one", "key_id")
        return row

    async def _named(self, change: Change, key_id: str) -> KeyRow:
        row = await KeyRepository(change.session, self._tenant).locked(key_id) if is_name(key_id) else None
        if row is None or not self._changes.actor.authority.may_manage(_grant_of(key_of(row))):
            raise KeyNotFound(f"there is no key {key_id[:80]!r}", "key_id")
        return row


async def revoke_row(change: Change, row: KeyRow) -> None:
    """End one live key."""
    before = key_of(row)
    row.revoked_at = change.now
    await change.note("key.revoke", row.id, tenant=row.tenant_id, before=before, after=key_of(row))


async def revoke_made_by(change: Change, maker: str, *, unless: Callable[[Key], bool] = lambda _: False) -> None:
    """End every live key that `maker` (the head of a key's lineage, or a member) made, directly or through its keys."""
    for row in await keys_made_by(change.session, maker):
        if not unless(key_of(row)):
            await revoke_row(change, row)


def _grant_of(key: Key) -> KeyGrant:
    return KeyGrant(scopes=key.scopes, models=key.models, project=key.project, expires_at=key.expires_at)


def _check_label(name: str) -> None:
    if not 1 <= len(name) <= 128 or not name.isprintable():
        raise InvalidTenant("a key's name has 1 to 128 printable characters", "name")


def _allow_list(models: frozenset[str] | None) -> str | None:
    if models is None:
        return None
    fine = all(1 <= len(model) <= MAX_MODEL_LENGTH and model.isprintable() for model in models)
    if not 1 <= len(models) <= MAX_MODELS or not fine:
        raise InvalidTenant(
            f"models names 1 to {MAX_MODELS} models of at most {MAX_MODEL_LENGTH} printable characters: "
            "tenant/adapter, or the base's name; leave it out to allow all",
            "models",
        )
    return "\n".join(sorted(models))


class Account:
    """One tenant's keys, projects and members, as one actor may change them."""

    def __init__(self, changes: Changes, tenant: TenantId, pepper: bytes) -> None:
        self.tenant = tenant
        self.keys = Keys(changes, tenant, pepper)
        self.projects = Projects(changes, tenant)
        self.members = Members(changes, tenant)


class Projects:
    """The projects of one tenant, as one actor may change them. Every tenant has a project called `default`."""

    def __init__(self, changes: Changes, tenant: TenantId) -> None:
        self._changes = changes
        self._tenant = tenant

    async def create(self, name: str) -> Project:
        """Create a project, or restore an archived project with its keys. Raises InvalidTenant or AlreadyExists."""
        if not is_name(name):
            raise InvalidTenant(f"a project's name is {GRAMMAR_IN_WORDS}; got {name[:80]!r}", "name")
        async with self._changes.begin() as change:
            projects = ProjectRepository(change.session, self._tenant)
            row = await projects.named(name)
            if row is None:
                if await projects.count() >= MAX_PROJECTS:
                    raise StillNeeded(f"a tenant has at most {MAX_PROJECTS} projects; reopen an archived one", "name")
                id = ProjectId(new_id("project"))
                row = ProjectRow(id=id, tenant_id=self._tenant, name=name, created_at=change.now)
                await projects.add(row)
            elif row.archived_at is None:
                raise AlreadyExists(f"there is a project {name!r} already; choose another name", "name")
            row.archived_at = None
            await change.note("project.create", row.id, tenant=self._tenant, after=project_of(row))
        return project_of(row)

    async def all(self) -> list[Project]:
        """Return every project by name, including archived ones."""
        async with self._changes.database.read() as session:
            return [project_of(row) for row in await ProjectRepository(session, self._tenant).all()]

    async def archive(self, name: str) -> Project:
        """Close a project. The project's keys, and requests of members in it, are refused until `create` restores the
        project.

        Raises ProjectNotFound, StillNeeded.
        """
        if name == DEFAULT_PROJECT:
            raise StillNeeded("the project `default` cannot be archived; keys without a project belong to it", "name")
        async with self._changes.begin() as change:
            row = await ProjectRepository(change.session, self._tenant).named(name) if is_name(name) else None
            if row is None:
                raise ProjectNotFound(f"there is no project {name[:80]!r}", "name")
            if row.archived_at is None:
                before = project_of(row)
                row.archived_at = change.now
                await change.note("project.archive", row.id, tenant=self._tenant, before=before, after=project_of(row))
        return project_of(row)


class Members:
    """The members of one tenant, as one actor may change them. The last owner of a tenant cannot be removed."""

    def __init__(self, changes: Changes, tenant: TenantId) -> None:
        self._changes = changes
        self._tenant = tenant

    async def add(self, issuer: str, subject: str, role: str) -> Member:
        """Add a member. Raises InvalidTenant, AlreadyExists, NotPermitted."""
        appointed = check_role(role)
        self._changes.actor.authority.ensure_appoints(appointed)
        for field, value in (("issuer", issuer), ("subject", subject)):
            if not 1 <= len(value) <= MAX_IDENTITY_LENGTH or not value.isprintable():
                raise InvalidTenant(f"{field} has 1 to {MAX_IDENTITY_LENGTH} printable characters", field)
        async with self._changes.begin() as change:
            members = MemberRepository(change.session, self._tenant)
            if await members.known(issuer, subject) is not None:
                raise AlreadyExists(f"{subject[:80]!r} is a member already; change the role instead", "subject")
            if await members.count() >= MAX_MEMBERS:
                raise StillNeeded(f"a tenant has at most {MAX_MEMBERS} members; remove one first", "subject")
            row = MemberRow(
                id=new_id("member"),
                tenant_id=self._tenant,
                issuer=issuer,
                subject=subject,
                role=appointed,
                created_at=change.now,
            )
            await members.add(row)
            await change.note("member.add", row.id, tenant=self._tenant, after=member_of(row))
        return member_of(row)

    async def all(self) -> list[Member]:
        """Return every member, oldest first."""
        async with self._changes.database.read() as session:
            return [member_of(row) for row in await MemberRepository(session, self._tenant).all()]

    async def change_role(self, member_id: str, role: str) -> Member:
        """Give a member another role, and end the member's keys that can do more than the new role.

        Raises InvalidTenant, MemberNotFound, NotPermitted, StillNeeded.
        """
        appointed = check_role(role)
        self._changes.actor.authority.ensure_appoints(appointed)
        async with self._changes.begin() as change:
            row = await self._leaving(change, member_id, stays=appointed is Role.OWNER)
            before = member_of(row)
            row.role = appointed
            await change.note("member.role", row.id, tenant=self._tenant, before=before, after=member_of(row))
            scopes = closure(ROLE_SCOPES[appointed])
            await revoke_made_by(change, row.id, unless=lambda key: closure(key.scopes) <= scopes)
        return member_of(row)

    async def remove(self, member_id: str) -> Member:
        """End a membership and the keys that the member made, at once.

        Raises MemberNotFound, NotPermitted, StillNeeded."""
        async with self._changes.begin() as change:
            row = await self._leaving(change, member_id, stays=False)
            await MemberRepository(change.session, self._tenant).remove(row)
            await change.note("member.remove", row.id, tenant=self._tenant, before=member_of(row))
            await revoke_made_by(change, row.id)
        return member_of(row)

    async def _leaving(self, change: Change, member_id: str, *, stays: bool) -> MemberRow:
        """Return the member, after checking that the actor may remove the member's role and that the member is not the
        only owner.
        """
        members = MemberRepository(change.session, self._tenant)
        owners = await members.lock_owners()
        row = await members.get(member_id) if member_id.isprintable() else None
        if row is None:
            raise MemberNotFound(f"there is no member {member_id[:80]!r}", "member_id")
        self._changes.actor.authority.ensure_appoints(Role(row.role))
        if not stays and list(owners) == [row.id]:
            raise StillNeeded("this is the last owner; make another member an owner first", "member_id")
        return row
