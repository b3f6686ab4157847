"""loramux batch: run files of requests on a running server when the server has free capacity."""

from __future__ import annotations

from pathlib import Path

import click

from loramux_api.cli.common import CommandGroup, table
from loramux_api.cli.remote import Remote, on_server
from loramux_client.objects import Batch

ENDPOINTS = ("/v1/chat/completions", "/v1/completions", "/v1/responses")


@click.group(cls=CommandGroup)
def batch() -> None:
    """Run files of requests on a running server when it has free capacity, at the price of batches.

    \b
    Example:
      export LORAMUX_API_KEY=sk-lm-...
      loramux batch run questions.jsonl --output answers.jsonl
      loramux batch ls
    """


@batch.command("run")
@click.argument("file", type=click.Path(exists=True, dir_okay=False, path_type=Path))
@click.option(
    "--endpoint", type=click.Choice(ENDPOINTS), default=ENDPOINTS[0], show_default=True, help="Endpoint of the lines."
)
@click.option("--window", default="24h", show_default=True, help="Hours within which it must end: 1h to 168h.")
@click.option("--output", type=click.Path(dir_okay=False, path_type=Path), help="Wait, and write the answers here.")
@click.option("--wait", is_flag=True, help="Wait for its end.")
@on_server
def run(remote: Remote, file: Path, *, endpoint: str, window: str, output: Path | None, wait: bool) -> None:
    """Send FILE, whose lines are {custom_id, method, url, body}, and run it as a batch.

    \b
    Example:
      loramux batch run questions.jsonl --output answers.jsonl
    """
    batches = remote.client.batches
    made = batches.run(file, endpoint, window=window)
    if wait or output is not None:
        made = batches.wait(made.id)
    if output is not None and made.output_file_id is not None:
        output.write_bytes(remote.client.files.content(made.output_file_id))
    remote.put(made, _text(made))
    if made.status in ("failed", "expired"):
        raise click.exceptions.Exit(1)


@batch.command("ls")
@click.option("--limit", type=click.IntRange(1, 100), default=20, show_default=True, help="Number of batches.")
@on_server
def list_batches(remote: Remote, limit: int) -> None:
    """List your project's batches, newest first.

    \b
    Example:
      loramux batch ls
    """
    found = remote.client.batches.list(limit=limit)
    remote.put(found, _batches_table(found) or "No batches yet; run one: loramux batch run FILE")


@batch.command("show")
@click.argument("id")
@on_server
def show(remote: Remote, id: str) -> None:
    """Show a batch: its state, counts and files, and the errors of its lines.

    \b
    Example:
      loramux batch show batch_...
    """
    found = remote.client.batches.get(id)
    remote.put(found, _text(found))


@batch.command("cancel")
@click.argument("id")
@on_server
def cancel(remote: Remote, id: str) -> None:
    """Cancel a batch: no further line begins. The output file has the answers of lines that ended.

    \b
    Example:
      loramux batch cancel batch_...
    """
    found = remote.client.batches.cancel(id)
    remote.put(found, _text(found))


@batch.command("output")
@click.argument("id")
@click.argument("file", type=click.Path(dir_okay=False, path_type=Path))
@click.option("--errors", is_flag=True, help="The lines that have no answer, in place of those that have.")
@on_server
def output(remote: Remote, id: str, file: Path, errors: bool) -> None:
    """Write the answers of an ended batch to FILE.

    \b
    Example:
      loramux batch output batch_... answers.jsonl
    """
    found = remote.client.batches.get(id)
    stored = found.error_file_id if errors else found.output_file_id
    if stored is None:
        raise click.ClickException(f"{id} has no such file: it is {found.status}. See: loramux batch show {id}")
    file.write_bytes(remote.client.files.content(stored))
    remote.put({"batch": id, "file_id": stored, "path": str(file)}, f"{stored} is in {file}.")


def _batches_table(found: list[Batch]) -> str:
    rows = [
        (one.id, one.status, counts.completed, counts.failed, counts.total, one.endpoint)
        for one in found
        for counts in [one.request_counts]
    ]
    return table(("id", "state", "answered", "failed", "lines", "endpoint"), rows)


def _text(one: Batch) -> str:
    lines = [_batches_table([one]), f"  input {one.input_file_id}"]
    lines += [f"  {what} {id}" for what, id in (("output", one.output_file_id), ("errors", one.error_file_id)) if id]
    for error in () if one.errors is None else one.errors.data:
        where = "" if error.line is None else f"line {error.line}: "
        lines.append(f"  {where}{error.message}")
    return "\n".join(lines)
