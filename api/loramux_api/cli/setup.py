"""The command `loramux init`: settings for a first server of an installed wheel."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterator
from pathlib import Path

import click
import msgspec

import loramux
from loramux.settings import load_settings
from loramux_api.cli.common import json_option, put

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
