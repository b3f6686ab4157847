"""loramux init, migrate and serve: settings for a first server, the database's schema, and the server."""

from __future__ import annotations

import logging
import os
import signal
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import NoReturn

import click
import msgspec

from loramux.common import logs
from loramux.common.settings.file import Settings, load_settings
from loramux.serving.checkpoint_files import ensure_checkpoints, missing_files
from loramux_api.cli.common import CONFIG_HELP, config_option, json_option, note, put
from loramux_api.cli.default_server import (
    config_argument,
    data_folder,
    default_config,
    find_models,
    model_name,
    settings_text,
    write_default_config,
)
from loramux_api.cli.hub import find_model
from loramux_api.process import exit_now

logger = logging.getLogger(__name__)


class InitResult(msgspec.Struct, frozen=True):
    """The files that `loramux init` wrote."""

    config: str
    data: str
    """Folder with the database, the adapters' files and the pepper."""
    model: str | None
    """Path of the model. None: no model was found, and the file has a placeholder."""
    served_model_name: str
    next: list[str]
    """Commands to run next."""


@click.command("init")
@click.argument("file", type=click.Path(dir_okay=False, path_type=Path), default="loramux.toml")
@click.option(
    "--model",
    type=click.Path(exists=True, file_okay=False, path_type=Path),
    help="Folder of a transformers checkpoint. Default: searched for in ., ./models and the Hugging Face cache.",
)
@click.option("--force", is_flag=True, help="Replace an existing file.")
@json_option
def init(file: Path, model: Path | None, force: bool, as_json: bool) -> None:
    """Write commented settings for a first server to FILE (default: loramux.toml), and print the next commands.

    These are the settings that `loramux serve MODEL` assumes, including the data folder. Change these settings as you
    like.

    \b
    Example:
      loramux init
      loramux init server.toml --model ./Llama-3.1-8B-Instruct
    """
    if model is not None and (missing := missing_files(model)):
        raise click.ClickException(
            f"--model: {model} is not a transformers checkpoint: it has no {' and no '.join(missing)}"
        )
    if file.exists() and not force:
        raise click.ClickException(f"{file} exists; choose another file, or replace it with --force")
    found = [model] if model else list(find_models())
    model, others = (found[0].absolute(), found[1:]) if found else (None, [])
    name = model_name(model) if model else "base"
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(f"# loramux serve --config {file}\n\n{settings_text(model, name, data_folder())}")
    load_settings(file)
    commands = [f"loramux serve --config {file}", *_first_commands(config_argument(file))]
    result = InitResult(str(file), str(data_folder()), None if model is None else str(model), name, commands)
    put(as_json, result, _text(result, others))


def _first_commands(options: str = "") -> list[str]:
    """Return the commands that make a first tenant and its key."""
    return [f"loramux tenant create acme{options}", f"loramux key create --tenant acme{options}"]


def _text(result: InitResult, others: list[Path]) -> str:
    lines = [f"Wrote {result.config}. Its data is in {result.data}."]
    if result.model is None:
        lines.append("No model was found: set model.path in it to the folder of a transformers checkpoint.")
    else:
        lines.append(f"Model: {result.model}, served as {result.served_model_name}.")
    lines += [f"  also found: {other}" for other in others[:5]]
    return "\n".join([*lines, "Next:", *(f"  {command}" for command in result.next)])


@click.command()
@click.argument("model", required=False)
@click.option(
    "--config",
    type=click.Path(dir_okay=False, path_type=Path),
    envvar="LORAMUX_CONFIG",
    show_envvar=True,
    help=CONFIG_HELP,
)
@click.option("--host", help="Listen address; overrides server.host. 0.0.0.0 is every interface.")
@click.option("--port", type=click.IntRange(1, 65535), help="Port; overrides server.port.")
@json_option
def serve(model: str | None, config: Path | None, host: str | None, port: int | None, as_json: bool) -> None:
    """Serve base models and their adapters.

    MODEL is the folder of a transformers checkpoint, or a repository of the Hugging Face hub (org/name), which is
    downloaded unless it is in the hub's cache. All data is then in one folder, LORAMUX_DATA (default:
    ~/.local/share/loramux), and the other commands find it without --config. Servers with other settings need a
    settings file.

    Loads the models, which takes seconds to minutes, and serves until SIGTERM or Ctrl-C. Running requests finish first.
    A SQLite database is created and migrated automatically; for PostgreSQL run `loramux migrate` first.

    \b
    Example:
      loramux serve ./Llama-3.1-8B-Instruct
      loramux serve HuggingFaceTB/SmolLM2-135M-Instruct --port 8001
      loramux serve --config configs/single-node.toml
    """
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, _end_at_once)
    file = _config_of(model, config, host, port, as_json)
    settings = _with_address(load_settings(file), host, port)
    ensure_checkpoints(settings, str(file))
    run: Callable[[Settings, Callable[..., None]], int]
    if settings.server.workers > 1:
        from loramux_api.workers import supervise as run
    else:
        from loramux_api.server import serve as run  # imports torch, which takes seconds

    logs.configure(settings.logging.format, settings.logging.level)
    url = f"http{'s' if settings.server.tls_certificate else ''}://{settings.server.host}:{settings.server.port}"
    models = [base.name for base in settings.served_bases]
    logger.info("loading %s", ", ".join(base.path for base in settings.served_bases))
    serving = {"status": "serving", "url": url, "model": models[0], "models": models, "pid": os.getpid()}
    text = f"loramux: serving {', '.join(models)} at {url}/v1 (API description: {url}/schema)."
    if file == default_config():
        serving |= {"data": str(file.parent), "next": _first_commands()}
        text += f" Data: {file.parent}.\nNext, in another terminal:\n" + "\n".join(f"  {c}" for c in _first_commands())
        text += "\nCtrl-C drains and stops."
    else:
        text += " Ctrl-C drains and stops."
    code = run(settings, lambda *_: put(as_json, serving, text))
    exit_now(code)


def _config_of(model: str | None, config: Path | None, host: str | None, port: int | None, as_json: bool) -> Path:
    """Return the settings file that was named. Without one, write the default server's for `model`, and return it."""
    if model is not None and config is not None:
        raise click.UsageError(
            f"MODEL is served without a settings file, and --config or LORAMUX_CONFIG names {config}; leave one "
            "out, or set model.path in the file"
        )
    if model is not None:
        folder = find_model(model, lambda text: note(as_json, f"loramux: {text}"))
        return write_default_config(folder, host, port)
    if config is None:
        if not default_config().is_file():
            raise click.UsageError(
                "give a MODEL (a folder, or org/name of the Hugging Face hub), or --config with a settings file, which "
                "`loramux init` writes"
            )
        return default_config()
    return config


def _end_at_once(number: int, _: FrameType | None) -> NoReturn:
    """End the process before anything is open: during torch's import, which takes seconds, an exception would become a
    crash.
    """
    os._exit(128 + number)


def _with_address(settings: Settings, host: str | None, port: int | None) -> Settings:
    server = settings.server
    server = msgspec.structs.replace(server, host=host or server.host, port=port or server.port)
    return msgspec.structs.replace(settings, server=server)


@click.command()
@config_option()
@json_option
def migrate(config: Path, as_json: bool) -> None:
    """Upgrade the database to this release's schema.

    PostgreSQL needs this once after each upgrade, before the servers start. SQLite is migrated automatically. A second
    run changes nothing.

    \b
    Example:
      loramux migrate --config configs/production.toml
    """
    from loramux.server.records import migrate as migrate_database

    revision = migrate_database(load_settings(config))
    put(as_json, {"revision": revision}, f"The database has schema {revision}.")
