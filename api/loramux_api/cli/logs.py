"""loramux adapter logs."""

from __future__ import annotations

from datetime import UTC, datetime

import click

from loramux.client.answers import Event, LoggedRequest
from loramux_api.cli.remote import Remote, on_server


@click.command("logs")
@click.argument("name")
@click.option("--limit", type=click.IntRange(1, 500), default=20, show_default=True, help="The latest so many of each.")
@on_server
def logs(remote: Remote, name: str, limit: int) -> None:
    """Show what happened to an adapter, and which revision answered its latest requests. Newest last.

    Prompts and answers are not kept anywhere.

    \b
    Example:
      loramux adapter logs support --limit 50
    """
    events = remote.client.adapters.events(name, limit=limit)
    requests = remote.client.adapters.requests(name, limit=limit)
    lines = [(event.created_at, _event_line(event)) for event in events]
    lines += [(request.created_at, _request_line(request)) for request in requests]
    lines.sort(key=lambda line: line[0])
    text = "\n".join(f"{_time(at)}  {line}" for at, line in lines) or f"nothing has happened to {name} yet"
    remote.put({"events": events, "requests": requests}, text)


def _event_line(event: Event) -> str:
    data = event.data
    what = event.type.rpartition(".")[2]
    reason = f": {data.error.message} ({data.error.code})" if data.error else ""
    return f"{what:<8}  {data.model or data.adapter}  {data.digest or data.upload or ''}{reason}".rstrip()


def _request_line(request: LoggedRequest) -> str:
    took = "" if request.settled_at is None else f"  {request.settled_at - request.created_at} s"
    return f"request   {request.model}  {request.digest}  {request.status}  {request.id}{took}"


def _time(seconds: int) -> str:
    return datetime.fromtimestamp(seconds, UTC).strftime("%Y-%m-%d %H:%M:%SZ")
