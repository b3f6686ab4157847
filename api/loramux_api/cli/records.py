"""loramux migrate."""

from __future__ import annotations

from pathlib import Path

import click

from loramux_api.cli.options import config_option, json_option, put, settings_of


@click.command()
@config_option()
@json_option
def migrate(config: Path, as_json: bool) -> None:
    """Bring the database to this release's schema.

    Only PostgreSQL needs this, once after each upgrade and before the servers start; SQLite is migrated by itself.
    Run a second time it changes nothing.

    \b
    Example:
      loramux migrate --config configs/production.toml
    """
    from loramux.gateway import migrate as run

    revision = run(settings_of(config))
    put(as_json, {"revision": revision}, f"The database is at schema {revision}.")
