"""The ranks 1 to N-1 of a tensor-parallel engine: load a share of the base, then execute the messages of rank 0.

Messages are plain data, pickled over pipes. Pipes are used instead of collectives because an idle engine then waits
without a time-out, and the end of a process is noticed at once. There are two pipes for each rank, because adapters are
loaded while steps run: one in the order of the steps (`RunStep`, `SaveKv`, `DropAdapter`, `Stop` and others), without
answers, and one for calls about adapters (`InstallAdapter`, `MergedSquares`, `HoldsRows`), each with an answer.

**Installs are ordered by step.** On GPUs rank 0 launches steps without waiting for them, so another rank may launch
them later. So an adapter is dropped in the order of the steps, and an install names the messages that this rank must
have handled before: the steps that may read the pages' old contents, and the end of the slot's last adapter. Then the
copy waits for the end of these steps on this rank's own GPU.
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
from functools import partial
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch
from transformers.utils.logging import disable_progress_bar

from loramux.common import logs
from loramux.common.garbage import freeze_garbage
from loramux.common.settings.file import Settings
from loramux.engine.execution.assembly import AssembledModel, find_device, load_share
from loramux.engine.execution.attention import UnsupportedModel
from loramux.engine.execution.checkpoint import max_positions
from loramux.engine.execution.runner import PackedStep, StepGraphs, run_forward
from loramux.engine.memory.host_memory import HostPages
from loramux_adapters.errors import BaseUnusable
from loramux_adapters.weights import AdapterWeights, LoraWeights
from loramux_kernels.device import runs_triton

logger = logging.getLogger(__name__)

RunsStep = Callable[[PackedStep], object]
"""Runs this rank's part of a step."""

PR_SET_PDEATHSIG = 1

# Messages in the order of the steps.


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
class CopyPages:
    """Copy pages to other pages of the pool."""

    pages: list[int]
    targets: list[int]


@dataclass(frozen=True, slots=True)
class DropAdapter:
    """Forget a slot."""

    slot: int


@dataclass(frozen=True, slots=True)
class Stop:
    """End the rank."""


# Answers of a rank at its start, in this order.


@dataclass(frozen=True, slots=True)
class WeightsRead:
    """The rank has read its weights, and waits for the others."""


@dataclass(frozen=True, slots=True)
class RankReady:
    """The rank has a pool."""

    num_pages: int
    page_elements: int
    biases: dict[str, torch.Tensor]
    """The rank's own biases `[out_features]` on the host, by linear."""


@dataclass(frozen=True, slots=True)
class StepsRecorded:
    """The rank can run steps."""

    graphs: StepGraphs


@dataclass(frozen=True, slots=True)
class RankRefused:
    """The rank's answer, instead of the first ones, if it cannot serve."""

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
    after: int
    """Number of messages in the order of the steps that are handled before."""


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
    if find_device(settings.engine.device).type == "cuda":
        logging.shutdown()
        os._exit(0)  # NCCL would wait for the other ranks, which may be gone


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
        share = load_share(settings, rank, meeting, meet=lambda: send(steps, WeightsRead()))
    except (UnsupportedModel, BaseUnusable) as refusal:
        _refuse(steps, RankRefused(str(refusal), is_refusal=True))
        return
    except Exception as error:
        logger.exception("rank %d could not load", rank)
        _refuse(steps, RankRefused(f"rank {rank}: {type(error).__name__}: {error}", is_refusal=False))
        return
    loaded()
    handled = HandledMessages()
    threading.Thread(target=_answer, args=(share, handled, adapters), daemon=True, name=f"rank-{rank}-adapters").start()
    bank = share.forward.bank
    try:
        send(steps, RankReady(bank.pool.numel() // bank.page_elements, bank.page_elements, _biases(share)))
        run_step, graphs = _runner(share, settings)
        send(steps, StepsRecorded(graphs))
        _run(share, settings, run_step, handled, steps)
    except (EOFError, OSError):
        pass  # rank 0 is gone: there is nothing left to serve
    except RuntimeError as error:  # a collective with a rank that has died or does not answer
        logger.error("rank %d ends: %s", rank, str(error).partition("\n")[0])
    finally:
        handled.end()
        steps.close()
        adapters.close()


class HandledMessages:
    """Number of messages in the order of the steps that a rank has handled: on a GPU, launched."""

    def __init__(self) -> None:
        self._count = 0
        self._has_ended = False
        self._changed = threading.Condition()

    def count_one(self) -> None:
        """Count a message."""
        with self._changed:
            self._count += 1
            self._changed.notify_all()

    def end(self) -> None:
        """Let `wait_for` raise EOFError from now on."""
        with self._changed:
            self._has_ended = True
            self._changed.notify_all()

    def wait_for(self, count: int) -> None:
        """Wait until `count` messages are handled."""
        with self._changed:
            self._changed.wait_for(lambda: self._has_ended or self._count >= count)
            if self._has_ended:
                raise EOFError


def _refuse(steps: Connection, refusal: RankRefused) -> None:
    with contextlib.suppress(OSError):  # rank 0 may have refused for the same reason, and be gone
        send(steps, refusal)


def _biases(share: AssembledModel) -> dict[str, torch.Tensor]:
    linears = share.local_weights.linears
    return {name: linear.bias.cpu() for name, linear in linears.items() if linear.bias is not None}


def _runner(share: AssembledModel, settings: Settings) -> tuple[RunsStep, StepGraphs]:
    """Return the function that runs this rank's part of a step, and its recordings."""
    forward = share.forward
    if not runs_triton(forward.bank.pool):
        return partial(run_forward, forward), StepGraphs()
    # Imported only if it runs, because it needs triton.
    from loramux.engine.execution.gpu_runner import GpuRunner

    states = share.states.num_pages
    longest = settings.engine.max_model_len or max_positions(forward.model.config)
    runner = GpuRunner.build(forward, (), None, share.limits, longest, share.block_size, states)
    return runner.follow, runner.graphs


def _run(
    share: AssembledModel,
    settings: Settings,
    run_step: RunsStep,
    handled: HandledMessages,
    steps: Connection,
) -> None:
    """Handle messages in the order in which rank 0 sends them."""
    bank = share.forward.bank
    host_kv = HostPages(bank.pool, bank.page_elements, settings.engine.swap_bytes)
    while True:
        match receive(steps):
            case RunStep(packed):
                run_step(packed)
            case SaveKv(pages, slots):
                host_kv.save(pages, slots)
            case RestoreKv(slots, pages):
                host_kv.restore(slots, pages)
            case CopyPages(pages, targets):
                host_kv.copy(pages, targets)
            case DropAdapter(slot):
                bank.drop(slot)
            case Stop():
                return
        handled.count_one()


def _answer(share: AssembledModel, handled: HandledMessages, adapters: Connection) -> None:
    """Answer rank 0's calls about adapters, on another thread than the steps."""
    if (device := share.forward.bank.pool.device).type == "cuda":
        torch.cuda.set_device(device)
    while True:
        try:
            question = receive(adapters)
            try:
                answer = _answered(share, handled, question)
            except EOFError:
                return
            except Exception as error:
                answer = error
            send(adapters, answer)
        except (EOFError, OSError):
            return


@torch.inference_mode()
def _answered(share: AssembledModel, handled: HandledMessages, question: Any) -> Any:
    bank = share.forward.bank
    match question:
        case InstallAdapter(slot, weights, pages, after):
            adapter = bank.prepare(weights)
            handled.wait_for(after)
            bank.install(adapter, pages, slot=slot)
        case MergedSquares(module, pair):
            return share.local_weights.linears[module].merged_squares(pair).cpu()
        case HoldsRows(module, start, rows):
            return share.local_weights.matrices[module].holds(start, rows)
    return None
