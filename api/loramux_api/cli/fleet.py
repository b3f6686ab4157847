"""loramux base, fleet and engine: commands for operators.

`base` and `fleet` work on a running server: on its base models and their migrations, and on its engines. `engine`
serves one engine to servers on other machines.
"""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path
from typing import TYPE_CHECKING, get_args

import click
import msgspec

from loramux.common import logs
from loramux.common.settings.file import Settings, SettingsError, load_settings
from loramux.common.settings.serving import BaseSettings, Dtype, Quantization
from loramux.serving.checkpoint_files import ensure_checkpoints
from loramux_api.cli.common import CommandGroup, config_option, json_option, note, put
from loramux_api.cli.remote import Remote, on_server
from loramux_client.objects import Base, BaseMigration, BaseMigrationItem, Engine, Linears, Moved

if TYPE_CHECKING:
    from loramux.fleet.serving import ListeningEngine

POLL_SECONDS = 1.0


class RangeType(click.ParamType[dict[str, int]]):
    """Option type of `MIN` or `MIN,MAX`."""

    name = "min,max"

    def convert(self, value: object, param: click.Parameter | None, ctx: click.Context | None) -> dict[str, int]:
        """Parse `MIN` or `MIN,MAX`."""
        numbers = str(value).split(",")
        if not (1 <= len(numbers) <= 2 and all(number.strip().isdecimal() for number in numbers)):
            self.fail(f"{value!r} is no range of engines; write MIN or MIN,MAX, such as 1,4", param, ctx)
        return dict(zip(("min", "max"), map(int, numbers), strict=False))


@click.group(cls=CommandGroup)
def base() -> None:
    """Add, list, retire and migrate base models on running servers. The key needs the scope `operator`.

    \b
    Example:
      loramux base add qwen3-8b-v2 --path /models/Qwen3-8B-v2 --key-file operator.key
      loramux base ls --key-file operator.key
    """


@base.command()
@click.argument("name")
@click.option(
    "--path", required=True, type=click.Path(path_type=Path), help="Folder of the checkpoint, on every server."
)
@click.option("--engines", type=RangeType(), default="1", show_default=True, help="Engines: MIN or MIN,MAX.")
@click.option("--device", "devices", multiple=True, help="A device of its engines, such as cuda:1; repeat for several.")
@click.option(
    "--dtype", type=click.Choice(get_args(Dtype)), default="auto", show_default=True, help="Type of the weights."
)
@click.option(
    "--quantization",
    type=click.Choice(get_args(Quantization)),
    default="none",
    show_default=True,
    help="Form of the weights in memory.",
)
@click.option("--wait/--no-wait", default=True, show_default=True, help="Wait until it serves, or has failed to load.")
@on_server
def add(
    remote: Remote,
    name: str,
    path: Path,
    engines: dict[str, int],
    devices: tuple[str, ...],
    dtype: str,
    quantization: str,
    wait: bool,
) -> None:
    """Add a base model, or serve a retired base model again.

    The base model is checked first, and then loaded while the server serves all other models. The exit code is 1 if it
    did not load.

    \b
    Example:
      loramux base add qwen3-8b-v2 --path /models/Qwen3-8B-v2 --engines 1,4 --key-file operator.key
    """
    wanted = {**engines, "devices": list(devices)} if devices else engines
    folder = str(path.absolute())
    found = remote.client.bases.add(name, folder, dtype=dtype, quantization=quantization, engines=wanted)
    while wait and found.state == "loading":
        if not remote.as_json:
            click.echo(_base_line(found), err=True)
        time.sleep(POLL_SECONDS)
        found = remote.client.bases.get(name)
    _put_base(remote, found)
    if found.state == "failed":
        raise SystemExit(1)


@base.command("ls")
@on_server
def list_bases(remote: Remote) -> None:
    """List the base models, with their state on the server that answers.

    \b
    Example:
      loramux base ls --key-file operator.key
    """
    bases = remote.client.bases.list()
    remote.put(bases, "\n".join(map(_base_line, bases)))


@base.command()
@click.argument("name")
@click.option("--successor", help="The base model that refusals name instead; default: that of its migration.")
@click.option(
    "--force", is_flag=True, help="Retire it even if aliases point at adapters for it; their requests get 410."
)
@on_server
def retire(remote: Remote, name: str, successor: str | None, force: bool) -> None:
    """Take no more uploads and requests for a base model, and stop its engines once no request runs.

    `loramux base add` with the same name serves it again.

    \b
    Example:
      loramux base retire qwen3-8b --successor qwen3-8b-v2 --key-file operator.key
    """
    _put_base(remote, remote.client.bases.retire(name, successor=successor, force=force))


@base.command()
@click.option("--from", "source", required=True, help="The base model that the adapters are for.")
@click.option("--to", "target", required=True, help="The base model to check them on; it serves already.")
@click.option("--tenant", help="Only this tenant's adapters.")
@click.option("--adapter", help="Only this adapter, TENANT/ADAPTER.")
@click.option(
    "--evaluate/--no-evaluate", default=True, show_default=True, help="Repeat owners' evaluations, on their bill."
)
@click.option("--wait/--no-wait", default=False, show_default=True, help="Wait for the end, and print the report.")
@on_server
def migrate(
    remote: Remote, source: str, target: str, tenant: str | None, adapter: str | None, evaluate: bool, wait: bool
) -> None:
    """Check every adapter that an alias points at on another base model, in the background.

    Each adapter fits, needs retraining, or is refused with the reason. An adapter that fits gets a new revision; no
    alias moves. The same command again, while the migration runs, shows this migration.

    \b
    Example:
      loramux base migrate --from qwen3-8b --to qwen3-8b-v2 --wait --key-file operator.key
      loramux base migrate --from qwen3-8b --to qwen3-8b-v2 --tenant acme --key-file operator.key
    """
    found = remote.client.migrations.begin(source, target, tenant=tenant, adapter=adapter, evaluate=evaluate)
    if wait:
        _put_report(remote, remote.client.migrations.wait(found.id))
    else:
        remote.put(found, _migration_line(found))


@base.command()
@on_server
def migrations(remote: Remote) -> None:
    """List migrations, newest first.

    \b
    Example:
      loramux base migrations --key-file operator.key
    """
    found = remote.client.migrations.list()
    remote.put(found, "\n".join(map(_migration_line, found)))


@base.command()
@click.argument("migration")
@on_server
def report(remote: Remote, migration: str) -> None:
    """Show a migration, and what was found about every adapter.

    \b
    Example:
      loramux base report migration_3f2a --key-file operator.key
    """
    _put_report(remote, remote.client.migrations.get(migration))


@base.command()
@click.argument("migration")
@on_server
def cancel(remote: Remote, migration: str) -> None:
    """End a running migration. The migration's decisions so far remain. Another `migrate` checks all adapters again.

    \b
    Example:
      loramux base cancel migration_3f2a --key-file operator.key
    """
    found = remote.client.migrations.cancel(migration)
    remote.put(found, _migration_line(found))


@base.command()
@click.argument("migration")
@click.option(
    "--weight",
    type=click.IntRange(1, 100),
    default=100,
    show_default=True,
    help="Percent of an alias's requests; below 100 it is a canary.",
)
@click.option("--tenant", help="Only this tenant's adapters.")
@click.option("--adapter", help="Only this adapter, TENANT/ADAPTER.")
@on_server
def promote(remote: Remote, migration: str, weight: int, tenant: str | None, adapter: str | None) -> None:
    """Move aliases of adapters that fit to their revisions for the new base model. Release policies apply.

    \b
    Example:
      loramux base promote migration_3f2a --adapter acme/support --weight 10 --key-file operator.key
      loramux base promote migration_3f2a --tenant acme --key-file operator.key
    """
    moved = remote.client.migrations.promote(migration, weight=weight, tenant=tenant, adapter=adapter)
    _put_moved(remote, moved)


@base.command()
@click.argument("migration")
@click.option("--tenant", help="Only this tenant's adapters.")
@click.option("--adapter", help="Only this adapter, TENANT/ADAPTER.")
@on_server
def rollback(remote: Remote, migration: str, tenant: str | None, adapter: str | None) -> None:
    """Move aliases back to their earlier targets.

    \b
    Example:
      loramux base rollback migration_3f2a --tenant acme --key-file operator.key
    """
    _put_moved(remote, remote.client.migrations.roll_back(migration, tenant=tenant, adapter=adapter))


def _put_base(remote: Remote, found: Base) -> None:
    remote.put(found, _base_line(found))


def _base_line(found: Base) -> str:
    after = f" for {found.seconds_in_state:.0f} s" if found.state in ("loading", "draining") else ""
    problem = f": {found.problem}" if found.problem else ""
    instead = f", use {found.successor}" if found.successor else ""
    return (
        f"{found.name}  {found.state}{after}, {found.engines_ready} of {found.engines_min} engines ready, "
        f"from {'the settings' if found.source == 'settings' else 'base add'}, {found.path}{instead}{problem}"
    )


def _migration_line(found: BaseMigration) -> str:
    counts = ", ".join(f"{count} {outcome.replace('_', ' ')}" for outcome, count in found.outcomes.items())
    error = f": {found.error}" if found.error else ""
    return f"{found.id}  {found.status}, {found.source} to {found.target}, {counts or 'no adapters'}{error}"


def _put_report(remote: Remote, found: BaseMigration) -> None:
    items = remote.client.migrations.items(found.id)
    lines = [_migration_line(found), *map(_item_line, items)]
    data = {**msgspec.structs.asdict(found), "items": items}
    remote.put(data, "\n".join(lines))


def _item_line(item: BaseMigrationItem) -> str:
    new = f", as @{item.new_revision}" if item.new_revision else ""
    reason = f": {item.reason}" if item.reason else ""
    return f"  {item.adapter}@{item.revision}  {item.outcome.replace('_', ' ')}{new}{reason}"


def _put_moved(remote: Remote, moved: list[Moved]) -> None:
    """Print what was moved. The exit code is 1 if something was not moved."""
    remote.put(moved, "\n".join(map(_moved_line, moved)))
    if any(one.error for one in moved):
        raise SystemExit(1)


def _moved_line(one: Moved) -> str:
    outcome = one.error or ", ".join(one.aliases) or "no alias to move"
    return f"{one.adapter}@{one.revision} -> @{one.new_revision}  {outcome}"


_engines = click.argument("engines", nargs=-1, required=True, metavar="ENGINE...")
_seconds = click.option(
    "--seconds",
    type=click.FloatRange(0, 3600),
    default=30.0,
    show_default=True,
    help="Time for running requests to end; those that still run then go on at other engines.",
)


@click.group(cls=CommandGroup)
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
    remote.put(engines, "\n".join(map(_engine_line, engines)))


@fleet.command()
@_engines
@_seconds
@on_server
def drain(remote: Remote, engines: tuple[str, ...], seconds: float) -> None:
    """Take engines out of service, one after the other. Each engine is stopped when its last request has ended.

    \b
    Example:
      loramux fleet drain base-0 --key-file operator.key
    """
    drained = [remote.client.engines.drain(engine, seconds) for engine in engines]
    remote.put(drained, "\n".join(map(_engine_line, drained)))


@fleet.command()
@_engines
@_seconds
@on_server
def restart(remote: Remote, engines: tuple[str, ...], seconds: float) -> None:
    """Restart engines, one after the other: each engine is drained, stopped and started, and must serve before the next
    engine is drained.

    No request fails. If a base has only one engine, requests wait for its restart.

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
    remote.put(restarted, "\n".join(map(_engine_line, restarted)))


def _engine_line(engine: Engine) -> str:
    problem = f"; {engine.problem}" if engine.problem else ""
    return (
        f"{engine.engine}  {engine.state}, {engine.requests} requests, started {engine.starts} times, "
        f"base {engine.base_model}{_linears(engine.linears)}{problem}"
    )


def _linears(linears: Linears | None) -> str:
    """Describe the format of an engine's linears, and a step's time for the weights next to its floor."""
    if linears is None:
        return ""
    floor = "" if linears.floor_ms is None else f", floor of a step {linears.floor_ms:.1f} ms"
    reading = "" if linears.reading_ms is None or not floor else f" (now {linears.reading_ms:.1f})"
    return f", linears in {linears.format}{floor}{reading}"


@click.group(cls=CommandGroup)
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

    The servers' keys are in fronts.public, the engine's own key is in engine.secret. On SIGTERM or Ctrl-C the engine's
    requests continue on other engines.

    \b
    Example:
      loramux engine serve --config loramux.toml --base qwen3-8b --listen tcp://0.0.0.0:7101 --device cuda:0
    """
    os.umask(0o077)  # only the engine's own user may read the files that it writes (fetched adapters, caches)
    settings = load_settings(config)
    own = settings.of_base(_base_of(settings, name))
    if device is not None:
        own = msgspec.structs.replace(own, engine=msgspec.structs.replace(own.engine, device=device))
    ensure_checkpoints(own, str(config))
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

    files = [str(file) for file in write_keys(Path(load_settings(config).fleet.keys))]
    put(as_json, {"files": files}, "\n".join(f"written: {file}" for file in files))


def _base_of(settings: Settings, name: str | None) -> BaseSettings:
    bases = {base.name: base for base in settings.served_bases}
    if name is None and len(bases) == 1:
        return next(iter(bases.values()))
    if name not in bases:
        problem = "--base is missing" if name is None else f"there is no base {name!r}"
        raise SettingsError(f"{problem}; the settings have {', '.join(bases)}")
    return bases[name]
