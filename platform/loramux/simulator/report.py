"""The figures of a simulation: exact times, counts by tenant, and the report made of them.

Times are counted to the microsecond, so every quantile is exact, in memory that does not grow with the tokens.
"""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Iterable
from dataclasses import dataclass, field

import msgspec

from loramux.engine.messages import TokenEvent
from loramux.engine.scheduling.step import Step
from loramux.simulator.traffic import Source


class Quantiles(msgspec.Struct, frozen=True):
    """Quantiles of a time, in milliseconds; None where nothing was measured."""

    p50: float | None
    p99: float | None


class Times:
    """Durations as a count for each microsecond, so that every quantile is exact."""

    def __init__(self) -> None:
        self.counts: dict[int, int] = {}

    def add(self, seconds: float) -> None:
        """One duration."""
        microseconds = round(seconds * 1e6)
        self.counts[microseconds] = self.counts.get(microseconds, 0) + 1

    def milliseconds(self, share: float) -> float | None:
        """The lowest duration that at least `share` of all do not exceed."""
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
    """All of them together."""
    total: Counter[int] = Counter()
    for one in times:
        total.update(one.counts)
    merge_times = Times()
    merge_times.counts = dict(total)
    return merge_times


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


@dataclass(slots=True)
class _Run:
    """One request on its way."""

    tally: TenantTally
    arrived: float
    deadline_s: float | None
    output_left: int
    next_token: TokenEvent
    """The same for all but the last, which is made when it comes."""
    last_token_at: float | None = None
    tokens_told: int = 0


@dataclass(slots=True)
class Share:
    """The mean of a share over time."""

    integral: float = 0.0
    seconds: float = 0.0

    def add(self, share: float, seconds: float) -> None:
        """Add a time during which it was `share`."""
        self.integral += share * seconds
        self.seconds += seconds

    @property
    def mean(self) -> float:
        """0 where nothing was added."""
        return self.integral / self.seconds if self.seconds else 0.0


class Meter:
    """Stands in for the sampler, and keeps the times."""

    def __init__(self) -> None:
        self.tallies: defaultdict[str, TenantTally] = defaultdict(TenantTally)
        self.num_answered = 0
        self.last_token_at = 0.0
        self._runs: dict[str, _Run] = {}

    def arrive(self, request_id: str, at: float, source: Source, output_tokens: int) -> None:
        """A request that will generate `output_tokens` came `at`, which may be before the loop saw it."""
        token = TokenEvent(request_id=request_id, token_id=0)
        self._runs[request_id] = _Run(self.tallies[source.tenant], at, source.deadline_s, output_tokens, token)

    def sample(self, step: Step, now: float) -> list[TokenEvent]:
        """The tokens of a step that ended `now`, one for each of `step.sampling`."""
        self.last_token_at = now
        return [self._next_token(self._runs[chunk.sequence.request.id], now) for chunk in step.sampling]

    def tokens_told(self, request_id: str) -> int:
        """Tokens that the client of an open request has."""
        return self._runs[request_id].tokens_told

    def end(self, event: TokenEvent, prompt_tokens: int) -> None:
        """A request was answered by `event`, which ends it."""
        run = self._runs.pop(event.request_id)
        self.num_answered += 1
        if event.fault is not None and event.fault.code != "deadline_exceeded":
            run.tally.refused += 1
            return
        run.tally.accepted += 1
        run.tally.prompt_tokens += prompt_tokens
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
        run.tally.in_deadline += run.deadline_s is not None and waited <= run.deadline_s


class TenantReport(msgspec.Struct, frozen=True, kw_only=True):
    """One tenant's part."""

    accepted: int
    refused: int
    prompt_tokens: int
    output_tokens: int
    ttft_ms: Quantiles
    itl_ms: Quantiles
    in_deadline: float | None


class Report(msgspec.Struct, frozen=True, kw_only=True):
    """The figures of one simulation; the same scenario gives the same ones."""

    throughput_tokens_per_s: float
    """Prompt tokens computed and tokens generated, each counted once, from the first arrival to the last token."""
    ttft_ms: Quantiles
    """Time from arrival to the first token."""
    itl_ms: Quantiles
    """Time between two tokens of one answer."""
    preemption_rate: float
    """Preemptions over accepted requests."""
    pages_swapped: int
    """Pages of preempted requests that were copied to the host's memory instead of being computed again."""
    pool_use: float
    """Share of the pool's pages that running requests and their adapters held, on average while others waited for room
    (while anything ran, if nothing ever waited)."""
    service_gap_max: float
    """The most that the service of two tenants of a class drifted apart while both waited, on every engine, in units
    over weight."""
    service_gap_bound: float
    """Its upper bound: decision 0004 for one engine, decision 0027 for a fleet."""
    adapter_loads: int
    """Loads of adapters, on all engines."""
    accepted: int
    refused: int
    in_deadline: float | None
    """Share of the accepted requests with a deadline that had their first token in time; None where none had one."""
    per_tenant: dict[str, TenantReport]


def share_in_deadline(tallies: Iterable[TenantTally]) -> float | None:
    """Return the share of accepted requests with a deadline that met it; None where none had one."""
    asked = in_time = 0
    for tally in tallies:
        asked += tally.with_deadline
        in_time += tally.in_deadline
    return in_time / asked if asked else None


def tenant_report(tally: TenantTally) -> TenantReport:
    """One tenant's part."""
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
    """All tenants as if they were one."""
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
