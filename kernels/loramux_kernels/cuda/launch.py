"""A kernel launch as plain data, to be run on a GPU or compiled for one on a machine without it."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import torch

PROGRAMS_WITHOUT_GPU = 3
"""Programs of a persistent launch in the interpreter: few, because each must walk through several items."""


@dataclass(frozen=True, eq=False)
class Launch:
    """A kernel, its grid and all its arguments."""

    kernel: Any
    """A function decorated with `triton.jit`."""
    grid: tuple[int, ...]
    arguments: dict[str, Any]
    """Values by parameter name, constexprs included."""
    num_warps: int
    num_stages: int

    @property
    def options(self) -> dict[str, Any]:
        """Options of the compiler. Fused multiply-add is named because its default differs between versions."""
        return {"num_warps": self.num_warps, "num_stages": self.num_stages, "enable_fp_fusion": True}

    def run(self) -> None:
        """Enqueue the kernel on the current stream."""
        self.kernel[self.grid](**self.arguments, **self.options)


def run_all(launches: Iterable[Launch]) -> None:
    """Enqueue launches one after the other."""
    for launch in launches:
        launch.run()


@lru_cache
def resident_programs(device: torch.device, per_processor: int) -> int:
    """Return the programs of a persistent launch that keeps `per_processor` of them on each multiprocessor."""
    if device.type != "cuda":
        return PROGRAMS_WITHOUT_GPU
    return int(torch.cuda.get_device_properties(device).multi_processor_count) * per_processor
