"""One tenant's keys: made, listed, rotated, revoked."""

from __future__ import annotations

import msgspec

from loramux.records import TenantId
from loramux.records.identity import new_id
from loramux.records.models import KeyRow
from loramux.records.names import is_name
from loramux.records.tenancy import ProjectRepository
from loramux.records.tenants import KeyRepository
from loramux.tenants.access import CUSTOMER_SCOPES, check_scopes
from loramux.tenants.audit import Change, Changes
from loramux.tenants.entities import Key, key_of
from loramux.tenants.errors import InvalidTenant, KeyNotFound, NotPermitted, ProjectNotFound
from loramux.tenants.pepper import mac, new_secret

SECOND = 1_000_000
MAX_MODELS = 1000
MAX_MODEL_LENGTH = 200
MAX_OVERLAP_SECONDS = 30 * 86_400
MAX_LIFE_SECONDS = 10 * 366 * 86_400
DEFAULT_PROJECT = "default"


class KeyRequest(msgspec.Struct, frozen=True, kw_only=True):
    """What a key is to be."""

    name: str = "default"
    scopes: frozenset[str] = CUSTOMER_SCOPES
    project: str = DEFAULT_PROJECT
    models: frozenset[str] | None = None
    """The only models that it may name, as they stand in a request's `model`; None: all of the tenant's."""
    expires_in: int | None = None
    """Seconds."""


class Keys:
    """The keys of one tenant, in the hands of one mandate."""

    def __init__(self, changes: Changes, tenant: TenantId, pepper: bytes) -> None:
        self._changes = changes
        self._tenant = tenant
        self._pepper = pepper

    async def create(self, wanted: KeyRequest) -> tuple[Key, str]:
        """A new key and its secret, which is shown this once and stored nowhere.

        Raises InvalidTenant for what cannot be, ProjectNotFound, and NotPermitted for a scope that the maker lacks.
        """
        scopes = check_scopes(wanted.scopes)
        _check_label(wanted.name)
        self._demand_own(scopes, wanted.models)
        models = _allow_list(wanted.models)
        if wanted.expires_in is not None and not 1 <= wanted.expires_in <= MAX_LIFE_SECONDS:
            raise InvalidTenant(f"expires_in is 1 to {MAX_LIFE_SECONDS} seconds, or absent", "expires_in")
        async with self._changes.begin() as change:
            project = await ProjectRepository(change.session, self._tenant).named(wanted.project)
            if project is None or project.archived_at is not None:
                raise ProjectNotFound(f"there is no project {wanted.project[:80]!r}; create it first", "project")
            row = KeyRow(
                name=wanted.name,
                scopes=" ".join(sorted(scopes)),
                project_id=project.id,
                models=models,
                expires_at=None if wanted.expires_in is None else change.now + wanted.expires_in * SECOND,
            )
            return await self._insert(change, row, "key.create")

    async def all(self) -> list[Key]:
        """The tenant's keys, revoked ones too, oldest first."""
        async with self._changes.database.read() as session:
            return [key_of(row) for row in await KeyRepository(session, self._tenant).all()]

    async def rotate(self, key_id: str, overlap: int) -> tuple[Key, str]:
        """A new key in the old one's place, and its secret; the old one ends after `overlap` seconds.

        Raises KeyNotFound, InvalidTenant for a key that has ended or an overlap of more than 30 days, NotPermitted.
        """
        if not 0 <= overlap <= MAX_OVERLAP_SECONDS:
            raise InvalidTenant(f"overlap is 0 to {MAX_OVERLAP_SECONDS} seconds", "overlap_seconds")
        async with self._changes.begin() as change:
            old = await self._live(change, key_id)
            models = None if old.models is None else frozenset(old.models.splitlines())
            self._demand_own(frozenset(old.scopes.split()), models)
            before = key_of(old)
            row = KeyRow(
                name=old.name,
                scopes=old.scopes,
                project_id=old.project_id,
                models=old.models,
                expires_at=old.expires_at,
            )
            made, secret = await self._insert(change, row, "key.create")
            ends = change.now + overlap * SECOND
            old.expires_at = ends if old.expires_at is None else min(ends, old.expires_at)
            old.replaced_by = made.id
            await change.note("key.rotate", old.id, tenant=self._tenant, before=before, after=key_of(old))
        return made, secret

    async def revoke(self, key_id: str) -> Key:
        """End a key, at once and for good; a second time changes nothing. Raises KeyNotFound."""
        async with self._changes.begin() as change:
            row = await self._named(change, key_id)
            if row.revoked_at is None:
                before = key_of(row)
                row.revoked_at = change.now
                await change.note("key.revoke", row.id, tenant=self._tenant, before=before, after=key_of(row))
        return key_of(row)

    async def _insert(self, change: Change, row: KeyRow, action: str) -> tuple[Key, str]:
        secret = new_secret()
        row.id, row.tenant_id, row.created_at = new_id("key"), self._tenant, change.now
        row.mac, row.hint, row.created_by = mac(self._pepper, secret), secret[-4:], self._changes.mandate.actor
        await KeyRepository(change.session, self._tenant).add(row)
        await change.note(action, row.id, tenant=self._tenant, after=key_of(row))
        return key_of(row), secret

    async def _live(self, change: Change, key_id: str) -> KeyRow:
        row = await self._named(change, key_id)
        if row.revoked_at is not None or (row.expires_at is not None and row.expires_at <= change.now):
            raise InvalidTenant(f"key {key_id!r} has ended; create a new one", "key_id")
        return row

    async def _named(self, change: Change, key_id: str) -> KeyRow:
        row = await KeyRepository(change.session, self._tenant).locked(key_id) if is_name(key_id) else None
        if row is None:
            raise KeyNotFound(f"there is no key {key_id[:80]!r}", "key_id")
        return row

    def _demand_own(self, scopes: frozenset[str], models: frozenset[str] | None) -> None:
        mandate = self._changes.mandate
        beyond = sorted(scopes - mandate.may_grant)
        if beyond:
            raise NotPermitted(f"you cannot give a key what you do not have yourself: {', '.join(beyond)}", "scopes")
        if mandate.may_allow is not None and (models is None or not models <= mandate.may_allow):
            yours = ", ".join(sorted(mandate.may_allow))[:200]
            raise NotPermitted(f"your own key may name only {yours}; give the new one these or fewer", "models")


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
