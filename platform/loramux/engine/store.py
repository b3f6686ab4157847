"""The adapter store of a real engine: PEFT files on disk, read by threads of its own into memory, and into the pool."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

import torch

from loramux.engine.host_tier import HostTier
from loramux.engine.request import AdapterRef
from loramux.engine.resident import Inspected
from loramux_adapters import AdapterPlan, BaseDescription, Limits, inspect_adapter
from loramux_adapters.bank import AdapterBank
from loramux_adapters.base_weights import BaseWeights, fit_to_base
from loramux_adapters.weights import AdapterWeights, load_adapter

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Source:
    """What adapters are read for, and within which limits."""

    base: BaseDescription
    weights: BaseWeights
    limits: Limits
    dtype: torch.dtype

    def inspect(self, ref: AdapterRef) -> AdapterPlan:
        """Check the files without reading the weights. Raises AdapterRejected."""
        return inspect_adapter(Path(ref.path), self.base, self.limits)

    def load(self, ref: AdapterRef) -> AdapterWeights:
        """Read and check the files, and fit what they hold to the base. Raises AdapterRejected."""
        return fit_to_base(load_adapter(Path(ref.path), self.base, self.limits, self.dtype), self.weights)


class DiskStore:
    """Checks again what it reads, but for the values, which do not change under a digest.

    Inspecting brings an adapter into the host's tier, while its requests queue. Reading and copying have threads of
    their own each, so that an adapter that is there never waits for ones that are still being read.
    """

    def __init__(
        self, bank: AdapterBank, source: Source, host: HostTier, max_loading: int, wake: Callable[[], None]
    ) -> None:
        self._bank = bank
        self._source = source
        self._host = host
        self._wake = wake
        self._readers = ThreadPoolExecutor(max_loading, thread_name_prefix="adapter-read")
        self._copiers = ThreadPoolExecutor(max_loading, thread_name_prefix="adapter-copy")

    def inspect(self, ref: AdapterRef) -> Future[Inspected]:
        """Check the files."""
        return self._start(self._readers, self._inspect, ref)

    def fill(self, ref: AdapterRef, pages: list[int]) -> Future[int]:
        """Copy the weights into `pages`; the result is their slot."""
        return self._start(self._copiers, self._fill, ref, pages)

    def drop(self, slot: int) -> None:
        """Forget a slot."""
        self._bank.drop(slot)

    def forget(self, digest: str) -> None:
        """The revision was deleted: the host's memory has no more of it."""
        self._host.forget(digest)

    def close(self) -> None:
        """Stop the threads once they have finished what they do."""
        for threads in (self._readers, self._copiers):
            threads.shutdown(wait=True, cancel_futures=True)

    def _start(self, threads: ThreadPoolExecutor, work: Callable[..., T], *args: object) -> Future[T]:
        future = threads.submit(work, *args)
        future.add_done_callback(lambda _: self._wake())
        return future

    def _inspect(self, ref: AdapterRef) -> Inspected:
        plan = self._source.inspect(ref)
        if self._host.may_take(plan.file_bytes):
            self._weights(ref)
        return Inspected(self._bank.plan_layout(plan).num_pages, plan.invocation)

    @torch.inference_mode()
    def _fill(self, ref: AdapterRef, pages: list[int]) -> int:
        weights = self._weights(ref)
        return self._bank.install(weights, self._bank.plan_layout(weights.plan), pages)

    def _weights(self, ref: AdapterRef) -> AdapterWeights:
        weights = self._host.get(ref.digest)
        if weights is None:
            weights = self._source.load(ref)
            self._host.put(ref.digest, weights)
        return weights
