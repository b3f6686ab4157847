"""The whole server below HTTP, simulated: two thousand seeds, each with another history."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from simulation.database import Template
from simulation.run import failing_seeds
from simulation.world import run_seed

SEEDS_PER_TEST = 250


@pytest.mark.parametrize("chunk", [0, 1, *(pytest.param(chunk, marks=pytest.mark.slow) for chunk in range(2, 4))])
def test_every_request_ends_and_nothing_is_left_for_calm_and_rough_seeds(chunk: int, template: Template) -> None:
    seeds = range(chunk * SEEDS_PER_TEST, (chunk + 1) * SEEDS_PER_TEST)
    failed = failing_seeds(seeds, template)
    assert not failed, "\n".join(f"python -m simulation {seed}: {error}" for seed, error in failed.items())


def test_seed_replays_exactly_in_another_process_with_other_hashes(template: Template, folder: Path) -> None:
    here = run_seed(42, template, folder).trace
    program = (
        "import sys, tempfile, pathlib; from simulation.database import make_template; "
        "from simulation.world import run_seed; folder = pathlib.Path(sys.argv[1]); place = folder / 'seed'; "
        "place.mkdir(); print('\\n'.join(run_seed(42, make_template(folder), place).trace))"
    )
    other = folder / "other"
    other.mkdir()
    paths = os.pathsep.join(sys.path)
    told = subprocess.run(
        [sys.executable, "-c", program, str(other)],
        env=os.environ | {"PYTHONPATH": paths, "PYTHONHASHSEED": "7"},
        capture_output=True,
        text=True,
        check=True,
    ).stdout
    assert here, "the seed has clients"
    assert told.splitlines() == here
