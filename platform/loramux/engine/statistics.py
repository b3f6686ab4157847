"""Statistics of an engine: the usage of each request, the service of each tenant, and one snapshot of all counters.

`RequestAccounting` counts tokens from the steps that ran, independently of the scheduler's bookkeeping; bills are
reconciled with its counts. `ServiceMeter` shows the tenants with the most service, up to a maximum number. `snapshot`
builds the `EngineStats` message. The engine sends it at most once a second while it is busy, and when it becomes idle.
"""

from __future__ import annotations

import heapq
from array import array
from collections import Counter, deque
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass, fields
from itertools import islice
from operator import attrgetter
from typing import Any

import msgspec

from loramux.common.units import TokenCounts
from loramux.engine.messages import (
    BatchRows,
    EngineCount,
    EngineMeters,
    EngineStats,
    RevisionDrafts,
    RoutingFacts,
    ServiceClass,
    StepSample,
    TenantService,
    TokenEvent,
)
from loramux.engine.metrics import Counters
from loramux.engine.scheduling.estimates import Acceptance
from loramux.engine.scheduling.fairness import Flow
from loramux.engine.scheduling.queue import RequestQueue
from loramux.engine.scheduling.scheduler import Scheduler
from loramux.engine.scheduling.sequence import BASE_SLOT, Step

LABELLED_TENANTS = 20
REPORTED_PREFIXES = 2048
"""Maximum number of digests of cached beginnings in the facts for a router."""
LABELLED_REVISIONS = 20
TIMELINE_SECONDS = 1.0
TIMELINE_SAMPLES = 60
LABELLED_ROWS = 6
"""Maximum number of pairs of a revision and a class in a sample of the timeline."""
LISTED_EVICTIONS = 8
LISTED_ADAPTERS = 64
"""Maximum number of waiting revisions in a report."""
OTHERS = "other"
COUNTED = {one.name for one in fields(Counters)}.intersection(EngineStats.__struct_fields__) - {"adapter_load_seconds"}
"""Counters that the statistics have under the same name and as the same number."""


@dataclass(slots=True)
class _OpenRequest:
    """A request that has been in a step."""

    num_prompt_tokens: int
    num_reached: int = 0
    """Number of leading tokens that the request has computed. Computing them again after a preemption is not counted.
    """
    num_computed: int = 0
    """Prompt tokens that went through the model."""
    num_loads: int = 0

    def total(self, num_output_tokens: int) -> EngineCount:
        """Return the usage so far, with the tokens that were generated. A prompt counts as far as it was gone over, so
        a request that ends before its first token is counted too; of these tokens, those that the model never computed
        were cached.
        """
        prompt = min(self.num_reached, self.num_prompt_tokens)
        tokens = TokenCounts(prompt=prompt, cached=prompt - self.num_computed, output=num_output_tokens)
        return EngineCount(tokens=tokens, adapter_loads=self.num_loads)


class RequestAccounting:
    """Counts of requests from their first step to their last event."""

    def __init__(self) -> None:
        self._open: dict[str, _OpenRequest] = {}
        self._outputs: Counter[str] = Counter()
        """Tokens that were generated for each open request."""
        self.ended = EngineCount()
        """Sum over all requests that have ended, since the start."""

    def count_step(self, step: Step) -> None:
        """Count a step that is about to run."""
        if step.is_plain:
            return  # it computes nothing of a prompt, and each of its requests was in an earlier step
        for chunk in step.chunks:
            sequence, start = chunk.sequence, chunk.start
            request = self._open.get(sequence.id)
            if request is None:
                # If another engine began the answer, it has counted the prompt.
                new = 0 if sequence.request.output_token_ids else sequence.num_prompt_tokens
                request = self._open[sequence.id] = _OpenRequest(new)
            end = start + chunk.length
            if start < request.num_prompt_tokens:
                fresh = min(end, request.num_prompt_tokens) - max(start, request.num_reached)
                request.num_computed += max(0, fresh)
                request.num_loads = sequence.num_loads
            request.num_reached = max(request.num_reached, end)

    def count_events(self, events: Collection[TokenEvent]) -> list[TokenEvent]:
        """Count the tokens of `events`; return the events, the last one of each request with the request's usage."""
        self._outputs.update([event.request_id for event in events if event.token_id is not None])
        return [event if event.finish_reason is None else self._end(event) for event in events]

    def _end(self, event: TokenEvent) -> TokenEvent:
        request, num_output_tokens = self._open.pop(event.request_id, None), self._outputs.pop(event.request_id, 0)
        count = EngineCount() if request is None else request.total(num_output_tokens)
        self.ended = self.ended + count
        return msgspec.structs.replace(event, count=count)


class StepTimeline:
    """Samples of steps for operators: one step per second, with its rows by revision and class."""

    def __init__(self, counters: Counters, unix_offset: float) -> None:
        """`unix_offset`: Unix time minus the engine's clock."""
        self._counters = counters
        self._unix_offset = unix_offset
        self._next_at = float("-inf")
        self.samples: deque[StepSample] = deque(maxlen=TIMELINE_SAMPLES)

    def sample(self, step: Step, now: float) -> None:
        """Keep a step that is about to run, unless a step was kept less than a second ago."""
        if now < self._next_at:
            return
        self._next_at = now + TIMELINE_SECONDS
        counters = self._counters
        totals = counters.steps, counters.prompt_tokens + counters.recomputed_tokens, counters.output_tokens
        self.samples.append(StepSample(now + self._unix_offset, *totals, _rows_of(step)))


def _rows_of(step: Step) -> list[BatchRows]:
    """Return the largest numbers of rows by revision and class, and the sum of all other rows by class."""
    prefill: Counter[tuple[str | None, ServiceClass]] = Counter()
    decode: Counter[tuple[str | None, ServiceClass]] = Counter()
    for chunk in step.chunks:
        request = chunk.sequence.request
        digest = None if chunk.slot == BASE_SLOT or request.adapter is None else request.adapter.digest
        kind = prefill if chunk.start < chunk.sequence.num_prompt_tokens else decode
        kind[digest, request.service_class] += chunk.length
    keys = sorted(prefill.keys() | decode.keys(), key=lambda key: -(prefill[key] + decode[key]))
    for key in keys[LABELLED_ROWS:]:
        rest = OTHERS, key[1]
        prefill[rest] += prefill.pop(key, 0)
        decode[rest] += decode.pop(key, 0)
    shown = keys[:LABELLED_ROWS] + sorted({(OTHERS, service_class) for _, service_class in keys[LABELLED_ROWS:]})
    return [BatchRows(*key, prefill[key], decode[key]) for key in shown]


class ServiceMeter:
    """Service by tenant for operators: the most-served tenants, and the sum of all other tenants by class.

    The queue forgets idle flows, so the meter keeps the units of labelled tenants that were forgotten. The meter's work
    grows with the number of remembered flows, not with the number of all tenants so far.
    """

    def __init__(self, queue: RequestQueue) -> None:
        self._queue = queue
        self._past: dict[tuple[ServiceClass, str], float] = {}
        self._labelled: set[tuple[ServiceClass, str]] = set()
        self._names = {group: service_class for service_class, group in queue.classes.items()}
        queue.on_forget = self._keep_past

    @property
    def gap(self) -> float:
        """Largest difference of counters, in units over weight, between two tenants of a class that both wait."""
        waiting = [[flow.served for flow in group.tenants] for group in self._queue.groups]
        return max((max(served) - min(served) for served in waiting if served), default=0.0)

    def label_tenants(self) -> list[TenantService]:
        """Return the most-served tenants and the sum of all other tenants, by class. Keep the past service of these
        tenants.
        """
        most = heapq.nlargest(LABELLED_TENANTS, self._totals(), key=lambda item: item[1])
        self._labelled = {key for key, _ in most}
        self._past = {key: units for key, units in self._past.items() if key in self._labelled}
        others = {service_class: group.executed for service_class, group in self._queue.classes.items()}
        for (service_class, _), units in most:
            others[service_class] -= units
        services = [TenantService(tenant, service_class, units) for (service_class, tenant), units in most]
        rest = [TenantService(OTHERS, name, units) for name, units in others.items() if units > 1e-9]
        return services + rest

    def _totals(self) -> list[tuple[tuple[ServiceClass, str], float]]:
        units = dict(self._past)
        # Only the largest flows can be among the largest sums, except for flows that have a past.
        candidates = heapq.nlargest(2 * LABELLED_TENANTS, self._queue.flows, key=attrgetter("executed"))
        for flow in candidates:
            key = self._names[flow.group], flow.tenant
            units[key] = units.get(key, 0.0) + flow.executed
        return list(units.items())

    def _keep_past(self, flow: Flow) -> None:
        key = self._names[flow.group], flow.tenant
        if key in self._labelled:
            self._past[key] = self._past.get(key, 0.0) + flow.executed


def count_step(counters: Counters, step: Step, bytes_of: Callable[[int], int]) -> None:
    """Count a step that is about to run; `bytes_of` returns the bytes of a slot's adapter."""
    counters.steps += 1
    for chunk in () if step.is_plain else step.chunks:  # a plain row computes none of these tokens
        sequence, start = chunk.sequence, chunk.start
        if start < sequence.num_prompt_tokens or start < sequence.num_ever_computed:
            counters.prompt_tokens += sequence.fresh_prompt(start, chunk.end)
            counters.recomputed_tokens += sequence.recomputed(start, chunk.end)
    slots = step.adapter_slots
    counters.distinct_adapters = len(slots)
    counters.step_adapters.observe(len(slots))
    counters.max_distinct_adapters = max(counters.max_distinct_adapters, len(slots))
    if step.holds_base:
        beside = max(counters.max_distinct_adapters_beside_base, len(slots))
        counters.max_distinct_adapters_beside_base = beside
    counters.adapter_bytes_read += sum(map(bytes_of, slots))


def labelled_drafts(revisions: Mapping[tuple[str, str | None], Acceptance], counters: Counters) -> list[RevisionDrafts]:
    """Return the drafts of the revisions with the most drafts, and the sum of all other revisions."""
    most = heapq.nlargest(LABELLED_REVISIONS, revisions.items(), key=lambda item: item[1].num_drafted)
    labelled = [RevisionDrafts(tenant, digest or "", a.num_drafted, a.num_accepted) for (tenant, digest), a in most]
    drafted = counters.drafted_tokens - sum(one.drafted for one in labelled)
    accepted = counters.accepted_tokens - sum(one.accepted for one in labelled)
    return [*labelled, RevisionDrafts(OTHERS, OTHERS, drafted, accepted)] if drafted else labelled


def snapshot(
    scheduler: Scheduler,
    meter: ServiceMeter,
    ended: EngineCount,
    *,
    timeline: Iterable[StepSample] = (),
    **gauges: Any,
) -> EngineStats:
    """Return the counters and gauges of this moment as a message; `gauges` are unknown to the scheduler."""
    counters, memory = scheduler.state.counters, scheduler.memory
    pages = memory.counts
    return EngineStats(
        **{name: getattr(counters, name) for name in COUNTED},
        **gauges,
        waiting=len(scheduler.queue),
        running=len(scheduler.running),
        pages_total=pages.total,
        pages_kv=pages.kv,
        pages_kv_cached=pages.kv_cached,
        pages_states_cached=memory.cache.num_of_states,
        pages_adapters=pages.adapters,
        pages_adapters_idle=pages.adapters_idle,
        pages_free=pages.free,
        kv_pages_in_host=memory.swap.num_held,
        adapters_resident=len(memory.residency.resident),
        adapter_load_seconds=counters.adapter_load_seconds.total,
        service_gap=meter.gap,
        ended=ended.tokens,
        meters=EngineMeters(
            queue_seconds=counters.queue_seconds.distribution,
            adapter_load_seconds=counters.adapter_load_seconds.distribution,
            step_adapters=counters.step_adapters.distribution,
            tenants=meter.label_tenants(),
            drafts=labelled_drafts(scheduler.speculation.revisions, counters),
            running_adapters=sorted({one.digest for one in scheduler.running if one.digest is not None}),
            waiting_adapters=sorted(islice(scheduler.queue.digests, LISTED_ADAPTERS)),
            timeline=list(timeline),
            evictable=memory.next_evictions(LISTED_EVICTIONS),
        ),
        routing=routing_facts(scheduler),
    )


def routing_facts(scheduler: Scheduler) -> RoutingFacts:
    """Collect the facts that a router needs: residency, prefix trees and the queue."""
    memory = scheduler.memory
    return RoutingFacts(
        resident=memory.residency.resident_pages(),
        activated=memory.residency.activated(),
        pinned=list(memory.residency.kept),
        prefixes=array("Q", memory.cache.recent_digests(REPORTED_PREFIXES)).tobytes(),
        queue_tokens=scheduler.num_queued_tokens,
        waiting_tenants=sum(len(group.tenants) for group in scheduler.queue.groups),
        max_running=scheduler.state.limits.max_num_seqs,
        prefill_tokens_per_s=scheduler.prefill_tokens_per_s,
        wait_s=scheduler.wait_s,
        step_s=scheduler.state.step_time.mean_seconds,
        page_s=scheduler.page_seconds,
        weights_s=scheduler.weights_seconds,
    )
