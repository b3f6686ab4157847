"""loramux serve and migrate."""

from __future__ import annotations

import logging
import os
import signal
from pathlib import Path
from types import FrameType
from typing import NoReturn

import click
import msgspec

from loramux import logs
from loramux.settings import Settings, SettingsError
from loramux_api.cli.common import config_option, json_option, put, settings_of

logger = logging.getLogger(__name__)


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
    settings = _with_address(settings_of(config), host, port)
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
    from loramux.gateway import migrate as migrate_database

    revision = migrate_database(settings_of(config))
    put(as_json, {"revision": revision}, f"The database has schema {revision}.")
