"""loramux project, member and audit."""

from __future__ import annotations

from datetime import UTC, datetime
from pathlib import Path

import click

from loramux.tenants import AuditEntry, Member, Role, Tenants
from loramux_api.cli.house import day, tenant_option, with_account, with_tenants
from loramux_api.cli.options import config_option, json_option, put


@click.group()
def project() -> None:
    """A tenant's projects, for limits and for the bill.

    \b
    Example:
      loramux project create web --tenant acme --config configs/single-node.toml
    """


@project.command("create")
@click.argument("name")
@tenant_option
@config_option()
@json_option
def create_project(name: str, tenant_name: str, config: Path, as_json: bool) -> None:
    """Make the project NAME; one that was archived comes back.

    \b
    Example:
      loramux project create web --tenant acme --config configs/single-node.toml
    """
    made = with_account(config, tenant_name, lambda account: account.projects.create(name))
    put(as_json, made, f"Project {made.name} ({made.id}) is there.")


@project.command("ls")
@tenant_option
@config_option()
@json_option
def list_projects(tenant_name: str, config: Path, as_json: bool) -> None:
    """List a tenant's projects.

    \b
    Example:
      loramux project ls --tenant acme --config configs/single-node.toml
    """
    found = with_account(config, tenant_name, lambda account: account.projects.all())
    put(as_json, found, "\n".join(f"{one.id}\t{one.name}\tarchived {day(one.archived_at)}" for one in found))


@project.command("archive")
@click.argument("name")
@tenant_option
@config_option()
@json_option
def archive_project(name: str, tenant_name: str, config: Path, as_json: bool) -> None:
    """No new keys for the project NAME; those that it has go on until they are revoked.

    \b
    Example:
      loramux project archive web --tenant acme --config configs/single-node.toml
    """
    put(
        as_json,
        with_account(config, tenant_name, lambda account: account.projects.archive(name)),
        f"Project {name} is archived.",
    )


@click.group()
def member() -> None:
    """A tenant's people, who come with tokens of an OIDC issuer.

    \b
    Example:
      loramux member add --tenant acme --issuer https://id.example --subject alice --role owner --config FILE
    """


@member.command("add")
@tenant_option
@click.option("--issuer", required=True, help="As its tokens have it in `iss`.")
@click.option("--subject", required=True, help="What the issuer calls the person.")
@click.option("--role", type=click.Choice([role.value for role in Role]), required=True, help="What the person may do.")
@config_option()
@json_option
def add_member(tenant_name: str, issuer: str, subject: str, role: str, config: Path, as_json: bool) -> None:
    """Let a person in.

    \b
    Example:
      loramux member add --tenant acme --issuer https://id.example --subject alice --role owner --config FILE
    """
    made = with_account(config, tenant_name, lambda account: account.members.add(issuer, subject, role))
    put(as_json, made, _person(made))


@member.command("ls")
@tenant_option
@config_option()
@json_option
def list_members(tenant_name: str, config: Path, as_json: bool) -> None:
    """List a tenant's people.

    \b
    Example:
      loramux member ls --tenant acme --config configs/single-node.toml
    """
    found = with_account(config, tenant_name, lambda account: account.members.all())
    put(as_json, found, "\n".join(map(_person, found)) or f"{tenant_name} has no members; keys need none.")


@member.command("role")
@click.argument("member_id")
@tenant_option
@click.option("--role", type=click.Choice([role.value for role in Role]), required=True, help="The new one.")
@config_option()
@json_option
def change_role(member_id: str, tenant_name: str, role: str, config: Path, as_json: bool) -> None:
    """Give the member MEMBER_ID another role, from the next request on.

    \b
    Example:
      loramux member role member_0123456789abcdef01234567 --tenant acme --role billing --config FILE
    """
    changed = with_account(config, tenant_name, lambda account: account.members.change_role(member_id, role))
    put(as_json, changed, _person(changed))


@member.command("rm")
@click.argument("member_id")
@tenant_option
@config_option()
@json_option
def remove_member(member_id: str, tenant_name: str, config: Path, as_json: bool) -> None:
    """End the membership MEMBER_ID, at once. The last owner stays.

    \b
    Example:
      loramux member rm member_0123456789abcdef01234567 --tenant acme --config FILE
    """
    put(
        as_json,
        with_account(config, tenant_name, lambda account: account.members.remove(member_id)),
        f"Member {member_id} is gone.",
    )


@click.group()
def audit() -> None:
    """Who changed what, from where, before and after.

    \b
    Example:
      loramux audit ls --tenant acme --config configs/single-node.toml
    """


@audit.command("ls")
@click.option("--tenant", "tenant_name", help="Only what belongs to this one.")
@click.option("--before", type=click.IntRange(1), help="Only entries older than this sequence: the next page.")
@click.option("--limit", type=click.IntRange(1, 500), default=50, show_default=True, help="How many.")
@config_option()
@json_option
def list_audit(tenant_name: str | None, before: int | None, limit: int, config: Path, as_json: bool) -> None:
    """Read the log, newest first.

    \b
    Example:
      loramux audit ls --limit 20 --config configs/single-node.toml
    """

    async def act(tenants: Tenants) -> list[AuditEntry]:
        tenant = (await tenants.named(tenant_name)).id if tenant_name else None
        return await tenants.audit.read(tenant=tenant, before=before, limit=limit)

    found = with_tenants(config, act)
    put(as_json, found, "\n".join(map(_entry, found)) or "Nothing was changed yet.")


def _person(one: Member) -> str:
    return f"{one.id}\t{one.role}\t{one.subject}\t{one.issuer}"


def _entry(one: AuditEntry) -> str:
    at = datetime.fromtimestamp(one.at / 1e6, UTC).isoformat(timespec="seconds")
    return f"{one.sequence}\t{at}\t{one.actor}\t{one.source}\t{one.action}\t{one.object_id}"
