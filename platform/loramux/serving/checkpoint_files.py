"""Check the files of a checkpoint at the start, before torch and transformers, whose import takes seconds."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from loramux.common.settings.file import Settings, SettingsError
from loramux_adapters.checkpoint_config import refusal_of_config

CONFIG, INDEX = "config.json", "model.safetensors.index.json"
TOKENIZERS = ("tokenizer.json", "tokenizer.model", "tokenizer_config.json", "spiece.model", "vocab.json", "*.tiktoken")
"""Files of which a checkpoint with a tokenizer has at least one."""
MAX_CONFIG_BYTES = 16 << 20


def missing_files(folder: Path) -> list[str]:
    """Return the parts of a checkpoint that a folder lacks. An adapter's folder lacks config.json."""
    found = {
        CONFIG: (folder / CONFIG).is_file(),
        "*.safetensors": any(folder.glob("*.safetensors")),
        "tokenizer.json": any(next(folder.glob(name), None) for name in TOKENIZERS),
    }
    return [name for name, is_there in found.items() if not is_there] or list(_missing_shards(folder))


def ensure_checkpoints(settings: Settings, origin: str) -> None:
    """Raise SettingsError, with the setting and a solution, if the folder of a base cannot be served.

    `origin` names the settings file. The engine checks the weights when it loads the model.
    """
    for base in settings.served_bases:
        folder = Path(base.path)
        if (problem := problem_of(folder)) is not None:
            field = f"bases.path of {base.name}" if settings.bases else "model.path"
            raise SettingsError(
                f"{field}: {folder} {problem}; in {origin}, set it to the folder of a transformers checkpoint "
                "(config.json, *.safetensors and the tokenizer), or try `loramux demo`"
            )


def problem_of(folder: Path) -> str | None:
    """Return the problem of a checkpoint's files, as the end of a sentence about its folder; None if the files are
    valid.
    """
    if not folder.exists():
        return "does not exist"
    if not (folder / CONFIG).is_file():
        return f"has no {CONFIG}"
    try:
        config = _read_json(folder / CONFIG)
    except (OSError, ValueError) as error:
        return f"has a {CONFIG} that cannot be read ({error})"
    if not isinstance(config, dict) or not isinstance(config.get("model_type"), str):
        return f"has a {CONFIG} without a model_type"
    if (refusal := refusal_of_config(config)) is not None:
        return f"is not served: {refusal.removesuffix('.')}"
    missing = missing_files(folder)
    return f"has no {' and no '.join(missing[:3])}" if missing else None


def _missing_shards(folder: Path) -> Iterator[str]:
    """Yield the files that the folder lacks, although the index of a checkpoint in several files names them."""
    if not (folder / INDEX).is_file():
        return
    try:
        shards = {str(name) for name in _read_json(folder / INDEX)["weight_map"].values()}
    except (OSError, ValueError, KeyError, AttributeError, TypeError):
        yield f"readable {INDEX}"
        return
    yield from sorted(name for name in shards if not (folder / name).is_file())


def _read_json(file: Path) -> Any:
    """Read a JSON file of bounded size. Raises OSError, ValueError."""
    if file.stat().st_size > MAX_CONFIG_BYTES:
        raise ValueError(f"it has more than {MAX_CONFIG_BYTES >> 20} MiB")
    return json.loads(file.read_bytes())
