"""Authentication: a key becomes a Principal before the body is read."""

from __future__ import annotations

from typing import Any

from litestar.connection import ASGIConnection
from litestar.handlers import BaseRouteHandler
from litestar.types import AsyncAnyCallable

from loramux.gateway import NotAllowed, Platform
from loramux.tenants import SCOPES, Credential, InvalidKey, Origin, Principal
from loramux_api.bodies import SMALL_BODY_BYTES
from loramux_api.headers import traceable_id

Connection = ASGIConnection[Any, Any, Any, Any]


def requires(scope: str) -> AsyncAnyCallable:
    """Return a guard for routes: a valid key or token with `scope`, on a server that is not being stopped.

    Before a large body of an inference request is read, the caller's requests by the minute are checked; they are
    counted at the admission. The handler finds the Principal in `request.auth`. Raises Draining, InvalidKey,
    TenantSuspended, NotAllowed or RateReached.
    """
    assert scope in SCOPES, f"no such scope: {scope}"

    async def guard(connection: Connection, _: BaseRouteHandler) -> None:
        platform = platform_of(connection)
        platform.completions.ensure_accepting()
        principal = await platform.tenants.authenticate(_credential(connection))
        if scope not in principal.scopes:
            raise NotAllowed(
                f"You lack the scope '{scope}' (you have: {', '.join(sorted(principal.scopes))}). "
                "Use another key, or have one made with that scope; a member's role is an owner's to change.",
                code="insufficient_permissions",
            )
        if scope == "inference" and _has_large_body(connection):
            await platform.usage.ensure_rate(principal)
        connection.scope["auth"] = principal

    guard.scope = scope  # type: ignore[attr-defined]  # read by tools that list the routes
    return guard


def platform_of(connection: Connection) -> Platform:
    """Return the platform that the application serves from."""
    platform = connection.app.state.platform
    assert isinstance(platform, Platform)
    return platform


def principal_of(request: Connection) -> Principal:
    """Return the caller; only on guarded routes."""
    assert isinstance(request.auth, Principal), "the route has no guard"
    return request.auth


def _has_large_body(connection: Connection) -> bool:
    """Return whether the body is large, or of a length that is not known."""
    length = connection.headers.get("content-length", "")
    return not length.isascii() or not length.isdigit() or int(length[:20]) > SMALL_BODY_BYTES


def _credential(connection: Connection) -> Credential:
    client = connection.client
    return Credential(
        secret=_secret(connection),
        organization=connection.headers.get("openai-organization"),
        project=connection.headers.get("openai-project"),
        origin=Origin(client.host if client else "unknown", traceable_id(connection.scope)),
    )


def _secret(connection: Connection) -> str:
    if secret := connection.headers.get("x-api-key", "").strip():  # Anthropic's clients
        return secret
    scheme, _, secret = connection.headers.get("authorization", "").partition(" ")
    if scheme.lower() != "bearer" or not secret.strip():
        raise InvalidKey("You didn't provide an API key. Send it in the header 'Authorization: Bearer sk-lm-...'.")
    return secret.strip()
