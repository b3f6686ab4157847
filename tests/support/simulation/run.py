"""Run many seeds, and collect what fails."""

from __future__ import annotations

import tempfile
from collections.abc import Iterable
from pathlib import Path

from simulation.database import Template
from simulation.world import World, run_seed


def memory_folder() -> str | None:
    """A folder in memory, if the machine has one: databases of seeds live for milliseconds."""
    return "/dev/shm" if Path("/dev/shm").is_dir() else None


def failing_seeds(seeds: Iterable[int], template: Template, world_of: type[World] = World) -> dict[int, BaseException]:
    """Run `seeds`, each on its own database; return those that fail, with their errors."""
    failed: dict[int, BaseException] = {}
    with tempfile.TemporaryDirectory(dir=memory_folder()) as parent:
        for seed in seeds:
            with tempfile.TemporaryDirectory(dir=parent) as folder:
                try:
                    run_seed(seed, template, Path(folder), world_of)
                except Exception as error:
                    failed[seed] = error
    return failed
