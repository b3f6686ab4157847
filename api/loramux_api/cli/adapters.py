"""loramux adapter: upload, release, inspect and delete adapters of a running server, with a tenant's key.

An upload shows progress bars on a terminal, and ends with the report of its checks.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import click
import msgspec
from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, Progress, TaskID, TimeRemainingColumn, TransferSpeedColumn

from loramux_api.cli.common import CommandGroup, table
from loramux_api.cli.releases import evaluate, metrics, policy, shadow
from loramux_api.cli.remote import AdapterType, Remote, RemoteRevision, RevisionType, on_server
from loramux_client import Progress as Step
from loramux_client import UploadRejected
from loramux_client.objects import (
    Adapter,
    AdapterSummary,
    Alias,
    AliasVersion,
    Bundle,
    Event,
    LoggedRequest,
    Target,
    TrainingAdapter,
    Upload,
    ValidationReport,
)
from loramux_client.objects import Revision as RevisionObject
from loramux_client.uploads import OnProgress, read_source

MARKS = {"passed": "ok", "failed": "no", "not_run": "--"}


@contextmanager
def show_upload(remote: Remote) -> Iterator[OnProgress]:
    """Show an upload's progress. If the upload is rejected, the command ends with the report and exit code 1."""
    try:
        with progress_bars() as on_progress:
            yield on_progress
    except UploadRejected as rejected:
        if not remote.as_json:
            raise click.ClickException(rejection_summary(rejected)) from None
        remote.put(rejected.upload, "")
        raise click.exceptions.Exit(1) from None


@contextmanager
def progress_bars() -> Iterator[OnProgress]:
    """Show a bar for each file that is hashed and sent, and a bar for the wait. Without a terminal, show nothing."""
    console = Console(stderr=True)
    columns = (
        "{task.description}",
        BarColumn(),
        DownloadColumn(),
        TransferSpeedColumn(),
        TimeRemainingColumn(),
    )
    with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as shown:
        tasks: dict[str, TaskID] = {}

        def on_progress(step: Step) -> None:
            label = f"{step.stage} {step.file}".strip()
            if label not in tasks:
                tasks[label] = shown.add_task(label, total=step.total or None)
            shown.update(tasks[label], completed=step.done)

        yield on_progress


def upload_summary(upload: Upload, *, verbose: bool = False) -> str:
    """Return the text about a finished upload."""
    lines = [f"{upload.revision} is ready ({upload.digest})."]
    if not upload.promote:
        lines.append(f"It gets no requests yet. To promote it: loramux adapter promote {upload.revision}")
    return "\n".join(lines + _report_lines(upload.report, verbose))


def rejection_summary(rejected: UploadRejected) -> str:
    """Return the text about a rejected upload."""
    field = f" [{rejected.param}]" if rejected.param else ""
    lines = [f"{rejected}{field} ({rejected.code})"]
    return "\n".join(lines + _report_lines(rejected.upload.report, verbose=True))


def _report_lines(report: ValidationReport | None, verbose: bool) -> list[str]:
    if report is None:
        return []
    lines = [
        f"  {MARKS.get(check.outcome, check.outcome)}  {_sentence(check.name, check.detail)}" for check in report.checks
    ]
    if report.converted:
        lines.append(f"  converted: {report.converted}")
    lines += [f"  note: {warning.message}" for warning in report.warnings]
    return lines + (_adapter_lines(report.found, verbose) if report.found else [])


def _adapter_lines(found: AdapterSummary, verbose: bool) -> list[str]:
    modules = ", ".join(f"{name} x{count}" for name, count in sorted(found.targets.items()))
    task = f" ({found.task})" if found.task not in (None, "CAUSAL_LM") else ""
    lines = [
        f"  {found.peft_type}{task}, rank {found.rank}, {found.parameters or 0:,} parameters in {found.tensors} tensors"
    ]
    if modules:
        lines.append(f"  on {modules}")
    if verbose:
        lines += [f"  no effect on serving: {field} ({reason})" for field, reason in found.ignored_fields.items()]
    return lines


def _sentence(name: str, detail: str) -> str:
    return name.replace("_", " ") + (f": {detail}" if detail else "")


alias_option = click.option("--alias", default="default", show_default=True, help="Alias of the adapter.")
promote_option = click.option(
    "--promote/--no-promote",
    default=True,
    show_default=True,
    help="Send all requests to this revision at once. The first revision is always promoted.",
)


@click.group(cls=CommandGroup)
def adapter() -> None:
    """Upload, release, roll back and delete adapters on a running server.

    \b
    Example:
      export LORAMUX_API_KEY=sk-lm-...
      loramux adapter push ./my-adapter --name support --no-promote
      loramux adapter canary support@2 5
      loramux adapter promote support@2
      loramux adapter rollback support
    """


for command in (evaluate, policy, shadow, metrics):
    adapter.add_command(command)


@adapter.command("push")
@click.argument("directory", type=click.Path(exists=True, file_okay=False, path_type=Path))
@click.option("--name", help="Adapter name; default: the folder's. An existing adapter gets a new revision.")
@promote_option
@click.option("--base-model", help="The adapter's base model, where a server has several that it fits.")
@click.option(
    "--resume",
    "upload_id",
    help="Resume this upload ID. An unfinished upload of the same files is resumed automatically.",
)
@click.option("--verbose", "-v", is_flag=True, help="Also list the config fields that have no effect on serving.")
@on_server
def push(
    remote: Remote,
    directory: Path,
    *,
    name: str | None,
    promote: bool,
    base_model: str | None,
    upload_id: str | None,
    verbose: bool,
) -> None:
    """Upload the PEFT adapter in DIRECTORY, as `save_pretrained` wrote it.

    The server validates the adapter against its base model first. An adapter that the server cannot serve exactly is
    refused, and the message names the field. To resume an interrupted upload, run the same command again.

    \b
    Example:
      loramux adapter push ./my-adapter --name support --key-file key.txt
    """
    uploads = remote.client.uploads
    with show_upload(remote) as on_progress:
        if upload_id:
            upload = uploads.resume(upload_id, directory, on_progress=on_progress)
        else:
            upload = uploads.push(directory, name, promote=promote, base_model=base_model, on_progress=on_progress)
    remote.put(upload, upload_summary(upload, verbose=verbose))


@adapter.command("import")
@click.argument("source")
@click.option("--name", required=True, help="Adapter name. An existing adapter gets a new revision.")
@promote_option
@on_server
def fetch(remote: Remote, source: str, name: str, promote: bool) -> None:
    """Let the server fetch an adapter from a bucket or a model hub that its settings allow.

    SOURCE is s3://BUCKET/PATH/, or HUB:OWNER/REPOSITORY@COMMIT with all 40 digits of the commit. If the adapter is in a
    folder of the repository: HUB:OWNER/REPOSITORY@COMMIT/FOLDER.

    \b
    Example:
      loramux adapter import s3://tuned/support/v2/ --name support --no-promote
    """
    parsed = read_source(source)
    if parsed is None:
        raise click.UsageError(f"{source!r} is neither s3://BUCKET/PATH/ nor HUB:OWNER/REPOSITORY@COMMIT (40 digits)")
    with show_upload(remote) as on_progress:
        upload = remote.client.uploads.fetch(name, parsed, promote=promote, on_progress=on_progress)
    remote.put(upload, upload_summary(upload))


@adapter.command("ls")
@on_server
def list_adapters(remote: Remote) -> None:
    """List your adapters.

    \b
    Example:
      loramux adapter ls
    """
    found = remote.client.adapters.list()
    remote.put(found, _adapters_table(found) or "No adapters yet; upload one: loramux adapter push DIRECTORY")


@adapter.command("training")
@on_server
def list_training_adapters(remote: Remote) -> None:
    """List the live versions of your training adapters, which a trainer pushes; the latest push first.

    \b
    Example:
      loramux adapter training
    """
    found = remote.client.adapters.training()
    none = "No version is live; a trainer pushes them: docs/guides/reinforcement-learning.md"
    remote.put(found, _training_table(found) or none)


@adapter.command("show")
@click.argument("name")
@on_server
def show(remote: Remote, name: str) -> None:
    """Show an adapter: its aliases, its revisions, and the tenants that may call it. NAME@3 shows a revision's bundle.

    \b
    Example:
      loramux adapter show support
      loramux adapter show support@3
    """
    adapters = remote.client.adapters
    plain, _, number = name.partition("@")
    if number.isdecimal():
        revision = adapters.revision(plain, int(number))
        remote.put(revision, "\n".join((_revision_line(revision), *_bundle_lines(revision.bundle))))
        return
    found, revisions, grants = adapters.get(name), adapters.revisions(name), adapters.grants(name)
    lines = [_adapters_table([found]), *map(_alias_line, found.aliases), *map(_revision_line, revisions)]
    lines += [f"  may be called by {grant.tenant}" for grant in grants]
    data: dict[str, Any] = {"adapter": found, "revisions": revisions, "grants": grants}
    remote.put(data, "\n".join(lines))


@adapter.command("promote")
@click.argument("revision", type=RevisionType())
@alias_option
@on_server
def promote(remote: Remote, revision: RemoteRevision, alias: str) -> None:
    """Send all requests of an adapter to REVISION, such as support@4.

    \b
    Example:
      loramux adapter promote support@4
    """
    assert revision.number is not None
    changed = remote.client.adapters.promote(revision.name, revision.number, alias)
    remote.put(changed, f"{changed.name}:{alias} is now @{revision.number}.")


@adapter.command("canary")
@click.argument("revision", type=RevisionType())
@click.argument("percent", type=click.IntRange(1, 99))
@alias_option
@on_server
def canary(remote: Remote, revision: RemoteRevision, percent: int, alias: str) -> None:
    """Send PERCENT of an adapter's requests to REVISION, and all others to its current main revision.

    Requests with the same `user` always get the same revision.

    \b
    Example:
      loramux adapter canary support@4 5
    """
    assert revision.number is not None
    try:
        changed = remote.client.adapters.canary(revision.name, revision.number, percent, alias)
    except ValueError as error:
        raise click.ClickException(str(error)) from None
    remote.put(changed, f"{percent}% of {changed.name}:{alias} now go to @{revision.number}.")


@adapter.command("rollback")
@click.argument("name")
@alias_option
@click.option(
    "--to",
    "version",
    type=click.IntRange(1),
    help="Version of the alias's history (see `loramux adapter history`); default: the previous one.",
)
@on_server
def rollback(remote: Remote, name: str, alias: str, version: int | None) -> None:
    """Restore an alias's previous targets.

    \b
    Example:
      loramux adapter rollback support
    """
    changed = remote.client.adapters.rollback(name, alias, version=version)
    targets = [target for one in changed.aliases if one.name == alias for target in one.targets]
    restored = ", ".join(f"@{target.revision}" for target in targets) or f"@{changed.revision}"
    remote.put(changed, f"{changed.name}:{alias} is {restored} again.")


@adapter.command("pin")
@click.argument("revision", type=RevisionType())
@click.option("--off", is_flag=True, help="Unpin it: the engine may evict it again.")
@on_server
def pin(remote: Remote, revision: RemoteRevision, off: bool) -> None:
    """Load REVISION into the engine's memory and keep it there.

    \b
    Example:
      loramux adapter pin support@4
    """
    assert revision.number is not None
    adapters = remote.client.adapters
    changed = (adapters.unpin if off else adapters.pin)(revision.name, revision.number)
    remote.put(changed, f"{changed.name} is {'no longer pinned' if off else 'pinned'}.")


@adapter.command("rm")
@click.argument("what", type=AdapterType())
@on_server
def remove(remote: Remote, what: RemoteRevision) -> None:
    """Delete an adapter, or one of its revisions that no alias targets. Running requests are not interrupted.

    \b
    Example:
      loramux adapter rm support@2
    """
    adapters = remote.client.adapters
    undo = f"To restore it: loramux adapter undelete {what}"
    if what.number is None:
        remote.put(adapters.delete(what.name), f"{what} is deleted. {undo}")
    else:
        remote.put(adapters.delete_revision(what.name, what.number), f"{what} is deleted. {undo}")


@adapter.command("undelete")
@click.argument("what", type=AdapterType())
@on_server
def undelete(remote: Remote, what: RemoteRevision) -> None:
    """Restore a deleted adapter or revision.

    \b
    Example:
      loramux adapter undelete support
    """
    restored = remote.client.adapters.undelete(what.name, what.number)
    remote.put(restored, f"{what} is restored; {restored.name} is @{restored.revision}.")


@adapter.command("grant")
@click.argument("name")
@click.argument("tenant")
@click.option("--off", is_flag=True, help="End the grant.")
@on_server
def grant(remote: Remote, name: str, tenant: str, off: bool) -> None:
    """Let another TENANT call an adapter, at that tenant's cost and without access to its files.

    \b
    Example:
      loramux adapter grant support globex
    """
    adapters = remote.client.adapters
    changed = (adapters.revoke if off else adapters.grant)(name, tenant)
    remote.put(changed, f"{tenant} may {'no longer ' if off else ''}call {name}.")


@adapter.command("logs")
@click.argument("name")
@click.option(
    "--limit", type=click.IntRange(1, 500), default=20, show_default=True, help="Number of events and of requests."
)
@click.option("--background", is_flag=True, help="Show lines of batches, evaluations and shadows too.")
@on_server
def logs(remote: Remote, name: str, limit: int, background: bool) -> None:
    """Show an adapter's events and releases, and the revisions that answered its latest requests. The newest entry is
    last.

    \b
    Example:
      loramux adapter logs support --limit 50
    """
    events = remote.client.adapters.events(name, limit=limit)
    requests = remote.client.adapters.requests(name, limit=limit, background=background)
    lines = [(event.created_at, _event_line(event)) for event in reversed(events)]
    lines += [(request.created_at, _request_line(request)) for request in reversed(requests)]
    lines.sort(key=lambda line: line[0])
    text = "\n".join(f"{_time(at)}  {line}" for at, line in lines) or f"{name} has no events yet"
    remote.put({"events": events, "requests": requests}, text)


@adapter.command("history")
@click.argument("name")
@alias_option
@on_server
def history(remote: Remote, name: str, alias: str) -> None:
    """Show the history of an alias, newest first. `rollback --to VERSION` restores one of its versions.

    \b
    Example:
      loramux adapter history support
    """
    versions = remote.client.adapters.history(name, alias)
    remote.put(
        versions,
        table(("version", "time", "targets", "by", "restores"), map(_version_row, versions))
        or f"{name}:{alias} has no history yet",
    )


def _adapters_table(found: list[Adapter]) -> str:
    return table(("adapter", "rank", "size", "digest", "default"), map(_adapter_row, found))


def _adapter_row(found: Adapter) -> tuple[object, ...]:
    default = next((alias.targets for alias in found.aliases if alias.name == "default"), [])
    name = f"{found.name}@{found.revision}"
    return name, found.rank, _size(found.size_bytes), _short(found.digest), _shares(default)


def _training_table(found: list[TrainingAdapter]) -> str:
    rows = [
        (one.id, one.base_model, one.rank, _size(one.size_bytes), _short(one.digest), _time(one.created_at), one.parity)
        for one in found
    ]
    return table(("version", "base", "rank", "size", "digest", "pushed", "compared with PEFT"), rows)


def _size(size_bytes: int) -> str:
    return f"{size_bytes / 1e6:,.1f} MB"


def _short(digest: str) -> str:
    """Return the first 12 digits of a digest; `show`, `logs` and --json have all 64."""
    return digest.removeprefix("sha256:")[:12]


def _alias_line(alias: Alias) -> str:
    return f"  :{alias.name} -> {_shares(alias.targets)}"


def _shares(targets: list[Target]) -> str:
    total = sum(target.weight for target in targets)
    return ", ".join(f"@{target.revision} {100 * target.weight / total:.3g}%" for target in targets)


def _revision_line(revision: RevisionObject) -> str:
    pinned = "\tpinned" if revision.pin else ""
    return f"  @{revision.revision}\t{revision.state}\trank {revision.rank}\t{revision.digest}{pinned}"


def _bundle_lines(bundle: Bundle | None) -> Iterator[str]:
    if bundle is None:
        yield "  no bundle: the base's template, tokenizer and defaults"
        return
    for name, value in msgspec.to_builtins(bundle).items():
        if name == "added_tokens" and value:
            yield f"  added tokens: {', '.join(f'{token.content} ({token.id})' for token in bundle.added_tokens)}"
        elif name == "chat_template" and value:
            yield f"  chat template: {len(value)} characters"
        elif value := ({k: v for k, v in value.items() if v is not None} if isinstance(value, dict) else value):
            yield f"  {name.replace('_', ' ')}: {value}"


def _version_row(version: AliasVersion) -> tuple[object, ...]:
    at = "" if version.changed_at is None else _time(version.changed_at)
    by = version.changed_by_name or version.changed_by or ""
    return version.version, at, _shares(version.targets), by, version.restores or ""


def _event_line(event: Event) -> str:
    data = event.data
    kind = event.type.removeprefix("adapter.").removeprefix("revision.")
    reason = f": {data.error.message} ({data.error.code})" if data.error else ""
    if data.alias is not None:
        before, after = (
            ", ".join(f"@{n} {w}" for n, w in one.items()) for one in (data.alias.before, data.alias.after)
        )
        return f"{kind:<20}  {data.adapter}:{data.alias.name}  {before or 'new'} -> {after}"
    return f"{kind:<20}  {data.model or data.adapter}  {data.digest or data.upload or ''}{reason}".rstrip()


def _request_line(request: LoggedRequest) -> str:
    took = "" if request.settled_at is None else f"  {request.settled_at - request.created_at} s"
    return f"{'request':<20}  {request.model}  {request.digest}  {request.status}  {request.id}{took}"


def _time(seconds: int) -> str:
    return datetime.fromtimestamp(seconds, UTC).strftime("%Y-%m-%d %H:%M:%SZ")
