"""Options and output that every command shares."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

import click
import msgspec

from loramux.settings import Settings, load_settings

Command = TypeVar("Command", bound=Callable[..., Any])


def config_option(*, required: bool = True) -> Callable[[Command], Command]:
    """--config, or LORAMUX_CONFIG."""
    return click.option(
        "--config",
        "config",
        type=click.Path(dir_okay=False, path_type=Path),
        envvar="LORAMUX_CONFIG",
        required=required,
        show_envvar=True,
        help="Settings file; start from one in configs/.",
    )


json_option = click.option(
    "--json", "as_json", is_flag=True, help="Print one JSON document on stdout and nothing else."
)


def settings_of(config: Path) -> Settings:
    """The settings in a file."""
    return load_settings(config)


def put(as_json: bool, data: Any, text: str) -> None:
    """The command's result, for programs or for people."""
    click.echo(msgspec.json.encode(data).decode() if as_json else text)


def note(as_json: bool, text: str) -> None:
    """Something that people should know, beside the result."""
    if not as_json:
        click.echo(text, file=sys.stderr)
