"""The ranks 1 to N-1 of a tensor-parallel engine: load a share of the base, then execute the messages of rank 0.

Messages are plain data, pickled over pipes. Pipes are used instead of collectives because an idle engine then waits
without a time-out, and the end of a process is noticed at once. There are two pipes for each rank, because adapters are
loaded while steps run: one in the order of the steps (`RunStep`, `SaveKv`, `RestoreKv`, `CopyPages`, `Stop`), without
answers, and one for calls about adapters (`InstallAdapter`, `DropAdapter`, `MergedSquares`, `HoldsRows`), each with an
answer.
"""

from __future__ import annotations

import contextlib
import ctypes
import logging
import os
import pickle
import signal
import threading
from collections.abc import Callable
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch
from transformers.utils.logging import disable_progress_bar

from loramux.common import logs
from loramux.common.garbage import freeze_garbage
from loramux.common.settings.file import Settings
from loramux.engine.execution.assembly import AssembledModel, load_share
from loramux.engine.execution.attention import UnsupportedModel
from loramux.engine.execution.runner import PackedStep, run_forward
from loramux.engine.execution.vision import StepImages
from loramux.engine.memory.host_memory import HostPages
from loramux_adapters.errors import BaseUnusable
from loramux_adapters.weights import AdapterWeights, LoraWeights

logger = logging.getLogger(__name__)

PR_SET_PDEATHSIG = 1

# Messages in the order of the steps.


@dataclass(frozen=True, slots=True)
class RunStep:
    """Run one forward."""

    packed: PackedStep
    images: StepImages | None = None
    """Rows of images, which rank 0 has computed."""


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
class CopyPages:
    """Copy pages to other pages of the pool."""

    pages: list[int]
    targets: list[int]


@dataclass(frozen=True, slots=True)
class Stop:
    """End the rank."""


@dataclass(frozen=True, slots=True)
class RankReady:
    """The rank's answer once it has loaded."""

    num_pages: int
    page_elements: int
    biases: dict[str, torch.Tensor]
    """The rank's own biases `[out_features]`, by linear."""


@dataclass(frozen=True, slots=True)
class RankRefused:
    """The rank's answer if it cannot serve."""

    reason: str
    is_refusal: bool
    """True if the settings or the base are at fault; the reason is then a sentence."""


# Messages about adapters. Each has an answer: a tensor, a bool, None, or an exception.


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
    """Return True if the rank's rows of a matrix, from `start` on, are these."""

    module: str
    start: int
    rows: torch.Tensor


def send(connection: Connection, message: Any) -> None:
    """Send one message. Tensors travel as bytes: multiprocessing's own pickling would share memory."""
    connection.send_bytes(pickle.dumps(message, protocol=pickle.HIGHEST_PROTOCOL))


def receive(connection: Connection) -> Any:
    """Wait for a message. Raises EOFError or OSError if the other end is gone."""
    return pickle.loads(connection.recv_bytes())  # noqa: S301 - both ends are processes of one engine


def serve_in_process(
    parent: int, settings: Settings, rank: int, meeting: Path, steps: Connection, adapters: Connection
) -> None:
    """Serve in a process that `parent` has started, until rank 0 sends Stop or is gone."""
    _kill_with_parent(parent)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    logs.configure(settings.logging.format, settings.logging.level)
    disable_progress_bar()
    serve_rank(settings, rank, meeting, steps, adapters, freeze_garbage)


def _kill_with_parent(parent: int) -> None:
    """Make the kernel kill this process when the thread that started it ends, even if this process is stopped or
    hangs."""
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:  # the parent ended before the call
        os._exit(1)


def serve_rank(
    settings: Settings,
    rank: int,
    meeting: Path,
    steps: Connection,
    adapters: Connection,
    loaded: Callable[[], None] = lambda: None,
) -> None:
    """Load, call `loaded`, and serve until rank 0 sends Stop, is gone, or a step fails; the step then fails on rank 0
    too."""
    try:
        share = load_share(settings, rank, meeting)
    except (UnsupportedModel, BaseUnusable) as refusal:
        _refuse(steps, RankRefused(str(refusal), is_refusal=True))
        return
    except Exception as error:
        logger.exception("rank %d could not load", rank)
        _refuse(steps, RankRefused(f"rank {rank}: {type(error).__name__}: {error}", is_refusal=False))
        return
    loaded()
    threading.Thread(target=_answer, args=(share, adapters), daemon=True, name=f"rank-{rank}-adapters").start()
    bank = share.forward.bank
    send(steps, RankReady(bank.pool.numel() // bank.page_elements, bank.page_elements, _biases(share)))
    try:
        _run(share, settings, steps)
    except (EOFError, OSError):
        pass  # rank 0 is gone: there is nothing left to serve
    except RuntimeError as error:  # a collective with a rank that has died or does not answer
        logger.error("rank %d ends: %s", rank, str(error).partition("\n")[0])
    finally:
        steps.close()
        adapters.close()


def _refuse(steps: Connection, refusal: RankRefused) -> None:
    with contextlib.suppress(OSError):  # rank 0 may have refused for the same reason, and be gone
        send(steps, refusal)


def _biases(share: AssembledModel) -> dict[str, torch.Tensor]:
    linears = share.local_weights.linears
    return {name: linear.bias for name, linear in linears.items() if linear.bias is not None}


def _run(share: AssembledModel, settings: Settings, steps: Connection) -> None:
    """Run steps, and copies of KV, in the order in which rank 0 sends them."""
    bank = share.forward.bank
    host_kv = HostPages(bank.pool, bank.page_elements, settings.engine.swap_bytes)
    while True:
        match receive(steps):
            case RunStep(packed, images):
                run_forward(share.forward, packed, images)
            case SaveKv(pages, slots):
                host_kv.save(pages, slots)
            case RestoreKv(slots, pages):
                host_kv.restore(slots, pages)
            case CopyPages(pages, targets):
                host_kv.copy(pages, targets)
            case Stop():
                return


def _answer(share: AssembledModel, adapters: Connection) -> None:
    """Answer rank 0's calls about adapters, on another thread than the steps."""
    while True:
        try:
            question = receive(adapters)
            try:
                answer = _answered(share, question)
            except Exception as error:
                answer = error
            send(adapters, answer)
        except (EOFError, OSError):
            return


@torch.inference_mode()
def _answered(share: AssembledModel, question: Any) -> Any:
    bank = share.forward.bank
    match question:
        case InstallAdapter(slot, weights, pages):
            bank.install(bank.prepare(weights), pages, slot=slot)
        case DropAdapter(slot):
            bank.drop(slot)
        case MergedSquares(module, pair):
            return share.local_weights.linears[module].merged_squares(pair).cpu()
        case HoldsRows(module, start, rows):
            return share.local_weights.matrices[module].holds(start, rows)
    return None
