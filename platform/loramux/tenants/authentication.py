"""The one place where a key's secret or a member's token becomes a verified Principal.

Nothing that lets a caller in is cached between requests: a revoked key is refused from the next request on.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Sequence
from contextlib import suppress
from datetime import UTC, datetime

import msgspec
from sqlalchemy.engine import Row

from loramux.records import Database, Origin, Principal, ProjectId, RecordsUnavailable, TenantId
from loramux.records.identity import is_name
from loramux.records.keys import CredentialRepository, KeyRow
from loramux.records.tenants import MemberRow, ProjectRow, TenantRow, TierRow
from loramux.tenants.authority import ROLE_SCOPES, Role, closure, effective_scopes
from loramux.tenants.errors import InvalidKey, TenantSuspended
from loramux.tenants.invalid_keys import FailedAttempts, KnownKeys
from loramux.tenants.keys import DEFAULT_PROJECT
from loramux.tenants.oidc import TokenVerifier, looks_like_token

Membership = Row[MemberRow, TenantRow, TierRow, ProjectRow]
FIELD = "authorization"
_INCORRECT = "Incorrect API key provided"
"""The beginning of OpenAI's refusal, by which gateways recognise it."""
FLUSH_SECONDS = 10.0
"""The most that `last_used_at` lags behind; a crash loses as much."""

logger = logging.getLogger(__name__)


class Credential(msgspec.Struct, frozen=True, kw_only=True):
    """The secret or token that a request carries, and where the request came from."""

    secret: str
    organization: str | None = None
    """A member of several tenants names one of them; a key belongs to one."""
    project: str | None = None
    """A member names the project of its requests; a key belongs to one."""
    origin: Origin = Origin()


class LastUse:
    """Times of the keys' last use: kept in memory and written in batches, so that no request waits for it."""

    def __init__(self, database: Database) -> None:
        self._database = database
        self._noted: dict[str, int] = {}
        self._task: asyncio.Task[None] | None = None

    def note(self, key_id: str, at: int) -> None:
        """Record that the key was used at `at`, in microseconds."""
        self._noted[key_id] = at

    def start(self) -> None:
        """Start the writing task; needs a running event loop."""
        self._task = asyncio.create_task(self._write_on(), name="last-use")

    async def stop(self) -> None:
        """End the writing task and write what is left."""
        if self._task is not None:
            self._task.cancel()
            with suppress(asyncio.CancelledError):
                await self._task
        await self.flush()

    async def flush(self) -> None:
        """Write what was noted in one statement; notes that the database does not take are kept for the next time."""
        noted, self._noted = self._noted, {}
        if not noted:
            return
        try:
            async with self._database.begin() as session:
                await CredentialRepository(session).touch(noted)
        except RecordsUnavailable:
            logger.warning("when %d keys were last used cannot be written now; trying again", len(noted))
            self._noted = noted | self._noted

    async def _write_on(self) -> None:
        while True:
            await asyncio.sleep(FLUSH_SECONDS)
            await self.flush()


class Authenticator:
    """Verifies keys by their MAC and tokens by their issuer."""

    def __init__(self, database: Database, pepper: bytes, verifier: TokenVerifier, last_use: LastUse) -> None:
        self._database = database
        self._verifier = verifier
        self._last_use = last_use
        self._known = KnownKeys(database, pepper)
        self._failures = FailedAttempts()

    async def authenticate(self, credential: Credential) -> Principal:
        """Return the caller. Raises InvalidKey, TooManyFailures or TenantSuspended."""
        try:
            if looks_like_token(credential.secret):
                return await self._person(credential)
            return await self._key(credential)
        except InvalidKey as why:
            raise self._failures.fail(credential.origin.source, self._database.now(), why) from None

    async def _key(self, credential: Credential) -> Principal:
        found, digest = None, await self._known.possible_mac(credential.secret)
        if digest is not None:
            async with self._database.read() as session:
                found = await CredentialRepository(session).key(digest)
            if found is None:
                self._known.remember_revoked(digest)
        if found is None:
            why = "the API key is unknown or was revoked; ask your operator for a new one"
            raise InvalidKey(f"{_INCORRECT}: {why}", FIELD)
        principal = principal_of_key(found, self._database.now(), credential.origin)
        self._last_use.note(principal.key_id, self._database.now())
        return principal

    async def principal_behind(self, tenant: TenantId, owner: str, project: ProjectId) -> Principal:
        """Return the present rights of the owner of what runs on its behalf, such as a batch.

        `owner`: the first key of a chain of rotations, whose newest key counts, or a member. Raises InvalidKey where
        nothing is left of them, and TenantSuspended.
        """
        now = self._database.now()
        async with self._database.read() as session:
            credentials = CredentialRepository(session)
            key = await credentials.newest_key(tenant, owner, now)
            member = await credentials.member(tenant, owner, project) if key is None else None
        if key is not None:
            return principal_of_key(key, now, Origin())
        if member is None:
            raise InvalidKey("the key was revoked or has expired, or the member was removed", FIELD)
        return principal_of_member(member, is_operator=False, origin=Origin())

    async def _person(self, credential: Credential) -> Principal:
        person = await self._verifier.verify(credential.secret)
        project = credential.project or DEFAULT_PROJECT
        async with self._database.read() as session:
            found = await CredentialRepository(session).person(person.issuer, person.subject, project[:80])
        chosen = _chosen(found, credential.organization)
        return principal_of_member(chosen, is_operator=person.is_operator, origin=credential.origin)


def principal_of_key(found: Row[KeyRow, TenantRow, TierRow, ProjectRow], now: int, origin: Origin) -> Principal:
    """Return the caller with this key. Raises InvalidKey, TenantSuspended."""
    key, tenant, tier, project = found
    if key.expires_at is not None and key.expires_at <= now:
        ended = datetime.fromtimestamp(key.expires_at / 1e6, UTC).isoformat(timespec="seconds")
        raise InvalidKey(f"{_INCORRECT}: the API key has expired ({ended}); ask for a new one", FIELD)
    _ensure_active(tenant)
    if project.archived_at is not None:
        raise InvalidKey(
            f"{_INCORRECT}: the project {project.name!r} of this API key is archived; use a key of another project, or "
            "have this one restored (POST /v1/projects with its name)",
            FIELD,
        )
    models = None if key.models is None else frozenset(key.models.splitlines())
    return Principal(
        tenant=tenant.id,
        tenant_name=tenant.name,
        key_id=key.id,
        scopes=effective_scopes(key.scopes.split(), models),
        project=key.project_id,
        tier=tier.name,
        service_class=tier.service_class,
        weight=tier.weight,
        service_tiers=frozenset(tier.service_tiers.split()),
        zero_retention=tenant.zero_retention,
        models=models,
        origin=origin,
        expires_at=key.expires_at,
        lineage=tuple(key.lineage.split()),
    )


def principal_of_member(found: Membership, *, is_operator: bool, origin: Origin) -> Principal:
    """Return a person as a caller. Raises TenantSuspended."""
    member, tenant, tier, project = found
    _ensure_active(tenant)
    role = Role(member.role)
    return Principal(
        tenant=tenant.id,
        tenant_name=tenant.name,
        key_id=member.id,
        scopes=closure(ROLE_SCOPES[role] | ({"operator"} if is_operator else set())),
        project=project.id,
        role=role,
        tier=tier.name,
        service_class=tier.service_class,
        weight=tier.weight,
        service_tiers=frozenset(tier.service_tiers.split()),
        zero_retention=tenant.zero_retention,
        origin=origin,
        lineage=(member.id,),
    )


def _chosen(found: Sequence[Membership], organization: str | None) -> Membership:
    """Return the membership that the caller means. Raises InvalidKey rather than guess."""
    if organization is not None and is_name(organization):
        found = [one for one in found if one[1].name == organization]
    if not found:
        raise InvalidKey("this person is no member of that organization, or it has no such project", FIELD)
    if len(found) > 1:
        names = ", ".join(one[1].name for one in found)[:200]
        raise InvalidKey(f"you are a member of {names}: name one in the header OpenAI-Organization", FIELD)
    return found[0]


def _ensure_active(tenant: TenantRow) -> None:
    if tenant.suspended_at is not None:
        raise TenantSuspended(f"the tenant {tenant.name!r} is suspended; talk to your operator", None)
