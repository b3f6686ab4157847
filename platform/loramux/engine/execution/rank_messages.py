"""Messages from rank 0 of a tensor-parallel engine to another one: plain data, pickled over pipes of its own.

Pipes and not collectives carry them: an idle engine waits without a time-out, and the end of a process is noticed at
once. There are two for each rank, because adapters are loaded while steps run.
"""

from __future__ import annotations

import pickle
from dataclasses import dataclass
from multiprocessing.connection import Connection
from typing import Any

import torch

from loramux.engine.execution.runner import PackedStep
from loramux_adapters.weights import AdapterWeights, LoraWeights

# In the order of the steps.


@dataclass(frozen=True, slots=True)
class RunStep:
    """Run one forward."""

    packed: PackedStep


@dataclass(frozen=True, slots=True)
class SaveKv:
    """Copy pages to slots of host memory."""

    pages: list[int]
    slots: list[int]


@dataclass(frozen=True, slots=True)
class RestoreKv:
    """Copy slots of host memory to pages."""

    slots: list[int]
    pages: list[int]


@dataclass(frozen=True, slots=True)
class Stop:
    """End."""


@dataclass(frozen=True, slots=True)
class RankReady:
    """The rank's answer once it has loaded."""

    num_pages: int
    page_elements: int
    biases: dict[str, torch.Tensor]
    """`[out_features]` of each linear that has one, the rank's own."""


@dataclass(frozen=True, slots=True)
class RankRefused:
    """The rank's answer where it cannot serve."""

    reason: str
    is_refusal: bool
    """The settings or the base are at fault, and the reason is a sentence."""


# About adapters. Each has an answer: a tensor, a bool, None, or an exception.


@dataclass(frozen=True, slots=True)
class InstallAdapter:
    """Copy a share of an adapter, fitted to the base, into pages."""

    slot: int
    weights: AdapterWeights
    pages: list[int]


@dataclass(frozen=True, slots=True)
class DropAdapter:
    """Forget a slot."""

    slot: int


@dataclass(frozen=True, slots=True)
class MergedSquares:
    """Return the rank's part of `FittedLinear.merged_squares`."""

    module: str
    pair: LoraWeights


@dataclass(frozen=True, slots=True)
class HoldsRows:
    """Return whether the rank's rows of a matrix are these, from `start` on."""

    module: str
    start: int
    rows: torch.Tensor


def send(connection: Connection, message: Any) -> None:
    """Send one message. Tensors travel as bytes: multiprocessing's own pickling would share memory."""
    connection.send_bytes(pickle.dumps(message, protocol=pickle.HIGHEST_PROTOCOL))


def receive(connection: Connection) -> Any:
    """Wait for a message. Raises EOFError or OSError where the other end is gone."""
    return pickle.loads(connection.recv_bytes())  # noqa: S301 - both ends are processes of one engine
