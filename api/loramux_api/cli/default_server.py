"""The server that needs no settings file: `loramux serve MODEL`, its settings and the folder with its data.

The settings are those of `configs/single-node.toml`, with this model and with all data in one folder, `LORAMUX_DATA`.
Each start writes the settings into this folder, so that commands without `--config` find the database, the pepper and
the address of the same server. `loramux init` writes the same settings to a file that the user chooses.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterator
from pathlib import Path

import click

import loramux
from loramux.serving.checkpoint_files import missing_files
from loramux_api.cli.hub import cache_folder

MAX_FOLDERS = 2000
"""Maximum number of folders that the search for a model looks at."""
DATA_VARIABLE = "LORAMUX_DATA"


def data_folder() -> Path:
    """Return the folder with the default server's data: LORAMUX_DATA, or `loramux` in the user's data folder."""
    chosen = os.environ.get(DATA_VARIABLE)
    if chosen:
        return Path(chosen).expanduser().absolute()
    return Path(os.environ.get("XDG_DATA_HOME") or "~/.local/share").expanduser().absolute() / "loramux"


def default_config() -> Path:
    """Return the path of the default server's settings file, which exists after the first `loramux serve MODEL`."""
    return data_folder() / "loramux.toml"


def config_argument(file: Path) -> str:
    """Return ` --config FILE` for a command to suggest, or nothing if the command finds the file by itself."""
    return "" if file == default_config() else f" --config {file}"


def write_default_config(model: Path, host: str | None, port: int | None) -> Path:
    """Write the default server's settings for this model, and return the file."""
    file = default_config()
    try:
        file.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        text = settings_text(model, model_name(model), file.parent, host=host, port=port)
        part = file.with_suffix(".part")
        part.write_text(
            f"# Written by `loramux serve {model.name}` at each start; `loramux init` writes one to change.\n\n{text}"
        )
        part.replace(file)
    except OSError as error:
        raise click.ClickException(
            f"{file} cannot be written: {error.strerror}; set {DATA_VARIABLE} to a folder that you may write to"
        ) from None
    return file


def settings_text(
    model: Path | None, name: str, data: Path, *, host: str | None = None, port: int | None = None
) -> str:
    """Return the text of configs/single-node.toml for this model, with its data in `data`."""
    _, _, text = (configs_folder() / "single-node.toml").read_text().partition("\n\n")
    changes: dict[str, str | int | None] = {
        "path": None if model is None else str(model),
        "served_model_name": name,
        "host": host,
        "port": port,
        "url": f"sqlite:///{data / 'loramux.sqlite3'}",
        "blobs": str(data / "blobs"),
        "cache": str(data / "cache"),
        "pepper_file": str(data / "pepper"),
        "keys": str(data / "fleet"),
    }
    for field, value in changes.items():
        if value is not None:
            written = f"{field} = {json.dumps(value)}"
            text, count = re.subn(rf"^{field} = (\"[^\"]*\"|\d+)", lambda _: written, text, count=1, flags=re.M)  # noqa: B023
            assert count == 1, f"configs/single-node.toml has no {field}"
    return text


def configs_folder() -> Path:
    """Return `loramux/configs` of an installed wheel, or `configs` of the repository."""
    package = Path(loramux.__file__).parent
    installed = package / "configs"
    return installed if installed.is_dir() else package.parents[1] / "configs"


def find_models() -> Iterator[Path]:
    """Yield folders with a transformers checkpoint: here, in ./models, and in the Hugging Face cache, newest first."""
    patterns = [
        (Path(), "."),
        (Path(), "*"),
        (Path("models"), "*"),
        (Path("models"), "*/*"),
        (cache_folder(), "models--*/snapshots/*"),
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


def model_name(model: Path) -> str:
    """Return the model's name in requests: the name of the folder, or of the repository if the folder is a snapshot in
    the Hugging Face cache.
    """
    named = model.parents[1].name.split("--")[-1] if model.parent.name == "snapshots" else model.name
    return re.sub(r"[^a-z0-9._-]+", "-", named.lower()).strip("-.") or "base"


def _changed_at(folder: Path) -> float:
    return folder.stat().st_mtime
