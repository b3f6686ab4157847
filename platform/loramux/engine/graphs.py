"""A function of fixed addresses, recorded once and then replayed: as a CUDA graph, or by calling it again."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import torch


@dataclass(frozen=True, slots=True)
class Recording:
    """`replay` brings `output` up to date with the buffers that the recorded function reads."""

    replay: Callable[[], object]
    output: torch.Tensor


class Recorder(Protocol):
    """Records functions that read and write the same addresses at every call."""

    def __call__(self, function: Callable[[], torch.Tensor]) -> Recording:
        """Call `function` at least once."""


class CudaGraphs:
    """Records CUDA graphs that share one pool of memory: a graph's output lasts until the next one is replayed."""

    def __init__(self) -> None:
        self._pool = torch.cuda.graph_pool_handle()

    def __call__(self, function: Callable[[], torch.Tensor]) -> Recording:
        """Once outside the graph, for what is made on first use: compiled kernels, tables, workspaces."""
        aside = torch.cuda.Stream()
        aside.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(aside):
            function()
        torch.cuda.current_stream().wait_stream(aside)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=self._pool):
            output = function()
        return Recording(graph.replay, output)


def record_calls(function: Callable[[], torch.Tensor]) -> Recording:
    """Where there are no graphs: the same buffers and the same answer, at the price of calling."""
    output = function()
    return Recording(lambda: output.copy_(function()), output)


def recorder_for(device: torch.device) -> Recorder:
    """What records on `device`."""
    return CudaGraphs() if device.type == "cuda" else record_calls
