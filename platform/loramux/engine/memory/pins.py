"""Pins: revisions that an operator or a tenant wants in the pool whether they are asked for or not.

A pin is loaded as soon as room for it is free, without evicting what a request waits for, and is kept until every owner
has unpinned it. Pins together may hold a share of the pool, so that traffic always has the rest.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from loramux.engine.memory.memory import Memory
from loramux.engine.memory.residency import AdapterState
from loramux.engine.messages import EngineFault, Pinned
from loramux.engine.request import AdapterRef

OPERATOR = ""
"""The owner of pins that no tenant made."""
_IN_POOL = (AdapterState.LOADING, AdapterState.READY)


@dataclass(frozen=True, slots=True)
class PinLimits:
    """Bounds on what pins may hold."""

    max_pages: int
    """The most pages of all pins together."""
    leave_free: int = 0
    """Pages that must stay free when a pin is loaded."""
    per_tenant: int = 2
    """Revisions of one tenant; the operator's are not counted."""


@dataclass(eq=False, slots=True)
class _Pin:
    owners: set[str] = field(default_factory=set)
    is_in_pool: bool = False
    claims: bool = False
    """Its load was started here, so that it stays in the pool until it is kept."""


class AdapterPins:
    """The pins; `advance` acts between steps, and reports the outcome of each pin once."""

    def __init__(self, limits: PinLimits, memory: Memory) -> None:
        self._limits = limits
        self._memory = memory
        self._residency = memory.residency
        self._pins: dict[str, _Pin] = {}
        self._outcomes: list[Pinned] = []

    def __len__(self) -> int:
        return sum(pin.is_in_pool for pin in self._pins.values())

    def pin(self, ref: AdapterRef, owner: str) -> None:
        """Keep `ref` for `owner`; a second time changes nothing."""
        held = sum(owner in pin.owners for digest, pin in self._pins.items() if digest != ref.digest)
        if owner != OPERATOR and held >= self._limits.per_tenant:
            message = f"The tenant has {held} pins; the maximum is {self._limits.per_tenant}. Unpin one first."
            self._outcomes.append(Pinned(ref.digest, owner, EngineFault("pin_limit", message)))
            return
        pin = self._pins.get(ref.digest)
        if pin is None:
            pin = self._pins[ref.digest] = _Pin()
            self._residency.acquire(ref)
        pin.owners.add(owner)
        if pin.is_in_pool:
            self._outcomes.append(Pinned(ref.digest, owner))

    def unpin(self, digest: str, owner: str) -> None:
        """Release `owner`'s pin; the weights stay until their room is needed. Unknown pins are gone already."""
        if (pin := self._pins.get(digest)) and owner in pin.owners:
            pin.owners.remove(owner)
            if not pin.owners:
                self._drop(digest)

    def retire(self, digest: str) -> None:
        """Drop the pin of a deleted revision."""
        if digest in self._pins:
            self._give_up(digest, EngineFault("adapter_failed", "The revision was deleted."))

    def advance(self) -> list[Pinned]:
        """Load pins that have room now; return the outcomes since the last call."""
        for digest, pin in list(self._pins.items()):
            if not pin.is_in_pool:
                self._advance(digest, pin)
        outcomes, self._outcomes = self._outcomes, []
        return outcomes

    def _advance(self, digest: str, pin: _Pin) -> None:
        match self._residency.state(digest):
            case AdapterState.FAILED:
                self._give_up(digest, EngineFault("adapter_failed", self._residency.failure(digest)))
            case AdapterState.KNOWN if reason := self._excess(digest):
                self._give_up(digest, EngineFault("pin_limit", reason))
            case AdapterState.KNOWN:
                free = self._limits.leave_free
                pin.claims = self._memory.load(digest, claimed=True, spare_wanted=True, leave_free=free)
            case AdapterState.READY:
                pin.is_in_pool = True
                self._residency.keep(digest)
                self._release_claim(digest, pin)
                self._outcomes += [Pinned(digest, owner) for owner in sorted(pin.owners)]
            case _:
                pass

    def _excess(self, digest: str) -> str | None:
        """Return why `digest` does not fit beside the pins that are loaded or loading; None where it does."""
        limit, size = self._limits.max_pages, self._residency.num_pages(digest)
        others = [other for other in self._pins if other != digest and self._residency.state(other) in _IN_POOL]
        taken = sum(map(self._residency.num_pages, others))
        if taken + size <= limit:
            return None
        return f"The adapter takes {size} pages; {taken} of the {limit} that may be pinned are. Unpin others first."

    def _give_up(self, digest: str, fault: EngineFault) -> None:
        self._outcomes += [Pinned(digest, owner, fault) for owner in sorted(self._pins[digest].owners)]
        self._drop(digest)

    def _drop(self, digest: str) -> None:
        pin = self._pins.pop(digest)
        if pin.is_in_pool:
            self._residency.unkeep(digest)
        self._release_claim(digest, pin)
        self._memory.release(digest)

    def _release_claim(self, digest: str, pin: _Pin) -> None:
        if pin.claims:
            pin.claims = False
            self._residency.release_claim(digest)
