"""The bases that a server should serve: those of its settings file and those that operators added (`records.bases`).

Before a base is added, `check_base` checks the properties that would otherwise fail only at the load: name, folder,
architecture, tokenizer and memory.
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

from loramux.common.settings.file import Settings
from loramux.common.settings.serving import BaseSettings
from loramux.data.records.bases import BaseRecord, BaseRepository
from loramux.serving.checkpoint_files import problem_of
from loramux.serving.errors import BaseConflict, InvalidBase, UnknownBase
from loramux.serving.tokenizer import Tokenizer

LISTED = 10
"""Maximum number of adapters that an error message lists."""
DEFAULT_POOL = 2 << 30
"""Bytes of a pool on a CPU if the settings give no size."""
MEMORY = Path("/proc/meminfo")

logger = logging.getLogger(__name__)
_name = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*(/[A-Za-z0-9][A-Za-z0-9._-]*)?")


@dataclass(frozen=True, slots=True)
class KnownBase:
    """A base of the settings file or of the records."""

    settings: BaseSettings
    is_added: bool
    retired_at: int | None = None
    successor: str | None = None

    @property
    def name(self) -> str:
        """Name of the base in requests."""
        return self.settings.name

    @property
    def names(self) -> tuple[str, ...]:
        """Current and former names of the base."""
        return (self.name, *self.settings.former_names)

    @property
    def is_retired(self) -> bool:
        """True if an operator has retired the base."""
        return self.retired_at is not None


def known_bases(settings: Settings, rows: Sequence[BaseRecord]) -> dict[str, KnownBase]:
    """Join the settings file and the rows by name. If a base is in both, its settings come from the file."""
    found = {row.name: row for row in rows}
    known = {}
    for base in settings.served_bases:
        row = found.pop(base.name, None)
        retired = (None, None) if row is None else (row.retired_at, row.successor)
        known[base.name] = KnownBase(base, False, *retired)
    for row in found.values():
        if row.settings is None:
            continue  # a retired base that was removed from the file
        try:
            base = complete(msgspec.json.decode(row.settings), settings)
        except msgspec.ValidationError as error:
            logger.error("the added base model %s is left out: this release refuses its settings: %s", row.name, error)
            continue
        known[row.name] = KnownBase(base, True, row.retired_at, row.successor)
    return known


def complete(base: dict[str, Any], settings: Settings) -> BaseSettings:
    """Convert a table of a base. Keys that its `engine` lacks come from `[engine]`. Raises msgspec.ValidationError."""
    own = base.get("engine", {})
    engine = msgspec.to_builtins(settings.engine) | own if isinstance(own, dict) else own
    return msgspec.convert({**base, "engine": engine}, BaseSettings)


def row_of(table: dict[str, Any], before: KnownBase | None, now: int) -> BaseRecord:
    """Return the row of a base that is added. For a base of the settings file, the settings stay in the file."""
    if before is not None and not before.is_added:
        return BaseRecord(name=table["name"], changed_at=now)
    return BaseRecord(name=table["name"], settings=msgspec.json.encode(table).decode(), changed_at=now)


def named(known: dict[str, KnownBase], name: str) -> KnownBase:
    """Return the base with that name. Raises UnknownBase."""
    if name not in known:
        raise UnknownBase(f"there is no base model {name[:80]!r}; there are {', '.join(known)}", "name")
    return known[name]


def ensure_unambiguous(base: BaseSettings, known: Iterable[KnownBase]) -> None:
    """Raise BaseConflict if a name of `base` belongs to another base."""
    for other in known:
        if other.name != base.name and (same := {base.name, *base.former_names} & set(other.names)):
            raise BaseConflict(
                "base_exists",
                f"{min(same)!r} is the name, or a former name, of the base model {other.name!r}; choose another",
                "name",
            )


async def ensure_unused(repository: BaseRepository, base: KnownBase) -> None:
    """Raise BaseConflict if an alias points at an adapter of the base; the message lists some of them."""
    found = await repository.aliased_adapters(base.names, LISTED + 1)
    if found:
        listed = ", ".join(found[:LISTED]) + (", and more" if len(found) > LISTED else "")
        raise BaseConflict(
            "base_in_use",
            f"aliases point at adapters for {base.name!r}: {listed}. Migrate and promote them first (`loramux base "
            "migrate`), or retire it all the same with force: their requests are answered 410 then",
            "name",
        )


async def check_base(base: BaseSettings, settings: Settings) -> None:
    """Raise InvalidBase for a base that could not be served, with the field and a solution."""
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
    from loramux_adapters.base import describe_base
    from loramux_adapters.errors import BaseUnusable

    if (problem := problem_of(folder)) is not None:
        raise InvalidBase(
            f"{folder} {problem}; give the folder, on this server, of a transformers checkpoint (config.json, "
            "*.safetensors and the tokenizer)",
            "path",
        )
    try:
        describe_base(folder)
    except BaseUnusable as error:
        raise InvalidBase(str(error), "path") from None
    try:
        Tokenizer.load(folder).close()
    except Exception as error:  # transformers passes on any error of its readers
        raise InvalidBase(f"the tokenizer in {folder} cannot be loaded: {error}", "path") from None


def _check_memory(base: BaseSettings) -> None:
    """Raise InvalidBase if the engines of a base on CPUs need more memory than is free. On GPUs the load itself shows
    it.
    """
    import torch  # only needed if a model is served

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
