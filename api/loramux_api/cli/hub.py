"""Find a base model by the name that a person types: a folder, or a repository of the Hugging Face hub.

If the hub's cache on this machine has the whole repository, the cached files are used. Otherwise the repository is
downloaded, with progress on stderr. An interrupted download continues at the point where it stopped.
"""

from __future__ import annotations

import errno
import os
import re
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

import click

from loramux.serving.checkpoint_files import missing_files

if TYPE_CHECKING:
    from huggingface_hub.errors import HfHubHTTPError

HUB = "https://huggingface.co"
TAKEN = ("*.json", "*.safetensors", "*.model", "*.txt", "*.jinja")
"""Files of a repository that a server reads."""
LEFT_OUT = ("*/*", "consolidated*")
"""Other forms of the same weights, which are not downloaded: folders such as `onnx/` and `original/`, and Mistral's own
file.
"""

_repository = re.compile(r"[A-Za-z0-9][\w.-]{0,95}/[A-Za-z0-9][\w.-]{0,95}")


def cache_folder() -> Path:
    """Return the folder of the hub's cache on this machine, which the hub's own tools also use."""
    home = os.environ.get("HF_HOME") or "~/.cache/huggingface"
    return Path(os.environ.get("HF_HUB_CACHE") or f"{home}/hub").expanduser()


def find_model(name: str, note: Callable[[str], None]) -> Path:
    """Return the folder of a model that is named by a folder or by `org/name`, and download it if necessary.

    `note` prints a remark. Raises ClickException.
    """
    folder = Path(name).expanduser()
    if folder.is_dir():
        if missing := missing_files(folder):
            raise click.ClickException(
                f"{folder} is not a transformers checkpoint: it has no {' and no '.join(missing[:3])}"
            )
        return folder.absolute()
    if not _repository.fullmatch(name):
        raise click.ClickException(
            f"there is no folder {name}; give the folder of a transformers checkpoint, or a repository of the Hugging "
            "Face hub as org/name"
        )
    for snapshot in _snapshots(name):
        if not missing_files(snapshot):
            return snapshot.absolute()
    note(f"downloading {name} from {_hub()} to {cache_folder()}")
    snapshot = _download(name)
    if missing := missing_files(snapshot):
        raise click.ClickException(
            f"the model {name} at {snapshot} has no {' and no '.join(missing[:3])}: either the repository has none, or "
            f"its download has not ended and {_hub()} cannot be reached from here"
        )
    return snapshot


def _snapshots(repository: str) -> list[Path]:
    """Return the cached versions of a repository: first the version that `main` names, then others, newest first."""
    root = cache_folder() / f"models--{repository.replace('/', '--')}"
    try:
        main = (root / "refs" / "main").read_text().strip()
    except OSError:
        main = ""
    found = [folder for folder in (root / "snapshots").glob("*") if folder.is_dir()]
    return sorted(found, key=lambda folder: (folder.name == main, folder.stat().st_mtime), reverse=True)


def _hub() -> str:
    return os.environ.get("HF_ENDPOINT", HUB).rstrip("/")


def _answered(error: HfHubHTTPError) -> str:
    status = "without a status" if error.response is None else error.response.status_code
    return f"could not be downloaded: {_hub()} answered {status}; run the same command again to go on"


def _download(repository: str) -> Path:
    """Download a repository into the cache. Raises ClickException with a solution."""
    from huggingface_hub import snapshot_download  # takes half a second, and is only needed for a download
    from huggingface_hub.errors import (
        GatedRepoError,
        HfHubHTTPError,
        LocalEntryNotFoundError,
        OfflineModeIsEnabled,
        RepositoryNotFoundError,
    )

    try:
        return Path(
            snapshot_download(
                repository,
                cache_dir=cache_folder(),
                endpoint=_hub(),
                allow_patterns=list(TAKEN),
                ignore_patterns=list(LEFT_OUT),
            )
        )
    except GatedRepoError:
        problem = f"asks for consent: accept its terms at {_hub()}/{repository}, and set HF_TOKEN to a token of yours"
    except RepositoryNotFoundError:
        problem = f"is not at {_hub()}, or is private: check the name, and set HF_TOKEN if it is yours"
    except (LocalEntryNotFoundError, OfflineModeIsEnabled) as error:
        if isinstance(error.__cause__, HfHubHTTPError):
            problem = _answered(error.__cause__)
        else:
            problem = (
                f"is not in the cache at {cache_folder()}, and {_hub()} cannot be reached from here: download it "
                "elsewhere, copy its folder to this machine, and run `loramux serve FOLDER`"
            )
    except HfHubHTTPError as error:
        problem = _answered(error)
    except OSError as error:
        full = error.errno in (errno.ENOSPC, errno.EDQUOT)
        reason = (
            "the disk is full; set HF_HOME to a folder on a larger one" if full else f"{error}; run it again to go on"
        )
        problem = f"could not be downloaded to {cache_folder()}: {reason}"
    raise click.ClickException(f"the model {repository} {problem}")
