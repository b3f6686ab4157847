"""Median times of a device, and the GPU's memory bandwidth and matrix rate."""

from __future__ import annotations

import time
from collections.abc import Callable
from statistics import median
from typing import Protocol

import torch
from floors import Ceilings

FLUSH_BYTES = 1 << 30
"""Number of bytes that are written between runs. It is larger than the second-level cache of any GPU, so that no run
finds its inputs there. Writing also takes long enough for the host to be ahead of the GPU; otherwise the GPU's events
would measure the host.
"""


class Clock(Protocol):
    """Times one device's work."""

    def median_ms(self, work: Callable[[], object], repeats: int) -> float:
        """Return the median of `repeats` runs in milliseconds, after two that do not count."""


class HostClock:
    """A clock for a device that works while the host waits."""

    def median_ms(self, work: Callable[[], object], repeats: int) -> float:
        """Return the median in milliseconds by the host's clock."""
        work()
        taken = []
        for _ in range(repeats):
            start = time.perf_counter()
            work()
            taken.append((time.perf_counter() - start) * 1e3)
        return median(taken)


class CudaClock:
    """Times work by events around replays of a graph, which shrinks the gaps between launches as the engine does."""

    def __init__(self, device: torch.device) -> None:
        self._flush = torch.empty(FLUSH_BYTES, dtype=torch.uint8, device=device)

    def median_ms(self, work: Callable[[], object], repeats: int) -> float:
        """With cold caches."""
        aside = torch.cuda.Stream()
        aside.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(aside):
            work()
            work()
        torch.cuda.current_stream().wait_stream(aside)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            work()
        marks = [(torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)) for _ in range(repeats)]
        for start, stop in marks:
            self._flush.zero_()
            start.record()
            graph.replay()
            stop.record()
        torch.cuda.synchronize()
        return median(start.elapsed_time(stop) for start, stop in marks)


def clock_for(device: torch.device) -> Clock:
    """Return the timer for `device`."""
    return CudaClock(device) if device.type == "cuda" else HostClock()


def measure_ceilings(device: torch.device, clock: Clock) -> Ceilings:
    """Measure the faster of copying and reading 1 GiB, and a product of 8192 x 8192 matrices. Without a GPU, sizes are
    smaller.
    """
    on_gpu = device.type == "cuda"
    num_bytes, side = (1 << 30, 8192) if on_gpu else (1 << 22, 128)
    source = torch.randint(0, 255, (num_bytes,), dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    copy_ms = clock.median_ms(lambda: target.copy_(source), 10)
    read_ms = clock.median_ms(source.view(torch.int32).amax, 10)
    a, b = torch.randn(2, side, side, device=device).to(torch.bfloat16)
    product = torch.empty_like(a)
    matmul_ms = clock.median_ms(lambda: torch.matmul(a, b, out=product), 10)
    return Ceilings(bytes_per_ms=num_bytes / min(copy_ms / 2, read_ms), flops_per_ms=2 * side**3 / matmul_ms)


def synchronize(device: torch.device) -> None:
    """Wait for the device."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
