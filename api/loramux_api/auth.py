"""Who is asking: a key becomes a Principal before anything of the request is read."""

from __future__ import annotations

from typing import Any, Literal

from litestar.connection import ASGIConnection
from litestar.handlers import BaseRouteHandler
from litestar.types import AsyncAnyCallable

from loramux.gateway import Platform
from loramux.tenants import InvalidKey, Principal
from loramux_api.problems import Forbidden

ApiScope = Literal["inference", "adapters", "usage"]
Connection = ASGIConnection[Any, Any, Any, Any]


def requires(scope: ApiScope) -> AsyncAnyCallable:
    """A guard for routes: a valid key whose scopes contain `scope`, on a server that is not being stopped.

    Raises Draining, InvalidKey or Forbidden. The handler finds the Principal in `request.auth`.
    """

    async def guard(connection: Connection, _: BaseRouteHandler) -> None:
        platform = platform_of(connection)
        platform.completions.demand_accepting()
        principal = await platform.tenants.authenticate(_secret(connection))
        if scope not in principal.scopes:
            raise Forbidden(
                f"This key lacks the scope '{scope}' (it has: {', '.join(sorted(principal.scopes))}). "
                "Use another key, or have one made with that scope.",
                code="insufficient_permissions",
            )
        connection.scope["auth"] = principal

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


def _secret(connection: Connection) -> str:
    scheme, _, secret = connection.headers.get("authorization", "").partition(" ")
    if scheme.lower() != "bearer" or not secret.strip():
        raise InvalidKey("You did not provide an API key: send it in the header 'Authorization: Bearer sk-lm-...'.")
    return secret.strip()
