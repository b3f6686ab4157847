"""The checks of a base before it is added: its name, its folder, its architecture, its tokenizer, its memory."""

from __future__ import annotations

import asyncio
import re
from pathlib import Path

from loramux.gateway.errors import InvalidBase
from loramux.gateway.tokenizer import Tokenizer
from loramux.settings import BaseSettings, Settings

DEFAULT_POOL = 2 << 30
"""Bytes of a pool on a CPU whose size is not set."""
MEMORY = Path("/proc/meminfo")

_name = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*(/[A-Za-z0-9][A-Za-z0-9._-]*)?")


async def check_base(base: BaseSettings, settings: Settings) -> None:
    """Raise InvalidBase for a base that could not be served, with the field and the way out."""
    if not _name.fullmatch(base.name) or len(base.name) > 200:
        raise InvalidBase(
            f"a base model's name has letters, digits, '.', '_' and '-', with one '/' at most; got {base.name[:80]!r}",
            "name",
        )
    if not Path(base.path).is_absolute():
        raise InvalidBase(f"path is absolute, for every server reads it; got {base.path[:200]!r}", "path")
    await asyncio.to_thread(_check_folder, Path(base.path))
    if settings.fleet.launcher == "local" and not base.engines.addresses:
        await asyncio.to_thread(_check_memory, base)


def _check_folder(folder: Path) -> None:
    from loramux_adapters import BaseUnusable, describe_base  # imports torch: only where a model is served

    if not (folder / "config.json").is_file():
        problem = "does not exist on this server" if not folder.exists() else "has no config.json"
        raise InvalidBase(
            f"{folder} {problem}; give the folder of a transformers checkpoint (config.json, *.safetensors and the "
            "tokenizer)",
            "path",
        )
    if not any(folder.glob("*.safetensors")):
        raise InvalidBase(f"{folder} has no *.safetensors; save the weights with save_pretrained", "path")
    try:
        describe_base(folder)
    except BaseUnusable as error:
        raise InvalidBase(str(error), "path") from None
    try:
        Tokenizer.load(folder).close()
    except Exception as error:  # transformers raises whatever its readers raise
        raise InvalidBase(f"the tokenizer in {folder} cannot be loaded: {error}", "path") from None


def _check_memory(base: BaseSettings) -> None:
    """Raise InvalidBase where the engines of a base on CPUs need more memory than is free; GPUs tell at the load."""
    import torch  # only where a model is served

    devices = base.engines.devices or (base.engine.device,)
    if any(device != "cpu" for device in devices) and torch.cuda.is_available():
        return
    weights = sum(file.stat().st_size for file in Path(base.path).glob("*.safetensors"))
    needed = max(1, base.engines.min) * (weights + (base.engine.pool_bytes or DEFAULT_POOL))
    free = _free_bytes()
    if free is not None and needed > free:
        raise InvalidBase(
            f"{max(1, base.engines.min)} engines of {base.name!r} need at least {needed >> 20} MiB for weights and "
            f"pools, and {free >> 20} MiB are free on this machine; set fewer engines or a smaller engine.pool_bytes",
            "engines",
        )


def _free_bytes() -> int | None:
    try:
        lines = MEMORY.read_text().splitlines()
    except OSError:
        return None
    return next((int(line.split()[1]) << 10 for line in lines if line.startswith("MemAvailable:")), None)
