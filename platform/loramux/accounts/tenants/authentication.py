"""The one place where a key's secret or a member's token becomes a verified Principal.

A key is found by the MAC of its secret. A token is verified with the public keys of the OIDC issuer that signed it,
which the settings must name. Sign-ins to the console verify their ID tokens here too. No positive result is cached
between requests: a revoked key is refused from the next request on.
"""

from __future__ import annotations

import asyncio
import base64
import json
import logging
import time
from collections.abc import Sequence
from contextlib import suppress
from datetime import UTC, datetime
from typing import Any

import httpx
import msgspec
from joserfc import jwt
from joserfc.errors import InvalidKeyIdError, JoseError
from joserfc.jwk import KeySet

from loramux.accounts.tenants.account import DEFAULT_PROJECT
from loramux.accounts.tenants.authority import ROLE_SCOPES, Role, closure, effective_scopes
from loramux.accounts.tenants.errors import InvalidKey, TenantSuspended
from loramux.accounts.tenants.secrets import FailedAttempts, KnownKeys
from loramux.common.identity import Origin, Principal, ProjectId, TenantId, is_name
from loramux.common.public_http import bounded, outside_client
from loramux.common.settings.server import IssuerSettings
from loramux.data.records.credentials import CallerKey, CallerMember, CallerTenant, CredentialRepository
from loramux.data.records.database import Database
from loramux.data.records.errors import RecordsUnavailable

FIELD = "authorization"
_INCORRECT = "Incorrect API key provided"
"""The beginning of OpenAI's refusal, by which clients and proxies recognise it."""
FLUSH_SECONDS = 10.0
"""Seconds between two writes of `last_used_at`; a crash loses only uses during the last such period."""

MAX_TOKEN_LENGTH = 16_384
LEEWAY_SECONDS = 60

DISCOVERY = "/.well-known/openid-configuration"
MAX_KEYS = 64
FRESH_SECONDS = 3600.0
STALE_SECONDS = 86_400.0
"""Seconds for which known keys stay valid while the issuer does not answer."""
RETRY_SECONDS = 10.0
"""Minimum time between two requests to the issuer in seconds, independent of the number of tokens with unknown keys."""

logger = logging.getLogger(__name__)


class Credential(msgspec.Struct, frozen=True, kw_only=True):
    """The secret or token that a request carries, and where the request came from."""

    secret: str
    organization: str | None = None
    """The tenant that a member of several tenants names; a key belongs to one tenant."""
    project: str | None = None
    """The project that a member names for its requests; a key belongs to one project."""
    origin: Origin = Origin()


class LastUse:
    """Times of the keys' last use. The times are kept in memory and written in batches, so that no request waits for a
    write.
    """

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
        """End the writing task, and write the remaining times."""
        if self._task is not None:
            self._task.cancel()
            with suppress(asyncio.CancelledError):
                await self._task
        await self.flush()

    async def flush(self) -> None:
        """Write the noted times in one statement. If the database does not accept the statement, keep the times for the
        next call.
        """
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

    async def authenticate(self, secret: str | Credential) -> Principal:
        """Return the caller of a secret or a token. Raises InvalidKey, TooManyFailures or TenantSuspended."""
        credential = Credential(secret=secret) if isinstance(secret, str) else secret
        try:
            if looks_like_token(credential.secret):
                return await self._person(credential)
            return await self._key(credential)
        except InvalidKey as why:
            raise self._failures.fail(credential.origin.source, self._database.now(), why) from None

    async def _key(self, credential: Credential) -> Principal:
        found, digest = None, await self._known.possible_mac(credential.secret)
        if digest is not None:
            async with self._database.look_up() as session:
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
        """Return the current rights of an owner for whom background work, such as a batch, runs.

        `owner` is a member, or the first key of a chain of rotations, whose newest key decides. Raises InvalidKey if no
        rights are left, and TenantSuspended if the tenant is suspended.
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


def principal_of_key(key: CallerKey, now: int, origin: Origin) -> Principal:
    """Return the caller with this key. Raises InvalidKey, TenantSuspended."""
    if key.expires_at is not None and key.expires_at <= now:
        ended = datetime.fromtimestamp(key.expires_at / 1e6, UTC).isoformat(timespec="seconds")
        raise InvalidKey(f"{_INCORRECT}: the API key has expired ({ended}); ask for a new one", FIELD)
    _ensure_active(key)
    if key.archived_at is not None:
        raise InvalidKey(
            f"{_INCORRECT}: the project {key.project_name!r} of this API key is archived; use a key of another "
            "project, or have this one restored (POST /v1/projects with its name)",
            FIELD,
        )
    models = None if key.models is None else frozenset(key.models.splitlines())
    return principal_in(
        key,
        key_id=key.id,
        scopes=effective_scopes(key.scopes.split(), models),
        models=models,
        origin=origin,
        expires_at=key.expires_at,
        lineage=tuple(key.lineage.split()),
    )


def principal_of_member(member: CallerMember, *, is_operator: bool, origin: Origin) -> Principal:
    """Return a person as a caller. Raises TenantSuspended."""
    _ensure_active(member)
    role = Role(member.role)
    return principal_in(
        member,
        key_id=member.id,
        scopes=closure(ROLE_SCOPES[role] | ({"operator"} if is_operator else set())),
        role=role,
        origin=origin,
        lineage=(member.id,),
    )


def principal_in(tenant: CallerTenant, **caller: Any) -> Principal:
    """Return a caller in this tenant and project, with the rights that the tenant and its tier give to every caller."""
    return Principal(
        tenant=tenant.tenant_id,
        tenant_name=tenant.tenant_name,
        tier=tenant.tier,
        service_class=tenant.service_class,
        weight=tenant.weight,
        service_tiers=frozenset(tenant.service_tiers.split()),
        zero_retention=tenant.zero_retention,
        project=tenant.project_id,
        **caller,
    )


def _chosen(found: Sequence[CallerMember], organization: str | None) -> CallerMember:
    """Return the membership that the caller means. Raises InvalidKey rather than guess."""
    if organization is not None and is_name(organization):
        found = [one for one in found if one.tenant_name == organization]
    if not found:
        raise InvalidKey("this person is no member of that organization, or it has no such project", FIELD)
    if len(found) > 1:
        names = ", ".join(one.tenant_name for one in found)[:200]
        raise InvalidKey(f"you are a member of {names}: name one in the header OpenAI-Organization", FIELD)
    return found[0]


def _ensure_active(tenant: CallerTenant) -> None:
    if tenant.suspended_at is not None:
        raise TenantSuspended(f"the tenant {tenant.tenant_name!r} is suspended; talk to your operator", None)


class Person(msgspec.Struct, frozen=True):
    """The person that a token identifies."""

    issuer: str
    subject: str
    is_operator: bool
    """True: the issuer's claim has a value that the settings name."""


class TokenVerifier:
    """Checks signature, issuer, audience and times of tokens."""

    def __init__(self, issuers: Sequence[IssuerSettings]) -> None:
        self._http = outside_client(5)
        self._issuers = {one.issuer: (one, IssuerKeys(one.issuer, self._http)) for one in issuers}

    async def aclose(self) -> None:
        """Close the connections to the issuers."""
        await self._http.aclose()

    async def verify(self, token: str) -> Person:
        """Return the person that the token identifies. Raises InvalidKey with the reason."""
        known = self._issuers.get(_claimed_issuer(token))
        if known is None:
            raise InvalidKey("the token is of no issuer that this server trusts", FIELD)
        return await _person(token, *known, known[0].audience)

    async def verify_id_token(self, issuer: str, token: str, client: str, nonce: str) -> Person:
        """Return the person that signed in at the issuer for `client`, with `nonce`. Raises InvalidKey."""
        return await _person(token, *self._issuers[issuer], client, nonce)

    async def endpoints(self, issuer: str) -> dict[str, str]:
        """Return the issuer's addresses by their names in its discovery document. Raises IssuerUnreachable."""
        return await self._issuers[issuer][1].endpoints()


def looks_like_token(secret: str) -> bool:
    """Return whether the secret has the form of a JWT. Keys have no dots."""
    return secret.count(".") == 2 and len(secret) <= MAX_TOKEN_LENGTH and secret.isascii()


async def _person(
    token: str, issuer: IssuerSettings, keys: IssuerKeys, audience: str, nonce: str | None = None
) -> Person:
    try:
        claims = await _verified_claims(token, issuer, keys, audience, nonce)
    except (JoseError, ValueError, RecursionError) as error:  # any sender can write a deeply nested header
        raise InvalidKey(f"the token is not valid: {str(error)[:200]}", FIELD) from None
    except IssuerUnreachable as error:
        raise InvalidKey(f"the token cannot be checked now: {error}; try again", FIELD) from None
    return Person(issuer.issuer, _identity(claims, issuer.identity_claim), _is_operator(claims, issuer))


async def _verified_claims(
    token: str, issuer: IssuerSettings, keys: IssuerKeys, audience: str, nonce: str | None
) -> dict[str, object]:
    """Return the claims of a token with a valid signature; an unknown key is fetched once."""
    try:
        decoded = jwt.decode(token, await keys.current(), algorithms=issuer.algorithms)
    except InvalidKeyIdError:
        decoded = jwt.decode(token, await keys.refreshed(), algorithms=issuer.algorithms)
    jwt.JWTClaimsRegistry(
        leeway=LEEWAY_SECONDS,
        iss={"essential": True, "value": issuer.issuer},
        aud={"essential": True, "value": audience},
        exp={"essential": True},
    ).validate(decoded.claims)
    if nonce is not None and decoded.claims.get("nonce") != nonce:
        raise ValueError("the token answers another sign-in (nonce)")
    if nonce is not None and decoded.claims.get("azp", audience) != audience:
        raise ValueError("the token was given to another client (azp)")
    return decoded.claims


def _claimed_issuer(token: str) -> str:
    """Return the unverified issuer, which selects the keys to verify the token with."""
    payload = token.split(".")[1]
    try:
        claims = json.loads(base64.urlsafe_b64decode(payload + "=" * (-len(payload) % 4)))
    except (ValueError, RecursionError):
        return ""
    issuer = claims.get("iss") if isinstance(claims, dict) else None
    return issuer if isinstance(issuer, str) else ""


def _is_operator(claims: dict[str, object], issuer: IssuerSettings) -> bool:
    claimed = claims.get(issuer.operator_claim)
    values = claimed if isinstance(claimed, list) else [claimed]
    return any(value in issuer.operators for value in values if isinstance(value, str))


def _identity(claims: dict[str, object], claim: str) -> str:
    identity = claims.get(claim)
    if not isinstance(identity, str) or not identity:
        raise InvalidKey(f"the token has no claim '{claim}', which says who you are", FIELD)
    if claim == "email" and claims.get("email_verified") is not True:
        raise InvalidKey("the token's e-mail address is not verified", FIELD)
    return identity


class IssuerUnreachable(Exception):
    """The issuer's keys cannot be fetched."""


class IssuerKeys:
    """One issuer's public keys. Concurrent callers share one fetch."""

    def __init__(self, issuer: str, http: httpx.AsyncClient) -> None:
        self._issuer = issuer
        self._http = bounded(http)
        self._keys: KeySet | None = None
        self._endpoints: dict[str, str] = {}
        self._fetched_at = 0.0
        self._asked_at = float("-inf")
        self._lock = asyncio.Lock()

    async def current(self) -> KeySet:
        """Return the keys, up to an hour old, or a day if the issuer does not answer. Raises IssuerUnreachable."""
        if self._keys is None or time.monotonic() - self._fetched_at > FRESH_SECONDS:
            return await self.refreshed()
        return self._keys

    async def refreshed(self) -> KeySet:
        """Fetch the keys again, unless the last fetch was within RETRY_SECONDS. Raises IssuerUnreachable."""
        async with self._lock:
            if time.monotonic() - self._asked_at >= RETRY_SECONDS:
                self._asked_at = time.monotonic()
                try:
                    self._keys = await self._fetch()
                    self._fetched_at = time.monotonic()
                except (httpx.HTTPError, httpx.InvalidURL, JoseError, ValueError, KeyError, TypeError) as error:
                    self._ensure_usable(error)
            if self._keys is None:
                raise IssuerUnreachable(f"{self._issuer} did not answer a moment ago")
            return self._keys

    async def endpoints(self) -> dict[str, str]:
        """Return the addresses of the discovery document, as old as the keys. Raises IssuerUnreachable."""
        await self.current()
        return self._endpoints

    def _ensure_usable(self, error: Exception) -> None:
        if self._keys is None or time.monotonic() - self._fetched_at > STALE_SECONDS:
            self._keys = None
            raise IssuerUnreachable(f"{self._issuer} gives no keys ({type(error).__name__})") from error

    async def _fetch(self) -> KeySet:
        described = await self._document(self._issuer.rstrip("/") + DISCOVERY)
        if described["issuer"] != self._issuer:
            raise ValueError("the discovery document is another issuer's")
        addresses = {name: str(url) for name, url in described.items() if name.endswith(("_endpoint", "_uri"))}
        if self._issuer.startswith("https://"):
            addresses = {name: url for name, url in addresses.items() if url.startswith("https://")}
        found = await self._document(addresses["jwks_uri"])
        keys = found["keys"]
        if not isinstance(keys, list) or len(keys) > MAX_KEYS or not all(isinstance(key, dict) for key in keys):
            raise ValueError(f"no list of at most {MAX_KEYS} keys")
        public = [key for key in keys if key.get("kty") != "oct" and key.get("use", "sig") == "sig"]
        imported = KeySet.import_key_set({"keys": public})
        self._endpoints = addresses
        return imported

    async def _document(self, url: str) -> dict[str, Any]:
        async with self._http.stream("GET", url) as response:
            response.raise_for_status()
            return await json_object(response)


async def json_object(response: httpx.Response) -> dict[str, Any]:
    """Read an issuer's answer. Raises ValueError, TypeError, httpx.HTTPError."""
    document = json.loads(await response.aread())
    if not isinstance(document, dict):
        raise TypeError(f"{response.url} is no JSON object")
    return document
