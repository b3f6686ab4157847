"""Metrics for Prometheus at /metrics: bounded labels, and no text from tenants.

`FAMILIES` describes every family once: the exposition, docs/metrics.md and the tests use it. The counters of the engine
and the serving layer are read at each scrape of Prometheus; no value is counted twice.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from pathlib import Path
from typing import Any, Literal, get_args

import msgspec
from cryptography.x509 import load_pem_x509_certificate
from litestar.types import Message, Scope
from prometheus_client import CollectorRegistry, Counter, Histogram, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.utils import floatToGoString
from typing_extensions import override

from loramux.data.storage.errors import Cause
from loramux.engine.messages import EngineStats
from loramux.engine.metrics import Distribution
from loramux.fleet.view import EngineState
from loramux.server.platform import Platform
from loramux.serving.generation import Generation
from loramux_api.peers import MetricsQuery, Peers
from loramux_api.vllm_metrics import VllmCollector

SECONDS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120, 300)


@dataclass(frozen=True, slots=True)
class Family:
    """A metric family. A counter's samples have the suffix `_total`, as Prometheus demands."""

    name: str
    kind: Literal["counter", "gauge", "histogram"]
    help: str
    labels: tuple[str, ...] = ()

    @property
    def series(self) -> str:
        """Name of the series in queries."""
        return f"{self.name}_total" if self.kind == "counter" else self.name


ENGINE = ("base_model", "engine")
"""Labels of the metrics that an engine reports."""


def _engine(name: str, kind: Literal["counter", "gauge"], help: str) -> Family:
    return Family(f"loramux_engine_{name}", kind, help, ENGINE)


ENGINE_FAMILIES: dict[str, Family] = {
    "steps": _engine("steps", "counter", "Steps of the engine that computed any token."),
    "waiting": _engine("waiting", "gauge", "Sequences that wait for their first step or for memory."),
    "running": _engine("running", "gauge", "Sequences in the running batch."),
    "pages_total": _engine("pages", "gauge", "Pages of the memory pool, which KV and adapters share."),
    "pages_kv": _engine("pages_kv", "gauge", "Pages with KV of running sequences."),
    "pages_kv_cached": _engine(
        "pages_kv_cached", "gauge", "Pages with cached prefixes that no sequence uses. They are evicted on demand."
    ),
    "pages_states_cached": _engine(
        "pages_states_cached",
        "gauge",
        "Pages of pages_kv_cached with states of linear attention, Mamba 2 or convolutions.",
    ),
    "pages_adapters": _engine("pages_adapters", "gauge", "Pages of adapters that are in use or being loaded."),
    "pages_adapters_idle": _engine(
        "pages_adapters_idle", "gauge", "Pages of resident adapters that no sequence uses. They are evicted on demand."
    ),
    "pages_free": _engine("pages_free", "gauge", "Pages that hold nothing."),
    "kv_evictions": _engine("kv_evictions", "counter", "Pages of cached prefixes that were evicted."),
    "kv_pages_swapped_out": _engine(
        "kv_pages_swapped_out", "counter", "Pages of preempted sequences that were copied to the host's memory."
    ),
    "kv_pages_swapped_in": _engine(
        "kv_pages_swapped_in", "counter", "Pages of preempted sequences that were copied back into the pool."
    ),
    "kv_pages_in_host": _engine("kv_pages_in_host", "gauge", "Pages of preempted sequences in the host's memory."),
    "adapters_resident": _engine("adapters_resident", "gauge", "Adapters in the pool, idle ones included."),
    "adapters_pinned": _engine("adapters_pinned", "gauge", "Adapters that a pin keeps in the pool."),
    "adapters_host": _engine("adapters_host", "gauge", "Adapters in the host's memory, read and checked."),
    "adapters_host_bytes": _engine("adapters_host_bytes", "gauge", "Bytes of the adapters in the host's memory."),
    "images_encoded": _engine("images_encoded", "counter", "Images that the vision tower has computed."),
    "images_found": _engine("images_found", "counter", "Images of requests that an earlier request had computed."),
    "image_bytes": _engine("image_bytes", "gauge", "Bytes of host memory with computed images."),
    "step_graphs": _engine("step_graphs", "gauge", "Recordings of steps that are CUDA graphs; 0 on a CPU."),
    "step_graphs_missing": _engine(
        "step_graphs_missing",
        "gauge",
        "Recordings of steps that no CUDA graph could be made of. Such steps take the host 10 to 20 times as long.",
    ),
    "adapter_loads": _engine("adapter_loads", "counter", "Adapters that were loaded into the pool."),
    "adapter_load_seconds": _engine(
        "adapter_load_seconds", "counter", "Seconds that loads of adapters took, summed over loads."
    ),
    "adapter_evictions": _engine("adapter_evictions", "counter", "Adapters that were evicted from the pool."),
    "adapter_load_failures": _engine("adapter_load_failures", "counter", "Loads of adapters that failed."),
    "adapter_hits": _engine("adapter_hits", "counter", "Requests whose adapter was in the pool when they arrived."),
    "adapter_misses": _engine("adapter_misses", "counter", "Requests whose adapter had to be loaded."),
    "preemptions": _engine("preemptions", "counter", "Sequences that were preempted for lack of pages or rows."),
    "refused_over_capacity": _engine(
        "refused_over_capacity", "counter", "Requests that were refused because they would have missed their deadline."
    ),
    "missed_deadlines": _engine("missed_deadlines", "counter", "Requests whose deadline passed while they waited."),
    "service_gap": _engine(
        "service_gap",
        "gauge",
        "The largest difference of service between two waiting tenants of one class, in service units per weight.",
    ),
    "prompt_tokens": _engine(
        "prompt_tokens",
        "counter",
        "Prompt tokens computed for the first time; cached and recomputed ones not included.",
    ),
    "cached_tokens": _engine("cached_tokens", "counter", "Prompt tokens that the prefix cache provided."),
    "recomputed_tokens": _engine(
        "recomputed_tokens", "counter", "Tokens of prompts and answers computed again after a preemption."
    ),
    "output_tokens": _engine("output_tokens", "counter", "Tokens that the engine has generated."),
    "drafted_tokens": _engine(
        "drafted_tokens", "counter", "Tokens that speculative decoding drafted and verified, right or wrong."
    ),
    "accepted_tokens": _engine(
        "accepted_tokens", "counter", "Drafted tokens that were accepted; the generated tokens include them."
    ),
    "distinct_adapters": _engine("distinct_adapters", "gauge", "Distinct adapters in the latest step."),
    "max_distinct_adapters": _engine(
        "max_distinct_adapters", "gauge", "The most distinct adapters in one step since the start."
    ),
    "max_distinct_adapters_beside_base": _engine(
        "max_distinct_adapters_beside_base",
        "gauge",
        "The most distinct adapters in one step that also ran the base model, since the start.",
    ),
    "adapter_bytes_read": _engine(
        "adapter_bytes_read", "counter", "Bytes of adapters that steps read, summed over steps."
    ),
    "weight_bytes": _engine("weight_bytes", "gauge", "Bytes of the base model's weights, which every step reads."),
    "ended_prompt_tokens": _engine("ended_prompt_tokens", "counter", "Prompt tokens of requests that have ended."),
    "ended_cached_tokens": _engine(
        "ended_cached_tokens", "counter", "Cached prompt tokens of requests that have ended."
    ),
    "ended_output_tokens": _engine("ended_output_tokens", "counter", "Generated tokens of requests that have ended."),
}
"""Metrics by the field of EngineStats; the field `ended` counts as one field per token count."""
ENGINE_UP = Family("loramux_engine_up", "gauge", "1 while the engine serves, else 0; absent while it rests.", ENGINE)
ENGINE_STARTS = Family("loramux_engine_starts", "counter", "Times that the engine was started.", ENGINE)
QUEUE_SECONDS = Family(
    "loramux_queue_seconds", "histogram", "Seconds from a request's arrival to its first step.", ENGINE
)
LOAD_SECONDS = Family(
    "loramux_adapter_load_seconds", "histogram", "Seconds of one load of an adapter into the pool.", ENGINE
)
STEP_ADAPTERS = Family("loramux_step_adapters", "histogram", "Distinct adapters in one step.", ENGINE)
DISTRIBUTIONS = {
    "queue_seconds": QUEUE_SECONDS,
    "adapter_load_seconds": LOAD_SECONDS,
    "step_adapters": STEP_ADAPTERS,
}
"""Histograms by the field of EngineMeters."""
SERVICE_UNITS = Family(
    "loramux_tenant_service_units",
    "gauge",
    "Service units (computed prompt tokens + 2 x generated tokens) since the start, of the tenants with the most "
    "service, and of all others together.",
    (*ENGINE, "tenant", "service_class"),
)
REVISION_DRAFTS = Family(
    "loramux_revision_draft_tokens",
    "gauge",
    "Tokens that speculative decoding drafted, and accepted, of the revisions with the most (empty: the base model), "
    "and of all others together.",
    (*ENGINE, "tenant", "revision", "kind"),
)
LEDGER_DRIFT = Family(
    "loramux_ledger_drift_tokens",
    "gauge",
    "Tokens that the engine counted and the ledger does not have. Alert on any value but 0.",
)
SERVED = ("base_model", "service_tier")
"""Labels of metrics that callers experience: an alert on the waits of people leaves out the tier `batch`."""
RUNNING = Family("loramux_completions_running", "gauge", "Requests that are admitted and have not ended.")
COMPLETIONS = Family("loramux_completions", "counter", "Requests that have ended, by outcome.", ("status",))
TOKENS = Family(
    "loramux_tokens",
    "counter",
    "Tokens of requests that have ended: prompt (cached ones included), cached and completion.",
    ("kind",),
)
INTER_TOKEN = Family(
    "loramux_inter_token_seconds",
    "histogram",
    "Seconds between two tokens of a request, of requests that have ended.",
    SERVED,
)
CHOICES = Family(
    "loramux_choices", "counter", "Choices that have ended, by finish reason.", ("base_model", "finish_reason")
)
UNSETTLED = Family(
    "loramux_unsettled_requests", "gauge", "Requests that have ended and wait for the database to record it."
)
SINK_ENTRIES = Family(
    "loramux_sink_entries",
    "counter",
    "Ledger entries `delivered` to a sink, events `parked` for an operator, and batches that `failed`.",
    ("sink", "outcome"),
)
STORAGE_FAULTS = Family(
    "loramux_storage_faults",
    "counter",
    "Faults of the object store or of this machine's disks, by cause: full, denied, absent, slow, unavailable.",
    ("cause",),
)
CERTIFICATE_EXPIRY = Family(
    "loramux_certificate_expiry_timestamp_seconds",
    "gauge",
    "Unix time at which server.tls_certificate ends; 0 without TLS.",
)
RESPONSES = Family(
    "loramux_http_responses",
    "counter",
    "HTTP responses by method, route template and status.",
    ("method", "route", "status"),
)
FIRST_TOKEN = Family(
    "loramux_first_token_seconds", "histogram", "Seconds from a request's admission to its first token.", SERVED
)
COMPLETION_SECONDS = Family(
    "loramux_completion_seconds", "histogram", "Seconds from a request's admission to its last token.", SERVED
)
FAMILIES = (
    *(RESPONSES, COMPLETIONS, CHOICES, RUNNING, TOKENS, FIRST_TOKEN, INTER_TOKEN, COMPLETION_SECONDS, LEDGER_DRIFT),
    *(ENGINE_UP, ENGINE_STARTS, QUEUE_SECONDS, LOAD_SECONDS, STEP_ADAPTERS, SERVICE_UNITS, REVISION_DRAFTS),
    *(UNSETTLED, SINK_ENTRIES, STORAGE_FAULTS, CERTIFICATE_EXPIRY),
    *ENGINE_FAMILIES.values(),
)


class PlatformCollector:
    """Reads the counters of the engine and the serving layer at each scrape of Prometheus."""

    def __init__(self, platform: Platform) -> None:
        self._platform = platform

    def collect(self) -> Iterator[Metric]:
        """Yield the families."""
        bases = self._platform.bases
        stats = {(name, engine): one for name, base in bases.items() for engine, one in base.engines.stats().items()}
        yield from _engine_metrics(stats)
        statuses = [status for base in bases.values() for status in base.engines.statuses()]
        needed = [one for one in statuses if one.state is not EngineState.RESTING]
        serves = {(one.base_model, one.engine): one.state is EngineState.READY for one in needed}
        yield _labelled(ENGINE_UP, serves)
        yield _labelled(ENGINE_STARTS, {(one.base_model, one.engine): one.starts for one in statuses})
        unclaimed = sum(base.engines.unclaimed_tokens for base in bases.values())
        yield _single(LEDGER_DRIFT, self._platform.usage.drift_tokens + unclaimed)
        yield _labelled(SINK_ENTRIES, self._platform.sinks.counters)
        faults = self._platform.blobs.faults.counts
        yield _labelled(STORAGE_FAULTS, {(cause,): faults[cause] for cause in get_args(Cause)})
        yield _single(CERTIFICATE_EXPIRY, _certificate_expiry(self._platform.settings.server.tls_certificate))
        yield from self._completions()

    def _completions(self) -> Iterator[Metric]:
        completions = self._platform.completions
        counters = completions.counters
        yield _single(RUNNING, completions.running)
        yield _single(UNSETTLED, completions.unsettled)
        yield _labelled(COMPLETIONS, {(status,): count for status, count in counters.requests.items()})
        tokens = counters.tokens
        by_kind = {("prompt",): tokens.prompt, ("cached",): tokens.cached, ("completion",): tokens.output}
        yield _labelled(TOKENS, by_kind)
        yield _histogram(INTER_TOKEN, {served: gaps.distribution for served, gaps in counters.token_gaps.items()})


def _engine_metrics(stats: Mapping[tuple[str, str], EngineStats]) -> Iterator[Metric]:
    """Yield the metrics of the engines' statistics, by base and engine."""
    rows = {name: _flat(one) for name, one in stats.items()}
    for field, family in ENGINE_FAMILIES.items():
        yield _labelled(family, {name: row[field] for name, row in rows.items()})
    for meter, family in DISTRIBUTIONS.items():
        yield _histogram(family, {name: getattr(one.meters, meter) for name, one in stats.items()})
    services = {name: one.meters.tenants for name, one in stats.items()}
    yield _labelled(
        SERVICE_UNITS,
        {(*name, one.tenant, one.service_class): one.units for name in services for one in services[name]},
    )
    drafts = [((*name, one.tenant, one.revision), one) for name in stats for one in stats[name].meters.drafts]
    drafted = {(*labels, "drafted"): one.drafted for labels, one in drafts}
    accepted = {(*labels, "accepted"): one.accepted for labels, one in drafts}
    yield _labelled(REVISION_DRAFTS, drafted | accepted)


def _flat(stats: EngineStats) -> dict[str, float]:
    """Return the numbers of an engine by the keys of ENGINE_FAMILIES."""
    fields = msgspec.structs.asdict(stats)
    counted = ("prompt", "cached", "output")  # engines do not count tokens of images apart
    ended = {f"ended_{kind}_tokens": getattr(stats.ended, kind) for kind in counted}
    return {name: value for name, value in fields.items() if name not in ("ended", "meters")} | ended


class Metrics:
    """One application's registry."""

    def __init__(self) -> None:
        self._registry = CollectorRegistry()
        self._responses = Counter(RESPONSES.name, RESPONSES.help, RESPONSES.labels, registry=self._registry)
        self._first_token = self._observed(FIRST_TOKEN)
        self._total = self._observed(COMPLETION_SECONDS)
        self._choices = Counter(CHOICES.name, CHOICES.help, CHOICES.labels, registry=self._registry)

    def watch(self, platform: Platform) -> None:
        """Also report on this platform."""
        collector = PlatformCollector(platform)
        self._registry.register(collector)
        self._registry.register(VllmCollector(platform, (collector, self._first_token, self._total, self._choices)))
        platform.completions.on_ended(self._observe)

    def families(self) -> list[Metric]:
        """Return all families with their present values."""
        return list(self._registry.collect())

    async def text(self, peers: Peers) -> bytes:
        """Return all metrics in Prometheus' text format, of all workers of this server."""
        if not peers.has_others:
            return generate_latest(self._registry)
        others: dict[int, list[Metric]] = await peers.ask(MetricsQuery())
        return generate_latest(CollectedFamilies(of_workers(peers.number, self.families(), others)))

    async def count(self, message: Message, scope: Scope) -> None:
        """Count a response: a Litestar `before_send` hook. The label of a route is its template, never text from a
        client.
        """
        if message["type"] == "http.response.start":
            route = scope.get("path_template")
            method = scope.get("method", "any") if route else "any"
            self._responses.labels(method, route or "unknown", message["status"]).inc()

    def _observe(self, generation: Generation) -> None:
        served = generation.base_model, generation.service_tier
        if generation.seconds_to_first_token is not None:
            self._first_token.labels(*served).observe(generation.seconds_to_first_token)
        if generation.seconds is not None:
            self._total.labels(*served).observe(generation.seconds)
        for reason in generation.finish_reasons:
            self._choices.labels(generation.base_model, reason).inc()

    def _observed(self, family: Family) -> Histogram:
        return Histogram(family.name, family.help, family.labels, buckets=SECONDS, registry=self._registry)


class CollectedFamilies(CollectorRegistry):
    """Families that were collected already."""

    def __init__(self, families: Sequence[Metric]) -> None:
        super().__init__()
        self._families = families

    @override
    def collect(self) -> Iterator[Metric]:
        yield from self._families


def of_workers(number: int, own: Sequence[Metric], others: Mapping[int, Sequence[Metric]]) -> list[Metric]:
    """Return the families of all workers, of which `own` are those of worker `number`.

    Samples of engines are the same in every worker, so they come from this worker. All other samples get the label
    `worker`: a sum over workers would fall when a worker is replaced, and Prometheus would count it twice.
    """
    joined: dict[str, Metric] = {}
    for worker, families in ((number, own), *others.items()):
        for family in families:
            metric = joined.setdefault(family.name, Metric(family.name, family.documentation, family.type))
            for sample in family.samples:
                if "engine" not in sample.labels:
                    metric.samples.append(sample._replace(labels={**sample.labels, "worker": str(worker)}))
                elif worker == number:
                    metric.samples.append(sample)
    return list(joined.values())


def _certificate_expiry(path: str | None) -> float:
    """Return the expiry of the file's first certificate, which is the server's own, or 0 if the file has no
    certificate.
    """
    if path is None:
        return 0.0
    try:
        return load_pem_x509_certificate(Path(path).read_bytes()).not_valid_after_utc.timestamp()
    except (OSError, ValueError):  # the file is being replaced
        return 0.0


def _single(family: Family, value: float) -> Metric:
    kind = GaugeMetricFamily if family.kind == "gauge" else CounterMetricFamily
    return kind(family.name, family.help, value=value)


def _labelled(family: Family, values: Mapping[Any, float]) -> Metric:
    kind = GaugeMetricFamily if family.kind == "gauge" else CounterMetricFamily
    metric = kind(family.name, family.help, labels=family.labels)
    for labels, value in values.items():
        metric.add_metric(labels, value)
    return metric


def _histogram(family: Family, values: Mapping[Any, Distribution]) -> HistogramMetricFamily:
    metric = HistogramMetricFamily(family.name, family.help, labels=family.labels)
    for labels, distribution in values.items():
        ends = [*map(floatToGoString, distribution.bounds), "+Inf"]
        buckets = list(zip(ends, accumulate(distribution.counts), strict=True))
        metric.add_metric(labels, buckets=buckets, sum_value=distribution.total)
    return metric
