"""The host's slots for pages of KV, as tensors. Apart from `kv_swap`, so that the scheduler needs no torch."""

from __future__ import annotations

import time
from collections.abc import Sequence

import torch

SAMPLE_PAGES = 16
"""Copied once each way to measure what a page takes."""


class HostPages:
    """A `HostKv` for the pool of a bank: tensors on a CPU; on a GPU pinned memory, copied in the order of its stream.

    The host waits for no copy. The device does, before its next step: a page takes some tens of microseconds over the
    link, and sequences are preempted in few steps.
    """

    def __init__(self, pool: torch.Tensor, page_elements: int, num_bytes: int) -> None:
        """`pool` is flat; at most `num_bytes` bytes are kept, and never more pages than the pool has."""
        self._pool = pool[: pool.numel() // page_elements * page_elements].view(-1, page_elements)
        self.num_slots = min(num_bytes // (page_elements * pool.element_size()), len(self._pool))
        # Uninitialised on purpose: on a CPU memory that is not touched is not held.
        shape = (self.num_slots, page_elements)
        self._slots = torch.empty(shape, dtype=pool.dtype, pin_memory=pool.device.type == "cuda")
        self.seconds_per_page = self._measured()

    @torch.inference_mode()
    def save(self, pages: Sequence[int], slots: Sequence[int]) -> None:
        """Copy each page to its slot."""
        for page, slot in zip(pages, slots, strict=True):
            self._slots[slot].copy_(self._pool[page], non_blocking=True)

    @torch.inference_mode()
    def restore(self, slots: Sequence[int], pages: Sequence[int]) -> None:
        """Copy each slot to its page."""
        for slot, page in zip(slots, pages, strict=True):
            self._pool[page].copy_(self._slots[slot], non_blocking=True)

    @torch.inference_mode()
    def _measured(self) -> float:
        """Seconds for a page one way, of a second round: the first one touches the memory."""
        pages = self._pool[:SAMPLE_PAGES]
        slots = torch.empty_like(pages, device="cpu", pin_memory=pages.device.type == "cuda")
        seconds = 0.0
        for _ in range(2):
            self._wait()
            start = time.perf_counter()
            for page, slot in zip(pages, slots, strict=True):
                slot.copy_(page, non_blocking=True)
                page.copy_(slot, non_blocking=True)
            self._wait()
            seconds = time.perf_counter() - start
        return seconds / (2 * len(pages))

    def _wait(self) -> None:
        if self._pool.device.type == "cuda":
            torch.cuda.synchronize(self._pool.device)
