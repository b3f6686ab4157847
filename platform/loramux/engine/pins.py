"""Revisions that somebody wants kept in the pool: loaded as soon as there is room, and not evicted till let go."""

from __future__ import annotations

from dataclasses import dataclass, field

from loramux.engine.budget import Budget
from loramux.engine.memory import Memory
from loramux.engine.messages import EngineFault, Pinned
from loramux.engine.request import AdapterRef
from loramux.engine.resident import AdapterState

OPERATOR = ""
"""The owner of pins that no tenant made."""
_IN_POOL = (AdapterState.LOADING, AdapterState.READY)


@dataclass(frozen=True, slots=True)
class PinLimits:
    """How much may be kept from everybody else."""

    pool_share: float = 0.25
    """Of all pins together."""
    per_tenant: int = 2
    """Revisions of one tenant; the operator's are not counted."""


@dataclass(eq=False, slots=True)
class _Pin:
    owners: set[str] = field(default_factory=set)
    kept: bool = False
    """Whether it is in the pool."""


class Pins:
    """Acts between steps; what became of a pin is told once."""

    def __init__(self, limits: PinLimits, budget: Budget, memory: Memory) -> None:
        self._limits = limits
        self._budget = budget
        self._memory = memory
        self._residency = memory.residency
        self._pins: dict[str, _Pin] = {}
        self._news: list[Pinned] = []

    def __len__(self) -> int:
        return sum(pin.kept for pin in self._pins.values())

    def pin(self, ref: AdapterRef, owner: str) -> None:
        """Keep `ref` for `owner`; a second time changes nothing."""
        held = sum(owner in pin.owners for digest, pin in self._pins.items() if digest != ref.digest)
        if owner != OPERATOR and held >= self._limits.per_tenant:
            fault = EngineFault(
                "pin_limit", f"The tenant has {held} pins already, and may have no more: unpin one first."
            )
            self._news.append(Pinned(ref.digest, owner, fault))
            return
        pin = self._pins.get(ref.digest)
        if pin is None:
            pin = self._pins[ref.digest] = _Pin()
            self._residency.want(ref)
        pin.owners.add(owner)
        if pin.kept:
            self._news.append(Pinned(ref.digest, owner))

    def unpin(self, digest: str, owner: str) -> None:
        """`owner` lets go; the weights stay until somebody needs the room. Unknown pins are gone already."""
        if (pin := self._pins.get(digest)) and owner in pin.owners:
            pin.owners.remove(owner)
            if not pin.owners:
                self._drop(digest)

    def retire(self, digest: str) -> None:
        """The revision was deleted."""
        if digest in self._pins:
            self._give_up(digest, EngineFault("adapter_failed", "The revision was deleted."))

    def advance(self) -> list[Pinned]:
        """Load what is not in the pool yet and has room; what became of pins since the last time."""
        for digest, pin in list(self._pins.items()):
            if not pin.kept:
                self._advance(digest, pin)
        news, self._news = self._news, []
        return news

    def _advance(self, digest: str, pin: _Pin) -> None:
        match self._residency.state(digest):
            case AdapterState.FAILED:
                self._give_up(digest, EngineFault("adapter_failed", self._residency.failure(digest)))
            case AdapterState.KNOWN if reason := self._excess(digest):
                self._give_up(digest, EngineFault("pin_limit", reason))
            case AdapterState.KNOWN:
                self._memory.load(digest, spare_wanted=True, leave_free=self._budget.watermark)
            case AdapterState.READY:
                pin.kept = True
                self._memory.keep(digest)
                self._news += [Pinned(digest, owner) for owner in sorted(pin.owners)]
            case _:
                pass

    def _excess(self, digest: str) -> str | None:
        """Why there is no place for `digest` beside the pins that are in the pool or on their way into it."""
        limit, size = int(self._budget.num_pages * self._limits.pool_share), self._residency.size(digest)
        others = [other for other in self._pins if other != digest and self._residency.state(other) in _IN_POOL]
        taken = sum(map(self._residency.size, others))
        if taken + size <= limit:
            return None
        return f"The adapter takes {size} pages; {taken} of the {limit} that may be pinned are. Unpin others first."

    def _give_up(self, digest: str, fault: EngineFault) -> None:
        self._news += [Pinned(digest, owner, fault) for owner in sorted(self._pins[digest].owners)]
        self._drop(digest)

    def _drop(self, digest: str) -> None:
        if self._pins.pop(digest).kept:
            self._memory.let_go(digest)
        self._memory.unwant(digest)
