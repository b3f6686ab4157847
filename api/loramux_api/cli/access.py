"""The commands `loramux key`, `member` and `audit`: access to the API, and the log of changes."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import click

from loramux.accounts.tenants.account import KeyRequest
from loramux.accounts.tenants.authority import CUSTOMER_SCOPES, SCOPES, Role
from loramux.accounts.tenants.entities import AuditEntry, Key, Member
from loramux.accounts.tenants.tenants import Tenants
from loramux.common.settings.file import load_settings
from loramux.common.units import SECONDS_PER_DAY
from loramux_api.cli.common import (
    CommandGroup,
    config_option,
    day,
    json_option,
    note,
    put,
    table,
    tenant_option,
    with_account,
    with_tenants,
)


@click.group(cls=CommandGroup)
def key() -> None:
    """Create, list, rotate and revoke API keys.

    \b
    Example:
      loramux key create --tenant acme --config configs/single-node.toml
    """


@key.command("create")
@tenant_option
@click.option("--name", default="default", show_default=True, help="Label of the key.")
@click.option("--project", default="default", show_default=True, help="Project of the key.")
@click.option(
    "--scope",
    "scopes",
    multiple=True,
    type=click.Choice(sorted(SCOPES)),
    help=f"Permission of the key; repeatable. Default: {', '.join(sorted(CUSTOMER_SCOPES))}.",
)
@click.option(
    "--model", "models", multiple=True, help="Allow only this model, TENANT/ADAPTER or the base's name; repeatable."
)
@click.option("--days", type=click.IntRange(1, 3650), help="Days until the key expires. Default: never.")
@config_option()
@json_option
def create_key(tenant_name: str, config: Path, as_json: bool, **wanted: Any) -> None:
    """Create a key and print it. The key is shown only once and not stored.

    stdout has the key alone, so that a script can store it.

    \b
    Example:
      export LORAMUX_API_KEY=$(loramux key create --tenant acme --config configs/single-node.toml)
    """
    made, secret = with_account(config, tenant_name, lambda account: account.keys.create(_request(**wanted)))
    note(as_json, f"A key for {tenant_name} ({', '.join(sorted(made.scopes))}). Store it now: it is not shown again.")
    _show(as_json, made, secret)


@key.command("replace-pepper")
@click.confirmation_option(prompt="Every API key becomes invalid, of every tenant. Continue?")
@config_option()
@json_option
def replace_pepper(config: Path, as_json: bool) -> None:
    """Make a new pepper if the old pepper is lost, and revoke every key.

    If there is a backup of the file, restore the backup instead: then every key stays valid. Stop all servers first.

    \b
    Example:
      loramux key replace-pepper --config configs/single-node.toml
    """
    from loramux.server.platform import renew_pepper

    revoked = asyncio.run(renew_pepper(load_settings(config)))
    put(as_json, {"revoked": revoked}, f"{revoked} keys are revoked. Make new ones with `loramux key create`.")


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
    put(as_json, found, _keys_table(found) or f"{tenant_name} has no keys yet.")


@key.command("rotate")
@click.argument("key_id")
@tenant_option
@click.option(
    "--overlap", type=click.IntRange(0), default=0, show_default=True, help="Seconds for which both keys are valid."
)
@config_option()
@json_option
def rotate_key(key_id: str, tenant_name: str, overlap: int, config: Path, as_json: bool) -> None:
    """Replace the key KEY_ID: print a new key once, and end the old key after the overlap.

    \b
    Example:
      loramux key rotate key_0123456789abcdef01234567 --tenant acme --overlap 3600 --config configs/single-node.toml
    """
    made, secret = with_account(config, tenant_name, lambda account: account.keys.rotate(key_id, overlap))
    note(as_json, f"{made.id} replaces {key_id}, which ends in {overlap} seconds. Store it now: it is not shown again.")
    _show(as_json, made, secret)


@key.command("revoke")
@click.argument("key_id")
@config_option()
@json_option
def revoke_key(key_id: str, config: Path, as_json: bool) -> None:
    """Revoke the key KEY_ID (see `loramux key ls`) at once. This cannot be undone.

    \b
    Example:
      loramux key revoke key_0123456789abcdef01234567 --config configs/single-node.toml
    """
    revoked = with_tenants(config, lambda tenants: tenants.revoke_key(key_id))
    put(as_json, revoked, f"Key {revoked.id} (...{revoked.hint}) is revoked.")


@click.group(cls=CommandGroup)
def member() -> None:
    """Manage a tenant's members, the people who log in with tokens of an OIDC issuer.

    \b
    Example:
      loramux member add --tenant acme --issuer https://id.example --subject alice --role owner --config FILE
    """


@member.command("add")
@tenant_option
@click.option("--issuer", required=True, help="Issuer, exactly as in the tokens' `iss`.")
@click.option("--subject", required=True, help="The person's identity at the issuer.")
@click.option("--role", type=click.Choice([role.value for role in Role]), required=True, help="Role in the tenant.")
@config_option()
@json_option
def add_member(tenant_name: str, issuer: str, subject: str, role: str, config: Path, as_json: bool) -> None:
    """Add a member.

    \b
    Example:
      loramux member add --tenant acme --issuer https://id.example --subject alice --role owner --config FILE
    """
    made = with_account(config, tenant_name, lambda account: account.members.add(issuer, subject, role))
    put(as_json, made, _members_table([made]))


@member.command("ls")
@tenant_option
@config_option()
@json_option
def list_members(tenant_name: str, config: Path, as_json: bool) -> None:
    """List a tenant's members.

    \b
    Example:
      loramux member ls --tenant acme --config configs/single-node.toml
    """
    found = with_account(config, tenant_name, lambda account: account.members.all())
    put(as_json, found, _members_table(found) or f"{tenant_name} has no members.")


@member.command("role")
@click.argument("member_id")
@tenant_option
@click.option("--role", type=click.Choice([role.value for role in Role]), required=True, help="The new role.")
@config_option()
@json_option
def change_role(member_id: str, tenant_name: str, role: str, config: Path, as_json: bool) -> None:
    """Change the role of the member MEMBER_ID, from the next request on.

    \b
    Example:
      loramux member role member_0123456789abcdef01234567 --tenant acme --role billing --config FILE
    """
    changed = with_account(config, tenant_name, lambda account: account.members.change_role(member_id, role))
    put(as_json, changed, _members_table([changed]))


@member.command("rm")
@click.argument("member_id")
@tenant_option
@config_option()
@json_option
def remove_member(member_id: str, tenant_name: str, config: Path, as_json: bool) -> None:
    """Remove the member MEMBER_ID at once. The last owner cannot be removed.

    \b
    Example:
      loramux member rm member_0123456789abcdef01234567 --tenant acme --config FILE
    """
    put(
        as_json,
        with_account(config, tenant_name, lambda account: account.members.remove(member_id)),
        f"Member {member_id} is removed.",
    )


@click.group(cls=CommandGroup)
def audit() -> None:
    """Read the audit log: each change with its author, source, and the values before and after.

    \b
    Example:
      loramux audit ls --tenant acme --config configs/single-node.toml
    """


@audit.command("ls")
@click.option("--tenant", "tenant_name", help="Only this tenant's entries.")
@click.option("--before", type=click.IntRange(1), help="Only entries before this sequence number (the next page).")
@click.option("--limit", type=click.IntRange(1, 500), default=50, show_default=True, help="Number of entries.")
@config_option()
@json_option
def list_audit(tenant_name: str | None, before: int | None, limit: int, config: Path, as_json: bool) -> None:
    """List the log, newest first.

    \b
    Example:
      loramux audit ls --limit 20 --config configs/single-node.toml
    """

    async def act(tenants: Tenants) -> list[AuditEntry]:
        tenant = (await tenants.named(tenant_name)).id if tenant_name else None
        return await tenants.audit.read(tenant=tenant, before=before, limit=limit)

    found = with_tenants(config, act)
    put(as_json, found, _log_table(found) or "The log is empty.")


def _request(name: str, project: str, scopes: tuple[str, ...], models: tuple[str, ...], days: int | None) -> KeyRequest:
    return KeyRequest(
        name=name,
        scopes=frozenset(scopes) or CUSTOMER_SCOPES,
        project=project,
        models=frozenset(models) or None,
        expires_in=None if days is None else days * SECONDS_PER_DAY,
    )


def _show(as_json: bool, made: Key, secret: str) -> None:
    put(as_json, {"id": made.id, "tenant": made.tenant, "scopes": sorted(made.scopes), "key": secret}, secret)


def _keys_table(found: Iterable[Key]) -> str:
    return table(("id", "ends with", "name", "scopes", "made", "used", "state"), map(_key_row, found))


def _key_row(one: Key) -> tuple[str, ...]:
    state = "revoked" if one.revoked_at else f"ends {day(one.expires_at)}" if one.expires_at else "live"
    scopes = ",".join(sorted(one.scopes))
    return one.id, one.hint, one.name, scopes, day(one.created_at), day(one.last_used_at), state


def _members_table(found: Iterable[Member]) -> str:
    return table(("id", "role", "subject", "issuer"), [(one.id, one.role, one.subject, one.issuer) for one in found])


def _log_table(found: Iterable[AuditEntry]) -> str:
    rows = [
        (one.sequence, f"{at:%Y-%m-%dT%H:%M:%SZ}", one.actor, one.source, one.action, one.object_id)
        for one in found
        for at in [datetime.fromtimestamp(one.at / 1e6, UTC)]
    ]
    return table(("number", "time", "by", "from", "action", "object"), rows)
