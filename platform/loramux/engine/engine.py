"""The engine: one continuously batched loop, a step at a time."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field

from loramux.engine.budget import Budget
from loramux.engine.distribution import COUNTS, Histogram
from loramux.engine.host_kv import HostPages
from loramux.engine.host_tier import HostTier
from loramux.engine.messages import EngineMeters, EngineStats, StepReport
from loramux.engine.model import LoadedModel
from loramux.engine.pages import PagePool
from loramux.engine.pins import PinLimits, Pins
from loramux.engine.policy import Policy
from loramux.engine.request import AdapterRef, Request
from loramux.engine.residency import Residency
from loramux.engine.resident import Patience
from loramux.engine.scheduler import Scheduler, SchedulerLimits
from loramux.engine.service_meter import ServiceMeter
from loramux.engine.step import Step
from loramux.engine.store import DiskStore, Source
from loramux.engine.tally import Tallies
from loramux.engine.turns import InTurn, OneAhead, Turns
from loramux.settings import Settings
from loramux_adapters import Limits


@dataclass(slots=True)
class _Counters:
    """Since the start; what the bill is reconciled against and what the benchmarks read."""

    steps: int = 0
    prompt_tokens: int = 0
    cached_tokens: int = 0
    recomputed_tokens: int = 0
    output_tokens: int = 0
    distinct: int = 0
    step_adapters: Histogram = field(default_factory=lambda: Histogram(COUNTS))
    max_distinct: int = 0
    max_distinct_beside_base: int = 0
    adapter_bytes_read: int = 0


class Engine:
    """A loaded model, its scheduler and its pool. Not thread-safe: one worker owns it."""

    def __init__(self, loaded: LoadedModel, settings: Settings, wake: Callable[[], None]) -> None:
        """`wake` is called from other threads when something that the next step can use has become ready."""
        self.facts = loaded.facts
        self._runner = loaded.runner
        self._weight_bytes = loaded.weight_bytes
        pool, bank = PagePool(loaded.facts.pages_total), loaded.runner.bank
        adapters = settings.adapters
        limits = Limits(adapters.max_rank, adapters.max_bytes, adapters.max_vocabulary_bytes)
        source = Source(loaded.base, loaded.weights, limits, bank.pool.dtype)
        self._host = HostTier(adapters.host_bytes, time.monotonic)
        self._store = DiskStore(bank, source, self._host, adapters.max_loading, wake)
        patience = Patience(max_loading=adapters.max_loading)
        self._residency = Residency(pool, self._store, time.monotonic, patience)
        self.scheduler = Scheduler(
            SchedulerLimits(
                max_num_seqs=settings.engine.max_num_seqs,
                max_num_batched_tokens=settings.engine.max_num_batched_tokens,
                max_model_len=loaded.facts.max_model_len,
            ),
            Budget(loaded.facts.pages_total, settings.engine.block_size),
            pool,
            self._residency,
            Policy.from_settings(settings, loaded.weight_bytes / bank.page_bytes),
            HostPages(bank.pool, bank.page_elements, settings.engine.swap_bytes),
        )
        limits_of_pins = PinLimits(adapters.pinned_pool_share, adapters.pins_per_tenant)
        self._pins = Pins(limits_of_pins, self.scheduler.budget, self.scheduler.memory)
        self._service = ServiceMeter(self.scheduler.queue, time.monotonic)
        self._turns: Turns = (OneAhead if self._runner.runs_ahead else InTurn)(self.scheduler, self._runner)
        self._counters = _Counters()
        self._tallies = Tallies()

    def step(self) -> StepReport | None:
        """Plan, run and commit one step; None when there was nothing to run and nothing to tell."""
        step = self.scheduler.plan()
        events = self.scheduler.take_news()
        if not step.empty:
            self._count(step)
            self._tallies.note(step)
        events += self._turns.take(step)
        pins = self._pins.advance()
        for event in events:
            if event.finish_reason is not None:
                self._runner.forget(event.request_id)
        self._counters.output_tokens += sum(event.token_id is not None for event in events)
        self._counters.cached_tokens += sum(event.cached_tokens for event in events)
        events = self._tallies.tell(events)
        return StepReport(events, self.stats(), pins) if events or pins or not step.empty else None

    def submit(self, request: Request) -> None:
        """Queue a request."""
        self.scheduler.add(request)

    def cancel(self, request_id: str) -> None:
        """End a request now; its pages are free for the next step."""
        self.scheduler.cancel(request_id)

    def retire(self, digest: str) -> None:
        """Free a deleted revision's pages once nothing uses it."""
        self._pins.retire(digest)
        self.scheduler.memory.retire(digest)

    def pin(self, ref: AdapterRef, owner: str) -> None:
        """Keep a revision in the pool; a later step's report says what became of it."""
        self._pins.pin(ref, owner)

    def unpin(self, digest: str, owner: str) -> None:
        """Keep it for `owner` no longer."""
        self._pins.unpin(digest, owner)

    @property
    def idle(self) -> bool:
        """Whether nothing runs, waits or is still to be told."""
        return self.scheduler.idle and self._turns.idle

    @property
    def stalled(self) -> bool:
        """Whether the next step has to wait for an adapter."""
        return self.scheduler.stalled and self._turns.idle

    @property
    def patience(self) -> float | None:
        """Seconds that a stalled engine may wait before somebody has to be answered; None: as long as it takes."""
        return self.scheduler.seconds_to_deadline

    def stats(self) -> EngineStats:
        """Counters and gauges of this moment."""
        self._service.look()
        pages, loads, count = self.scheduler.memory.counts, self._residency.counters, self._counters
        ended, swap = self._tallies.ended, self.scheduler.memory.swap
        return EngineStats(
            steps=count.steps,
            waiting=len(self.scheduler.queue),
            running=len(self.scheduler.running),
            pages_total=pages.total,
            pages_kv=pages.kv,
            pages_kv_cached=pages.kv_cached,
            pages_adapters=pages.adapters,
            pages_adapters_idle=pages.adapters_idle,
            pages_free=pages.free,
            kv_evictions=self.scheduler.memory.cache.num_evictions,
            kv_pages_swapped_out=swap.num_out,
            kv_pages_swapped_in=swap.num_back,
            kv_pages_in_host=swap.num_held,
            adapters_resident=self._residency.num_resident,
            adapters_pinned=len(self._pins),
            adapters_host=len(self._host),
            adapters_host_bytes=self._host.num_bytes,
            adapter_loads=loads.loads,
            adapter_load_seconds=loads.load_seconds.total,
            adapter_hits=loads.hits,
            adapter_misses=loads.misses,
            adapter_evictions=loads.evictions,
            adapter_load_failures=loads.failures,
            preemptions=self.scheduler.num_preemptions,
            refused_over_capacity=self.scheduler.counters.refused,
            missed_deadlines=self.scheduler.counters.missed,
            service_gap=self._service.gap,
            prompt_tokens=count.prompt_tokens,
            cached_tokens=count.cached_tokens,
            recomputed_tokens=count.recomputed_tokens,
            output_tokens=count.output_tokens,
            ended_prompt_tokens=ended.prompt_tokens,
            ended_cached_tokens=ended.cached_tokens,
            ended_output_tokens=ended.output_tokens,
            distinct_adapters=count.distinct,
            max_distinct_adapters=count.max_distinct,
            max_distinct_adapters_beside_base=count.max_distinct_beside_base,
            adapter_bytes_read=count.adapter_bytes_read,
            weight_bytes=self._weight_bytes,
            meters=EngineMeters(
                queue_seconds=self.scheduler.counters.queue_seconds.distribution,
                adapter_load_seconds=loads.load_seconds.distribution,
                step_adapters=count.step_adapters.distribution,
                tenants=self._service.tenants,
            ),
        )

    def close(self) -> None:
        """Stop the loader threads."""
        self._store.close()

    def _count(self, step: Step) -> None:
        count, slots = self._counters, step.adapter_slots
        count.steps += 1
        for chunk in step.chunks:
            sequence, start = chunk.sequence, chunk.start
            if start < sequence.num_prompt_tokens or start < sequence.num_seen:
                count.prompt_tokens += sequence.fresh_prompt(start, chunk.end)
                count.recomputed_tokens += sequence.recomputed(start, chunk.end)
        count.distinct = len(slots)
        count.step_adapters.observe(len(slots))
        count.max_distinct = max(count.max_distinct, len(slots))
        if step.holds_base:
            count.max_distinct_beside_base = max(count.max_distinct_beside_base, len(slots))
        count.adapter_bytes_read += sum(map(self._runner.bank.bytes_of, slots))
