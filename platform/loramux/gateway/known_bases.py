"""The bases that servers should serve: those of the settings file, joined with the rows of `records.bases`."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import msgspec

from loramux.gateway.errors import BaseConflict, UnknownBase
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
