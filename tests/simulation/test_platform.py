"""The whole platform, simulated: uploads, registry, background jobs and requests."""

from __future__ import annotations

import pytest
from simulation.database import Template
from simulation.platform_world import PlatformWorld
from simulation.run import failing_seeds

SEEDS_PER_TEST = 20


@pytest.mark.parametrize("chunk", [0, *(pytest.param(chunk, marks=pytest.mark.slow) for chunk in (1, 2))])
def test_uploads_end_and_serve_the_bytes_that_were_sent(chunk: int, template: Template) -> None:
    seeds = range(chunk * SEEDS_PER_TEST, (chunk + 1) * SEEDS_PER_TEST)
    failed = failing_seeds(seeds, template, PlatformWorld)
    assert not failed, "\n".join(f"python -m simulation {seed} --platform: {e}" for seed, e in failed.items())


def test_upload_whose_client_left_ends_although_its_checks_are_never_possible(template: Template) -> None:
    """The checking process of this seed dies in each of the attempts, the last of them a minute after the first."""
    assert not failing_seeds([3275], template, PlatformWorld)


def test_server_that_starts_during_an_outage_of_its_database_serves_after_it(template: Template) -> None:
    assert not failing_seeds([3889], template, PlatformWorld)
