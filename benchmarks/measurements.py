"""Measurements of systems on one machine, and the ratios between them."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from statistics import median

import msgspec
from figures import Figures, Outcome
from workloads import Item


class Case(msgspec.Struct, frozen=True, kw_only=True):
    """One cell of a comparison."""

    system: str
    model: str
    dtype: str
    workload: str
    mode: str = "continuous"
    """continuous: requests join and leave at any time. static: batches one after the other, each as long as its longest
    request.
    """
    rep: int = 0


class Resources(msgspec.Struct, frozen=True, kw_only=True):
    """Use of the machine in a window of time."""

    peak_pss_bytes: int
    """Proportional set size of the measured process tree: pages that processes share count once."""
    own_cores: float
    """Processor time over wall time, the load generator included."""
    other_cores: float
    """The same for everything else on the machine. If it is well above 0, do not trust the measurement."""


class Counters(msgspec.Struct, frozen=True, kw_only=True):
    """The engine's counters over a window of time."""

    steps: int
    adapter_bytes_read: int
    weight_bytes: int


class Floor(msgspec.Struct, frozen=True, kw_only=True):
    """The bound on a drive by the engine's own steps."""

    steps: int
    omega: float
    """The minimum overhead of LoRA in decoding: bytes of the steps' distinct adapters, divided by all other bytes that
    the steps read.
    """
    share: float
    """Time to read all necessary bytes of the steps at the machine's bandwidth, divided by the measured time."""
    arithmetic: float | None = None
    """Time of the base's multiplications at the machine's rate, divided by the measured time. No run can be shorter
    than the longer of the reading time and this time; with long prompts this time is longer. None: the machine's rate
    is not known.
    """


class Drive(msgspec.Struct, frozen=True, kw_only=True):
    """One workload sent once through one system."""

    outcomes: list[Outcome]
    wall_s: float
    resources: Resources
    start_s: float
    """Seconds from start to a loaded model that serves."""
    counters: Counters | None = None


class Measurement(msgspec.Struct, frozen=True, kw_only=True, tag="measurement"):
    """The figures of one drive."""

    case: Case
    figures: Figures
    resources: Resources
    start_s: float
    floor: Floor | None = None


class Failure(msgspec.Struct, frozen=True, kw_only=True, tag="failure"):
    """A system that could not be measured."""

    system: str
    model: str
    dtype: str
    rep: int
    reason: str


class Agreement(msgspec.Struct, frozen=True, kw_only=True, tag="agreement"):
    """Count of a drive's answers with the same tokens as the reference's."""

    case: Case
    reference: str
    same: int
    requests: int


def context_tokens(items: Iterable[Item]) -> int:
    """Tokens of context that attention reads for all generated tokens: the k-th token reads the prompt and the tokens
    before it.
    """
    return sum(i.max_tokens * len(i.prompt_token_ids) + i.max_tokens * (i.max_tokens - 1) // 2 for i in items)


def floor_of(
    counters: Counters, kv_bytes: int, wall_s: float, bandwidth_bytes_per_s: float, multiplying_s: float | None = None
) -> Floor:
    """omega = adapter bytes / (steps x weight bytes + KV bytes), as in docs/benchmarks.md.

    `multiplying_s` is the time in seconds of the base's multiplications at the machine's rate.
    """
    without_adapters = counters.steps * counters.weight_bytes + kv_bytes
    floor_s = (without_adapters + counters.adapter_bytes_read) / bandwidth_bytes_per_s
    return Floor(
        steps=counters.steps,
        omega=counters.adapter_bytes_read / without_adapters,
        share=floor_s / wall_s,
        arithmetic=None if multiplying_s is None else multiplying_s / wall_s,
    )


# ---- ratios


@dataclass(frozen=True)
class Spread:
    """One figure over the repetitions."""

    values: tuple[float, ...]

    @property
    def median(self) -> float:
        """The figure to quote."""
        return median(self.values)

    def __str__(self) -> str:
        if len(self.values) == 1:
            return f"{self.median:.2f}"
        return f"{self.median:.2f} ({min(self.values):.2f} to {max(self.values):.2f})"


Figure = Callable[[Measurement], float | None]


def spread(measurements: Iterable[Measurement], figure: Figure) -> Spread | None:
    """Return the spread of `figure` over all measurements that have it; None without such measurements."""
    values = tuple(value for m in measurements if (value := figure(m)) is not None)
    return Spread(values) if values else None


def paired(over: Iterable[Measurement], under: Iterable[Measurement], figure: Figure) -> Spread | None:
    """Return the ratio of `figure` in `over` to `under` for each repetition; None if no repetition has both."""
    denominators = {m.case.rep: value for m in under if (value := figure(m))}
    ratios = tuple(
        value / denominators[m.case.rep]
        for m in over
        if m.case.rep in denominators and (value := figure(m)) is not None
    )
    return Spread(ratios) if ratios else None
