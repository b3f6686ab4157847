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


@dataclass(frozen=True, slots=True)
class AbsentBase:
    """A base that this server does not serve: retired, or not loaded."""

    name: str
    former_names: tuple[str, ...] = ()
    is_retired: bool = False
    successor: str | None = None
    """The base to use instead, where the operator has named one."""


class BaseModels:
    """The bases of one server, in the order of its settings. They change while it runs (`gateway.lifecycle`)."""

    def __init__(self, bases: Iterable[BaseModel] = ()) -> None:
        self._bases = {base.name: base for base in bases}
        self._absent: tuple[AbsentBase, ...] = ()

    def __iter__(self) -> Iterator[BaseModel]:
        return iter(self._bases.values())

    def add(self, base: BaseModel) -> None:
        """Serve one more base."""
        self._bases[base.name] = base

    def remove(self, name: str) -> None:
        """Serve a base no longer."""
        self._bases.pop(name, None)

    def set_absent(self, bases: Iterable[AbsentBase]) -> None:
        """Note the bases that are known and not served."""
        self._absent = tuple(bases)

    @property
    def names(self) -> tuple[str, ...]:
        """Their names in requests."""
        return tuple(self._bases)

    def named(self, name: str) -> BaseModel | None:
        """Return the base of that name."""
        return self._bases.get(name)

    def absent(self, recorded: str) -> AbsentBase | None:
        """Return the base that has, or had, this name and is not served."""
        return next((base for base in self._absent if recorded in (base.name, *base.former_names)), None)

    def of_revision(self, recorded: str, fingerprint: str) -> BaseModel | None:
        """Return the base that serves a revision made for `recorded`; None where no base does.

        Equal fingerprints mean equal shapes and not equal weights, so the name decides. Revisions of a release that
        served one base have no name: theirs is the first base that they fit, and `Registry.name_bases` records it.
        """
        for base in self:
            if recorded in ("", base.name, *base.former_names) and base.description.fingerprint == fingerprint:
                return base
        return None

    def way_out(self, absent: AbsentBase) -> str:
        """Name the base, or the bases, to use instead of a retired one."""
        if absent.successor is not None:
            return f"`{absent.successor}`"
        return " or ".join(f"`{name}`" for name in self.names) or "another base"
