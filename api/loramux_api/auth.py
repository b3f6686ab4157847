"""Who is asking: a key becomes a Principal before anything of the request is read."""

from __future__ import annotations

from typing import Any

from litestar.connection import ASGIConnection
from litestar.handlers import BaseRouteHandler
from litestar.types import AsyncAnyCallable

from loramux.gateway import Platform
from loramux.tenants import SCOPES, Credential, InvalidKey, Origin, Principal
from loramux_api.problems import Forbidden
from loramux_api.request_ids import request_id

Connection = ASGIConnection[Any, Any, Any, Any]


def requires(scope: str) -> AsyncAnyCallable:
    """A guard for routes: a valid key or token whose scopes contain `scope`, on a server that is not being stopped.

    Raises Draining, InvalidKey, TenantSuspended or Forbidden. The handler finds the Principal in `request.auth`.
    """
    assert scope in SCOPES, f"no such scope: {scope}"

    async def guard(connection: Connection, _: BaseRouteHandler) -> None:
        platform = platform_of(connection)
        platform.completions.demand_accepting()
        principal = await platform.tenants.authenticate(_credential(connection))
        if scope not in principal.scopes:
            raise Forbidden(
                f"You lack the scope '{scope}' (you have: {', '.join(sorted(principal.scopes))}). "
                "Use another key, or have one made with that scope; a member's role is an owner's to change.",
                code="insufficient_permissions",
            )
        connection.scope["auth"] = principal

    guard.scope = scope  # type: ignore[attr-defined]  # for who lists the routes and what they ask
    return guard


def platform_of(connection: Connection) -> Platform:
    """The house that the application serves from."""
    platform = connection.app.state.platform
    assert isinstance(platform, Platform)
    return platform


def principal_of(request: Connection) -> Principal:
    """Who is asking; only on guarded routes."""
    assert isinstance(request.auth, Principal), "the route has no guard"
    return request.auth


def _credential(connection: Connection) -> Credential:
    client = connection.client
    return Credential(
        secret=_secret(connection),
        organization=connection.headers.get("openai-organization"),
        project=connection.headers.get("openai-project"),
        origin=Origin(client.host if client else "unknown", request_id(connection.scope)),
    )


def _secret(connection: Connection) -> str:
    scheme, _, secret = connection.headers.get("authorization", "").partition(" ")
    if scheme.lower() != "bearer" or not secret.strip():
        raise InvalidKey("You did not provide an API key: send it in the header 'Authorization: Bearer sk-lm-...'.")
    return secret.strip()
