"""The adapter store of a real engine: PEFT files on disk, read by threads of its own into pages of the bank."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

import torch

from loramux.engine.request import AdapterRef
from loramux_adapters import BaseDescription, Limits, load_adapter, validate_adapter
from loramux_adapters.bank import AdapterBank


class DiskStore:
    """Validates again what it reads: the folder may have changed since the upload."""

    def __init__(self, bank: AdapterBank, base: BaseDescription, limits: Limits, wake: Callable[[], None]) -> None:
        self._bank = bank
        self._base = base
        self._limits = limits
        self._wake = wake
        self._threads = ThreadPoolExecutor(max_workers=2, thread_name_prefix="adapter")

    def inspect(self, ref: AdapterRef) -> Future[int]:
        """Validate the files; the result is the number of pages the adapter takes."""
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
        plan = validate_adapter(Path(ref.path), self._base, self._limits)
        return self._bank.plan_layout(plan).num_pages

    @torch.inference_mode()
    def _fill(self, ref: AdapterRef, pages: list[int]) -> int:
        directory = Path(ref.path)
        layout = self._bank.plan_layout(validate_adapter(directory, self._base, self._limits))
        weights = load_adapter(directory, self._base, self._limits, self._bank.pool.dtype)
        return self._bank.install(weights, layout, pages)
