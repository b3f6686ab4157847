"""The display of an upload: progress bars, and the report of its checks."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import click
from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, Progress, TaskID, TimeRemainingColumn, TransferSpeedColumn

from loramux_api.cli.remote import Remote
from loramux_client import Progress as Step
from loramux_client import UploadRejected
from loramux_client.objects import AdapterSummary, Upload, ValidationReport
from loramux_client.uploads import OnProgress

MARKS = {"passed": "ok", "failed": "no", "not_run": "--"}


@contextmanager
def show_upload(remote: Remote) -> Iterator[OnProgress]:
    """Show an upload's progress. If it is rejected, the command ends with the report and exit code 1."""
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
    """Show a bar for each file that is hashed and sent, and one for the wait. Without a terminal, nothing."""
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
