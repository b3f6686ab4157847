"""loramux engine and fleet: engines that listen for servers, their keys, and the engines of a running server."""

from __future__ import annotations

import os
import signal
from pathlib import Path
from typing import TYPE_CHECKING

import click
import msgspec

from loramux import logs
from loramux.settings import BaseSettings, Settings, SettingsError
from loramux_api.cli.common import config_option, json_option, note, put, settings_of
from loramux_api.cli.remote import Remote, on_server
from loramux_client.objects import Engine

if TYPE_CHECKING:
    from loramux.fleet.serving import ListeningEngine


@click.group()
def engine() -> None:
    """Serve one engine of a base for servers on this and other machines.

    \b
    Example:
      loramux engine keys --config loramux.toml
      loramux engine serve --config loramux.toml --listen tcp://0.0.0.0:7101
    """


@engine.command()
@config_option()
@click.option("--base", "name", help="Name of the base; may be left out where the settings have one.")
@click.option(
    "--listen", default="tcp://127.0.0.1:7101", show_default=True, help="Address for servers. Port 0: a free one."
)
@click.option("--device", help="Device; overrides engine.device, such as cuda:1.")
@json_option
def serve(config: Path, name: str | None, listen: str, device: str | None, as_json: bool) -> None:
    """Load a base and serve it to the servers that list this address in `engines.addresses`.

    Their keys are in fronts.public, its own in engine.secret. On SIGTERM or Ctrl-C its requests go on at other engines.

    \b
    Example:
      loramux engine serve --config loramux.toml --base qwen3-8b --listen tcp://0.0.0.0:7101 --device cuda:0
    """
    settings = settings_of(config)
    own = settings.of_base(_base_of(settings, name))
    if device is not None:
        own = msgspec.structs.replace(own, engine=msgspec.structs.replace(own.engine, device=device))
    logs.configure(settings.logging.format, settings.logging.level)
    from loramux.fleet.serving import serve_engine  # imports torch, which takes seconds

    def announce(address: str, listening: ListeningEngine) -> None:
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, lambda *_: listening.stop())
        base = own.model.served_model_name
        put(
            as_json,
            {"status": "listening", "address": address, "base": base, "pid": os.getpid()},
            f"loramux: an engine of {base} listens at {address}, and loads {own.model.path}. Ctrl-C stops it.",
        )

    reason = serve_engine(own, listen, announce)
    if reason is not None:
        note(as_json, f"loramux: the engine has ended: {reason}")
    os._exit(0 if reason is None else 1)  # the interpreter's own end would free torch's objects for seconds


@engine.command()
@config_option()
@json_option
def keys(config: Path, as_json: bool) -> None:
    """Make the keys of a fleet in the folder `fleet.keys`.

    Copy engine.secret and fronts.public to the machines of engines, front.secret and engine.public to those of servers.

    \b
    Example:
      loramux engine keys --config loramux.toml
    """
    from loramux.fleet.wire import write_keys

    files = [str(file) for file in write_keys(Path(settings_of(config).fleet.keys))]
    put(as_json, {"files": files}, "\n".join(f"written: {file}" for file in files))


def _base_of(settings: Settings, name: str | None) -> BaseSettings:
    bases = {base.name: base for base in settings.served_bases}
    if name is None and len(bases) == 1:
        return next(iter(bases.values()))
    if name not in bases:
        problem = "--base is missing" if name is None else f"there is no base {name!r}"
        raise SettingsError(f"{problem}; the settings have {', '.join(bases)}")
    return bases[name]


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
