"""The trainer on the server's own machine: a process that is started when a job waits, and that ends when none does.

It stays in the server's session: Linux divides the processors between sessions first (autogroups), and the priority of
a process counts only within its session.
"""

from __future__ import annotations

import asyncio
import logging
import os
import time
from asyncio.subprocess import DEVNULL, PIPE, Process
from collections.abc import Callable, Sequence

from loramux.serving.service import CompletionService
from loramux.training.share import BUSY, QUIET

STOP_SECONDS = 10.0
"""Seconds within which a trainer ends after SIGTERM."""

RESTART_SECONDS = 15.0
"""Minimum seconds between two starts, because a trainer that fails at its start would be started all the time."""

logger = logging.getLogger(__name__)


def watch_busy(completions: CompletionService, note: Callable[[bool], None]) -> None:
    """Call `note` whenever `completions.others_running` has changed, with its result; also now, if it is true."""
    was_busy = False

    def compare(_: object = None) -> None:
        nonlocal was_busy
        if (is_busy := completions.others_running()) != was_busy:
            was_busy = is_busy
            note(is_busy)

    completions.on_begun(compare)
    completions.on_ended(compare)
    compare()


class LocalTrainer:
    """Runs `command`, which ends when it has had no job for a while.

    The command reads `settings` on its standard input, and then BUSY or QUIET whenever that changes. The requests of
    `completions` are watched from its first start on, so they cost nothing on a server that trains nothing.
    """

    def __init__(self, command: Sequence[str], settings: bytes, completions: CompletionService) -> None:
        self._command = command
        self._settings = settings
        self._completions = completions
        self.process: Process | None = None
        """The trainer that was started last."""
        self._started_at = float("-inf")
        self._busy_workers: set[int] = set()

    def note_busy(self, is_busy: bool, worker: int = 0) -> None:
        """Note if a worker of the server answers requests, and tell the trainer if any does; 0 is this process."""
        was_busy = bool(self._busy_workers)
        if is_busy:
            self._busy_workers.add(worker)
        else:
            self._busy_workers.discard(worker)
        if bool(self._busy_workers) != was_busy:
            self._pass_on()

    def _pass_on(self) -> None:
        if self.process is not None and self.process.returncode is None:
            assert self.process.stdin is not None
            self.process.stdin.write(BUSY if self._busy_workers else QUIET)

    async def ensure_runs(self) -> None:
        """Start the trainer unless it runs or was started a short time ago."""
        if self.process is not None and self.process.returncode is None:
            return
        if time.monotonic() - self._started_at < RESTART_SECONDS:
            return
        self._started_at = time.monotonic()
        process = await asyncio.create_subprocess_exec(
            *self._command, stdin=PIPE, stdout=DEVNULL, process_group=0, env=dict(os.environ)
        )
        if self.process is None:
            watch_busy(self._completions, self.note_busy)
        self.process = process
        assert self.process.stdin is not None
        self.process.stdin.write(self._settings + b"\n")
        self._pass_on()
        logger.info("a trainer is started for the waiting jobs: process %d", self.process.pid)

    async def stop(self) -> None:
        """End the trainer, whose jobs go on from their last checkpoints later."""
        if self.process is None or self.process.returncode is not None:
            return
        self.process.terminate()
        try:
            async with asyncio.timeout(STOP_SECONDS):
                await self.process.wait()
        except TimeoutError:
            self.process.kill()
            await self.process.wait()
