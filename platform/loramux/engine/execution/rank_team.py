"""Rank 0's end of a tensor-parallel engine: starts the other ranks, sends them each step, and keeps them alike.

    rank 0   scheduler -> plan -> pack ── RunStep ──> rank 1 .. N-1     the same forward with their share
                                  forward  <── all-reduce ──>  forward
             sampler <── logits gathered on rank 0

Rank 0 is the same as an engine with one rank. The other ranks decide nothing. Their pools have the same pages, and
every change of rank 0's pages (an adapter's blocks, saved KV) is repeated on theirs. `RankTeam` starts them and notices
their end. `RankedBank`, `RankedHostKv` and `ranked_weights` replace the bank, the host's KV and the base's weights of
one rank, and act on all ranks.
"""

from __future__ import annotations

import contextlib
import logging
import multiprocessing
import os
import queue
import shutil
import signal
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from multiprocessing.connection import wait
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import torch
from torch.nn import functional

from loramux.common.settings.file import Settings
from loramux.engine.execution.assembly import find_device
from loramux.engine.execution.attention import UnsupportedModel
from loramux.engine.execution.rank_worker import (
    CopyPages,
    DropAdapter,
    HoldsRows,
    InstallAdapter,
    MergedSquares,
    RankReady,
    RankRefused,
    RestoreKv,
    RunStep,
    SaveKv,
    StepsRecorded,
    Stop,
    WeightsRead,
    receive,
    send,
    serve_in_process,
    serve_rank,
)
from loramux.engine.execution.runner import PackedStep
from loramux.engine.memory.host_memory import HostPages
from loramux_adapters.bank import AdapterBank
from loramux_adapters.base import BaseDescription
from loramux_adapters.base_weights import BaseMatrix, BaseWeights, FittedLinear
from loramux_adapters.components import AdapterPlan
from loramux_adapters.prepared import PreparedAdapter, prepare
from loramux_adapters.ranks import shard_pair, shard_plan, shard_weights, take
from loramux_adapters.sharding import Sharding
from loramux_adapters.weights import AdapterLayout, AdapterWeights, LoraWeights

logger = logging.getLogger(__name__)

Answer = TypeVar("Answer", WeightsRead, RankReady, StepsRecorded)

POLL_S = 5e-5
"""Seconds between two questions to a GPU if its step has ended."""

END_TIMEOUT_S = 5.0
"""Seconds after which a rank that was told to stop and has not ended is killed."""


class RankDied(RuntimeError):
    """A rank has ended while the engine served."""


class OtherRank:
    """One other rank: a process, or a thread if the engine itself is a thread."""

    def __init__(self, settings: Settings, rank: int, meeting: Path) -> None:
        self.rank = rank
        self.process: BaseProcess | None = None
        self._asking = threading.Lock()
        context = multiprocessing.get_context("spawn")
        self.num_told = 0
        """Messages that were sent in the order of the steps."""
        self._telling = threading.Lock()
        self.steps, their_steps = context.Pipe()
        self._adapters, their_adapters = context.Pipe()
        arguments = (settings, rank, meeting, their_steps, their_adapters)
        if settings.engine.in_process:
            threading.Thread(target=serve_rank, args=arguments, daemon=True, name=f"rank-{rank}").start()
            return
        self.process = context.Process(
            target=serve_in_process, args=(os.getpid(), *arguments), name=f"loramux-rank-{rank}"
        )
        # The process inherits the signal mask: a Ctrl-C must not end it while it imports torch.
        blocked = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT, signal.SIGTERM})
        try:
            self.process.start()
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, blocked)
        their_steps.close()
        their_adapters.close()

    def tell(self, message: Any) -> None:
        """Send a message in the order of the steps. Any thread may call it."""
        try:
            with self._telling:
                self.num_told += 1
                send(self.steps, message)
        except OSError as error:
            raise RankDied(self.reason()) from error

    def ask(self, question: Any) -> Any:
        """Send a message about adapters and wait for the answer. Any thread may call it."""
        try:
            with self._asking:
                send(self._adapters, question)
                answer = receive(self._adapters)
        except (EOFError, OSError) as error:
            raise RankDied(self.reason()) from error
        if isinstance(answer, Exception):
            raise answer
        return answer

    def reason(self) -> str:
        """Return a text that says how the rank ended."""
        if self.process is None:
            return f"rank {self.rank} has ended"
        self.process.join(END_TIMEOUT_S)
        code = self.process.exitcode
        how = f"was ended by signal {-code}" if code is not None and code < 0 else f"ended with exit code {code}"
        return f"rank {self.rank} of the engine {how}"

    def close(self) -> None:
        """Close this end of both pipes."""
        self.steps.close()
        self._adapters.close()


class RankTeam:
    """The ranks 1 to N-1 of this engine."""

    def __init__(self, settings: Settings) -> None:
        """Start the ranks; each then loads its share of the base."""
        self._folder = Path(tempfile.mkdtemp(prefix="loramux-ranks-"))
        self.meeting = self._folder / "meeting"
        self.size = settings.engine.tensor_parallel_size
        self._timeout_s = settings.engine.step_timeout_s
        self.others: list[OtherRank] = []
        self._dead: queue.SimpleQueue[str] = queue.SimpleQueue()
        self._is_closed = threading.Event()
        self._may_wait = False
        """True if rank 0 may wait in a collective."""
        self._is_on_gpu = find_device(settings.engine.device).type == "cuda"
        self.on_death: Callable[[], None] = lambda: None
        """Called on another thread when a rank has ended."""
        try:
            self.others += [OtherRank(settings, rank, self.meeting) for rank in range(1, self.size)]
        except BaseException:
            self.close()
            raise
        if not settings.engine.in_process:
            threading.Thread(target=self._watch, daemon=True, name="ranks").start()

    def wait_for(self, kind: type[Answer]) -> list[Answer]:
        """Wait for each rank's next answer, of this kind. Raises UnsupportedModel or RankDied if one cannot serve."""
        found = []
        for other in self.others:
            try:
                answer = receive(other.steps)
            except (EOFError, OSError) as error:
                raise RankDied(other.reason()) from error
            if isinstance(answer, RankRefused):
                raise UnsupportedModel(answer.reason) if answer.is_refusal else RankDied(answer.reason)
            assert isinstance(answer, kind), "the answers at a start have an order"
            found.append(answer)
        self._may_wait = True
        return found

    def run(self, packed: PackedStep) -> None:
        """Send a step."""
        self.tell(RunStep(packed.for_other_ranks()))

    def tell(self, message: Any) -> None:
        """Send a message to every rank, in order with the steps."""
        for other in self.others:
            other.tell(message)

    def wait_until(self, has_ended: Callable[[], bool]) -> None:
        """Wait for a GPU by asking it, because a recorded collective with a rank that has ended never ends. Raises
        RankDied."""
        deadline = time.monotonic() + self._timeout_s
        while not has_ended():
            self.ensure_alive()
            if time.monotonic() > deadline:
                raise RankDied(self._silence)
            time.sleep(POLL_S)

    def ensure_alive(self) -> None:
        """Raise RankDied if a rank has ended."""
        if not self._dead.empty():
            raise RankDied(self._dead.get())

    def explained(self, error: Exception) -> Exception:
        """Return the cause of a step's failure: the end of a rank, or else `error`."""
        if isinstance(error, RankDied):
            return error
        ended = time.monotonic() + 1.0  # a collective fails at once, and the process is reaped a moment later
        while time.monotonic() < ended and self._dead.empty() and any(o.process is not None for o in self.others):
            time.sleep(0.02)
        if not self._dead.empty():
            return RankDied(self._dead.get())
        if "timed out" in str(error).lower():
            return RankDied(self._silence)
        return error

    @property
    def _silence(self) -> str:
        return f"a rank of the engine did not answer within engine.step_timeout_s = {self._timeout_s:g} s"

    def close(self) -> None:
        """End the ranks: tell them to stop, and kill those that do not."""
        if self._is_closed.is_set():
            return
        self._is_closed.set()
        for other in self.others:
            with contextlib.suppress(RankDied):
                other.tell(Stop())
        for other in self.others:
            if (process := other.process) is not None:
                process.join(END_TIMEOUT_S)
                if process.is_alive():
                    process.kill()
                    process.join()
            other.close()
        shutil.rmtree(self._folder, ignore_errors=True)

    def _watch(self) -> None:
        """End all ranks when the first one ends, because the others would wait for it in a collective."""
        processes = {other.process.sentinel: other for other in self.others if other.process is not None}
        ended = wait(list(processes))
        if self._is_closed.is_set():
            return
        other = next(one for sentinel, one in processes.items() if sentinel in ended)
        reason = other.reason()
        logger.error("%s: the engine ends", reason)
        self._dead.put(reason)
        for one in self.others:
            if one is not other and one.process is not None:
                one.process.kill()
        self.on_death()
        # The thread of the steps raises RankDied, unless it waits for the GPU, for example while it records a step.
        while self._is_on_gpu and not self._is_closed.wait(END_TIMEOUT_S):
            if self._may_wait:
                os._exit(1)


class RankedFence(NamedTuple):
    """A point in the order of the steps, on all ranks."""

    event: torch.cuda.Event | None
    """End of rank 0's steps; None on a CPU."""
    num_told: tuple[int, ...]
    """Messages that each other rank has got."""


class RankedBank:
    """Banks of all ranks as one. An adapter is in all of them, in the same slot and the same pages, or in none."""

    def __init__(self, bank: AdapterBank, sharding: Sharding, team: RankTeam) -> None:
        """`bank` is rank 0's."""
        self._bank = bank
        self._sharding = sharding
        self._team = team
        self._dropped_after: dict[int, tuple[int, ...]] = {}
        """Messages that each other rank had got when it was told to drop a slot's last adapter."""

    def plan_layout(self, plan: AdapterPlan) -> AdapterLayout:
        """Lay out a rank's share of a validated adapter. Raises AdapterRejected if its rank is too large."""
        return self._bank.plan_layout(shard_plan(plan, self._sharding))

    def fence(self) -> RankedFence:
        """Return the end of all steps that were launched so far."""
        return RankedFence(self._bank.fence(), self._num_told())

    def prepare(self, weights: AdapterWeights) -> PreparedAdapter:
        """Return the whole adapter: its tensors are cut when it is installed."""
        return prepare(weights, self.plan_layout(weights.plan))

    def install(self, adapter: PreparedAdapter, pages: list[int], fence: RankedFence) -> int:
        """Copy each rank's share into `pages` of that rank after `fence`, and return the slot that serves the
        adapter."""
        weights = adapter.source
        assert isinstance(weights, AdapterWeights), "prepared by this class"
        own = self._bank.prepare(shard_weights(weights, self._sharding, 0))
        slot = self._bank.install(own, pages, fence.event)
        # The slot may have become free after the fence.
        dropped_after = self._dropped_after.get(slot, fence.num_told)
        installed: list[OtherRank] = []
        try:
            for other, *places in zip(self._team.others, fence.num_told, dropped_after, strict=True):
                share = shard_weights(weights, self._sharding, other.rank)
                other.ask(InstallAdapter(slot, share, pages, max(places)))
                installed.append(other)
        except BaseException:
            self._drop(slot, installed)
            raise
        return slot

    def drop(self, slot: int) -> None:
        """Forget a slot. After this call, its pages may be overwritten after a new fence."""
        self._drop(slot, self._team.others)

    def _drop(self, slot: int, installed: Sequence[OtherRank]) -> None:
        for other in installed:
            other.tell(DropAdapter(slot))
        self._dropped_after[slot] = self._num_told()
        self._bank.drop(slot)  # last: another load may take the slot from here on

    def _num_told(self) -> tuple[int, ...]:
        return tuple(other.num_told for other in self._team.others)


class RankedHostKv:
    """A `HostKv` in which every rank copies its share of a page, in the order of the steps."""

    def __init__(self, own: HostPages, team: RankTeam) -> None:
        self._own = own
        self._team = team
        self.num_slots = own.num_slots
        self.seconds_per_page = own.seconds_per_page

    def save(self, pages: Sequence[int], slots: Sequence[int]) -> None:
        """Copy each page to its slot."""
        self._team.tell(SaveKv(list(pages), list(slots)))
        self._own.save(pages, slots)

    def restore(self, slots: Sequence[int], pages: Sequence[int]) -> None:
        """Copy each slot to its page."""
        self._team.tell(RestoreKv(list(slots), list(pages)))
        self._own.restore(slots, pages)

    def copy(self, pages: Sequence[int], targets: Sequence[int]) -> None:
        """Copy each page to another page of the pool."""
        self._team.tell(CopyPages(list(pages), list(targets)))
        self._own.copy(pages, targets)


@dataclass(frozen=True, slots=True)
class RankedLinear:
    """A linear whose weights are spread over several ranks. What is joined is on the host."""

    name: str
    own: FittedLinear
    bias: torch.Tensor | None
    """`[out_features]` of the whole linear."""
    out_features: int
    sharding: Sharding
    others: Sequence[OtherRank]

    def merged_squares(self, pair: LoraWeights) -> torch.Tensor:
        """Add up the ranks' parts, or join them; see FittedLinear."""
        own = self.own.merged_squares(self._share(pair, 0)).cpu()
        if not (self.sharding.is_row_parallel(self.name) or self.sharding.outputs(self.name, 0, self.out_features)):
            return own
        total = own.new_zeros(self.out_features)
        for rank, part in self._parts(own, pair):
            shares = self.sharding.outputs(self.name, rank, self.out_features)
            if shares is None:
                total += part
            else:
                place_shares(total, shares, part)
        return total

    def _parts(self, own: torch.Tensor, pair: LoraWeights) -> Iterator[tuple[int, torch.Tensor]]:
        yield 0, own
        for other in self.others:
            yield other.rank, other.ask(MergedSquares(self.name, self._share(pair, other.rank)))

    def _share(self, pair: LoraWeights, rank: int) -> LoraWeights:
        """Return the part of `pair` that fits the rank's own weights; those of the head may be filled up with zeros."""
        if not self.sharding.is_vocabulary(self.name):
            return shard_pair(self.name, pair, self.sharding, rank)
        b = take(pair.b, self.sharding.outputs(self.name, rank, self.out_features), 0)
        rows = self.sharding.length_of(self.name, self.out_features)
        return LoraWeights(pair.a, functional.pad(b, (0, 0, 0, rows - len(b))), pair.scale)


@dataclass(frozen=True, slots=True)
class RankedMatrix:
    """A matrix with a row for each token; each rank has an equal number of rows."""

    name: str
    own: BaseMatrix
    """Rank 0's part; the last rank's may be filled up."""
    num_tokens: int
    others: Sequence[OtherRank]

    def __len__(self) -> int:
        return self.num_tokens

    def holds(self, start: int, rows: torch.Tensor) -> bool:
        """Compare each rank's own rows on that rank."""
        each, stop = len(self.own), start + len(rows)
        for rank in range(len(self.others) + 1):
            first, last = max(start, rank * each), min(stop, (rank + 1) * each)
            if first >= last:
                continue
            part = rows[first - start : last - start].contiguous()
            place = first - rank * each
            found = (
                self.others[rank - 1].ask(HoldsRows(self.name, place, part)) if rank else self.own.holds(place, part)
            )
            if not found:
                return False
        return True


def place_shares(whole: torch.Tensor, shares: Sequence[range], part: torch.Tensor) -> None:
    """Copy a rank's `part` `[n]` to its `shares` of `whole`; elements of `part` after them only fill it up."""
    start = 0
    for share in shares:
        whole[share.start : share.stop] = part[start : start + len(share)]
        start += len(share)


def ranked_weights(
    base: BaseDescription, own: BaseWeights, sharding: Sharding, team: RankTeam, ready: Sequence[RankReady]
) -> BaseWeights:
    """Return the weights of the whole base, of which `own` are rank 0's."""
    dimensions: dict[str, int] = {name: shape.out_features for name, shape in base.modules.items()}
    if base.vocabulary is not None:
        dimensions[base.vocabulary.head] = base.vocabulary.num_tokens
    linears: Mapping[str, FittedLinear] = {
        name: RankedLinear(
            name,
            linear,
            _bias(name, linear, dimensions[name], sharding, ready),
            dimensions[name],
            sharding,
            team.others,
        )
        for name, linear in own.linears.items()
    }
    num_tokens = base.vocabulary.num_tokens if base.vocabulary else 0
    matrices = {name: RankedMatrix(name, matrix, num_tokens, team.others) for name, matrix in own.matrices.items()}
    return BaseWeights(linears, matrices, own.packed_bytes)


def _bias(
    name: str, own: FittedLinear, out_features: int, sharding: Sharding, ready: Sequence[RankReady]
) -> torch.Tensor | None:
    """Join the ranks' biases. If the outputs are not divided, rank 0 has the whole bias."""
    if own.bias is None or sharding.outputs(name, 0, out_features) is None:
        return None if own.bias is None else own.bias.cpu()
    whole = own.bias.cpu().new_zeros(out_features)
    for rank, bias in enumerate((own.bias.cpu(), *(one.biases[name] for one in ready))):
        shares = sharding.outputs(name, rank, out_features)
        assert shares is not None, "all ranks divide alike"
        place_shares(whole, shares, bias)
    return whole
