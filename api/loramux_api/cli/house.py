"""The operator's commands work straight on the database of --config, through the same services as the server."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from datetime import UTC, datetime
from pathlib import Path
from typing import TypeVar

import click

from loramux.limits import Limits
from loramux.tenants import Account, Tenant, Tenants
from loramux_api.cli.options import settings_of

T = TypeVar("T")

tenant_option = click.option("--tenant", "tenant_name", required=True, help="Whose.")


def with_tenants(config: Path, act: Callable[[Tenants], Awaitable[T]]) -> T:
    """Open the records of `config`, act, and close them."""
    from loramux.gateway import open_tenants

    settings = settings_of(config)

    async def run() -> T:
        async with open_tenants(settings) as tenants:
            return await act(tenants)

    return asyncio.run(run())


def with_account(config: Path, tenant_name: str, act: Callable[[Account], Awaitable[T]]) -> T:
    """The same with one tenant's keys, projects and members. Raises TenantNotFound."""

    async def found(tenants: Tenants) -> T:
        return await act(await tenants.account(tenant_name))

    return with_tenants(config, found)


def with_limits(config: Path, tenant_name: str, act: Callable[[Limits, Tenant], Awaitable[T]]) -> T:
    """The same with one tenant and its limits. Raises TenantNotFound."""

    async def found(tenants: Tenants) -> T:
        return await act(Limits(tenants.changes), await tenants.named(tenant_name))

    return with_tenants(config, found)


def day(microseconds: int | None) -> str:
    """A date for people; `-` where there is none."""
    return "-" if microseconds is None else datetime.fromtimestamp(microseconds / 1e6, UTC).date().isoformat()
