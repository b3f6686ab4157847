"""loramux fleet: the engines of a running server, for operators."""

from __future__ import annotations

import click
import msgspec

from loramux_api.cli.remote import Remote, on_server
from loramux_client.objects import Engine

_engines = click.argument("engines", nargs=-1, required=True, metavar="ENGINE...")
_seconds = click.option(
    "--seconds",
    type=click.FloatRange(0, 3600),
    default=30.0,
    show_default=True,
    help="Time for running requests to end; those that still run then go on at other engines.",
)


@click.group()
def fleet() -> None:
    """Show, drain and restart a running server's engines. The key needs the scope `operator`.

    \b
    Example:
      loramux fleet status --key-file operator.key
      loramux fleet restart base-0 base-1 --key-file operator.key
    """


@fleet.command()
@on_server
def status(remote: Remote) -> None:
    """List the engines of every base, with their state.

    \b
    Example:
      loramux fleet status --key-file operator.key
    """
    engines = remote.client.engines.list()
    remote.put([msgspec.structs.asdict(engine) for engine in engines], "\n".join(map(_line, engines)))


@fleet.command()
@_engines
@_seconds
@on_server
def drain(remote: Remote, engines: tuple[str, ...], seconds: float) -> None:
    """Take engines out of service, one after the other; each is stopped once it has no request.

    \b
    Example:
      loramux fleet drain base-0 --key-file operator.key
    """
    drained = [remote.client.engines.drain(engine, seconds) for engine in engines]
    remote.put([msgspec.structs.asdict(engine) for engine in drained], "\n".join(map(_line, drained)))


@fleet.command()
@_engines
@_seconds
@on_server
def restart(remote: Remote, engines: tuple[str, ...], seconds: float) -> None:
    """Restart engines, one after the other: each is drained, stopped and started, and must serve before the next.

    No request fails meanwhile; where a base has one engine they wait for it.

    \b
    Example:
      loramux fleet restart base-0 base-1 --key-file operator.key
    """
    restarted = []
    for name in engines:
        engine = remote.client.engines.restart(name, seconds)
        restarted.append(engine)
        if engine.state != "ready":
            raise click.ClickException(f"{name} does not serve: {engine.problem}; the engines after it are left alone")
    remote.put([msgspec.structs.asdict(engine) for engine in restarted], "\n".join(map(_line, restarted)))


def _line(engine: Engine) -> str:
    problem = f"; {engine.problem}" if engine.problem else ""
    return (
        f"{engine.engine}  {engine.state}, {engine.requests} requests, started {engine.starts} times, "
        f"base {engine.base_model}{problem}"
    )
