"""More seeds of the simulation, in a separate file so that another core runs them."""

from __future__ import annotations

import pytest
from simulation.database import Template
from simulation.run import failing_seeds

SEEDS_PER_TEST = 250


@pytest.mark.parametrize("chunk", [4, *(pytest.param(chunk, marks=pytest.mark.slow) for chunk in range(5, 8))])
def test_every_request_ends_and_nothing_is_left_for_calm_and_rough_seeds(chunk: int, template: Template) -> None:
    seeds = range(chunk * SEEDS_PER_TEST, (chunk + 1) * SEEDS_PER_TEST)
    failed = failing_seeds(seeds, template)
    assert not failed, "\n".join(f"python -m simulation {seed}: {error}" for seed, error in failed.items())
