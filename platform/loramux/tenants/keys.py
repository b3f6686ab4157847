"""One tenant's keys: create, list, rotate, revoke."""

from __future__ import annotations

from collections.abc import Callable

import msgspec

from loramux.records import TenantId
from loramux.records.identity import is_name, new_id
from loramux.records.keys import CredentialRepository, KeyRepository, KeyRow, keys_made_by
from loramux.records.tenants import ProjectRepository, ProjectRow
from loramux.tenants.audit import Change, Changes
from loramux.tenants.authority import CUSTOMER_SCOPES, Authority, KeyGrant, check_scopes
from loramux.tenants.entities import Key, key_of
from loramux.tenants.errors import InvalidKey, InvalidTenant, KeyNotFound, ProjectNotFound, StillNeeded
from loramux.tenants.secrets import mac, new_secret
from loramux.units import SECOND, SECONDS_PER_DAY

MAX_LIVE_KEYS = 10_000
"""The most of a tenant: lists show all of them, and every check of limits names them."""
MAX_MODELS = 1000
MAX_MODEL_LENGTH = 200
MAX_OVERLAP_SECONDS = 30 * SECONDS_PER_DAY
MAX_LIFE_SECONDS = 10 * 366 * SECONDS_PER_DAY
DEFAULT_PROJECT = "default"


class KeyRequest(msgspec.Struct, frozen=True, kw_only=True):
    """The properties of a key to be made."""

    name: str = "default"
    scopes: frozenset[str] = CUSTOMER_SCOPES
    project: str | None = None
    """Its name; None: the maker's own where the maker is bound to one, else `default`."""
    models: frozenset[str] | None = None
    """The only models that it may name, as they stand in a request's `model`; None: all of the tenant's."""
    expires_in: int | None = None
    """Seconds; None: as long as its maker lives."""


class Keys:
    """The keys of one tenant, as one actor may change them."""

    def __init__(self, changes: Changes, tenant: TenantId, pepper: bytes) -> None:
        self._changes = changes
        self._tenant = tenant
        self._pepper = pepper

    async def create(self, wanted: KeyRequest) -> tuple[Key, str]:
        """Make a key and return it with its secret, which is shown this once and stored nowhere.

        Raises InvalidTenant, ProjectNotFound, and NotPermitted for more than the maker may pass on.
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
        """Return the tenant's keys that the actor may manage, revoked ones too, oldest first."""
        async with self._changes.database.read() as session:
            keys = [key_of(row) for row in await KeyRepository(session, self._tenant).all()]
        return [key for key in keys if self._changes.actor.authority.may_manage(_grant_of(key))]

    async def rotate(self, key_id: str, overlap: int) -> tuple[Key, str]:
        """Make a key in the old one's place and return it with its secret; the old one ends after `overlap` seconds.

        Limits and budgets of the old key count the new one. Raises KeyNotFound, InvalidTenant for a key that has ended
        or an overlap of more than 30 days, NotPermitted for a key that the actor could not make.
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
        """End a key, and the keys that it made unless a rotation has put another one in its place.

        At once and for good; a second time changes nothing. Raises KeyNotFound.
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
        """Insert the row while its maker is locked: a key that is revoked meanwhile makes none. Raises InvalidKey."""
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
    """End every live key that `maker` (the head of a key's lineage, or a member) made, or that one of those made."""
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
