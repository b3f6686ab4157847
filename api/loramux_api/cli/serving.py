"""loramux init, migrate and serve: settings for a first server, the database's schema, and the server."""

from __future__ import annotations

import json
import logging
import os
import re
import signal
from collections.abc import Iterator
from pathlib import Path
from types import FrameType
from typing import NoReturn

import click
import msgspec

import loramux
from loramux.common import logs
from loramux.common.settings.file import Settings, SettingsError, load_settings
from loramux_api.cli.common import config_option, json_option, put

logger = logging.getLogger(__name__)

MAX_FOLDERS = 2000
"""Folders that the search for a model looks at."""


class InitResult(msgspec.Struct, frozen=True):
    """The files that `loramux init` wrote."""

    config: str
    model: str | None
    """None: no model was found, and the file has a placeholder."""
    served_model_name: str
    next: list[str]
    """The commands to run next."""


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
    file.write_text(settings_text(model, name))
    load_settings(file)
    commands = [
        f"loramux serve --config {file}",
        f"loramux tenant create acme --config {file}",
        f"loramux key create --tenant acme --config {file}",
    ]
    result = InitResult(str(file), None if model is None else str(model), name, commands)
    put(as_json, result, _text(result, others))


def find_models() -> Iterator[Path]:
    """Yield folders with a transformers checkpoint: here, in ./models, and in the Hugging Face cache, newest first."""
    cache = Path(os.environ.get("HF_HOME", "~/.cache/huggingface")).expanduser() / "hub"
    patterns = [
        (Path(), "."),
        (Path(), "*"),
        (Path("models"), "*"),
        (Path("models"), "*/*"),
        (cache, "models--*/snapshots/*"),
    ]
    looked_at = 0
    for root, pattern in patterns:
        try:
            folders = [root] if pattern == "." else sorted(root.glob(pattern), key=_changed_at, reverse=True)
        except OSError:
            continue
        for folder in folders:
            looked_at += 1
            if looked_at > MAX_FOLDERS:
                return
            if folder.is_dir() and not missing_files(folder):
                yield folder.absolute()


def missing_files(folder: Path) -> list[str]:
    """Return the parts of a checkpoint that a folder lacks. An adapter's folder lacks config.json."""
    wanted = {"config.json": "config.json", "*.safetensors": "*.safetensors", "tokenizer*.json": "tokenizer.json"}
    return [name for pattern, name in wanted.items() if next(iter(folder.glob(pattern)), None) is None]


def model_name(model: Path) -> str:
    """Return a name for requests: the folder's, or the repository's for a snapshot in the Hugging Face cache."""
    named = model.parents[1].name.split("--")[-1] if model.parent.name == "snapshots" else model.name
    return re.sub(r"[^a-z0-9._-]+", "-", named.lower()).strip("-.") or "base"


def settings_text(model: Path | None, name: str) -> str:
    """Return configs/single-node.toml for this model, with its data below the file's own folder."""
    text = (configs_folder() / "single-node.toml").read_text().replace("../var", "var")
    if model is not None:
        text = re.sub(r"^path = .*$", lambda _: f"path = {json.dumps(str(model))}", text, count=1, flags=re.M)
    return re.sub(
        r'^served_model_name = "base"', lambda _: f"served_model_name = {json.dumps(name)}", text, count=1, flags=re.M
    )


def configs_folder() -> Path:
    """Return `loramux/configs` of an installed wheel, or `configs` of the repository."""
    package = Path(loramux.__file__).parent
    installed = package / "configs"
    return installed if installed.is_dir() else package.parents[1] / "configs"


def _changed_at(folder: Path) -> float:
    return folder.stat().st_mtime


def _text(result: InitResult, others: list[Path]) -> str:
    lines = [f"Wrote {result.config}."]
    if result.model is None:
        lines.append("No model was found: set model.path in it to the folder of a transformers checkpoint.")
    else:
        lines.append(f"Model: {result.model}, served as {result.served_model_name}.")
    lines += [f"  also found: {other}" for other in others[:5]]
    return "\n".join([*lines, "Next:", *(f"  {command}" for command in result.next)])


@click.command()
@config_option()
@click.option("--host", help="Listen address; overrides server.host. 0.0.0.0 is every interface.")
@click.option("--port", type=click.IntRange(1, 65535), help="Port; overrides server.port.")
@json_option
def serve(config: Path, host: str | None, port: int | None, as_json: bool) -> None:
    """Serve base models and their adapters.

    Loads the models, which takes seconds to minutes, and serves until SIGTERM or Ctrl-C. Running requests finish first.
    A SQLite database is created and migrated automatically; for PostgreSQL run `loramux migrate` first.

    \b
    Example:
      loramux serve --config configs/single-node.toml --port 8000
      curl http://127.0.0.1:8000/health/ready
    """
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, _end_at_once)
    settings = _with_address(load_settings(config), host, port)
    _ensure_models(settings, config)
    from loramux_api.server import exit_now
    from loramux_api.server import serve as run  # imports torch, which takes seconds

    logs.configure(settings.logging.format, settings.logging.level)
    url = f"http{'s' if settings.server.tls_certificate else ''}://{settings.server.host}:{settings.server.port}"
    models = [base.name for base in settings.served_bases]
    logger.info("loading %s", ", ".join(base.path for base in settings.served_bases))
    code = run(
        settings,
        lambda _: put(
            as_json,
            {"status": "serving", "url": url, "model": models[0], "models": models, "pid": os.getpid()},
            f"loramux: serving {', '.join(models)} at {url}/v1 (API description: {url}/schema). Ctrl-C drains and "
            "stops.",
        ),
    )
    exit_now(code)


def _end_at_once(number: int, _: FrameType | None) -> NoReturn:
    """End the process before anything is open: torch's import, of seconds, turns an exception into a crash."""
    os._exit(128 + number)


def _ensure_models(settings: Settings, config: Path) -> None:
    """Refuse a model path without a model before anything else starts. Raises SettingsError."""
    for base in settings.served_bases:
        folder = Path(base.path)
        if (folder / "config.json").is_file():
            continue
        problem = "does not exist" if not folder.exists() else "has no config.json"
        field = f"bases.path of {base.name}" if settings.bases else "model.path"
        raise SettingsError(
            f"{field}: {folder} {problem}; in {config}, set it to the folder of a transformers checkpoint "
            "(config.json, *.safetensors and the tokenizer), or try `loramux demo`"
        )


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
    from loramux.server.platform import migrate as migrate_database

    revision = migrate_database(load_settings(config))
    put(as_json, {"revision": revision}, f"The database has schema {revision}.")
