"""loramux adapter: a client of a running server."""

from __future__ import annotations

from contextlib import ExitStack
from pathlib import Path
from typing import Any

import click
import httpx
from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, Progress, TimeRemainingColumn, TransferSpeedColumn

from loramux_api.cli.options import config_option, json_option, put, settings_of

FILES = ("adapter_config.json", "adapter_model.safetensors")
DEFAULT_URL = "http://127.0.0.1:8000"

_url = click.option(
    "--url", envvar="LORAMUX_URL", show_envvar=True, help=f"The server; default: that of --config, else {DEFAULT_URL}."
)
_key = click.option(
    "--key", envvar="LORAMUX_API_KEY", show_envvar=True, required=True, help="An API key of your tenant."
)


@click.group()
def adapter() -> None:
    """Upload and list adapters on a running server.

    \b
    Example:
      export LORAMUX_API_KEY=sk-lm-...
      loramux adapter push ./my-adapter --name support-bot
      loramux adapter ls
    """


@adapter.command("push")
@click.argument("directory", type=click.Path(exists=True, file_okay=False, path_type=Path))
@click.option("--name", help="The adapter's name; default: the folder's. A name that is taken gets a new revision.")
@_url
@_key
@config_option(required=False)
@json_option
def push(directory: Path, name: str | None, url: str | None, key: str, config: Path | None, as_json: bool) -> None:
    """Upload the PEFT adapter in DIRECTORY, as `save_pretrained` wrote it.

    The server checks it against its base model before it says yes; what cannot be served exactly is refused with the
    field's name.

    \b
    Example:
      loramux adapter push ./my-adapter --name support-bot --key sk-lm-...
    """
    missing = [file for file in FILES if not (directory / file).is_file()]
    if missing:
        raise click.ClickException(
            f"{directory} has no {' and no '.join(missing)}; save it with model.save_pretrained()"
        )
    name = name or directory.resolve().name
    info = _upload(_base_url(url, config), key, name, directory)
    put(as_json, info, f"{info['name']}@{info['revision']} is {info['state']} ({info['digest']}).")


@adapter.command("ls")
@_url
@_key
@config_option(required=False)
@json_option
def list_adapters(url: str | None, key: str, config: Path | None, as_json: bool) -> None:
    """List your adapters.

    \b
    Example:
      loramux adapter ls --key sk-lm-...
    """
    with _client(_base_url(url, config), key) as client:
        found = _answer(client, "GET", "/v1/adapters")["data"]
    lines = [f"{one['name']}@{one['revision']}\trank {one['rank']}\t{one['size_bytes']} bytes" for one in found]
    put(as_json, found, "\n".join(lines) or "No adapters yet; upload one with: loramux adapter push DIRECTORY")


def _upload(url: str, key: str, name: str, directory: Path) -> Any:
    progress = Progress(
        "{task.description}",
        BarColumn(),
        DownloadColumn(),
        TransferSpeedColumn(),
        TimeRemainingColumn(),
        console=Console(stderr=True),
        transient=True,
        disable=not Console(stderr=True).is_terminal,
    )
    with progress, ExitStack() as opened, _client(url, key) as client:
        files = {
            file: (file, opened.enter_context(progress.open(directory / file, "rb", description=file)))
            for file in FILES
        }
        return _answer(client, "POST", "/v1/adapters", data={"name": name}, files=files)


def _client(url: str, key: str) -> httpx.Client:
    return httpx.Client(base_url=url, headers={"Authorization": f"Bearer {key}"}, timeout=httpx.Timeout(30, read=600))


def _answer(client: httpx.Client, method: str, path: str, **content: Any) -> Any:
    """The server's JSON; raises ClickException with the server's own sentence."""
    try:
        response = client.request(method, path, **content)
        answer = response.json()
    except (httpx.HTTPError, httpx.InvalidURL, ValueError) as error:
        raise click.ClickException(f"no loramux server answers at {client.base_url}: {error}") from None
    if response.is_error:
        raise click.ClickException(answer.get("error", {}).get("message", f"{response.status_code}: {response.text}"))
    return answer


def _base_url(url: str | None, config: Path | None) -> str:
    if url:
        return url.rstrip("/").removesuffix("/v1")
    if config is None:
        return DEFAULT_URL
    server = settings_of(config).server
    return f"http://{server.host}:{server.port}"
