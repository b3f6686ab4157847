"""Commands that are a client of a running server: where it is, whose key is shown, and what is named."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from functools import wraps
from pathlib import Path
from typing import Any, NamedTuple

import click

from loramux.client import Client, Patience
from loramux_api.cli.options import config_option, json_option, put, settings_of

PATIENCE = Patience(retries=2, first=0.2)
"""Somebody sits before the screen."""

_revision = re.compile(r"(?P<name>[^@]+)@(?P<number>[1-9][0-9]{0,8})")


@dataclass(frozen=True, slots=True)
class Remote:
    """A server, and how its answers are shown."""

    client: Client
    as_json: bool

    def put(self, data: Any, text: str) -> None:
        """The command's result, for programs or for people."""
        put(self.as_json, data, text)


class Revision(NamedTuple):
    """`support@3`, or `support` where the number may be absent."""

    name: str
    number: int | None

    def __str__(self) -> str:
        return self.name if self.number is None else f"{self.name}@{self.number}"


class RevisionType(click.ParamType[Revision]):
    """`ADAPTER@REVISION`."""

    name = "revision"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Revision:
        """Take it apart."""
        found = _revision.fullmatch(str(value))
        if found is None:
            self.fail(f"{value!r} is no revision; write ADAPTER@NUMBER, such as support@3", param, ctx)
        return Revision(found["name"], int(found["number"]))


class AdapterType(RevisionType):
    """`ADAPTER`, or `ADAPTER@REVISION`."""

    name = "adapter"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Revision:
        """Take it apart."""
        return super().convert(value, param, ctx) if "@" in str(value) else Revision(str(value), None)


def on_server(command: Callable[..., None]) -> Callable[..., None]:
    """Options for the server and the key; the command gets a Remote as its first argument."""

    @click.option("--url", envvar="LORAMUX_URL", show_envvar=True, help="The server; default: that of --config.")
    @click.option("--key", envvar="LORAMUX_API_KEY", show_envvar=True, help="An API key of your tenant.")
    @click.option(
        "--key-file",
        type=click.Path(exists=True, dir_okay=False, path_type=Path),
        help="A file that holds the key, so that it stands in no list of processes.",
    )
    @config_option(required=False)
    @json_option
    @wraps(command)
    def run(
        *args: Any,
        url: str | None,
        key: str | None,
        key_file: Path | None,
        config: Path | None,
        as_json: bool,
        **rest: Any,
    ) -> None:
        secret = key_file.read_text().strip() if key_file else key
        if not secret:
            raise click.UsageError("give an API key: --key-file FILE, --key KEY, or LORAMUX_API_KEY in the environment")
        with Client(url or _url_of(config), api_key=secret) as client:
            command(Remote(client, as_json), *args, **rest)

    return run


def _url_of(config: Path | None) -> str | None:
    """Where the server of these settings listens; None: where servers do by default."""
    if config is None:
        return None
    server = settings_of(config).server
    return f"http://{server.host}:{server.port}"
