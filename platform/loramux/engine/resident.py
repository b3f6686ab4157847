"""One revision on its way into the pool: where it comes from, where it stands, and how well it is remembered."""

from __future__ import annotations

import enum
import math
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import NamedTuple, Protocol

from loramux.engine.ranking import COLD, warmed
from loramux.engine.request import AdapterRef


class Inspected(NamedTuple):
    """What is known of a revision once its files were checked."""

    num_pages: int
    """That it takes."""
    invocation: tuple[int, ...] | None = None
    """Of an activated LoRA: the tokens that switch it on."""


class AdapterStore(Protocol):
    """Where weights come from and go to; every method returns at once and works on threads of its own."""

    def inspect(self, ref: AdapterRef) -> Future[Inspected]:
        """Check the files, and so bring them into the host's memory."""
        ...

    def fill(self, ref: AdapterRef, pages: list[int]) -> Future[int]:
        """Read the weights into `pages`; the result is the bank slot that serves them."""
        ...

    def drop(self, slot: int) -> None:
        """Forget a slot; its pages are about to be given back."""
        ...

    def forget(self, digest: str) -> None:
        """The revision was deleted: keep nothing of it."""
        ...


class AdapterState(enum.Enum):
    """A revision's way into the pool."""

    INSPECTING = enum.auto()
    KNOWN = enum.auto()
    """On disk, its size known, no pages held."""
    LOADING = enum.auto()
    """Pages held, weights on their way."""
    READY = enum.auto()
    FAILED = enum.auto()


@dataclass(frozen=True, slots=True)
class Patience:
    """How residency remembers: failures and use."""

    first_retry: float = 1.0
    """Seconds before a failed revision is tried again; doubled with every failure in a row, its quarantine."""
    last_retry: float = 600.0
    half_life: float = 300.0
    """Seconds after which a use counts half."""
    max_loading: int = 4
    """Loads under way at a time; the others wait in the scheduler's order."""
    overhead_pages: float = 8.0
    """What a load costs beside its bytes, in the time that a page takes."""

    def quarantine(self, failures: int) -> float:
        """Seconds to wait after so many failures in a row."""
        return min(self.last_retry, self.first_retry * 2.0 ** (failures - 1))


@dataclass(eq=False, slots=True)
class Resident:
    """One revision; `users` are the running sequences under it, `interested` the waiting and running ones."""

    ref: AdapterRef
    pending: Future[Inspected] | Future[int] | None = None
    """An inspection, or a load."""
    state: AdapterState = AdapterState.INSPECTING
    num_pages: int = 0
    invocation: tuple[int, ...] | None = None
    pages: list[int] = field(default_factory=list)
    slot: int | None = None
    users: int = 0
    interested: int = 0
    num_trees: int = 0
    """Prefix trees with cached KV under it; it is no leaf before they are empty."""
    heat: float = COLD
    loading_since: float = 0.0
    retired: bool = False
    failures: int = 0
    retry_at: float = 0.0
    reason: str = ""

    def warm(self, now: float) -> None:
        """A use at `now`, in half-lives."""
        self.heat = warmed(self.heat, now)

    def worth(self, overhead_pages: float) -> float:
        """log2 of expected uses x cost of a miss / pages; a page's way over the host link costs one."""
        return self.heat + math.log2(1.0 + overhead_pages / max(self.num_pages, 1))
