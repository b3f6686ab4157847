"""The benchmarks are scripts, not a package: their folder goes on the path, as it does when they run."""

from __future__ import annotations

import sys
from pathlib import Path

BENCHMARKS = Path(__file__).resolve().parents[2] / "benchmarks"
sys.path[:0] = [str(BENCHMARKS), str(BENCHMARKS / "gpu"), str(Path(__file__).resolve().parent)]
