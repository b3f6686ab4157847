"""loramux key."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click

from loramux.tenants import CUSTOMER_SCOPES, SCOPES, Key, KeyRequest
from loramux_api.cli.house import day, tenant_option, with_account, with_tenants
from loramux_api.cli.options import config_option, json_option, note, put

DAY = 86_400


@click.group()
def key() -> None:
    """Make, list, rotate and revoke API keys.

    \b
    Example:
      loramux key create --tenant acme --config configs/single-node.toml
    """


@key.command("create")
@tenant_option
@click.option("--name", default="default", show_default=True, help="A label to tell keys apart.")
@click.option("--project", default="default", show_default=True, help="The tenant's project that it belongs to.")
@click.option(
    "--scope",
    "scopes",
    multiple=True,
    type=click.Choice(sorted(SCOPES)),
    help=f"What the key may do; give it several times. Default: {', '.join(sorted(CUSTOMER_SCOPES))}.",
)
@click.option("--model", "models", multiple=True, help="Allow these models only: tenant/adapter, or the base's name.")
@click.option("--days", type=click.IntRange(1, 3650), help="The key ends after so many days. Default: never.")
@config_option()
@json_option
def create_key(tenant_name: str, config: Path, as_json: bool, **wanted: Any) -> None:
    """Make a key and print it, this once: it is stored nowhere.

    The key alone goes to stdout, so that a script can keep it.

    \b
    Example:
      export LORAMUX_API_KEY=$(loramux key create --tenant acme --config configs/single-node.toml)
    """
    made, secret = with_account(config, tenant_name, lambda account: account.keys.create(_request(**wanted)))
    note(as_json, f"A key for {tenant_name} ({', '.join(sorted(made.scopes))}). Keep it: it is not shown again.")
    _show(as_json, made, secret)


@key.command("ls")
@tenant_option
@config_option()
@json_option
def list_keys(tenant_name: str, config: Path, as_json: bool) -> None:
    """List a tenant's keys, by id and last four characters.

    \b
    Example:
      loramux key ls --tenant acme --config configs/single-node.toml
    """
    found = with_account(config, tenant_name, lambda account: account.keys.all())
    put(as_json, found, "\n".join(map(_line, found)) or f"{tenant_name} has no keys yet.")


@key.command("rotate")
@click.argument("key_id")
@tenant_option
@click.option("--overlap", type=click.IntRange(0), default=0, show_default=True, help="Seconds that both are good.")
@config_option()
@json_option
def rotate_key(key_id: str, tenant_name: str, overlap: int, config: Path, as_json: bool) -> None:
    """Make a key like KEY_ID, print it this once, and end the old one after the overlap.

    \b
    Example:
      loramux key rotate key_0123456789abcdef01234567 --tenant acme --overlap 3600 --config configs/single-node.toml
    """
    made, secret = with_account(config, tenant_name, lambda account: account.keys.rotate(key_id, overlap))
    note(as_json, f"{made.id} takes the place of {key_id}, which ends in {overlap} seconds. It is not shown again.")
    _show(as_json, made, secret)


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
    revoked = with_tenants(config, lambda tenants: tenants.revoke_key(key_id))
    put(as_json, revoked, f"Key {revoked.id} (...{revoked.hint}) is revoked.")


def _request(name: str, project: str, scopes: tuple[str, ...], models: tuple[str, ...], days: int | None) -> KeyRequest:
    return KeyRequest(
        name=name,
        scopes=frozenset(scopes) or CUSTOMER_SCOPES,
        project=project,
        models=frozenset(models) or None,
        expires_in=None if days is None else days * DAY,
    )


def _show(as_json: bool, made: Key, secret: str) -> None:
    put(as_json, {"id": made.id, "tenant": made.tenant, "scopes": sorted(made.scopes), "key": secret}, secret)


def _line(one: Key) -> str:
    state = "revoked" if one.revoked_at else f"ends {day(one.expires_at)}" if one.expires_at else "live"
    scopes = ",".join(sorted(one.scopes))
    return (
        f"{one.id}\t...{one.hint}\t{one.name}\t{scopes}\t{day(one.created_at)}\tused {day(one.last_used_at)}\t{state}"
    )
