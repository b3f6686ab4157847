"""The adapter store of a real engine: PEFT files on disk, read by threads of its own into pages of the bank."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

import torch

from loramux.engine.request import AdapterRef
from loramux_adapters import BaseDescription, Limits, inspect_adapter, load_adapter
from loramux_adapters.bank import AdapterBank


class DiskStore:
    """Checks again what it reads, but for the values, which do not change under a digest."""

    def __init__(self, bank: AdapterBank, base: BaseDescription, limits: Limits, wake: Callable[[], None]) -> None:
        self._bank = bank
        self._base = base
        self._limits = limits
        self._wake = wake
        self._threads = ThreadPoolExecutor(max_workers=2, thread_name_prefix="adapter")

    def inspect(self, ref: AdapterRef) -> Future[int]:
        """Check the files; the result is the number of pages the adapter takes."""
        return self._start(self._inspect, ref)

    def fill(self, ref: AdapterRef, pages: list[int]) -> Future[int]:
        """Read the weights into `pages`; the result is their slot."""
        return self._start(self._fill, ref, pages)

    def drop(self, slot: int) -> None:
        """Forget a slot."""
        self._bank.drop(slot)

    def close(self) -> None:
        """Stop the threads once they have finished what they do."""
        self._threads.shutdown(wait=True, cancel_futures=True)

    def _start(self, work: Callable[..., int], *args: object) -> Future[int]:
        future = self._threads.submit(work, *args)
        future.add_done_callback(lambda _: self._wake())
        return future

    def _inspect(self, ref: AdapterRef) -> int:
        plan = inspect_adapter(Path(ref.path), self._base, self._limits)
        return self._bank.plan_layout(plan).num_pages

    @torch.inference_mode()
    def _fill(self, ref: AdapterRef, pages: list[int]) -> int:
        weights = load_adapter(Path(ref.path), self._base, self._limits, self._bank.pool.dtype)
        return self._bank.install(weights, self._bank.plan_layout(weights.plan), pages)
