"""Authentication: a key, a token or the console's cookie becomes a Principal before the body is read.

Browsers send a cookie for any page that makes a request. So a cookie counts only if the request also proves that it
comes from a page of this server. The request's origin must be this server, and a change needs the session's CSRF token.
"""

from __future__ import annotations

import base64
from typing import Any

from litestar.connection import ASGIConnection
from litestar.handlers import BaseRouteHandler
from litestar.types import AsyncAnyCallable

from loramux.accounts.tenants.authentication import Credential
from loramux.accounts.tenants.authority import SCOPES
from loramux.accounts.tenants.errors import InvalidKey
from loramux.accounts.tenants.sessions import Session
from loramux.common.identity import Origin, Principal
from loramux.common.jobs import work_for
from loramux.server.platform import Platform
from loramux.serving.errors import NotAllowed
from loramux_api.bodies import SMALL_BODY_BYTES
from loramux_api.headers import FROM_CONSOLE, SESSION_COOKIE, cookie_name, traceable_id

Connection = ASGIConnection[Any, Any, Any, Any]

CSRF_HEADER = "x-csrf-token"
VIEW_HEADER = "x-view-tenant"
"""Header with the tenant that an operator looks at, read-only."""
KEY_HEADERS = ("x-api-key", "api-key")
"""Headers that contain only a key: Anthropic's clients send the first header, Azure's clients the second."""
SAFE_METHODS = ("GET", "HEAD", "OPTIONS")


def requires(scope: str, *others: str) -> AsyncAnyCallable:
    """Return a guard for routes: a valid key or token with `scope` or one of the `others`, on a server that is not
    being stopped.

    The caller's request rate is checked before a large body of an inference request is read; the request is counted at
    the admission. The handler finds the Principal in `request.auth`. Raises Draining, InvalidKey, TenantSuspended,
    NotAllowed or RateReached.
    """
    scopes, named = {scope, *others}, " or ".join(f"'{one}'" for one in (scope, *others))
    assert scopes <= SCOPES, f"no such scopes: {scopes - SCOPES}"

    async def guard(connection: Connection, _: BaseRouteHandler) -> None:
        platform = platform_of(connection)
        platform.completions.ensure_accepting()
        principal = await _authenticated(platform, connection)
        if not scopes & principal.scopes:
            raise NotAllowed(
                f"You lack the scope {named} (you have: {', '.join(sorted(principal.scopes))}). "
                "Use another key, or have one made with that scope; a member's role is an owner's to change.",
                code="insufficient_permissions",
            )
        if scope == "inference" and _has_large_body(connection):
            await platform.usage.ensure_rate(principal)
        connection.scope["auth"] = principal
        work_for(principal.tenant)

    guard.scope = scope  # type: ignore[attr-defined]  # read by tools that list the routes
    return guard


def platform_of(connection: Connection) -> Platform:
    """Return the platform that the application serves from."""
    platform = connection.app.state.platform
    assert isinstance(platform, Platform)
    return platform


def principal_of(request: Connection) -> Principal:
    """Return the caller. Only works on guarded routes."""
    assert isinstance(request.auth, Principal), "the route has no guard"
    return request.auth


async def session_of(connection: Connection) -> Session:
    """Return the console's session of the request's cookie. Raises InvalidKey, TenantSuspended, NotAllowed."""
    _ensure_own_page(connection)
    secret = connection.cookies.get(cookie_name(SESSION_COOKIE, connection), "")
    sessions = platform_of(connection).tenants.sessions
    session = await sessions.find(secret, origin_of(connection))
    if not _is_safe(connection) and not sessions.is_csrf_token(secret, connection.headers.get(CSRF_HEADER, "")):
        raise NotAllowed(
            f"The header {CSRF_HEADER} must have the session's token; reload the page.", code="csrf_token_invalid"
        )
    return session


def origin_of(connection: Connection) -> Origin:
    """Return the address and the request id, which the audit log records."""
    client = connection.client
    return Origin(client.host if client else "unknown", traceable_id(connection.scope))


def ensure_same_origin(connection: Connection) -> None:
    """Raise NotAllowed for a request from a page of another site."""
    _ensure_own_page(connection)
    origin = connection.headers.get("origin")
    if "sec-fetch-site" in connection.headers or origin is None:
        return
    if origin.partition("://")[2] != connection.headers.get("host"):
        raise NotAllowed("Only the console's own pages may sign in.", code="cross_site_request")


def _is_safe(connection: Connection) -> bool:
    """Return whether the request only reads."""
    return connection.scope.get("method") in SAFE_METHODS


def _ensure_own_page(connection: Connection) -> None:
    if connection.headers.get("sec-fetch-site", "none") not in ("same-origin", "none"):
        raise NotAllowed("Another site's page has sent this request.", code="cross_site_request")


async def _authenticated(platform: Platform, connection: Connection) -> Principal:
    """Return the caller by its key or token. If the request has neither, return the caller by the console's cookie."""
    has_key = any(header in connection.headers for header in ("authorization", *KEY_HEADERS))
    if has_key or cookie_name(SESSION_COOKIE, connection) not in connection.cookies:
        return await platform.tenants.authenticator.authenticate(_credential(connection))
    session = await session_of(connection)
    connection.scope[FROM_CONSOLE] = True  # type: ignore[literal-required]  # for the headers of its answer
    viewed = connection.headers.get(VIEW_HEADER)
    if viewed is None:
        return session.principal
    if not _is_safe(connection):
        raise NotAllowed(f"You look at {viewed[:80]}'s pages, and change nothing there.", code="read_only_view")
    return await platform.tenants.sessions.principal_viewing(session, viewed)


def _has_large_body(connection: Connection) -> bool:
    """Return whether the body is large, or its length is unknown."""
    length = connection.headers.get("content-length", "")
    return not length.isascii() or not length.isdigit() or int(length[:20]) > SMALL_BODY_BYTES


def _credential(connection: Connection) -> Credential:
    return Credential(
        secret=_secret(connection),
        organization=connection.headers.get("openai-organization"),
        project=connection.headers.get("openai-project"),
        origin=origin_of(connection),
    )


def _secret(connection: Connection) -> str:
    for header in KEY_HEADERS:
        if secret := connection.headers.get(header, "").strip():
            return secret
    scheme, _, secret = connection.headers.get("authorization", "").partition(" ")
    if scheme.lower() == "basic":
        secret = _password(secret)
    elif scheme.lower() != "bearer":
        secret = ""
    if not secret.strip():
        raise InvalidKey("You didn't provide an API key. Send it in the header 'Authorization: Bearer sk-lm-...'.")
    return secret.strip()


def _password(credentials: str) -> str:
    """Return the password of HTTP Basic credentials, or the user without a password, which is the key. Clients without
    a setting for a key send `https://anything:sk-lm-...@host` in this form.
    """
    try:
        user, _, password = base64.b64decode(credentials, validate=True).decode().partition(":")
    except ValueError:
        return ""
    return password or user
