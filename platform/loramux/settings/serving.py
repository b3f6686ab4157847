"""The base model, the engine and its scheduler."""

from __future__ import annotations

from typing import Annotated

import msgspec
from msgspec import Meta

from loramux.settings.ranges import Fraction, Positive, Share


class ModelSettings(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """The one base model."""

    path: str
    """A local transformers checkpoint; relative paths start at the settings file."""
    served_model_name: str
    dtype: str = "auto"
    """auto (as saved), bfloat16, float16 or float32."""


class EngineSettings(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """The loop and its memory; the names are the field's usual ones."""

    device: str = "auto"
    max_num_seqs: Positive = 64
    max_num_batched_tokens: Positive = 1024
    max_model_len: Annotated[int, Meta(ge=8)] | None = None
    """None: as the model's config says."""
    block_size: Annotated[int, Meta(ge=1, le=256)] = 16
    pool_bytes: Annotated[int, Meta(ge=1)] | None = None
    """The one pool for KV and adapters. None: gpu_memory_utilization of the device, or 2 GiB on a CPU."""
    gpu_memory_utilization: Annotated[float, Meta(gt=0, le=1)] = 0.9
    prefix_cache: bool = True
    """Keep full pages of KV for requests of the same tenant and revision that begin with the same tokens."""
    share_base_cache_between_projects: bool = False
    """Let a tenant's projects find each other's KV of the base model, as they do an adapter's. Tenants never do."""
    swap_bytes: Annotated[int, Meta(ge=0)] = 1 << 30
    """Of the host's memory, for KV of preempted requests: it goes there where that is quicker than computing it again.
    0: never."""
    num_threads: Positive | None = None
    in_process: bool = False
    """Run the engine on a thread of the server instead of in a process of its own."""


class ClassShares(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """How the service classes divide the engine when all of them have work."""

    interactive: Share = 8.0
    standard: Share = 3.0
    batch: Share = 1.0


class ClassDeadlines(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Milliseconds to the first token, for requests that bring no deadline of their own; None: as long as it takes."""

    interactive: Positive | None = None
    standard: Positive | None = None
    batch: Positive | None = None


class ReservedPages(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Share of the pool that is kept for a class while it holds less."""

    interactive: Fraction = 0.0
    standard: Fraction = 0.0
    batch: Fraction = 0.0

    def __post_init__(self) -> None:
        if (total := self.interactive + self.standard + self.batch) > 0.9:
            raise ValueError(f"reserved_pages add up to {total:g}, and may to 0.9: the rest serves everybody")


class SchedulerSettings(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Who gets how much, and when the answer is no. docs/scheduling.md explains each."""

    class_shares: ClassShares = ClassShares()
    tau: Annotated[float, Meta(ge=0)] = 8192.0
    """Units of service over weight that a tenant may be ahead of another one who waits."""
    quantum: Annotated[float, Meta(ge=0)] = 512.0
    """Units over weight by which a tenant may be admitted early because its adapter is in the batch already."""
    overhead_target: Annotated[float, Meta(gt=0)] = 0.1
    """From which slow-down by the adapters in the batch on `quantum` counts."""
    reserved_pages: ReservedPages = ReservedPages()
    tenant_guaranteed_pages: Fraction = 0.0
    """Share of the pool, times the tenant's weight, that it gets back from those who have borrowed it."""
    tenant_max_pages: Annotated[float, Meta(gt=0, le=1)] = 1.0
    """Share of the pool that one tenant may hold."""
    deadlines_ms: ClassDeadlines = ClassDeadlines()
