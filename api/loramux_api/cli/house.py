"""The operator's commands work straight on the database of --config, through the same services as the server."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from datetime import UTC, datetime
from pathlib import Path
from typing import TypeVar

import click

from loramux.tenants import Tenants
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


def day(microseconds: int | None) -> str:
    """A date for people; `-` where there is none."""
    return "-" if microseconds is None else datetime.fromtimestamp(microseconds / 1e6, UTC).date().isoformat()
