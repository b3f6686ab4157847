"""Rank 0's end of a tensor-parallel engine: starts the other ranks, sends them each step, and notices their end.

    rank 0   scheduler -> plan -> pack ── RunStep ──> rank 1 .. N-1     the same forward with their share
                                  forward  <── all-reduce ──>  forward
             sampler <── logits gathered on rank 0

Rank 0 is the engine as it is for one rank. The others decide nothing: their pools have the same pages, and what rank 0
does with one (an adapter's blocks, KV that is saved) they do with theirs.
"""

from __future__ import annotations

import logging
import multiprocessing
import os
import queue
import shutil
import signal
import tempfile
import threading
import time
from collections.abc import Callable
from dataclasses import replace
from multiprocessing.connection import wait
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

from loramux.engine.execution.attention import UnsupportedModel
from loramux.engine.execution.rank_messages import RankReady, RankRefused, RunStep, Stop, receive, send
from loramux.engine.execution.rank_worker import serve_in_process, serve_rank
from loramux.engine.execution.runner import PackedStep
from loramux.settings import Settings

logger = logging.getLogger(__name__)

END_TIMEOUT_S = 5.0
"""Seconds in which a rank that is told to stop has to end, before it is killed."""


class RankDied(RuntimeError):
    """A rank has ended while the engine served."""


class OtherRank:
    """One other rank: a process, or a thread where the engine itself is one."""

    def __init__(self, settings: Settings, rank: int, meeting: Path) -> None:
        self.rank = rank
        self.process: BaseProcess | None = None
        self._asking = threading.Lock()
        context = multiprocessing.get_context("spawn")
        self.steps, their_steps = context.Pipe()
        self._adapters, their_adapters = context.Pipe()
        arguments = (settings, rank, meeting, their_steps, their_adapters)
        if settings.engine.in_process:
            threading.Thread(target=serve_rank, args=arguments, daemon=True, name=f"rank-{rank}").start()
            return
        self.process = context.Process(
            target=serve_in_process, args=(os.getpid(), *arguments), name=f"loramux-rank-{rank}"
        )
        # It inherits the mask: a Ctrl-C must not end it while it imports torch.
        blocked = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT, signal.SIGTERM})
        try:
            self.process.start()
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, blocked)
        their_steps.close()
        their_adapters.close()

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
        """Say how it ended."""
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
        """Start them; each loads its share of the base meanwhile."""
        self._folder = Path(tempfile.mkdtemp(prefix="loramux-ranks-"))
        self.meeting = self._folder / "meeting"
        self.size = settings.engine.tensor_parallel_size
        self._timeout_s = settings.engine.step_timeout_s
        self.others: list[OtherRank] = []
        self._dead: queue.SimpleQueue[str] = queue.SimpleQueue()
        self._is_closed = False
        self.on_death: Callable[[], None] = lambda: None
        """Called on another thread when a rank has ended."""
        try:
            self.others += [OtherRank(settings, rank, self.meeting) for rank in range(1, self.size)]
        except BaseException:
            self.close()
            raise
        if not settings.engine.in_process:
            threading.Thread(target=self._watch, daemon=True, name="ranks").start()

    def wait_ready(self) -> list[RankReady]:
        """Wait until each has loaded. Raises UnsupportedModel or RankDied where one cannot."""
        found = []
        for other in self.others:
            try:
                answer = receive(other.steps)
            except (EOFError, OSError) as error:
                raise RankDied(other.reason()) from error
            if isinstance(answer, RankRefused):
                raise UnsupportedModel(answer.reason) if answer.is_refusal else RankDied(answer.reason)
            assert isinstance(answer, RankReady), "the first message of a rank"
            found.append(answer)
        return found

    def run(self, packed: PackedStep) -> None:
        """Send a step; what only the sampler needs stays here."""
        self.tell(RunStep(replace(packed, scored=None)))

    def tell(self, message: Any) -> None:
        """Send a message in the order of the steps."""
        for other in self.others:
            try:
                send(other.steps, message)
            except OSError as error:
                raise RankDied(other.reason()) from error

    def ensure_alive(self) -> None:
        """Raise RankDied where a rank has ended."""
        if not self._dead.empty():
            raise RankDied(self._dead.get())

    def explained(self, error: Exception) -> Exception:
        """Return why a step failed: the end of a rank where that is the cause, else `error`."""
        if isinstance(error, RankDied):
            return error
        ended = time.monotonic() + 1.0  # a collective fails at once, and the process is reaped a moment later
        while time.monotonic() < ended and self._dead.empty() and any(o.process is not None for o in self.others):
            time.sleep(0.02)
        if not self._dead.empty():
            return RankDied(self._dead.get())
        if "timed out" in str(error).lower():
            return RankDied(f"a rank of the engine did not answer within engine.step_timeout_s = {self._timeout_s:g} s")
        return error

    def close(self) -> None:
        """End the ranks: they are asked to, and killed where they do not."""
        if self._is_closed:
            return
        self._is_closed = True
        for other in self.others:
            try:
                send(other.steps, Stop())
            except OSError:
                continue
        for other in self.others:
            if (process := other.process) is not None:
                process.join(END_TIMEOUT_S)
                if process.is_alive():
                    process.kill()
                    process.join()
            other.close()
        shutil.rmtree(self._folder, ignore_errors=True)

    def _watch(self) -> None:
        """End all ranks with the first that ends: the others would wait for it in a collective."""
        processes = {other.process.sentinel: other for other in self.others if other.process is not None}
        ended = wait(list(processes))
        if self._is_closed:
            return
        other = next(one for sentinel, one in processes.items() if sentinel in ended)
        reason = other.reason()
        logger.error("%s: the engine ends", reason)
        self._dead.put(reason)
        for one in self.others:
            if one is not other and one.process is not None:
                one.process.kill()
        self.on_death()
