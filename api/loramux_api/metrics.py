"""What Prometheus reads at /metrics: bounded labels, and nothing that a tenant wrote."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import accumulate

import msgspec
from litestar.types import Message, Scope
from prometheus_client import CollectorRegistry, Counter, Histogram, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.utils import floatToGoString

from loramux.engine.distribution import Distribution
from loramux.engine.messages import EngineMeters
from loramux.gateway import Generation, Platform

GAUGES = frozenset(
    {
        "waiting",
        "running",
        "pages_total",
        "pages_kv",
        "pages_kv_cached",
        "kv_pages_in_host",
        "pages_adapters",
        "pages_adapters_idle",
        "pages_free",
        "adapters_resident",
        "adapters_pinned",
        "adapters_host",
        "adapters_host_bytes",
        "distinct_adapters",
        "max_distinct_adapters",
        "max_distinct_adapters_beside_base",
        "weight_bytes",
        "service_gap",
    }
)
"""The fields of EngineStats that can fall; the others only grow."""
SECONDS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120, 300)


class PlatformCollector:
    """Reads the engine's and the gateway's own counters when asked; nothing is counted twice."""

    def __init__(self, platform: Platform) -> None:
        self._platform = platform

    def collect(self) -> Iterator[Metric]:
        """One family each."""
        stats = msgspec.structs.asdict(self._platform.engine.stats())
        meters: EngineMeters = stats.pop("meters")
        for name, value in stats.items():
            family = GaugeMetricFamily if name in GAUGES else CounterMetricFamily
            yield family(f"loramux_engine_{name}", f"Engine: {name.replace('_', ' ')}.", value=value)
        yield from _of_meters(meters)
        yield GaugeMetricFamily("loramux_engine_up", "Whether the engine serves.", value=self._platform.engine.alive)
        drift = self._platform.usage.drift_tokens + self._platform.engine.unclaimed_tokens
        yield GaugeMetricFamily(
            "loramux_ledger_drift_tokens",
            "Tokens that the engine counted and the ledger lacks.",
            value=drift,
        )
        yield from self._completions()

    def _completions(self) -> Iterator[Metric]:
        completions = self._platform.completions
        yield GaugeMetricFamily("loramux_completions_running", "Requests under way.", value=completions.running)
        ended = CounterMetricFamily("loramux_completions", "Requests by how they ended.", labels=["status"])
        for status, count in completions.counters.requests.items():
            ended.add_metric([status], count)
        yield ended
        tokens = CounterMetricFamily(
            "loramux_tokens", "Tokens of ended requests; cached are prompt's.", labels=["kind"]
        )
        for kind in ("prompt", "cached", "completion"):
            tokens.add_metric([kind], getattr(completions.counters, f"{kind}_tokens"))
        yield tokens
        gaps = completions.counters.token_gaps.distribution
        yield _histogram("loramux_inter_token_seconds", "From a token to the next, of ended requests.", gaps)


class Metrics:
    """One application's registry."""

    def __init__(self) -> None:
        self._registry = CollectorRegistry()
        self._responses = Counter(
            "loramux_http_responses", "Responses.", ["method", "route", "status"], registry=self._registry
        )
        self._first_token = self._histogram(
            "loramux_first_token_seconds", "From a request's acceptance to its first token."
        )
        self._total = self._histogram("loramux_completion_seconds", "From a request's acceptance to its last token.")

    def watch(self, platform: Platform) -> None:
        """Report on this house too."""
        self._registry.register(PlatformCollector(platform))
        platform.completions.on_ended(self._observe)

    def text(self) -> bytes:
        """Everything, in Prometheus' text format."""
        return generate_latest(self._registry)

    async def count(self, message: Message, scope: Scope) -> None:
        """A Litestar `before_send` hook. Routes are templates, never what a client wrote."""
        if message["type"] == "http.response.start":
            route = scope.get("path_template")
            method = scope.get("method", "any") if route else "any"
            self._responses.labels(method, route or "unknown", message["status"]).inc()

    def _observe(self, generation: Generation) -> None:
        if generation.seconds_to_first_token is not None:
            self._first_token.observe(generation.seconds_to_first_token)
        if generation.seconds is not None:
            self._total.observe(generation.seconds)

    def _histogram(self, name: str, meaning: str) -> Histogram:
        return Histogram(name, meaning, buckets=SECONDS, registry=self._registry)


def _of_meters(meters: EngineMeters) -> Iterator[Metric]:
    yield _histogram("loramux_queue_seconds", "From a request's arrival to its first step.", meters.queue_seconds)
    yield _histogram("loramux_adapter_load_seconds", "Of adapters into the pool.", meters.adapter_load_seconds)
    yield _histogram("loramux_step_adapters", "Distinct adapters in a step.", meters.step_adapters)
    service = GaugeMetricFamily(
        "loramux_tenant_service_units",
        "Service that a tenant received (prompt tokens + 2 x generated) since the start: who got most, and all others.",
        labels=["tenant", "service_class"],
    )
    for one in meters.tenants:
        service.add_metric([one.tenant, one.service_class], one.units)
    yield service


def _histogram(name: str, meaning: str, values: Distribution) -> HistogramMetricFamily:
    ends = [*map(floatToGoString, values.bounds), "+Inf"]
    buckets = list(zip(ends, accumulate(values.counts), strict=True))
    return HistogramMetricFamily(name, meaning, buckets=buckets, sum_value=values.total)
