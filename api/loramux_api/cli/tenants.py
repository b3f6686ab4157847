"""loramux tenant, tier and project."""

from __future__ import annotations

from pathlib import Path

import click

from loramux.tenants import ALLOWED_AT_FIRST, CHOSEN, SERVICE_CLASSES, Tenant
from loramux_api.cli.common import config_option, day, json_option, put, tenant_option, with_account, with_tenants


@click.group()
def tenant() -> None:
    """Create, list, move and suspend tenants (customers).

    A tenant owns its adapters, keys and usage; no other tenant sees any of them.

    \b
    Example:
      loramux tenant create acme --config configs/single-node.toml
    """


@tenant.command("create")
@click.argument("name")
@click.option("--tier", default="standard", show_default=True, help="Its tier; `loramux tier ls` lists them.")
@config_option()
@json_option
def create_tenant(name: str, tier: str, config: Path, as_json: bool) -> None:
    """Create the tenant NAME, which consists of a-z, 0-9, '.', '_' and '-'.

    Its adapters are called NAME/ADAPTER. It starts with one project, `default`.

    \b
    Example:
      loramux tenant create acme --config configs/single-node.toml
    """
    made = with_tenants(config, lambda tenants: tenants.create(name, tier))
    put(
        as_json, made, f"Tenant {made.name} is created. Next: loramux key create --tenant {made.name} --config {config}"
    )


@tenant.command("ls")
@config_option()
@json_option
def list_tenants(config: Path, as_json: bool) -> None:
    """List the tenants.

    \b
    Example:
      loramux tenant ls --config configs/single-node.toml
    """
    found = with_tenants(config, lambda tenants: tenants.list_tenants())
    put(as_json, found, "\n".join(map(_line, found)) or "No tenants yet.")


@tenant.command("move")
@click.argument("name")
@click.option("--tier", required=True, help="The new tier.")
@config_option()
@json_option
def move_tenant(name: str, tier: str, config: Path, as_json: bool) -> None:
    """Move the tenant NAME to another tier, from its next request on.

    \b
    Example:
      loramux tenant move acme --tier interactive --config configs/single-node.toml
    """
    moved = with_tenants(config, lambda tenants: tenants.move(name, tier))
    put(as_json, moved, _line(moved))


@tenant.command("suspend")
@click.argument("name")
@config_option()
@json_option
def suspend_tenant(name: str, config: Path, as_json: bool) -> None:
    """Refuse every request of the tenant NAME from now on. Nothing is deleted.

    \b
    Example:
      loramux tenant suspend acme --config configs/single-node.toml
    """
    changed = with_tenants(config, lambda tenants: tenants.suspend(name))
    put(as_json, changed, _line(changed))


@tenant.command("resume")
@click.argument("name")
@config_option()
@json_option
def resume_tenant(name: str, config: Path, as_json: bool) -> None:
    """Serve the suspended tenant NAME again.

    \b
    Example:
      loramux tenant resume acme --config configs/single-node.toml
    """
    changed = with_tenants(config, lambda tenants: tenants.resume(name))
    put(as_json, changed, _line(changed))


@tenant.command("zero-retention")
@click.argument("name")
@click.option("--on/--off", "zero_retention", default=True, show_default=True, help="Begin it, or end it.")
@config_option()
@json_option
def set_zero_retention(name: str, zero_retention: bool, config: Path, as_json: bool) -> None:
    """Store nothing of what the requests of the tenant NAME say or get, from now on.

    Kept answers, files and batches of the tenant are deleted.

    \b
    Example:
      loramux tenant zero-retention acme --on --config configs/single-node.toml
    """
    changed = with_tenants(config, lambda tenants: tenants.set_zero_retention(name, zero_retention))
    put(as_json, changed, _line(changed))


@tenant.command("allow-judges")
@click.argument("name")
@click.option("--on/--off", "allow_judges", default=True, show_default=True, help="Allow it, or no longer.")
@config_option()
@json_option
def set_allow_judges(name: str, allow_judges: bool, config: Path, as_json: bool) -> None:
    """Let evaluations of the tenant NAME show prompts and answers to judges: models of third parties.

    \b
    Example:
      loramux tenant allow-judges acme --on --config configs/single-node.toml
    """
    changed = with_tenants(config, lambda tenants: tenants.set_allow_judges(name, allow_judges))
    put(as_json, changed, _line(changed))


@click.group()
def tier() -> None:
    """Manage tiers: a class of the scheduler, a weight in it, and the service tiers that requests may ask for.

    \b
    Example:
      loramux tier put gold --class interactive --weight 4 --config configs/single-node.toml
    """


@tier.command("put")
@click.argument("name")
@click.option("--class", "service_class", type=click.Choice(SERVICE_CLASSES), required=True, help="Scheduler class.")
@click.option(
    "--weight", type=click.IntRange(1, 1000), default=1, show_default=True, help="A tenant's weight in the class."
)
@click.option(
    "--service-tier",
    "service_tiers",
    type=click.Choice(CHOSEN),
    multiple=True,
    default=ALLOWED_AT_FIRST,
    show_default=True,
    help="A service tier that requests may ask for beside `default`. Repeatable.",
)
@config_option()
@json_option
def put_tier(
    name: str, service_class: str, weight: int, service_tiers: tuple[str, ...], config: Path, as_json: bool
) -> None:
    """Create the tier NAME, or change it for all its tenants.

    \b
    Example:
      loramux tier put gold --class interactive --weight 4 --service-tier priority --service-tier batch \
        --config configs/single-node.toml
    """
    made = with_tenants(config, lambda tenants: tenants.tiers.put(name, service_class, weight, service_tiers))
    allows = ", ".join(made.service_tiers) or "no other service tier"
    put(as_json, made, f"Tier {made.name}: {made.service_class}, weight {made.weight}, allows {allows}.")


@tier.command("ls")
@config_option()
@json_option
def list_tiers(config: Path, as_json: bool) -> None:
    """List the tiers.

    \b
    Example:
      loramux tier ls --config configs/single-node.toml
    """
    found = with_tenants(config, lambda tenants: tenants.tiers.all())
    lines = [f"{one.name}\t{one.service_class}\tweight {one.weight}\t{' '.join(one.service_tiers)}" for one in found]
    put(as_json, found, "\n".join(lines))


@tier.command("rm")
@click.argument("name")
@config_option()
@json_option
def remove_tier(name: str, config: Path, as_json: bool) -> None:
    """Delete the tier NAME. No tenant may be in it.

    \b
    Example:
      loramux tier rm gold --config configs/single-node.toml
    """
    removed = with_tenants(config, lambda tenants: tenants.tiers.remove(name))
    put(as_json, removed, f"Tier {removed.name} is deleted.")


@click.group()
def project() -> None:
    """Manage a tenant's projects. Limits and invoice lines can be set per project.

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
    """Create the project NAME, or restore it with its keys if it is archived.

    \b
    Example:
      loramux project create web --tenant acme --config configs/single-node.toml
    """
    made = with_account(config, tenant_name, lambda account: account.projects.create(name))
    put(as_json, made, f"Project {made.name} ({made.id}) is created.")


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
    """Archive the project NAME: its keys are refused from their next request on, until it is restored.

    \b
    Example:
      loramux project archive web --tenant acme --config configs/single-node.toml
    """
    put(
        as_json,
        with_account(config, tenant_name, lambda account: account.projects.archive(name)),
        f"Project {name} is archived: its keys are refused until `loramux project create {name}` restores it.",
    )


def _line(one: Tenant) -> str:
    state = "live" if one.suspended_at is None else f"suspended since {day(one.suspended_at)}"
    retention = "\tzero retention" if one.zero_retention else ""
    judges = "\tjudges allowed" if one.allow_judges else ""
    return f"{one.name}\t{one.tier}\tsince {day(one.created_at)}\t{state}{retention}{judges}"
