"""Run the simulation from a shell.

python -m simulation 42                    one seed: what its clients saw, and the traceback where it fails
python -m simulation 0:100000 --jobs 2     many: a line for each that fails
"""

from __future__ import annotations

import argparse
import collections
import multiprocessing
import sys
import tempfile
import time
import traceback
from pathlib import Path

from simulation.database import Template, make_template
from simulation.plan import make_plan
from simulation.platform_world import PlatformWorld
from simulation.run import failing_seeds, memory_folder
from simulation.world import World, run_seed

CHUNK = 50


def _tell(seed: int, template: Template, folder: Path, world_of: type[World]) -> int:
    print(make_plan(seed))
    try:
        world = run_seed(seed, template, folder, world_of)
    except Exception as error:
        traceback.print_exception(error)
        return 1
    print("\n".join(world.trace))
    return 0


def _lines(seeds: range, template: Template, world_of: type[World]) -> list[tuple[int, str]]:
    failed = failing_seeds(seeds, template, world_of)
    return [(seed, f"{type(error).__name__}: {str(error)[:300]}") for seed, error in failed.items()]


def _run_all(seeds: range, template: Template, jobs: int, world_of: type[World]) -> int:
    chunks = [(seeds[i : i + CHUNK], template, world_of) for i in range(0, len(seeds), CHUNK)]
    began, kinds = time.monotonic(), collections.Counter[str]()
    with multiprocessing.get_context("fork").Pool(jobs) as pool:
        for lines in pool.starmap(_lines, chunks, chunksize=1):
            for seed, line in lines:
                print(f"seed {seed}: {line}")
                kinds[line.partition(":")[0]] += 1
    print(f"{len(seeds)} seeds, {kinds.total()} failed {dict(kinds)}, {time.monotonic() - began:.1f} s")
    return bool(kinds)


def main() -> int:
    """Run the seeds of the command line."""
    parser = argparse.ArgumentParser(prog="simulation", description="Simulate the whole server below HTTP.")
    parser.add_argument("seeds", help="one seed, or FROM:TO")
    parser.add_argument("--jobs", type=int, default=1, help="processes")
    parser.add_argument("--platform", action="store_true", help="simulate uploads and background jobs too")
    options = parser.parse_args()
    world_of = PlatformWorld if options.platform else World
    first, colon, last = options.seeds.partition(":")
    with tempfile.TemporaryDirectory(dir=memory_folder()) as folder:
        template = make_template(Path(folder))
        if colon:
            return _run_all(range(int(first), int(last)), template, options.jobs, world_of)
        place = Path(folder) / "seed"
        place.mkdir()
        return _tell(int(first), template, place, world_of)


if __name__ == "__main__":
    sys.exit(main())
