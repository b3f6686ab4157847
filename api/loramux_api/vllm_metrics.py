"""Metrics of vLLM's server, under its names, if the meaning is the same: dashboards and routers work unchanged.

The endpoint picker of the Gateway API inference extension reads the queue, the KV use and `lora_requests_info` here.
Most families are our own under a second name (`SAME`); the others are computed from the engines' statistics.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Literal, Protocol

from prometheus_client.core import Metric
from prometheus_client.samples import Sample

from loramux.engine.messages import EngineStats
from loramux.server.platform import Platform

PREFIX = "vllm:"
LABELS = {"base_model": "model_name", "finish_reason": "finished_reason"}
"""vLLM's name for each of our labels."""
DIGEST_LENGTH = len("sha256:") + 12


class _Collector(Protocol):
    def collect(self) -> Iterable[Metric]: ...


@dataclass(frozen=True, slots=True)
class VllmFamily:
    """A family of vLLM: its kind, and our family with the same values or a function that computes its values."""

    kind: Literal["counter", "gauge", "histogram"]
    ours: str
    help: str


SAME: dict[str, VllmFamily] = {
    "num_requests_running": VllmFamily("gauge", "loramux_engine_running", "Sequences in the running batch."),
    "num_requests_waiting": VllmFamily("gauge", "loramux_engine_waiting", "Sequences that wait."),
    "num_preemptions": VllmFamily("counter", "loramux_engine_preemptions", "Sequences that were preempted."),
    "generation_tokens": VllmFamily("counter", "loramux_engine_output_tokens", "Generated tokens."),
    "prefix_cache_hits": VllmFamily(
        "counter", "loramux_engine_cached_tokens", "Prompt tokens that the prefix cache provided."
    ),
    "request_queue_time_seconds": VllmFamily("histogram", "loramux_queue_seconds", "Seconds in the engine's queue."),
    "time_to_first_token_seconds": VllmFamily(
        "histogram", "loramux_first_token_seconds", "Seconds to the first token."
    ),
    "inter_token_latency_seconds": VllmFamily("histogram", "loramux_inter_token_seconds", "Seconds between tokens."),
    "e2e_request_latency_seconds": VllmFamily("histogram", "loramux_completion_seconds", "Seconds to the last token."),
    "request_success": VllmFamily("counter", "loramux_choices", "Choices that have ended, by finish reason."),
}
COMPUTED: dict[str, VllmFamily] = {
    "prompt_tokens": VllmFamily(
        "counter",
        "`loramux_engine_prompt_tokens_total` + `loramux_engine_cached_tokens_total`",
        "Prompt tokens, cached ones included.",
    ),
    "prefix_cache_queries": VllmFamily(
        "counter", "as `vllm:prompt_tokens_total`", "Prompt tokens that were looked up."
    ),
    "kv_cache_usage_perc": VllmFamily(
        "gauge",
        "pages that are neither free nor can be evicted, by `loramux_engine_pages`",
        "The part of the page pool that is in use, 0 to 1; cached prefixes and idle adapters count as free.",
    ),
    "cache_config_info": VllmFamily("gauge", "`block_size` and `num_gpu_blocks` as labels", "Always 1."),
    "lora_requests_info": VllmFamily(
        "gauge",
        "digests, cut to 12 digits, of the adapters that run and wait; `max_lora`: adapters that one step may mix",
        "The Unix time of the scrape.",
    ),
}
FAMILIES = SAME | COMPUTED
"""Families by vLLM's name without its prefix."""


class VllmCollector:
    """Reads our own collectors again, and reports under vLLM's names."""

    def __init__(self, platform: Platform, collectors: Iterable[_Collector]) -> None:
        self._platform = platform
        self._collectors = tuple(collectors)
        self._names = {family.ours: name for name, family in SAME.items()}

    def collect(self) -> Iterator[Metric]:
        """Yield the families."""
        for collector in self._collectors:
            for metric in collector.collect():
                if (name := self._names.get(metric.name)) is not None:
                    yield _renamed(metric, name)
        computed = {name: _empty(name) for name in COMPUTED}
        for base_name, base in self._platform.bases.items():
            for engine, stats in base.engines.stats().items():
                labels = {"model_name": base_name, "engine": engine}
                _add(computed, stats, labels, base.facts.block_size)
        yield from computed.values()

    def describe(self) -> list[Metric]:
        """Return no families, because they are known only when engines report."""
        return []


def _renamed(metric: Metric, name: str) -> Metric:
    renamed = _empty(name)
    for sample in metric.samples:
        if not sample.name.endswith("_created"):
            labels = {LABELS.get(label, label): value for label, value in sample.labels.items()}
            renamed.samples.append(Sample(sample.name.replace(metric.name, renamed.name, 1), labels, sample.value))
    return renamed


def _add(families: dict[str, Metric], stats: EngineStats, labels: dict[str, str], block_size: int) -> None:
    """Add the samples of one engine."""
    prompt = stats.prompt_tokens + stats.cached_tokens
    unused = stats.pages_free + stats.pages_kv_cached + stats.pages_adapters_idle
    cache = {"block_size": str(block_size), "num_gpu_blocks": str(stats.pages_total)}
    adapters = {
        "max_lora": str(stats.routing.max_running),
        "running_lora_adapters": _digests(stats.meters.running_adapters),
        "waiting_lora_adapters": _digests(stats.meters.waiting_adapters),
    }
    samples: dict[str, tuple[dict[str, str], float]] = {
        "prompt_tokens": ({}, prompt),
        "prefix_cache_queries": ({}, prompt),
        "kv_cache_usage_perc": ({}, 1 - unused / max(1, stats.pages_total)),
        "cache_config_info": (cache, 1),
        "lora_requests_info": (adapters, time.time()),
    }
    for name, (more, value) in samples.items():
        suffix = "_total" if COMPUTED[name].kind == "counter" else ""
        families[name].samples.append(Sample(f"{PREFIX}{name}{suffix}", labels | more, value))


def _digests(adapters: Iterable[str]) -> str:
    return ",".join(sorted({one[:DIGEST_LENGTH] for one in adapters}))


def _empty(name: str) -> Metric:
    family = FAMILIES[name]
    return Metric(f"{PREFIX}{name}", family.help, family.kind)
