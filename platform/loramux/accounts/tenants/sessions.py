"""Sessions of the web console, and the sign-in at an OIDC issuer that opens them.

A key or a member signs in once. After that, the secret in a cookie identifies the session. A session has no rights
itself. On each request its key or member is looked up, and its current rights apply. So a revoked key, a removed member
or a suspended tenant ends the session, with the same answer. Only a MAC of the secret is stored.

Members sign in with an authorization code and PKCE (RFC 7636), which the server redeems itself. The browser that begins
a sign-in gets a secret in a cookie. State, nonce and PKCE verifier are MACs of that secret and the issuer under the
pepper. So the server stores no state, and any server of a deployment can finish a sign-in that another server has
begun. An answer of one issuer is not accepted as an answer of another issuer. A callback is accepted only within ten
minutes, and only in the browser in which the sign-in began.
"""

from __future__ import annotations

import base64
import hashlib
import hmac
import logging
import secrets
from collections.abc import Sequence
from pathlib import Path
from urllib.parse import quote, urlencode, urlsplit

import httpx
import msgspec

from loramux.accounts.tenants.account import DEFAULT_PROJECT
from loramux.accounts.tenants.authentication import (
    IssuerUnreachable,
    Person,
    TokenVerifier,
    json_object,
    principal_in,
    principal_of_key,
    principal_of_member,
)
from loramux.accounts.tenants.authority import TENANT_SCOPES, actor_of, closure, operator_of
from loramux.accounts.tenants.entities import Changes
from loramux.accounts.tenants.errors import (
    InvalidKey,
    IssuerDown,
    NotAMember,
    NotPermitted,
    SeveralTenants,
    SignInDenied,
    SignInExpired,
    SignInRefused,
    StillNeeded,
    TenantNotFound,
)
from loramux.common.identity import Origin, Principal, is_name, new_id
from loramux.common.public_http import outside_client
from loramux.common.settings.file import SettingsError
from loramux.common.settings.server import ConsoleSettings, IssuerSettings, SignInSettings
from loramux.common.units import MINUTE, SECOND
from loramux.data.records.credentials import CredentialRepository, SessionRepository, SessionRow
from loramux.data.records.database import Database

SESSION, LINK = "session", "link"
LINK_SECONDS = 3600
MAX_OF_HOLDER = 200
"""Maximum number of sessions and links of one key or member."""
MAX_VIEWED = 50
FIELD = "session"
VIEWING_SCOPES = closure(TENANT_SCOPES - {"inference"})
"""Scopes of an operator that looks at a tenant: all but inference, which would be billed to the tenant."""

CALLBACK = "/console/oidc/callback"
SIGN_IN_SECONDS = 600
MAX_CODE_LENGTH = 4096
TIMEOUT_SECONDS = 10

logger = logging.getLogger(__name__)


class Session(msgspec.Struct, frozen=True, kw_only=True):
    """A session under way."""

    id: str
    principal: Principal
    created_at: int
    ends_at: int
    """The time at which the session ends, even if it is in use."""
    viewed: tuple[str, ...]
    """Tenants that the session's operator has chosen to look at."""


class OpenedLink(msgspec.Struct, frozen=True, kw_only=True):
    """A sign-in link."""

    secret: str
    ends_at: int


class SessionNote(msgspec.Struct, frozen=True, kw_only=True):
    """A session in the audit log."""

    id: str
    holder: str
    ends_at: int


class Sessions:
    """Opens, finds and ends sessions."""

    def __init__(self, database: Database, pepper: bytes, settings: ConsoleSettings) -> None:
        self._database = database
        self._pepper = pepper
        self._idle = settings.idle_seconds * SECOND
        self._life = settings.session_seconds * SECOND

    async def open(self, caller: Principal, *, is_operator: bool = False) -> str:
        """Open a session with the caller's rights, and return its secret. Raises StillNeeded.

        The session ends with the key that opened it, if that is earlier.
        """
        ends = self._database.now() + self._life
        ends = ends if caller.expires_at is None else min(ends, caller.expires_at)
        return await self._add(caller, SESSION, ends, is_operator=is_operator)

    async def open_link(self, caller: Principal) -> OpenedLink:
        """Return a secret that opens one session with the key's rights, within an hour. Raises NotPermitted."""
        if caller.role is not None:
            raise NotPermitted("a sign-in link is made with an API key; members sign in at their identity provider")
        ends = self._database.now() + LINK_SECONDS * SECOND
        ends = ends if caller.expires_at is None else min(ends, caller.expires_at)
        return OpenedLink(secret=await self._add(caller, LINK, ends), ends_at=ends)

    async def holder_of_link(self, secret: str, origin: Origin) -> Principal:
        """Use up a sign-in link, and return the key that it signs in. Raises InvalidKey, TenantSuspended."""
        async with self._database.begin() as session:
            row = await SessionRepository(session).take(self._mac(secret), LINK)
        if row is None or row.expires_at <= self._database.now():
            raise InvalidKey("this sign-in link was used already or has expired; make a new one, or use a key", FIELD)
        return await self._principal(row, origin)

    async def find(self, secret: str, origin: Origin) -> Session:
        """Return the session of this secret.

        Raises InvalidKey if the session has ended, and TenantSuspended if its tenant is suspended.
        """
        now = self._database.now()
        async with self._database.read() as session:
            row = await SessionRepository(session).find(self._mac(secret), SESSION)
        if row is None or row.expires_at <= now or row.used_at + self._idle <= now:
            raise InvalidKey("the session has ended; sign in again", FIELD)
        principal = await self._principal(row, origin)
        if row.used_at + MINUTE <= now:
            async with self._database.begin() as session:
                await SessionRepository(session).touch(row.id, now)
        return Session(
            id=row.id,
            principal=principal,
            created_at=row.created_at,
            ends_at=row.expires_at,
            viewed=tuple(row.viewed.split()),
        )

    async def end(self, secret: str, origin: Origin, *, all_of_holder: bool = False) -> None:
        """End the session, or all sessions of its key or member. Raises InvalidKey."""
        found = await self.find(secret, origin)
        async with Changes(self._database, actor_of(found.principal)).begin() as change:
            sessions = SessionRepository(change.session)
            if all_of_holder:
                await sessions.remove_of(found.principal.key_id)
            else:
                await sessions.take(self._mac(secret), SESSION)
            note = SessionNote(id=found.id, holder=found.principal.key_id, ends_at=found.ends_at)
            action = "session.end_all" if all_of_holder else "session.end"
            await change.note(action, found.id, tenant=found.principal.tenant, before=note)

    async def view(self, session: Session, tenant: str) -> Session:
        """Let an operator read a tenant's pages without changing anything. The tenant's audit log records this view.

        Raises TenantNotFound, and StillNeeded if the operator has opened the pages of too many tenants.
        """
        operator = operator_of(session.principal)
        if tenant in session.viewed:
            return session
        if len(session.viewed) >= MAX_VIEWED:
            raise StillNeeded(f"one session looks at {MAX_VIEWED} tenants at most; sign in again", "tenant")
        viewed = (*session.viewed, tenant)
        async with Changes(self._database, operator).begin() as change:
            found = await SessionRepository(change.session).tenant(tenant, DEFAULT_PROJECT) if is_name(tenant) else None
            if found is None:
                raise TenantNotFound(f"there is no tenant {tenant[:80]!r}", "tenant")
            await SessionRepository(change.session).view(session.id, " ".join(viewed))
            note = SessionNote(id=session.id, holder=session.principal.key_id, ends_at=session.ends_at)
            await change.note("session.view", found.tenant_id, tenant=found.tenant_id, after=note)
        return msgspec.structs.replace(session, viewed=viewed)

    async def principal_viewing(self, session: Session, tenant: str) -> Principal:
        """Return the operator as a caller in a tenant that `view` has allowed it to look at. Raises NotPermitted."""
        if "operator" not in session.principal.scopes or tenant not in session.viewed:
            raise NotPermitted("open the tenant's pages first; the tenant's audit log shows that you did", "tenant")
        async with self._database.read() as database:
            found = await SessionRepository(database).tenant(tenant, DEFAULT_PROJECT)
        if found is None:
            raise TenantNotFound(f"there is no tenant {tenant[:80]!r}", "tenant")
        return principal_in(
            found,
            key_id=session.principal.key_id,
            scopes=VIEWING_SCOPES,
            origin=session.principal.origin,
            lineage=session.principal.lineage,
        )

    def csrf_token(self, secret: str) -> str:
        """Return the token that a page sends with the cookie, to prove that the page belongs to the console."""
        digest = hmac.digest(self._pepper, b"csrf token of " + secret.encode(), hashlib.sha256)
        return base64.urlsafe_b64encode(digest[:24]).decode()

    def is_csrf_token(self, secret: str, token: str) -> bool:
        """Return whether the token belongs to the session."""
        return hmac.compare_digest(token.encode(), self.csrf_token(secret).encode())

    async def _add(self, caller: Principal, kind: str, ends: int, *, is_operator: bool = False) -> str:
        secret = secrets.token_urlsafe(32)
        async with Changes(self._database, actor_of(caller)).begin() as change:
            sessions = SessionRepository(change.session)
            await sessions.remove_expired(change.now, change.now - self._idle)
            if await sessions.count(caller.key_id) >= MAX_OF_HOLDER:
                raise StillNeeded(f"one key or member has {MAX_OF_HOLDER} sessions at most; sign out elsewhere first")
            row = SessionRow(
                id=new_id("session"),
                mac=self._mac(secret),
                kind=kind,
                tenant_id=caller.tenant,
                holder=caller.key_id,
                project_id=caller.project,
                is_operator=is_operator,
                viewed="",
                created_at=change.now,
                used_at=change.now,
                expires_at=ends,
            )
            await sessions.add(row)
            note = SessionNote(id=row.id, holder=row.holder, ends_at=ends)
            await change.note(f"{kind}.open", row.id, tenant=caller.tenant, after=note)
        return secret

    async def _principal(self, row: SessionRow, origin: Origin) -> Principal:
        """Return the present rights of the key or member. Raises InvalidKey, TenantSuspended."""
        async with self._database.read() as session:
            credentials = CredentialRepository(session)
            key = await credentials.key_of_id(row.tenant_id, row.holder)
            member = await credentials.member(row.tenant_id, row.holder, row.project_id) if key is None else None
        if key is not None:
            return principal_of_key(key, self._database.now(), origin)
        if member is None:
            raise InvalidKey("the key was revoked, or the member was removed; sign in again", FIELD)
        return principal_of_member(member, is_operator=row.is_operator, origin=origin)

    def _mac(self, secret: str) -> bytes:
        return hmac.digest(self._pepper, b"console " + secret.encode(), hashlib.sha256)


class Provider(msgspec.Struct, frozen=True):
    """An issuer at which people sign in."""

    issuer: str
    label: str


class BegunSignIn(msgspec.Struct, frozen=True):
    """The issuer's page, and the secret that the browser keeps until it returns."""

    location: str
    secret: str


class Callback(msgspec.Struct, frozen=True, kw_only=True):
    """The parameters of the issuer's redirect."""

    state: str
    code: str
    issuer: str | None
    """The issuer (RFC 9207); issuers may leave it out."""
    error: str | None


class SignIns:
    """Sends browsers to issuers, and receives them when they return."""

    def __init__(
        self, database: Database, pepper: bytes, verifier: TokenVerifier, issuers: Sequence[IssuerSettings], url: str
    ) -> None:
        self._database = database
        self._pepper = pepper
        self._verifier = verifier
        self._http = outside_client(TIMEOUT_SECONDS)
        self._clients = {one.issuer: one.sign_in for one in issuers if one.sign_in is not None}
        self._secrets = {issuer: _secret_of(issuer, client) for issuer, client in self._clients.items()}
        self._url = url.rstrip("/")

    async def aclose(self) -> None:
        """Close the connections to token endpoints."""
        await self._http.aclose()

    @property
    def url(self) -> str:
        """Return the server's address as browsers see it."""
        return self._url

    @property
    def providers(self) -> list[Provider]:
        """Return the issuers at which people sign in."""
        return [Provider(issuer, one.label or urlsplit(issuer).netloc) for issuer, one in self._clients.items()]

    async def begin(self, issuer: str, tenant: str | None) -> BegunSignIn:
        """Return the address of the issuer's page to which the browser is sent. Raises SignInRefused.

        `tenant`: the tenant that a person with several memberships has chosen.
        """
        client = self._clients.get(issuer)
        if client is None or (tenant is not None and not is_name(tenant)):
            raise SignInRefused("this server has no sign-in at that issuer, or no tenant can have that name", "issuer")
        ends = self._database.now() // SECOND + SIGN_IN_SECONDS
        secret = f"{ends}.{secrets.token_urlsafe(24)}.{tenant or ''}"
        page = await self._endpoint(issuer, "authorization_endpoint")
        query = {
            "response_type": "code",
            "client_id": client.client_id,
            "redirect_uri": self._url + CALLBACK,
            "scope": " ".join(dict.fromkeys(("openid", *client.scopes))),
            "state": self._mac("state", issuer, secret),
            "nonce": self._mac("nonce", issuer, secret),
            "code_challenge": _challenge(self._mac("verifier", issuer, secret)),
            "code_challenge_method": "S256",
        }
        return BegunSignIn(f"{page}{'&' if '?' in page else '?'}{urlencode(query)}", secret)

    async def finish(self, secret: str, callback: Callback, origin: Origin) -> tuple[Principal, bool]:
        """Return the member that has signed in, and whether the issuer makes it an operator.

        Raises SignInRefused, InvalidKey and TenantSuspended.
        """
        issuer = self._issuer_of(secret, callback)
        if callback.error is not None or not 0 < len(callback.code) <= MAX_CODE_LENGTH:
            raise SignInDenied("the identity provider did not sign you in")
        token = await self._redeem(issuer, callback.code, self._mac("verifier", issuer, secret))
        nonce, client = self._mac("nonce", issuer, secret), self._clients[issuer].client_id
        person = await self._verifier.verify_id_token(issuer, token, client, nonce)
        tenant = secret.rpartition(".")[2]
        return await self._member(person, tenant, origin), person.is_operator

    def _issuer_of(self, secret: str, callback: Callback) -> str:
        """Return the issuer whose answer this browser awaits. Raises SignInRefused."""
        ends = secret.partition(".")[0]
        if ends.isascii() and ends.isdigit() and int(ends[:15]) > self._database.now() // SECOND:
            for issuer in self._clients:
                is_its = hmac.compare_digest(self._mac("state", issuer, secret).encode(), callback.state.encode())
                if is_its and callback.issuer in (None, issuer):
                    return issuer
        raise SignInExpired("this browser has not begun that sign-in, or too long ago")

    async def _redeem(self, issuer: str, code: str, verifier: str) -> str:
        """Exchange the code for an ID token, server to server. Raises SignInRefused."""
        client, secret = self._clients[issuer], self._secrets[issuer]
        form = {
            "grant_type": "authorization_code",
            "code": code,
            "redirect_uri": self._url + CALLBACK,
            "code_verifier": verifier,
            "client_id": client.client_id,
        }
        headers = {"Accept": "application/json"}
        if secret is not None:
            pair = f"{quote(client.client_id, safe='')}:{quote(secret, safe='')}"  # RFC 6749, 2.3.1
            headers["Authorization"] = f"Basic {base64.b64encode(pair.encode()).decode()}"
        url = await self._endpoint(issuer, "token_endpoint")
        try:
            async with self._http.stream("POST", url, data=form, headers=headers) as response:
                if response.is_server_error:
                    response.raise_for_status()
                answer = await json_object(response)
        except (httpx.HTTPError, httpx.InvalidURL, ValueError, TypeError, RecursionError) as error:
            raise _unreachable(issuer, error) from error
        token = answer.get("id_token")
        if response.status_code != httpx.codes.OK or not isinstance(token, str):
            logger.warning("%s refused a sign-in's code: %d %s", issuer, response.status_code, str(answer)[:300])
            raise SignInRefused("the identity provider did not accept the sign-in's code")
        return token

    async def _member(self, person: Person, tenant: str, origin: Origin) -> Principal:
        """Return the person as a member of `tenant` or, if the person is a member of only one tenant, of that tenant.
        Raises SignInRefused, TenantSuspended.
        """
        async with self._database.read() as session:
            found = await CredentialRepository(session).person(person.issuer, person.subject, DEFAULT_PROJECT)
        chosen = [one for one in found if tenant in ("", one.tenant_name)]
        if not chosen:
            logger.warning("%r of %s signed in, and is no member of any tenant", person.subject[:200], person.issuer)
            raise NotAMember("no tenant here has you as a member")
        if len(chosen) > 1:
            raise SeveralTenants(person.issuer, [one.tenant_name for one in chosen])
        return principal_of_member(chosen[0], is_operator=person.is_operator, origin=origin)

    async def _endpoint(self, issuer: str, name: str) -> str:
        try:
            return (await self._verifier.endpoints(issuer))[name]
        except (IssuerUnreachable, KeyError) as error:
            raise _unreachable(issuer, error) from error

    def _mac(self, purpose: str, issuer: str, secret: str) -> str:
        digest = hmac.digest(self._pepper, f"sign-in {purpose}\0{issuer}\0{secret}".encode(), hashlib.sha256)
        return base64.urlsafe_b64encode(digest).rstrip(b"=").decode()


def _challenge(verifier: str) -> str:
    return base64.urlsafe_b64encode(hashlib.sha256(verifier.encode()).digest()).rstrip(b"=").decode()


def _unreachable(issuer: str, error: Exception) -> IssuerDown:
    logger.warning("sign-in at %s: %s: %s", issuer, type(error).__name__, str(error)[:300])
    return IssuerDown("the identity provider does not answer; try again in a moment")


def _secret_of(issuer: str, client: SignInSettings) -> str | None:
    if client.secret_file is None:
        return None
    where = f"issuers.{issuer}.sign_in.secret_file: {client.secret_file}"
    try:
        secret = Path(client.secret_file).read_text().strip()
    except (OSError, UnicodeDecodeError) as error:
        raise SettingsError(f"{where} cannot be read: {error}") from None
    if not secret:
        raise SettingsError(f"{where} is empty")
    return secret
