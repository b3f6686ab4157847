"""`loramux demo`."""

from __future__ import annotations

import json
import tempfile
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path

import click
from rich.console import Console
from rich.status import Status

from loramux_demo.house import House, create_customers, free_port


@click.command("demo")
@click.option("--once", is_flag=True, help="Exit after the report instead of serving on.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON report on stdout and nothing else.")
@click.option(
    "--port", type=click.IntRange(1, 65535), help="Listen here; any free port by default, and where this one is taken."
)
@click.option(
    "--dir",
    "folder",
    type=click.Path(file_okay=False, path_type=Path),
    help="Keep the demo's settings, database and log in this empty or new folder; a temporary one by default.",
)
def demo_command(once: bool, as_json: bool, port: int | None, folder: Path | None) -> None:
    """See it work: five adapters of two customers, and the base model, in the same batches.

    Starts a real server with the tiny model that is shipped with loramux, makes two tenants, uploads their adapters,
    asks every model many questions at once with the official openai client, and checks each answer, what shared a
    step, and the bill. Then it serves on until Ctrl-C, with lines to try by hand. Exit code 0 means that all of it
    was as it should be.

    \b
    Example:
      loramux demo
      loramux demo --once --json
    """
    console = Console(stderr=True)
    with ExitStack() as stack:
        status = stack.enter_context(console.status("making two tenants and their keys"))
        house = House(stack.enter_context(demo_folder(folder)), free_port(port))
        if port not in (None, house.port):
            console.print(f"Port {port} is taken; this demo uses {house.port}.")
        run(house, status, once=once, as_json=as_json)


@contextmanager
def demo_folder(wanted: Path | None) -> Iterator[Path]:
    """`wanted`, which must be empty or new, or a temporary folder that is removed afterwards."""
    if wanted is None:
        with tempfile.TemporaryDirectory(prefix="loramux-demo-") as temporary:
            yield Path(temporary)
        return
    if wanted.exists() and any(wanted.iterdir()):
        raise click.BadParameter(
            f"{wanted} is not empty; name a new folder, or serve what it holds: "
            f"loramux serve --config {wanted / 'loramux.toml'}",
            param_hint="--dir",
        )
    yield wanted.resolve()


def run(house: House, status: Status, *, once: bool, as_json: bool) -> None:
    """The whole demo; raises click.ClickException with a sentence for whatever was not as it should be."""
    from loramux_demo.screen import show
    from loramux_demo.server import running_server
    from loramux_demo.tour import tour  # openai: a second

    house.furnish()
    keys = create_customers(house)
    status.update("starting the server and loading the base model")
    with running_server(house) as server:
        server.wait_until_ready()
        with server.blamed():
            report = tour(house.url, keys, status.update)
        status.stop()
        if as_json:
            click.echo(json.dumps(report.as_json(), indent=2))
        else:
            show(report, keys, Console(), serving=not once)
        if report.failures:
            raise click.ClickException("; ".join(report.failures))
        if not once:
            with suppress(KeyboardInterrupt):
                server.wait()
            status.update("the server finishes what runs, and ends")
            status.start()
