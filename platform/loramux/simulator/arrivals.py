"""Arrival times, lengths and choices of adapters: the distributions of the literature, drawn from seeds."""

from __future__ import annotations

from typing import Annotated

import msgspec
import numpy as np
from msgspec import Meta

Rng = np.random.Generator
LONGEST = 4096
"""Tokens; the tails of the log-normals are cut off here."""


class Constant(msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag_field="distribution", tag="constant"):
    """Always `tokens`."""

    tokens: Annotated[int, Meta(ge=1)]

    def draw(self, rng: Rng, count: int) -> np.ndarray:  # noqa: ARG002  nothing to draw
        """int64[count]."""
        return np.full(count, self.tokens, dtype=np.int64)


class Uniform(msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag_field="distribution", tag="uniform"):
    """Every length from `low` to `high`, both included, alike."""

    low: Annotated[int, Meta(ge=1)]
    high: Annotated[int, Meta(ge=1)]

    def draw(self, rng: Rng, count: int) -> np.ndarray:
        """int64[count]."""
        return rng.integers(self.low, self.high + 1, count)


class LogNormal(msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag_field="distribution", tag="lognormal"):
    """exp(Normal(mu, sigma)) tokens, cut off at both ends."""

    mu: float
    sigma: Annotated[float, Meta(ge=0)]
    low: Annotated[int, Meta(ge=1)] = 1
    high: Annotated[int, Meta(ge=1)] = LONGEST

    def draw(self, rng: Rng, count: int) -> np.ndarray:
        """int64[count]."""
        return np.clip(rng.lognormal(self.mu, self.sigma, count).astype(np.int64), self.low, self.high)


Lengths = Constant | Uniform | LogNormal
"""A distribution of token counts, each at least 1."""


def arrival_times(rng: Rng, count: int, rate: float, cv: float) -> np.ndarray:
    """float64[count] seconds, the first at 0: Gamma gaps of mean 1/rate with shape 1/cv^2 and scale cv^2/rate."""
    gaps = rng.gamma(1 / cv**2, cv**2 / rate, count) if cv else np.full(count, 1 / rate)
    times: np.ndarray = np.cumsum(gaps) - gaps[0]
    return times


def with_pauses(times: np.ndarray, on_s: float, off_s: float) -> np.ndarray:
    """The same arrivals in bursts of `on_s` seconds with `off_s` of silence between them, float64 like `times`."""
    return times + np.floor(times / on_s) * off_s


def choose(rng: Rng, count: int, popularity: str, options: int) -> np.ndarray:
    """int64[count] of 0..options-1.

    `identical` (all the first), `distinct` (each another until all have had a turn), `uniform` or `zipf:EXPONENT`.
    Raises ValueError for anything else.
    """
    kind, _, argument = popularity.partition(":")
    match kind:
        case "identical":
            return np.zeros(count, dtype=np.int64)
        case "distinct":
            return np.arange(count, dtype=np.int64) % options
        case "uniform" | "zipf":
            weights = np.arange(1, options + 1) ** -float(argument or 0.0)
            return rng.choice(options, count, p=weights / weights.sum())
    raise ValueError(f"popularity {popularity!r} is none of identical, distinct, uniform, zipf:EXPONENT")
