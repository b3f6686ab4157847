"""loramux serve."""

from __future__ import annotations

import logging
import os
import sys
from pathlib import Path

import click
import msgspec

from loramux.settings import Settings
from loramux_api.cli.options import config_option, json_option, note, put, settings_of


@click.command()
@config_option()
@click.option("--host", help="Listen here instead of at server.host of the settings; 0.0.0.0 is every interface.")
@click.option("--port", type=click.IntRange(1, 65535), help="Listen here instead of at server.port of the settings.")
@json_option
def serve(config: Path, host: str | None, port: int | None, as_json: bool) -> None:
    """Serve one base model and everybody's adapters.

    Loads the model (this takes seconds to minutes), then answers until it gets SIGTERM or Ctrl-C; streams that run
    are finished first. An embedded SQLite database is made and migrated by itself.

    \b
    Example:
      loramux serve --config configs/single-node.toml --port 8000
      curl http://127.0.0.1:8000/health/ready
    """
    from loramux_api.server import serve as run  # torch and transformers: seconds

    settings = _listening(settings_of(config), host, port)
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(name)s: %(message)s")
    url = f"http://{settings.server.host}:{settings.server.port}"
    model = settings.model.served_model_name
    note(as_json, f"loramux: loading {settings.model.path} ...")
    code = run(
        settings,
        lambda _: put(
            as_json,
            {"status": "serving", "url": url, "model": model, "pid": os.getpid()},
            f"loramux: serving {model} at {url}/v1 (API description: {url}/schema). Ctrl-C drains and stops.",
        ),
    )
    sys.exit(code)


def _listening(settings: Settings, host: str | None, port: int | None) -> Settings:
    server = settings.server
    server = msgspec.structs.replace(server, host=host or server.host, port=port or server.port)
    return msgspec.structs.replace(settings, server=server)
