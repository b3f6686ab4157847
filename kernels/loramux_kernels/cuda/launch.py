"""A kernel launch as plain data, to be run on a GPU or compiled for one on a machine without it."""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from functools import lru_cache
from typing import Any

import torch

PROGRAMS_WITHOUT_GPU = 3
"""Programs of a persistent launch in the interpreter: few, because each must walk through several items."""

REGISTERS = 64 << 10
"""Registers of a multiprocessor, of every architecture since sm_70."""

THREAD_REGISTERS = 255
"""Maximum number of registers of a thread."""

LEAST_DEPENDENT_ARCH = 90
"""First architecture with programmatic dependent launch."""

AMPERE = 8
"""Major version of sm_80 to sm_89."""


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
    may_depend: bool = True
    """False if the kernel must not begin early: a kernel of the same step writes what it reads before it waits."""
    programs: int | None = None
    """Programs that the registers of a multiprocessor must suffice for; a thread may take all that this leaves.

    None: the assembler weighs registers against programs itself. At times it then spills for one program more.
    """
    by_major: Mapping[int, Mapping[str, Any]] = field(default_factory=dict)
    """Fields that have other values on some architectures, by major version: `{AMPERE: {"num_stages": 3}}`."""

    def for_arch(self, arch: int) -> tuple[dict[str, Any], dict[str, Any]]:
        """Return the arguments and the compiler's options for devices of `arch` (80, 90, ...; 0: the interpreter).

        A kernel with the parameter DEPENDENT begins early if it may and can (see `dependent_launch`). Fused
        multiply-add is named because its default differs between versions.
        """
        if other := self.by_major.get(arch // 10):
            return replace(self, **other, by_major={}).for_arch(arch)
        arguments = self.arguments
        options = {"num_warps": self.num_warps, "num_stages": self.num_stages, "enable_fp_fusion": True}
        if "DEPENDENT" in self.kernel.arg_names:
            depends = self.may_depend and arch >= LEAST_DEPENDENT_ARCH
            arguments = arguments | {"DEPENDENT": depends}
            options |= {"launch_pdl": True} if depends else {}
        if self.programs is not None and arch > 0:
            per_thread = REGISTERS // (self.programs * self.num_warps * 32)
            options["maxnreg"] = min(THREAD_REGISTERS, per_thread)
        return arguments, options

    def run(self) -> None:
        """Enqueue the kernel on the current stream."""
        arguments, options = self.for_arch(_current_arch())
        self.kernel[self.grid](**arguments, **options)


def run_all(launches: Iterable[Launch]) -> None:
    """Enqueue launches one after the other."""
    for launch in launches:
        launch.run()


def _current_arch() -> int:
    if os.environ.get("TRITON_INTERPRET") == "1" or not torch.cuda.is_available():
        return 0
    return _arch(torch.cuda.current_device())


@lru_cache
def _arch(device: int) -> int:
    major, minor = torch.cuda.get_device_capability(device)
    return 10 * major + minor


@lru_cache
def resident_programs(device: torch.device, per_processor: int) -> int:
    """Return the programs of a persistent launch that keeps `per_processor` of them on each multiprocessor."""
    if device.type != "cuda":
        return PROGRAMS_WITHOUT_GPU
    return int(torch.cuda.get_device_properties(device).multi_processor_count) * per_processor
