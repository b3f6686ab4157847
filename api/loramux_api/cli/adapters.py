"""loramux adapter: from a PEFT folder to a revision, and what there is."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click

from loramux.client.answers import Adapter, Alias
from loramux.client.answers import Revision as RevisionAnswer
from loramux.client.sources import read_source
from loramux_api.cli.lifecycle import canary, grant, pin, promote, remove, rollback, undelete
from loramux_api.cli.logs import logs
from loramux_api.cli.remote import Remote, on_server
from loramux_api.cli.uploading import on_screen, told

promote_option = click.option(
    "--promote/--no-promote",
    default=True,
    show_default=True,
    help="Let the adapter's name mean this revision at once. A first revision is meant in any case.",
)


@click.group()
def adapter() -> None:
    """Upload, release, roll back and retire adapters on a running server.

    \b
    Example:
      export LORAMUX_API_KEY=sk-lm-...
      loramux adapter push ./my-adapter --name support --no-promote
      loramux adapter canary support@2 5
      loramux adapter promote support@2
      loramux adapter rollback support
    """


@adapter.command("push")
@click.argument("directory", type=click.Path(exists=True, file_okay=False, path_type=Path))
@click.option("--name", help="The adapter's name; default: the folder's. A name that is taken gets a new revision.")
@promote_option
@click.option("--resume", "upload_id", help="Go on with this upload. One of the same files is gone on with by itself.")
@on_server
def push(remote: Remote, directory: Path, name: str | None, promote: bool, upload_id: str | None) -> None:
    """Upload the PEFT adapter in DIRECTORY, as `save_pretrained` wrote it.

    The server checks it against its base model before it serves it; what cannot be served exactly is refused with the
    field's name. An upload that was cut off goes on where it was when the command is given again.

    \b
    Example:
      loramux adapter push ./my-adapter --name support --key-file key.txt
    """
    uploads = remote.client.uploads
    with on_screen(remote) as on_progress:
        if upload_id:
            upload = uploads.resume(upload_id, directory, on_progress=on_progress)
        else:
            upload = uploads.push(directory, name, promote=promote, on_progress=on_progress)
    remote.put(upload, told(upload))


@adapter.command("import")
@click.argument("source")
@click.option("--name", required=True, help="The adapter's name. A name that is taken gets a new revision.")
@promote_option
@on_server
def fetch(remote: Remote, source: str, name: str, promote: bool) -> None:
    """Have the server fetch an adapter itself, from a bucket or a model hub that its operator lists.

    SOURCE is s3://BUCKET/PATH/, or HUB:OWNER/REPOSITORY@COMMIT with all 40 digits of the commit.

    \b
    Example:
      loramux adapter import s3://tuned/support/v2/ --name support --no-promote
    """
    place = read_source(source)
    if place is None:
        raise click.UsageError(f"{source!r} is neither s3://BUCKET/PATH/ nor HUB:OWNER/REPOSITORY@COMMIT (40 digits)")
    with on_screen(remote) as on_progress:
        upload = remote.client.uploads.fetch(name, place, promote=promote, on_progress=on_progress)
    remote.put(upload, told(upload))


@adapter.command("ls")
@on_server
def list_adapters(remote: Remote) -> None:
    """List your adapters.

    \b
    Example:
      loramux adapter ls
    """
    found = remote.client.adapters.all()
    remote.put(found, "\n".join(map(_line, found)) or "No adapters yet; upload one: loramux adapter push DIRECTORY")


@adapter.command("show")
@click.argument("name")
@on_server
def show(remote: Remote, name: str) -> None:
    """Show an adapter: its aliases, revisions, and who else may call it.

    \b
    Example:
      loramux adapter show support
    """
    adapters = remote.client.adapters
    found, revisions, grants = adapters.get(name), adapters.revisions(name), adapters.grants(name)
    lines = [_line(found), *map(_alias_line, found.aliases), *map(_revision_line, revisions)]
    lines += [f"  may be called by {grant.tenant}" for grant in grants]
    data: dict[str, Any] = {"adapter": found, "revisions": revisions, "grants": grants}
    remote.put(data, "\n".join(lines))


for command in (promote, canary, rollback, pin, remove, undelete, grant, logs):
    adapter.add_command(command)


def _line(found: Adapter) -> str:
    return f"{found.name}@{found.revision}\trank {found.rank}\t{found.size_bytes} bytes\t{found.digest}"


def _alias_line(alias: Alias) -> str:
    whole = sum(target.weight for target in alias.targets)
    shares = ", ".join(f"@{target.revision} {100 * target.weight / whole:.3g}%" for target in alias.targets)
    return f"  :{alias.name} -> {shares}"


def _revision_line(revision: RevisionAnswer) -> str:
    pinned = "\tpinned" if revision.pin else ""
    return f"  @{revision.revision}\t{revision.state}\trank {revision.rank}\t{revision.digest}{pinned}"
