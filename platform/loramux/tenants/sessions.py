"""Sessions of the web console: a key or a member signs in once, and a cookie's secret stands for it.

A session copies no rights. On each request its key or member is looked up as if it had come itself, so that a revoked
key, a removed member and a suspended tenant end the session with the same answer. Only a MAC of the secret is stored.
"""

from __future__ import annotations

import base64
import hashlib
import hmac
import secrets

import msgspec

from loramux.records import Database, Origin, Principal
from loramux.records.identity import is_name, new_id
from loramux.records.keys import CredentialRepository
from loramux.records.sessions import SessionRepository, SessionRow
from loramux.settings import ConsoleSettings
from loramux.tenants.audit import Changes
from loramux.tenants.authentication import principal_of_key, principal_of_member
from loramux.tenants.authority import TENANT_SCOPES, actor_of, closure, operator_of
from loramux.tenants.errors import InvalidKey, NotPermitted, StillNeeded, TenantNotFound
from loramux.tenants.keys import DEFAULT_PROJECT
from loramux.units import MINUTE, SECOND

SESSION, LINK = "session", "link"
LINK_SECONDS = 3600
MAX_OF_HOLDER = 200
"""Sessions and links of one key or member."""
MAX_VIEWED = 50
FIELD = "session"
VIEWING_SCOPES = closure(TENANT_SCOPES - {"inference"})
"""What an operator sees of a tenant: all but answers, which would be billed to it."""


class Session(msgspec.Struct, frozen=True, kw_only=True):
    """A session under way."""

    id: str
    principal: Principal
    created_at: int
    ends_at: int
    """The time at which it ends however much it is used."""
    viewed: tuple[str, ...]
    """Tenants that its operator has chosen to look at."""


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

        It ends with the key that opened it, if that is earlier.
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
        """Use a sign-in link up, and return the key that it stands for. Raises InvalidKey, TenantSuspended."""
        async with self._database.begin() as session:
            row = await SessionRepository(session).take(self._mac(secret), LINK)
        if row is None or row.expires_at <= self._database.now():
            raise InvalidKey("this sign-in link was used already or has expired; make a new one, or use a key", FIELD)
        return await self._principal(row, origin)

    async def find(self, secret: str, origin: Origin) -> Session:
        """Return the session of this secret. Raises InvalidKey for one that has ended, and TenantSuspended."""
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
        """Let an operator look at a tenant's pages, read-only; the tenant's audit log says so.

        Raises TenantNotFound, and StillNeeded for too many.
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
            await change.note("session.view", found[0].id, tenant=found[0].id, after=note)
        return msgspec.structs.replace(session, viewed=viewed)

    async def principal_viewing(self, session: Session, tenant: str) -> Principal:
        """Return the operator as it looks at a tenant, which `view` has allowed. Raises NotPermitted."""
        if "operator" not in session.principal.scopes or tenant not in session.viewed:
            raise NotPermitted("open the tenant's pages first; the tenant's audit log shows that you did", "tenant")
        async with self._database.read() as database:
            found = await SessionRepository(database).tenant(tenant, DEFAULT_PROJECT)
        if found is None:
            raise TenantNotFound(f"there is no tenant {tenant[:80]!r}", "tenant")
        owner, tier, project = found
        return Principal(
            tenant=owner.id,
            tenant_name=owner.name,
            key_id=session.principal.key_id,
            scopes=VIEWING_SCOPES,
            project=project.id,
            tier=tier.name,
            service_class=tier.service_class,
            weight=tier.weight,
            zero_retention=owner.zero_retention,
            origin=session.principal.origin,
            lineage=session.principal.lineage,
        )

    def csrf_token(self, secret: str) -> str:
        """Return what a page sends beside the cookie to show that it is the console's own."""
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
