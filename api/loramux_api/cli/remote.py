"""Options and argument types of the commands that call a running server."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from functools import wraps
from pathlib import Path
from typing import Any, NamedTuple

import click

from loramux.common.settings.file import load_settings
from loramux_api.cli.common import config_option, json_option, put
from loramux_client import Client, RetryPolicy

RETRY = RetryPolicy(retries=2, first_pause=0.2)
"""Retries with short pauses, because a person waits at the terminal."""

_revision = re.compile(r"(?P<name>[^@]+)@(?P<number>[1-9][0-9]{0,8})")


@dataclass(frozen=True, slots=True)
class Remote:
    """A client of the server, and the output format."""

    client: Client
    as_json: bool

    def put(self, data: Any, text: str) -> None:
        """Print the command's result, as JSON or as text."""
        put(self.as_json, data, text)


class RemoteRevision(NamedTuple):
    """An adapter and a revision number, `support@3`. The number is None for `support`."""

    name: str
    number: int | None

    def __str__(self) -> str:
        return self.name if self.number is None else f"{self.name}@{self.number}"


class RevisionType(click.ParamType[RemoteRevision]):
    """Argument type of `ADAPTER@REVISION`."""

    name = "revision"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> RemoteRevision:
        """Parse `ADAPTER@REVISION`."""
        found = _revision.fullmatch(str(value))
        if found is None:
            self.fail(f"{value!r} is not a revision; write ADAPTER@NUMBER, such as support@3", param, ctx)
        return RemoteRevision(found["name"], int(found["number"]))


class AdapterType(RevisionType):
    """Argument type of `ADAPTER`, or `ADAPTER@REVISION`."""

    name = "adapter"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> RemoteRevision:
        """Parse `ADAPTER` or `ADAPTER@REVISION`."""
        return super().convert(value, param, ctx) if "@" in str(value) else RemoteRevision(str(value), None)


def on_server(command: Callable[..., None]) -> Callable[..., None]:
    """Add the options for the server and the key. The command gets a Remote as its first argument."""

    @click.option(
        "--url",
        envvar="LORAMUX_URL",
        show_envvar=True,
        help="Server address; default: that of --config, else http://127.0.0.1:8000.",
    )
    @click.option("--key", envvar="LORAMUX_API_KEY", show_envvar=True, help="API key.")
    @click.option(
        "--key-file",
        type=click.Path(exists=True, dir_okay=False, path_type=Path),
        help="File with the API key. It keeps the key out of the process list.",
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
        with Client(url or address_of(config), api_key=secret, retry=RETRY) as client:
            command(Remote(client, as_json), *args, **rest)

    return run


def address_of(config: Path | None) -> str | None:
    """Return the address at which this machine calls the settings' server; None for the default address."""
    if config is None:
        return None
    server = load_settings(config).server
    every = {"0.0.0.0": "127.0.0.1", "::": "::1"}  # noqa: S104  every interface is an address to listen on, not to call
    host = every.get(server.host, server.host)
    scheme = "http" if server.tls_certificate is None else "https"
    return f"{scheme}://{f'[{host}]' if ':' in host else host}:{server.port}"
