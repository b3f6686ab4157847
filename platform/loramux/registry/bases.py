"""The base models of a server, and which of them a revision belongs to."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from loramux_adapters import BaseDescription


@dataclass(frozen=True, slots=True)
class BaseModel:
    """One base: its name in requests, and what adapters see of it."""

    name: str
    description: BaseDescription
    former_names: tuple[str, ...] = ()
    """Names that it had: revisions made under them are served on it."""


class BaseModels:
    """The bases of one server, in the order of its settings."""

    def __init__(self, bases: Iterable[BaseModel]) -> None:
        self._bases = {base.name: base for base in bases}

    def __iter__(self) -> Iterator[BaseModel]:
        return iter(self._bases.values())

    @property
    def names(self) -> tuple[str, ...]:
        """Their names in requests."""
        return tuple(self._bases)

    def named(self, name: str) -> BaseModel | None:
        """Return the base of that name."""
        return self._bases.get(name)

    def of_revision(self, recorded: str, fingerprint: str) -> BaseModel | None:
        """Return the base that serves a revision made for `recorded`; None where no base does.

        Equal fingerprints mean equal shapes and not equal weights, so the name decides. Revisions of a release that
        served one base have no name: theirs is the first base that they fit, and `Registry.name_bases` records it.
        """
        for base in self:
            if recorded in ("", base.name, *base.former_names) and base.description.fingerprint == fingerprint:
                return base
        return None
