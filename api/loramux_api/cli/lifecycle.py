"""loramux adapter promote, canary, rollback, pin, rm, undelete, grant."""

from __future__ import annotations

import click

from loramux_api.cli.remote import AdapterType, Remote, Revision, RevisionType, on_server

alias_option = click.option("--alias", default="default", show_default=True, help="Which of the adapter's aliases.")


@click.command("promote")
@click.argument("revision", type=RevisionType())
@alias_option
@on_server
def promote(remote: Remote, revision: Revision, alias: str) -> None:
    """Send all of an adapter's requests to REVISION, such as support@4.

    \b
    Example:
      loramux adapter promote support@4
    """
    assert revision.number is not None
    changed = remote.client.adapters.promote(revision.name, revision.number, alias)
    remote.put(changed, f"{changed.name}:{alias} is @{revision.number} now.")


@click.command("canary")
@click.argument("revision", type=RevisionType())
@click.argument("percent", type=click.IntRange(1, 99))
@alias_option
@on_server
def canary(remote: Remote, revision: Revision, percent: int, alias: str) -> None:
    """Send PERCENT of an adapter's requests to REVISION, the others where they go now.

    Requests that name a `user` get the same revision every time.

    \b
    Example:
      loramux adapter canary support@4 5
    """
    assert revision.number is not None
    try:
        changed = remote.client.adapters.canary(revision.name, revision.number, percent, alias)
    except ValueError as error:
        raise click.ClickException(str(error)) from None
    remote.put(changed, f"{percent}% of {changed.name}:{alias} go to @{revision.number} now.")


@click.command("rollback")
@click.argument("name")
@alias_option
@click.option("--to", "version", type=click.IntRange(1), help="A version of the alias's history; default: the last.")
@on_server
def rollback(remote: Remote, name: str, alias: str, version: int | None) -> None:
    """Let an alias mean what it meant before.

    \b
    Example:
      loramux adapter rollback support
    """
    changed = remote.client.adapters.rollback(name, alias, version=version)
    targets = [target for one in changed.aliases if one.name == alias for target in one.targets]
    means = ", ".join(f"@{target.revision}" for target in targets) or f"@{changed.revision}"
    remote.put(changed, f"{changed.name}:{alias} is {means} again.")


@click.command("pin")
@click.argument("revision", type=RevisionType())
@click.option("--off", is_flag=True, help="Let it go again.")
@on_server
def pin(remote: Remote, revision: Revision, off: bool) -> None:
    """Load REVISION into the pool and keep it there.

    \b
    Example:
      loramux adapter pin support@4
    """
    assert revision.number is not None
    adapters = remote.client.adapters
    changed = (adapters.unpin if off else adapters.pin)(revision.name, revision.number)
    remote.put(changed, f"{changed.name} is {'no longer pinned' if off else 'pinned'}.")


@click.command("rm")
@click.argument("what", type=AdapterType())
@on_server
def remove(remote: Remote, what: Revision) -> None:
    """Delete an adapter, or one revision of it that no alias means. Requests that run finish.

    \b
    Example:
      loramux adapter rm support@2
    """
    adapters = remote.client.adapters
    undo = f"Undo it for a while: loramux adapter undelete {what}"
    if what.number is None:
        remote.put(adapters.delete(what.name), f"{what} is deleted. {undo}")
    else:
        remote.put(adapters.delete_revision(what.name, what.number), f"{what} is deleted. {undo}")


@click.command("undelete")
@click.argument("what", type=AdapterType())
@on_server
def undelete(remote: Remote, what: Revision) -> None:
    """Undo the deletion of an adapter or a revision.

    \b
    Example:
      loramux adapter undelete support
    """
    back = remote.client.adapters.undelete(what.name, what.number)
    remote.put(back, f"{what} is back; {back.name} is @{back.revision}.")


@click.command("grant")
@click.argument("name")
@click.argument("tenant")
@click.option("--off", is_flag=True, help="End the grant.")
@on_server
def grant(remote: Remote, name: str, tenant: str, off: bool) -> None:
    """Let another TENANT call an adapter, at that tenant's cost; it sees no files.

    \b
    Example:
      loramux adapter grant support globex
    """
    adapters = remote.client.adapters
    changed = (adapters.revoke if off else adapters.grant)(name, tenant)
    remote.put(changed, f"{tenant} may {'no longer ' if off else ''}call {name}.")
