"""Arrivals, lengths and adapters of requests, by distributions from the literature."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from loramux.simulator.scenario import Lengths, LogNormal, Rng, Uniform, choose


@dataclass(frozen=True)
class Pattern:
    """One kind of traffic."""

    rate: float
    """Requests a second."""
    cv: float
    """Coefficient of variation of the gaps between requests: 1 is Poisson; larger values mean more bursts."""
    prompts: Lengths
    outputs: Lengths
    adapters: int = 16
    popularity: str = "uniform"


PATTERNS = {
    "s-lora": Pattern(2.0, 1.0, Uniform(8, 512), Uniform(8, 512)),
    "azure-conversation": Pattern(5.53, 1.09, LogNormal(6.63, 0.99), LogNormal(5.02, 0.86)),
    "azure-code": Pattern(2.57, 13.2, LogNormal(7.00, 1.36), LogNormal(2.79, 0.85)),
    "lmsys": Pattern(2.5, 1.0, LogNormal(3.77, 1.64), LogNormal(4.94, 1.38), 27, "zipf:1.49"),
}
"""S-LoRA's synthetic traffic (cv of 1, 2, 4, 6 and 8 there), fits of two Azure traces, and VTC's slice of LMSYS."""


def choose_adapters(rng: Rng, count: int, popularity: str, names: Iterable[str]) -> list[str | None]:
    """The adapter of each request.

    `popularity` is `base` (None for all), `only:NAME`, or a value that `choose` knows. Raises ValueError for other
    values.
    """
    adapters = list(names)
    kind, _, argument = popularity.partition(":")
    if kind == "base":
        return [None] * count
    if kind == "only":
        return [argument] * count
    try:
        return [adapters[i] for i in choose(rng, count, popularity, len(adapters))]
    except ValueError as error:
        raise ValueError(f"{error}; nor base, nor only:NAME") from None
