"""A function of fixed addresses, recorded once and then replayed: as a CUDA graph, or by calling it again."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch.utils._python_dispatch import TorchDispatchMode

ANSWERED_BY_THE_DEVICE = frozenset(
    ("_local_scalar_dense", "bincount", "nonzero", "masked_select", "_unique2", "unique_dim", "unique_consecutive")
)
"""Operators that make the host wait for a value, or for a shape that depends on one."""

logger = logging.getLogger(__name__)


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


def recorder_for(function: Callable[[], torch.Tensor], device: torch.device) -> Recorder:
    """What records functions like `function` on `device`: calls where it asks the device, which no graph can hold."""
    questions = questions_of(function)
    if questions:
        logger.warning("decode steps run without CUDA graphs: the model asks the device for %s", sorted(questions))
    return CudaGraphs() if device.type == "cuda" and not questions else record_calls


def questions_of(function: Callable[[], torch.Tensor]) -> set[str]:
    """The operators with which `function` makes the host wait for its device."""
    with _Listener() as listener:
        function()
    return listener.heard


def _masks(args: Sequence[Any]) -> bool:
    """Whether one of an indexing operator's indices is a mask, whose ones must be counted first."""
    indices = args[1] if len(args) > 1 and isinstance(args[1], list | tuple) else ()
    return any(isinstance(index, torch.Tensor) and index.dtype == torch.bool for index in indices)


class _Listener(TorchDispatchMode):
    """Takes note of operators that a CUDA graph cannot hold."""

    def __init__(self) -> None:
        super().__init__()
        self.heard: set[str] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func.__name__.split(".")[0]
        if name in ANSWERED_BY_THE_DEVICE or (name.startswith("index") and _masks(args)):
            self.heard.add(name)
        return func(*args, **kwargs or {})
