"""The trainer on the server's own machine: a process that is started when a job waits, and that ends when none does."""

from __future__ import annotations

import asyncio
import logging
import os
from asyncio.subprocess import DEVNULL, PIPE, Process
from collections.abc import Sequence

STOP_SECONDS = 10.0
"""Seconds within which a trainer ends after SIGTERM."""

logger = logging.getLogger(__name__)


class LocalTrainer:
    """Runs `command`, which reads `settings` on its standard input and ends when it has had no job for a while."""

    def __init__(self, command: Sequence[str], settings: bytes) -> None:
        self._command = command
        self._settings = settings
        self._process: Process | None = None

    async def ensure_runs(self) -> None:
        """Start the trainer unless it runs."""
        if self._process is not None and self._process.returncode is None:
            return
        self._process = await asyncio.create_subprocess_exec(
            *self._command, stdin=PIPE, stdout=DEVNULL, start_new_session=True, env=dict(os.environ)
        )
        assert self._process.stdin is not None
        self._process.stdin.write(self._settings + b"\n")
        logger.info("a trainer is started for the waiting jobs: process %d", self._process.pid)

    async def stop(self) -> None:
        """End the trainer, whose jobs go on from their last checkpoints later."""
        if self._process is None or self._process.returncode is not None:
            return
        self._process.terminate()
        try:
            async with asyncio.timeout(STOP_SECONDS):
                await self._process.wait()
        except TimeoutError:
            self._process.kill()
            await self._process.wait()
