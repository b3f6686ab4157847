"""The base models that servers should serve, and the checks of one before it is added.

`known_bases` joins those of the settings file with the rows of `records.bases`; `lifecycle` loads and unloads what
differs. `check_base` looks at what would otherwise fail only when the base is loaded: its name, its folder, its
architecture, its tokenizer and its memory.
"""

from __future__ import annotations

import asyncio
import logging
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec

from loramux.gateway.errors import BaseConflict, InvalidBase, UnknownBase
from loramux.gateway.tokenizer import Tokenizer
from loramux.records.bases import BaseRecord, BaseRepository
from loramux.settings import BaseSettings, Settings

LISTED = 10
"""Adapters that a refusal names."""

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class KnownBase:
    """A base of the settings file or of the records."""

    settings: BaseSettings
    is_added: bool
    retired_at: int | None = None
    successor: str | None = None

    @property
    def name(self) -> str:
        """Its name in requests."""
        return self.settings.name

    @property
    def names(self) -> tuple[str, ...]:
        """Its name and those that it had."""
        return (self.name, *self.settings.former_names)

    @property
    def is_retired(self) -> bool:
        """Has an operator retired it?"""
        return self.retired_at is not None


def known_bases(settings: Settings, rows: Sequence[BaseRecord]) -> dict[str, KnownBase]:
    """Join the settings file and the rows, by name; of a base in both, the file has the settings."""
    found = {row.name: row for row in rows}
    known = {}
    for base in settings.served_bases:
        row = found.pop(base.name, None)
        retired = (None, None) if row is None else (row.retired_at, row.successor)
        known[base.name] = KnownBase(base, False, *retired)
    for row in found.values():
        if row.settings is None:
            continue  # a retired base that has left the file
        try:
            base = complete(msgspec.json.decode(row.settings), settings)
        except msgspec.ValidationError as error:
            logger.error("the added base model %s is left out: this release refuses its settings: %s", row.name, error)
            continue
        known[row.name] = KnownBase(base, True, row.retired_at, row.successor)
    return known


def complete(base: dict[str, Any], settings: Settings) -> BaseSettings:
    """Convert a table of a base; what its `engine` leaves out is as in `[engine]`. Raises msgspec.ValidationError."""
    own = base.get("engine", {})
    engine = msgspec.to_builtins(settings.engine) | own if isinstance(own, dict) else own
    return msgspec.convert({**base, "engine": engine}, BaseSettings)


def row_of(table: dict[str, Any], before: KnownBase | None, now: int) -> BaseRecord:
    """Return the row of a base that is added; the settings file keeps those that it has."""
    if before is not None and not before.is_added:
        return BaseRecord(name=table["name"], changed_at=now)
    return BaseRecord(name=table["name"], settings=msgspec.json.encode(table).decode(), changed_at=now)


def named(known: dict[str, KnownBase], name: str) -> KnownBase:
    """Return the base of that name. Raises UnknownBase."""
    if name not in known:
        raise UnknownBase(f"there is no base model {name[:80]!r}; there are {', '.join(known)}", "name")
    return known[name]


def ensure_unambiguous(base: BaseSettings, known: Iterable[KnownBase]) -> None:
    """Raise BaseConflict where a name of `base` is another base's."""
    for other in known:
        if other.name != base.name and (same := {base.name, *base.former_names} & set(other.names)):
            raise BaseConflict(
                "base_exists",
                f"{min(same)!r} is the name, or a former name, of the base model {other.name!r}; choose another",
                "name",
            )


async def ensure_unused(repository: BaseRepository, base: KnownBase) -> None:
    """Raise BaseConflict where an alias points at an adapter for the base; the message lists some of them."""
    found = await repository.aliased_adapters(base.names, LISTED + 1)
    if found:
        listed = ", ".join(found[:LISTED]) + (", and more" if len(found) > LISTED else "")
        raise BaseConflict(
            "base_in_use",
            f"aliases point at adapters for {base.name!r}: {listed}. Migrate and promote them first (`loramux base "
            "migrate`), or retire it all the same with force: their requests are answered 410 then",
            "name",
        )


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
