"""The dependencies of handlers: what a handler names as a parameter, it gets from here."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from litestar import Request
from litestar.di import Provide

from loramux.gateway import Platform
from loramux.limits import Limits
from loramux.tenants import Account, Principal, Tenants
from loramux.webhooks import Endpoints
from loramux_api.auth import platform_of, principal_of
from loramux_api.inference import inference
from loramux_api.services import services_of

AnyRequest = Request[Any, Any, Any]


def platform(request: AnyRequest) -> Platform:
    """The open platform."""
    return platform_of(request)


def principal(request: AnyRequest) -> Principal:
    """The caller, on guarded routes."""
    return principal_of(request)


def account(request: AnyRequest) -> Account:
    """The caller's own tenant, to look at and to change."""
    return platform_of(request).tenants.account_of(principal_of(request))


def limits(request: AnyRequest) -> Limits:
    """Limits and budgets, changed as the caller."""
    return Limits(platform_of(request).tenants.changes_by(principal_of(request)))


def endpoints(request: AnyRequest) -> Endpoints:
    """The caller's webhook endpoints."""
    platform, caller = platform_of(request), principal_of(request)
    return platform.webhooks.endpoints(platform.tenants.changes_by(caller), caller)


def operators(request: AnyRequest) -> Tenants:
    """Every tenant. Raises NotAllowed unless the caller is an operator."""
    return platform_of(request).tenants.as_operator(principal_of(request))


def _part(of: Callable[[AnyRequest], object], name: str) -> Callable[[AnyRequest], Any]:
    def part(request: AnyRequest) -> Any:
        return getattr(of(request), name)

    return part


OF_SERVICES = ("batches", "files", "evaluations", "guards", "shadows", "policies", "migrations", "revision_metrics")
PROVIDERS: dict[str, Callable[..., Any]] = {
    "platform": platform,
    **{provider.__name__: provider for provider in (principal, inference, account, limits, endpoints, operators)},
    **{name: _part(platform_of, name) for name in ("completions", "uploads", "adapters")},
    **{name: _part(services_of, name) for name in OF_SERVICES},
}
DEPENDENCIES = {name: Provide(provider, sync_to_thread=False) for name, provider in PROVIDERS.items()}
