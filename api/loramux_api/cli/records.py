"""loramux migrate, tenant and key: the operator's commands, straight on the database of --config."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from datetime import UTC, datetime
from pathlib import Path
from typing import TypeVar

import click

from loramux.settings import Settings
from loramux.tenants import CUSTOMER_SCOPES, SCOPES, Key, TenantNotFound, Tenants
from loramux_api.cli.options import config_option, json_option, note, put, settings_of

T = TypeVar("T")


@click.command()
@config_option()
@json_option
def migrate(config: Path, as_json: bool) -> None:
    """Bring the database to this release's schema.

    Only PostgreSQL needs this, once after each upgrade and before the servers start; SQLite is migrated by itself.
    Run a second time it changes nothing.

    \b
    Example:
      loramux migrate --config configs/production.toml
    """
    from loramux.gateway import migrate as run

    revision = run(settings_of(config))
    put(as_json, {"revision": revision}, f"The database is at schema {revision}.")


@click.group()
def tenant() -> None:
    """Make and list tenants (customers).

    A tenant owns its adapters, keys and usage; no other tenant sees any of them.

    \b
    Example:
      loramux tenant create acme --config configs/single-node.toml
    """


@tenant.command("create")
@click.argument("name")
@config_option()
@json_option
def create_tenant(name: str, config: Path, as_json: bool) -> None:
    """Make the tenant NAME: a-z, 0-9, '.', '_' and '-'.

    Its adapters will be called NAME/something.

    \b
    Example:
      loramux tenant create acme --config configs/single-node.toml
    """
    made = _with_tenants(settings_of(config), lambda tenants: tenants.create(name))
    put(as_json, made, f"Tenant {made.name} is there. Next: loramux key create --tenant {made.name} --config {config}")


@tenant.command("ls")
@config_option()
@json_option
def list_tenants(config: Path, as_json: bool) -> None:
    """List the tenants.

    \b
    Example:
      loramux tenant ls --config configs/single-node.toml
    """
    found = _with_tenants(settings_of(config), lambda tenants: tenants.list_tenants())
    put(as_json, found, "\n".join(f"{one.name}\tsince {_day(one.created_at)}" for one in found) or "No tenants yet.")


@click.group()
def key() -> None:
    """Make, list and revoke API keys.

    \b
    Example:
      loramux key create --tenant acme --config configs/single-node.toml
    """


@key.command("create")
@click.option("--tenant", "tenant_name", required=True, help="Whose key it is.")
@click.option("--name", default="default", show_default=True, help="A label to tell keys apart.")
@click.option(
    "--scope",
    "scopes",
    multiple=True,
    type=click.Choice(sorted(SCOPES)),
    help=f"What the key may do; give it several times. Default: {', '.join(sorted(CUSTOMER_SCOPES))}.",
)
@config_option()
@json_option
def create_key(tenant_name: str, name: str, scopes: tuple[str, ...], config: Path, as_json: bool) -> None:
    """Make a key and print it, this once: it is stored nowhere.

    The key alone goes to stdout, so that a script can keep it.

    \b
    Example:
      export LORAMUX_API_KEY=$(loramux key create --tenant acme --config configs/single-node.toml)
    """
    made, secret = _with_tenants(
        settings_of(config),
        lambda tenants: tenants.create_key(tenant_name, name=name, scopes=scopes or CUSTOMER_SCOPES),
    )
    note(as_json, f"A key for {tenant_name} ({', '.join(sorted(made.scopes))}). Keep it: it is not shown again.")
    put(as_json, {"id": made.id, "tenant": tenant_name, "scopes": sorted(made.scopes), "key": secret}, secret)


@key.command("ls")
@click.option("--tenant", "tenant_name", required=True, help="Whose keys.")
@config_option()
@json_option
def list_keys(tenant_name: str, config: Path, as_json: bool) -> None:
    """List a tenant's keys, by id and last four characters.

    \b
    Example:
      loramux key ls --tenant acme --config configs/single-node.toml
    """
    found = _with_tenants(settings_of(config), lambda tenants: _keys_of(tenants, tenant_name))
    put(as_json, found, "\n".join(map(_line, found)) or f"{tenant_name} has no keys yet.")


@key.command("revoke")
@click.argument("key_id")
@config_option()
@json_option
def revoke_key(key_id: str, config: Path, as_json: bool) -> None:
    """End the key KEY_ID (see `loramux key ls`), at once and for good.

    \b
    Example:
      loramux key revoke key_0123456789abcdef01234567 --config configs/single-node.toml
    """
    revoked = _with_tenants(settings_of(config), lambda tenants: tenants.revoke_key(key_id))
    put(as_json, revoked, f"Key {revoked.id} (...{revoked.hint}) is revoked.")


async def _keys_of(tenants: Tenants, tenant_name: str) -> list[Key]:
    found = [one for one in await tenants.list_tenants() if one.name == tenant_name]
    if not found:
        raise TenantNotFound(f"there is no tenant {tenant_name[:80]!r}; create it first", "tenant")
    return await tenants.list_keys(found[0].id)


def _with_tenants(settings: Settings, act: Callable[[Tenants], Awaitable[T]]) -> T:
    from loramux.gateway import open_tenants

    async def run() -> T:
        async with open_tenants(settings) as tenants:
            return await act(tenants)

    return asyncio.run(run())


def _line(one: Key) -> str:
    state = "revoked" if one.revoked_at else "live"
    return f"{one.id}\t...{one.hint}\t{one.name}\t{','.join(sorted(one.scopes))}\t{_day(one.created_at)}\t{state}"


def _day(microseconds: int) -> str:
    return datetime.fromtimestamp(microseconds / 1e6, UTC).date().isoformat()
