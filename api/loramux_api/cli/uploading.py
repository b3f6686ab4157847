"""An upload on the screen: bars while it goes on, and the report of its checks at the end."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import click
from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, Progress, TaskID, TimeRemainingColumn, TransferSpeedColumn

from loramux.client import Progress as Step
from loramux.client import UploadRejected
from loramux.client.upload_answers import Found, Report, Upload
from loramux.client.uploads import OnProgress
from loramux_api.cli.remote import Remote

MARKS = {"passed": "ok", "failed": "no", "not_run": "--"}


@contextmanager
def on_screen(remote: Remote) -> Iterator[OnProgress]:
    """Show an upload while it goes on; one that is rejected ends the command with its report."""
    try:
        with bars() as on_progress:
            yield on_progress
    except UploadRejected as rejected:
        if not remote.as_json:
            raise click.ClickException(refusal(rejected)) from None
        remote.put(rejected.upload, "")
        raise click.exceptions.Exit(1) from None


@contextmanager
def bars() -> Iterator[OnProgress]:
    """A bar for every file that is read and sent, and one for the wait; none where nobody looks."""
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


def told(upload: Upload) -> str:
    """A finished upload, for people."""
    lines = [f"{upload.revision} is ready ({upload.digest})."]
    if not upload.promote:
        lines.append(f"It is not what {upload.adapter} means yet: loramux adapter promote {upload.revision}")
    return "\n".join(lines + _report(upload.report))


def refusal(rejected: UploadRejected) -> str:
    """A rejected upload, for people."""
    field = f" [{rejected.param}]" if rejected.param else ""
    lines = [f"{rejected}{field} ({rejected.code})"]
    return "\n".join(lines + _report(rejected.upload.report))


def _report(report: Report | None) -> list[str]:
    if report is None:
        return []
    lines = [
        f"  {MARKS.get(check.outcome, check.outcome)}  {_sentence(check.name, check.detail)}" for check in report.checks
    ]
    if report.converted:
        lines.append(f"  converted: {report.converted}")
    lines += [f"  note: {warning.message}" for warning in report.warnings]
    return lines + (_found(report.found) if report.found else [])


def _found(found: Found) -> list[str]:
    modules = ", ".join(f"{name} x{count}" for name, count in sorted(found.targets.items()))
    lines = [f"  {found.peft_type}, rank {found.rank}, {found.parameters or 0:,} parameters in {found.tensors} tensors"]
    if modules:
        lines.append(f"  on {modules}")
    return lines + [f"  without effect here: {field} ({why})" for field, why in found.ignored_fields.items()]


def _sentence(name: str, detail: str) -> str:
    return name.replace("_", " ") + (f": {detail}" if detail else "")
