"""The command `loramux demo`."""

from __future__ import annotations

import json
import tempfile
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path

import click
from rich.console import Console
from rich.status import Status

from loramux_demo.server import (
    Workspace,
    console_keys,
    create_customers,
    free_port,
    running_server,
    sign_in_links,
)


@click.command("demo")
@click.option("--once", is_flag=True, help="Exit after the report.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON report on stdout and nothing else.")
@click.option(
    "--port", type=click.IntRange(1, 65535), help="Port of the server; default, and if it is taken: any free port."
)
@click.option(
    "--dir",
    "folder",
    type=click.Path(file_okay=False, path_type=Path),
    help="Empty or new folder for settings, database and log; default: a temporary one.",
)
def demo_command(once: bool, as_json: bool, port: int | None, folder: Path | None) -> None:
    """Run the demo: six adapters of two customers and the base model in the same batches.

    Starts a real server with the tiny model that loramux ships, creates two tenants, uploads their adapters, sends
    many requests to all models at once with the official openai client, and checks each answer, the adapters per
    step, and the usage. Then the server runs until Ctrl-C, and the demo prints commands to try. Exit code 0 means
    that every check has passed.

    \b
    Example:
      loramux demo
      loramux demo --once --json
    """
    console = Console(stderr=True)
    with ExitStack() as stack:
        status = stack.enter_context(console.status("creating two tenants and their keys"))
        workspace = Workspace(stack.enter_context(demo_folder(folder)), free_port(port))
        if port not in (None, workspace.port):
            console.print(f"Port {port} is taken; this demo uses {workspace.port}.")
        run(workspace, status, once=once, as_json=as_json)


@contextmanager
def demo_folder(wanted: Path | None) -> Iterator[Path]:
    """Yield `wanted`, which must be empty or new, or a temporary folder that is removed afterwards."""
    if wanted is None:
        with tempfile.TemporaryDirectory(prefix="loramux-demo-") as temporary:
            yield Path(temporary)
        return
    if wanted.exists() and any(wanted.iterdir()):
        raise click.BadParameter(
            f"{wanted} is not empty; choose a new folder, or start its server: "
            f"loramux serve --config {wanted / 'loramux.toml'}",
            param_hint="--dir",
        )
    yield wanted.resolve()


def run(workspace: Workspace, status: Status, *, once: bool, as_json: bool) -> None:
    """Run the demo. Raises click.ClickException with the checks that failed."""
    try:
        from loramux_demo.tour import tour
    except ModuleNotFoundError as error:
        if error.name != "openai":
            raise
        raise click.ClickException("the demo needs the openai client: pip install 'loramux[demo]'") from None
    from loramux_demo.tour import show

    workspace.prepare()
    keys = create_customers(workspace)
    console = {} if once else console_keys(workspace)
    status.update("starting the server and loading the base model")
    with running_server(workspace) as server:
        server.wait_until_ready()
        with server.explain_failures():
            report = tour(workspace.url, keys, status.update)
        status.stop()
        if as_json:
            click.echo(json.dumps(report.as_json(), indent=2))
        else:
            show(report, keys, Console(), links=None if once else sign_in_links(workspace, console))
        if report.failures:
            raise click.ClickException("; ".join(report.failures))
        if not once:
            with suppress(KeyboardInterrupt):
                server.wait()
            status.update("the server finishes running requests, and stops")
            status.start()
