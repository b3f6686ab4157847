"""How requests arrive, how long they are and whom they ask: the distributions of the literature."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Protocol

import numpy as np

Rng = np.random.Generator
LONGEST = 4096
"""Tokens; the tails of the log-normals are cut off here."""


class Lengths(Protocol):
    """A distribution of token counts."""

    def draw(self, rng: Rng, count: int) -> np.ndarray:
        """int64[count], each at least 1."""
        ...


@dataclass(frozen=True)
class Uniform:
    """Every length from `low` to `high`, both included, alike."""

    low: int
    high: int

    def draw(self, rng: Rng, count: int) -> np.ndarray:
        """int64[count]."""
        return rng.integers(self.low, self.high + 1, count)


@dataclass(frozen=True)
class LogNormal:
    """exp(Normal(mu, sigma)) tokens, cut off at both ends."""

    mu: float
    sigma: float
    low: int = 1
    high: int = LONGEST

    def draw(self, rng: Rng, count: int) -> np.ndarray:
        """int64[count]."""
        return np.clip(rng.lognormal(self.mu, self.sigma, count).astype(np.int64), self.low, self.high)


@dataclass(frozen=True)
class Pattern:
    """One kind of traffic."""

    rate: float
    """Requests a second."""
    cv: float
    """Coefficient of variation of the gaps between requests: 1 is Poisson, more is burstier."""
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


def arrival_times(rng: Rng, count: int, rate: float, cv: float) -> np.ndarray:
    """float64[count] seconds, the first at 0: Gamma gaps of mean 1/rate with shape 1/cv^2 and scale cv^2/rate."""
    gaps = rng.gamma(1 / cv**2, cv**2 / rate, count)
    times: np.ndarray = np.cumsum(gaps) - gaps[0]
    return times


def choose_adapters(rng: Rng, count: int, popularity: str, names: Iterable[str]) -> list[str | None]:
    """The adapter of each request.

    `base` (None for all), `only:NAME`, `identical` (all the first), `uniform`, `zipf:EXPONENT`, or `distinct` (each
    another until all have had a turn). Raises ValueError for anything else.
    """
    adapters = list(names)
    kind, _, argument = popularity.partition(":")
    match kind:
        case "base":
            return [None] * count
        case "only":
            return [argument] * count
        case "identical":
            return [adapters[0]] * count
        case "distinct":
            return [adapters[i % len(adapters)] for i in range(count)]
        case "uniform" | "zipf":
            weights = np.arange(1, len(adapters) + 1) ** -float(argument or 0.0)
            return [adapters[i] for i in rng.choice(len(adapters), count, p=weights / weights.sum())]
    raise ValueError(
        f"popularity {popularity!r} is none of base, only:NAME, identical, uniform, zipf:EXPONENT, distinct"
    )
