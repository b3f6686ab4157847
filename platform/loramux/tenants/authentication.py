"""A secret or a person's token becomes a verified Principal: the one place where that happens.

Nothing is cached between requests: a key that was revoked is refused from the next request on.
"""

from __future__ import annotations

from collections.abc import Sequence
from datetime import UTC, datetime

import msgspec
from sqlalchemy.engine import Row

from loramux.records import Database, Origin, Principal
from loramux.records.models import TenantRow
from loramux.records.names import is_name
from loramux.records.tenancy_models import MemberRow, ProjectRow, TierRow
from loramux.records.tenants import CredentialRepository
from loramux.tenants.access import ROLE_SCOPES, Role, closure
from loramux.tenants.errors import InvalidKey, TenantSuspended
from loramux.tenants.keys import DEFAULT_PROJECT
from loramux.tenants.last_use import LastUse
from loramux.tenants.oidc import TokenVerifier, looks_like_token
from loramux.tenants.pepper import is_secret, mac

Membership = Row[MemberRow, TenantRow, TierRow, ProjectRow]
FIELD = "authorization"


class Credential(msgspec.Struct, frozen=True, kw_only=True):
    """What a caller shows."""

    secret: str
    organization: str | None = None
    """For a person who is a member of several tenants: which one. A key belongs to one anyway."""
    project: str | None = None
    """For a person: in the name of which project. A key belongs to one anyway."""
    origin: Origin = Origin()


class Authenticator:
    """Verifies keys by their MAC and tokens by their issuer."""

    def __init__(self, database: Database, pepper: bytes, verifier: TokenVerifier, last_use: LastUse) -> None:
        self._database = database
        self._pepper = pepper
        self._verifier = verifier
        self._last_use = last_use

    async def authenticate(self, credential: Credential) -> Principal:
        """Who this is. Raises InvalidKey or TenantSuspended."""
        if looks_like_token(credential.secret):
            return await self._person(credential)
        return await self._key(credential)

    async def _key(self, credential: Credential) -> Principal:
        found = None
        if is_secret(credential.secret):
            async with self._database.read() as session:
                found = await CredentialRepository(session).key(mac(self._pepper, credential.secret))
        if found is None:
            raise InvalidKey("the API key is unknown or was revoked; ask your operator for a new one", FIELD)
        key, tenant, tier = found
        now = self._database.now()
        if key.expires_at is not None and key.expires_at <= now:
            ended = datetime.fromtimestamp(key.expires_at / 1e6, UTC).isoformat(timespec="seconds")
            raise InvalidKey(f"the API key has expired ({ended}); ask for a new one", FIELD)
        _demand_active(tenant)
        self._last_use.note(key.id, now)
        return Principal(
            tenant=tenant.id,
            tenant_name=tenant.name,
            key_id=key.id,
            scopes=closure(key.scopes.split()),
            project=key.project_id,
            tier=tier.name,
            service_class=tier.service_class,
            weight=tier.weight,
            models=None if key.models is None else frozenset(key.models.splitlines()),
            origin=credential.origin,
        )

    async def _person(self, credential: Credential) -> Principal:
        person = await self._verifier.verify(credential.secret)
        project = credential.project or DEFAULT_PROJECT
        async with self._database.read() as session:
            found = await CredentialRepository(session).person(person.issuer, person.subject, project[:80])
        member, tenant, tier, of = _chosen(found, credential.organization)
        _demand_active(tenant)
        role = Role(member.role)
        return Principal(
            tenant=tenant.id,
            tenant_name=tenant.name,
            key_id=member.id,
            scopes=closure(ROLE_SCOPES[role] | ({"operator"} if person.is_operator else set())),
            project=of.id,
            role=role,
            tier=tier.name,
            service_class=tier.service_class,
            weight=tier.weight,
            origin=credential.origin,
        )


def _chosen(found: Sequence[Membership], organization: str | None) -> Membership:
    """The membership that is meant; refuses to guess."""
    if organization is not None and is_name(organization):
        found = [one for one in found if one[1].name == organization]
    if not found:
        raise InvalidKey("this person is no member of that organization, or it has no such project", FIELD)
    if len(found) > 1:
        names = ", ".join(one[1].name for one in found)[:200]
        raise InvalidKey(f"you are a member of {names}: name one in the header OpenAI-Organization", FIELD)
    return found[0]


def _demand_active(tenant: TenantRow) -> None:
    if tenant.suspended_at is not None:
        raise TenantSuspended(f"the tenant {tenant.name!r} is suspended; talk to your operator", None)
