"""Programmatic dependent launch: a kernel begins before the launch before it has ended.

The programs of such a kernel are placed on multiprocessors as soon as all programs of the launch before have called
`begin_dependent` or have ended. Until the kernel calls `wait_for_earlier`, earlier kernels may still run. So three
rules hold for a kernel with the parameter DEPENDENT:

1. Before `wait_for_earlier` it reads only what no kernel of the step writes: weights, adapters, and tables that the
   host has copied before the step's first kernel.
2. Before `wait_for_earlier` it writes nothing.
3. Every program calls `wait_for_earlier`, whether it has work or not. The next kernel waits for this launch alone, so
   the end of this launch must imply the end of all launches before it.

Shrink has no such parameter: steps in which it began early took 0.01 to 0.05 ms longer (see docs/gpu.md).

Launches of other kernels, such as cuBLAS's, wait for the end of the launch before as ever. Source: PTX ISA,
`griddepcontrol`, sm_90 and later. Without DEPENDENT both functions compile to nothing.
"""

from __future__ import annotations

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait


@triton.jit
def begin_dependent(DEPENDENT: tl.constexpr) -> None:
    """Let the next kernel begin once all programs have called this."""
    if DEPENDENT:
        gdc_launch_dependents()


@triton.jit
def wait_for_earlier(DEPENDENT: tl.constexpr) -> None:
    """Wait for the end of all launches before this one; further calls do nothing."""
    if DEPENDENT:
        gdc_wait()
