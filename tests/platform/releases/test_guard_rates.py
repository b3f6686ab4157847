"""Guards of canaries by simulation, from counted requests to the decision: how often each is wrong, and how soon right.

A tenth of the traffic goes to the canary; the guard looks after every fifty requests, as it does every ten seconds.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections import Counter
from collections.abc import Callable, Iterator

import numpy as np
import pytest

from loramux.data.entities import FIRST_TOKEN_BOUNDS
from loramux.data.records.revision_metrics import COUNTED, FIRST_TOKENS
from loramux.releases.policies import ALPHA, ERRORS, LATENCY, compared
from loramux.releases.statistics import drop_found

MODELS = ["acme/a@1", "acme/a@2"]
BOUND_S = 0.5
SPREAD = 0.6
"""Standard deviation of the logarithms of the times to the first token."""
PER_LOOK = 50
Draw = Callable[[np.random.Generator, int, int], Counter[str]]
"""Counts of some requests of one look."""


def errors(rate: float) -> Draw:
    """Requests of which a share is answered; of the others, half fail and half have an aborted choice."""

    def draw(rng: np.random.Generator, look: int, number: int) -> Counter[str]:
        bad = number - int(rng.binomial(number, rate))
        failed = int(rng.binomial(bad, 0.5))
        return Counter(completed=number - failed, failed=failed, abort=bad - failed)

    return draw


def latencies(rate: float, *, bursts: bool = False) -> Draw:
    """First tokens of which a share is in time. `bursts`: a quarter of the time everything takes twice as long."""
    median = BOUND_S * math.exp(-SPREAD * normal_quantile(rate))

    def draw(rng: np.random.Generator, look: int, number: int) -> Counter[str]:
        slow = 2.0 if bursts and look // 10 % 4 == 3 else 1.0
        seconds = median * slow * np.exp(SPREAD * rng.standard_normal(number))
        found = Counter(FIRST_TOKENS[bisect_left(FIRST_TOKEN_BOUNDS, one)] for one in seconds)
        return found + Counter(completed=number)

    return draw


def normal_quantile(share: float) -> float:
    low, high = -8.0, 8.0
    for _ in range(60):
        middle = (low + high) / 2
        low, high = (middle, high) if 0.5 * (1 + math.erf(middle / math.sqrt(2))) < share else (low, middle)
    return low


def looks(rng: np.random.Generator, before: Draw, canary: Draw, most: int) -> Iterator[dict[str, Counter[str]]]:
    counts = {model: Counter(dict.fromkeys(COUNTED, 0)) for model in MODELS}
    for look in range(most):
        number = int(rng.binomial(PER_LOOK, 0.1))
        counts[MODELS[0]].update(before(rng, look, PER_LOOK - number))
        counts[MODELS[1]].update(canary(rng, look, number))
        yield counts


def requests_to_rollback(rng: np.random.Generator, measure: str, before: Draw, canary: Draw, most: int) -> float:
    """Requests that the canary got until the guard took it back."""
    bound = BOUND_S if measure == LATENCY else None
    for counts in looks(rng, before, canary, most):
        numbers = compared(MODELS, measure, {model: dict(one) for model, one in counts.items()}, {}, bound)
        if drop_found(*numbers.candidate, *numbers.before, ALPHA):
            return numbers.candidate[1]
    return math.inf


CASES = [
    pytest.param(ERRORS, errors, id="errors"),
    pytest.param(LATENCY, latencies, id="latency"),
    pytest.param(LATENCY, lambda rate: latencies(rate, bursts=True), id="latency in bursts"),
]


@pytest.mark.parametrize("rate", [0.99, 0.95, 0.8])
@pytest.mark.parametrize(("measure", "draw"), CASES)
def test_guard_takes_back_at_most_5_of_100_good_canaries(
    measure: str, draw: Callable[[float], Draw], rate: float
) -> None:
    runs, same = 300, draw(rate)
    rng = np.random.default_rng(21)
    alarms = sum(requests_to_rollback(rng, measure, same, same, 80) < math.inf for _ in range(runs))
    assert alarms <= 0.05 * runs


@pytest.mark.parametrize(("rate", "within"), [(0.99, 120), (0.95, 250), (0.8, 500)])
@pytest.mark.parametrize(("measure", "draw"), CASES[:2])
def test_guard_finds_a_drop_of_ten_points_within_a_stated_number(
    measure: str, draw: Callable[[float], Draw], rate: float, within: int
) -> None:
    rng = np.random.default_rng(22)
    found = sorted(requests_to_rollback(rng, measure, draw(rate), draw(rate - 0.1), 400) for _ in range(100))
    assert found[94] <= within
