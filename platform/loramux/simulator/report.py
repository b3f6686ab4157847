"""The figures of a simulation: exact times, the service gap, the report made of them, and a plot over time.

Times are counted to the microsecond: every quantile is exact, and memory does not grow with the tokens. VTC (OSDI 2024)
calls the service gap the accumulated service difference of backlogged clients. The gap is the largest difference
between the service of two parties, over any interval in which both waited. A `SimulatedTimeline` samples the pool, the
queue and the tenants' tokens; `plot_report` draws it.
"""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

import msgspec
import numpy as np

from loramux.engine.messages import TokenEvent
from loramux.engine.scheduling.fairness import VirtualTokenCounter
from loramux.engine.scheduling.queue import RequestQueue
from loramux.engine.scheduling.sequence import Step
from loramux.simulator.hardware import Front
from loramux.simulator.scenario import ScenarioError
from loramux.simulator.traffic import StageName, TrafficSource

Resource = Literal["memory", "bandwidth", "arithmetic", "link", "front"]
"""A part of the platform that may be the first to be full: pages of the pool, the memory's bandwidth, operations, the
host link and storage, or the server's own process.
"""


class Quantiles(msgspec.Struct, frozen=True):
    """Quantiles of a time, in milliseconds; None if nothing was measured."""

    p50: float | None
    p99: float | None


class Times:
    """Durations as a count for each microsecond, from which every quantile is exact."""

    def __init__(self) -> None:
        self.counts: dict[int, int] = {}

    def add(self, seconds: float) -> None:
        """Count one duration."""
        microseconds = round(seconds * 1e6)
        self.counts[microseconds] = self.counts.get(microseconds, 0) + 1

    def milliseconds(self, share: float) -> float | None:
        """Return the lowest duration that at least `share` of all do not exceed."""
        missing = math.ceil(share * sum(self.counts.values()))
        for microseconds in sorted(self.counts):
            missing -= self.counts[microseconds]
            if missing <= 0:
                return microseconds / 1000
        return None

    @property
    def quantiles(self) -> Quantiles:
        """Median and P99."""
        return Quantiles(self.milliseconds(0.5), self.milliseconds(0.99))


def merge_times(times: Iterable[Times]) -> Times:
    """Return all durations together."""
    total: Counter[int] = Counter()
    for one in times:
        total.update(one.counts)
    merged = Times()
    merged.counts = dict(total)
    return merged


@dataclass(slots=True)
class TenantTally:
    """One tenant's requests."""

    accepted: int = 0
    refused: int = 0
    prompt_tokens: int = 0
    output_tokens: int = 0
    with_deadline: int = 0
    in_deadline: int = 0
    ttft: Times = field(default_factory=Times)
    itl: Times = field(default_factory=Times)


class StageReport(msgspec.Struct, frozen=True, kw_only=True):
    """Figures of one stage of conversations."""

    requests: int
    prompt_tokens: int
    cached_tokens: int
    """Prompt tokens that were found in a prefix cache."""
    ttft_ms: Quantiles


@dataclass(slots=True)
class StageTally:
    """The requests of one stage of conversations."""

    requests: int = 0
    prompt_tokens: int = 0
    cached_tokens: int = 0
    ttft: Times = field(default_factory=Times)

    @property
    def report(self) -> StageReport:
        """Figures of the stage."""
        return StageReport(
            requests=self.requests,
            prompt_tokens=self.prompt_tokens,
            cached_tokens=self.cached_tokens,
            ttft_ms=self.ttft.quantiles,
        )


@dataclass(slots=True)
class _Run:
    """One request that has not ended."""

    tally: TenantTally
    stage: StageTally | None
    """Tally of the request's stage, if it is of a conversation and not of the warm-up."""
    arrived: float
    deadline_s: float | None
    output_left: int
    next_token: TokenEvent
    """Event of the next token: the event is the same for all tokens except the last."""
    last_token_at: float | None = None
    tokens_told: int = 0


@dataclass(slots=True)
class Share:
    """The mean of a share over time."""

    integral: float = 0.0
    seconds: float = 0.0

    def add(self, share: float, seconds: float) -> None:
        """Add `seconds` during which the value was `share`."""
        self.integral += share * seconds
        self.seconds += seconds

    @property
    def mean(self) -> float:
        """Mean over time; 0 if nothing was added."""
        return self.integral / self.seconds if self.seconds else 0.0


class FrontQueue:
    """A server's own process: it does one thing at a time, so that its work delays requests and tokens."""

    def __init__(self, front: Front) -> None:
        self._front = front
        self._free_at = 0.0

    def pass_request(self, at: float) -> float:
        """Return the time at which a request that comes `at` reaches the engine."""
        begins = max(self._free_at, at)
        self._free_at = begins + self._front.request_s
        return begins + max(self._front.request_s, self._front.latency_s)

    def pass_token(self, at: float) -> float:
        """Return the time at which a token that an engine sends `at` reaches the client."""
        self._free_at = max(self._free_at, at) + self._front.token_s
        return self._free_at


class Meter:
    """Takes the place of the sampler, and records the times."""

    def __init__(self, warmup_s: float = 0.0, fronts: Sequence[FrontQueue] = ()) -> None:
        """Requests that arrive before `warmup_s` are in no tally. `fronts`: the servers, if they were measured."""
        self._fronts = fronts
        self._warmup_s = warmup_s
        self._early = TenantTally()
        self.tallies: defaultdict[str, TenantTally] = defaultdict(TenantTally)
        self.stages: defaultdict[StageName, StageTally] = defaultdict(StageTally)
        self.conversations = Times()
        """Times from the beginning of a conversation to its last token."""
        self.num_answered = 0
        self.last_token_at = 0.0
        self._runs: dict[str, _Run] = {}

    def arrive(
        self, request_id: str, at: float, source: TrafficSource, output_tokens: int, stage: StageName | None = None
    ) -> None:
        """Note a request that will generate `output_tokens`; it came `at`, which may be before the loop saw it.

        `stage` is the request's place in a conversation.
        """
        token = TokenEvent(request_id=request_id, token_id=0)
        is_early = at < self._warmup_s
        tally = self._early if is_early else self.tallies[source.tenant]
        counted = None if stage is None or is_early else self.stages[stage]
        self._runs[request_id] = _Run(tally, counted, at, source.deadline_s, output_tokens, token)

    def note_cached(self, event: TokenEvent) -> None:
        """Note the cached tokens of a first event."""
        if (stage := self._runs[event.request_id].stage) is not None:
            stage.cached_tokens += event.cached_tokens

    def end_conversation(self, began_at: float, now: float) -> None:
        """Note the last token of a conversation."""
        if began_at >= self._warmup_s:
            self.conversations.add(now - began_at)

    def sample(self, step: Step, now: float) -> list[TokenEvent]:
        """Return the tokens of a step that ended `now`, one for each of `step.sampling`."""
        events = []
        for chunk in step.sampling:
            request_id = chunk.sequence.request.id
            at = self._fronts[int(request_id) % len(self._fronts)].pass_token(now) if self._fronts else now
            events.append(self._next_token(self._runs[request_id], at))
            self.last_token_at = max(self.last_token_at, at)
        return events

    def tokens_told(self, request_id: str) -> int:
        """Return the number of tokens that the client of an open request has."""
        return self._runs[request_id].tokens_told

    def end(self, event: TokenEvent, prompt_tokens: int) -> None:
        """Note that `event` ends a request."""
        run = self._runs.pop(event.request_id)
        self.num_answered += 1
        if event.fault is not None and event.fault.code != "deadline_exceeded":
            run.tally.refused += 1
            return
        run.tally.accepted += 1
        run.tally.prompt_tokens += prompt_tokens
        if run.stage is not None:
            run.stage.requests += 1
            run.stage.prompt_tokens += prompt_tokens
        run.tally.with_deadline += run.deadline_s is not None

    def _next_token(self, run: _Run, now: float) -> TokenEvent:
        if run.last_token_at is None:
            self._first_token(run, now)
        else:
            run.tally.itl.add(now - run.last_token_at)
        run.last_token_at = now
        run.tally.output_tokens += 1
        run.output_left -= 1
        run.tokens_told += 1
        return run.next_token if run.output_left else msgspec.structs.replace(run.next_token, finish_reason="stop")

    def _first_token(self, run: _Run, now: float) -> None:
        waited = now - run.arrived
        run.tally.ttft.add(waited)
        if run.stage is not None:
            run.stage.ttft.add(waited)
        run.tally.in_deadline += run.deadline_s is not None and waited <= run.deadline_s


WATCHED = 256
"""Parties compared at once, because the work grows with the square. If more wait, the first that came are compared."""


class ServiceGap:
    """The largest difference between the service of two parties, over any interval in which both waited.

    The unit is service units over weight. A pair's difference at the time when both began to wait does not count; the
    range of the difference since then does.
    """

    def __init__(self, watched: int = WATCHED) -> None:
        self.largest = 0.0
        self._places: dict[VirtualTokenCounter, int] = {}
        self._free = list(range(watched - 1, -1, -1))
        self._lifted = np.zeros(watched)
        self._highest = np.zeros((watched, watched))
        """Highest difference of row minus column; the lowest is minus the highest of column minus row."""

    def observe(self, waiting: Iterable[VirtualTokenCounter]) -> None:
        """Note a step, with the parties that have eligible work waiting."""
        counters = list(waiting)
        self._forget_all_but(counters)
        if len(counters) < 2:
            return
        news = [counter for counter in counters if counter not in self._places][: len(self._free)]
        for counter in news:
            self._places[counter] = self._free.pop()
        watched = [counter for counter in counters if counter in self._places]
        self._measure(watched, news)

    def _forget_all_but(self, counters: list[VirtualTokenCounter]) -> None:
        if self._places and self._places.keys() - (staying := set(counters)):
            for counter in [counter for counter in self._places if counter not in staying]:
                self._free.append(self._places.pop(counter))

    def _measure(self, watched: list[VirtualTokenCounter], news: list[VirtualTokenCounter]) -> None:
        places = np.array([self._places[counter] for counter in watched])
        received = np.array([counter.received for counter in watched])
        lifted = np.array([counter.credited for counter in watched])
        differences = received[:, None] - received[None, :]
        square = (places[:, None], places[None, :])
        highest = np.maximum(self._highest[square], differences)
        began = lifted != self._lifted[places]
        if news:
            fresh = set(news)
            began |= np.array([counter in fresh for counter in watched])
        if began.any():
            anew = began[:, None] | began[None, :]
            highest = np.where(anew, differences, highest)
            self._lifted[places] = lifted
        self._highest[square] = highest
        self.largest = max(self.largest, float((highest + highest.T).max()))


class FleetGap:
    """The largest difference of service over the fleet between two tenants of a class that wait on every engine."""

    def __init__(self) -> None:
        self._gaps: defaultdict[str, ServiceGap] = defaultdict(ServiceGap)
        self._totals: dict[tuple[str, str], VirtualTokenCounter] = {}

    @property
    def largest(self) -> float:
        """Largest gap of all classes, in units over weight."""
        return max((gap.largest for gap in self._gaps.values()), default=0.0)

    def observe(self, queues: Sequence[RequestQueue]) -> None:
        """Compare the tenants that wait in all of `queues`."""
        for service_class in queues[0].classes:
            flows = [{flow.tenant: flow for flow in queue.classes[service_class].tenants} for queue in queues]
            waiting = []
            for tenant in flows[0]:
                if all(tenant in others for others in flows):
                    total = self._totals.setdefault((service_class, tenant), VirtualTokenCounter())
                    total.credited = sum(others[tenant].credited for others in flows)
                    total.served = total.credited + sum(others[tenant].received for others in flows)
                    waiting.append(total)
            self._gaps[service_class].observe(waiting)


class TenantReport(msgspec.Struct, frozen=True, kw_only=True):
    """Figures of one tenant."""

    accepted: int
    refused: int
    prompt_tokens: int
    output_tokens: int
    ttft_ms: Quantiles
    itl_ms: Quantiles
    in_deadline: float | None


class SimulationReport(msgspec.Struct, frozen=True, kw_only=True):
    """The figures of one simulation; the same scenario gives the same figures."""

    throughput_tokens_per_s: float
    """Prompt tokens computed and tokens generated, each counted once, from the first arrival to the last token."""
    ttft_ms: Quantiles
    """Time from arrival to the first token."""
    itl_ms: Quantiles
    """Time between two tokens of one answer."""
    preemption_rate: float
    """Preemptions, divided by the accepted requests."""
    pages_swapped: int
    """Pages of preempted requests that were copied to the host's memory instead of being computed again."""
    pool_use: float
    """Share of the pool's pages that running requests and their adapters held. The value is the mean over the time in
    which requests waited for pages or, if no request waited, over the time in which requests ran.
    """
    service_gap_max: float
    """Largest difference between the service of two tenants of a class while both waited, on every engine, in units
    over weight."""
    service_gap_bound: float
    """Upper bound of the service gap: decision 0004 for one engine, decision 0027 for a fleet."""
    adapter_loads: int
    """Loads of adapters, on all engines."""
    prompt_tokens_computed: int
    """Prompt tokens that went through the model, so without those found in prefix caches."""
    bound_by: Resource
    """Resource that is closest to its limit."""
    moves: int
    """Adapters and prefixes that routers moved to another engine because their engine's steps were too long."""
    accepted: int
    refused: int
    in_deadline: float | None
    """Share of the accepted requests with a deadline that had their first token in time; None if no request had a
    deadline.
    """
    per_stage: dict[StageName, StageReport]
    """Figures of the stages of conversations; empty: there were none."""
    conversation_ms: Quantiles
    """Time from the beginning of a conversation to its last token."""
    per_tenant: dict[str, TenantReport]


def share_in_deadline(tallies: Iterable[TenantTally]) -> float | None:
    """Return the share of accepted requests with a deadline that met it; None if no request had a deadline."""
    asked = in_time = 0
    for tally in tallies:
        asked += tally.with_deadline
        in_time += tally.in_deadline
    return in_time / asked if asked else None


def tenant_report(tally: TenantTally) -> TenantReport:
    """Return the figures of one tenant."""
    return TenantReport(
        accepted=tally.accepted,
        refused=tally.refused,
        prompt_tokens=tally.prompt_tokens,
        output_tokens=tally.output_tokens,
        ttft_ms=tally.ttft.quantiles,
        itl_ms=tally.itl.quantiles,
        in_deadline=share_in_deadline([tally]),
    )


def overall(tallies: Iterable[TenantTally]) -> TenantReport:
    """Return the figures of all tenants as if they were one."""
    together = list(tallies)
    return tenant_report(
        TenantTally(
            accepted=sum(t.accepted for t in together),
            refused=sum(t.refused for t in together),
            prompt_tokens=sum(t.prompt_tokens for t in together),
            output_tokens=sum(t.output_tokens for t in together),
            with_deadline=sum(t.with_deadline for t in together),
            in_deadline=sum(t.in_deadline for t in together),
            ttft=merge_times(t.ttft for t in together),
            itl=merge_times(t.itl for t in together),
        )
    )


BUSIEST = 8
"""Number of tenants whose service is plotted."""


@dataclass(frozen=True, slots=True)
class TimelinePoint:
    """One sample of a running simulation."""

    seconds: float
    pool_use: float
    waiting: int
    running: int
    tokens: dict[str, int]
    """Tokens generated so far by tenant; only the first BUSIEST tenants that got any are counted."""


@dataclass(slots=True)
class SimulatedTimeline:
    """Samples of a simulation, at least `interval` seconds of simulated time apart."""

    interval: float
    moments: list[TimelinePoint] = field(default_factory=list)
    _next_at: float = 0.0
    _watched: list[str] = field(default_factory=list)

    def due(self, now: float) -> bool:
        """Return whether it is time for another sample."""
        return now >= self._next_at

    def look(self, now: float, pool_use: float, counts: tuple[int, int], tallies: Mapping[str, TenantTally]) -> None:
        """Keep a sample; `counts` are the numbers of waiting and running requests."""
        self._next_at = now + self.interval
        if len(self._watched) < BUSIEST:
            self._watched = list(tallies)[:BUSIEST]
        tokens = {tenant: tallies[tenant].output_tokens for tenant in self._watched}
        self.moments.append(TimelinePoint(now, pool_use, *counts, tokens))


def plot_report(course: SimulatedTimeline, title: str, path: Path) -> None:
    """Write a picture file of tokens by tenant, requests and the pool over time.

    Raises ScenarioError if matplotlib is missing or the file's kind is unknown.
    """
    try:
        from matplotlib.figure import Figure
    except ImportError:
        raise ScenarioError("--plot needs matplotlib: pip install 'loramux[plot]'") from None
    figure = Figure(figsize=(9, 7), layout="constrained")
    service, requests, pool = figure.subplots(3, 1, sharex=True, height_ratios=[3, 2, 1])
    seconds = [moment.seconds for moment in course.moments]
    tenants = sorted({tenant for moment in course.moments for tenant in moment.tokens})
    for tenant in tenants:
        service.plot(seconds, [moment.tokens.get(tenant, 0) for moment in course.moments], label=tenant)
    service.set_ylabel("tokens generated")
    service.legend(loc="upper left", fontsize="small")
    requests.plot(seconds, [moment.waiting for moment in course.moments], label="waiting")
    requests.plot(seconds, [moment.running for moment in course.moments], label="running")
    requests.set_ylabel("requests")
    requests.legend(loc="upper left", fontsize="small")
    pool.fill_between(seconds, [100 * moment.pool_use for moment in course.moments], alpha=0.5)
    pool.set_ylabel("pool in use, %")
    pool.set_ylim(0, 100)
    pool.set_xlabel("seconds")
    service.set_title(title)
    try:
        figure.savefig(path, dpi=110)
    except (ValueError, OSError) as error:
        raise ScenarioError(f"cannot write the plot {path}: {error}") from None
