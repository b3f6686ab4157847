"""Write the Grafana dashboards: `python tools/dashboards.py configs/dashboards`. A test compares the files."""

from __future__ import annotations

import json
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

WIDTH, HEIGHT = 12, 8
GRID = 24


@dataclass(frozen=True, slots=True)
class Panel:
    """A graph: its title, Grafana's unit, and the queries by their legends."""

    title: str
    unit: str
    queries: dict[str, str]


def rate(series: str, by: str = "") -> str:
    """Return the sum of a series' rates; `by` keeps labels."""
    return f"sum {f'by ({by}) ' if by else ''}(rate({series}[$__rate_interval]))"


def quantiles(title: str, family: str) -> Panel:
    """Return a panel of a histogram's median and 99th percentile, in seconds."""
    buckets = rate(f"{family}_bucket", "le")
    return Panel(title, "s", {name: f"histogram_quantile({q}, {buckets})" for name, q in (("p50", 0.5), ("p99", 0.99))})


def rates(title: str, unit: str, **families: str) -> Panel:
    """Return a panel of counters' rates."""
    return Panel(title, unit, {legend.replace("_", " "): rate(family) for legend, family in families.items()})


def gauges(title: str, unit: str = "short", **families: str) -> Panel:
    """Return a panel of gauges, summed over engines."""
    return Panel(title, unit, {legend.replace("_", " "): f"sum ({family})" for legend, family in families.items()})


E = "loramux_engine_"
SERVICE = "loramux_tenant_service_units"
OWN_SERVICE = f'{SERVICE}{{tenant="$tenant"}}'
HITS = rate(f"{E}adapter_hits_total")
DASHBOARDS: dict[str, tuple[str, tuple[Panel, ...]]] = {
    "overview": (
        "loramux: overview",
        (
            quantiles("Time to first token", "loramux_first_token_seconds"),
            quantiles("Time between tokens", "loramux_inter_token_seconds"),
            Panel(
                "Requests by outcome",
                "reqps",
                {"{{status}}": rate("loramux_completions_total", "status")},
            ),
            Panel(
                "Responses by status",
                "reqps",
                {"{{status}}": rate("loramux_http_responses_total", "status")},
            ),
            rates(
                "Tokens a second",
                "short",
                prompt_computed=f"{E}prompt_tokens_total",
                prompt_cached=f"{E}cached_tokens_total",
                generated=f"{E}output_tokens_total",
                computed_again=f"{E}recomputed_tokens_total",
            ),
            gauges("Sequences", running=f"{E}running", waiting=f"{E}waiting"),
            Panel("Engines that serve", "short", {"{{base_model}}": "sum by (base_model) (loramux_engine_up)"}),
            gauges(
                "Money: all 0 when well",
                ledger_drift="abs(loramux_ledger_drift_tokens)",
                unsettled="loramux_unsettled_requests",
            ),
        ),
    ),
    "tenant": (
        "loramux: one tenant",
        (
            Panel(
                "Service a second",
                "short",
                {"{{service_class}}": rate(OWN_SERVICE, "service_class")},
            ),
            Panel(
                "Share of all service",
                "percentunit",
                {"share": f"{rate(OWN_SERVICE)} / {rate(SERVICE)}"},
            ),
            quantiles("Everybody's wait in the queue", "loramux_queue_seconds"),
            Panel("Gap between tenants that wait", "short", {"units over weight": f"max ({E}service_gap)"}),
        ),
    ),
    "memory": (
        "loramux: adapters and memory",
        (
            gauges(
                "Pages by use",
                kv_running=f"{E}pages_kv",
                kv_cached=f"{E}pages_kv_cached",
                adapters_in_use=f"{E}pages_adapters",
                adapters_idle=f"{E}pages_adapters_idle",
                free=f"{E}pages_free",
            ),
            Panel(
                "Adapters found in the pool",
                "percentunit",
                {"hit rate": f"{HITS} / ({HITS} + {rate(f'{E}adapter_misses_total')})"},
            ),
            rates(
                "Adapters loaded and evicted",
                "ops",
                loaded=f"{E}adapter_loads_total",
                evicted=f"{E}adapter_evictions_total",
                failed=f"{E}adapter_load_failures_total",
            ),
            quantiles("Time of a load", "loramux_adapter_load_seconds"),
            gauges(
                "Adapters",
                resident=f"{E}adapters_resident",
                pinned=f"{E}adapters_pinned",
                in_host_memory=f"{E}adapters_host",
            ),
            rates("Cached prefixes evicted", "ops", pages=f"{E}kv_evictions_total"),
            rates("Pages swapped", "ops", out=f"{E}kv_pages_swapped_out_total", back=f"{E}kv_pages_swapped_in_total"),
            gauges("Host memory", "bytes", adapters=f"{E}adapters_host_bytes", images=f"{E}image_bytes"),
        ),
    ),
    "scheduler": (
        "loramux: scheduler and fairness",
        (
            quantiles("Wait in the queue", "loramux_queue_seconds"),
            Panel(
                "Preempted share of requests (alert at 5%)",
                "percentunit",
                {"share": f"{rate(f'{E}preemptions_total')} / {rate('loramux_queue_seconds_count')}"},
            ),
            rates(
                "Refused for lack of time",
                "reqps",
                at_once=f"{E}refused_over_capacity_total",
                after_waiting=f"{E}missed_deadlines_total",
            ),
            Panel(
                "Service by tenant (opaque ids)",
                "short",
                {"{{tenant}} {{service_class}}": rate(SERVICE, "tenant, service_class")},
            ),
            Panel("Gap between tenants that wait", "short", {"units over weight": f"max ({E}service_gap)"}),
            quantiles("Distinct adapters in a step", "loramux_step_adapters"),
            rates("Steps", "ops", steps=f"{E}steps_total"),
            gauges("Steps as CUDA graphs", recorded=f"{E}step_graphs", missing=f"{E}step_graphs_missing"),
            Panel("Starts of engines", "short", {"{{engine}}": f"sum by (engine) ({E}starts_total)"}),
        ),
    ),
    "billing": (
        "loramux: billing and sinks",
        (
            Panel(
                "Tokens of ended requests",
                "short",
                {"{{kind}}": rate("loramux_tokens_total", "kind")},
            ),
            rates(
                "Tokens by the engines' count",
                "short",
                prompt=f"{E}ended_prompt_tokens_total",
                cached=f"{E}ended_cached_tokens_total",
                generated=f"{E}ended_output_tokens_total",
            ),
            gauges("Tokens missing from the ledger", ledger_drift="abs(loramux_ledger_drift_tokens)"),
            gauges("Requests that wait for the database", requests="loramux_unsettled_requests"),
            Panel(
                "Sinks",
                "ops",
                {"{{sink}} {{outcome}}": rate("loramux_sink_entries_total", "sink, outcome")},
            ),
            Panel(
                "Days until the certificate ends",
                "short",
                {"{{instance}}": "(loramux_certificate_expiry_timestamp_seconds > 0) / 86400 - time() / 86400"},
            ),
        ),
    ),
}
EMPTY_AT_FIRST = {"Sinks", "Days until the certificate ends"}
"""Panels that are empty on a server without sinks or TLS."""


def dashboard(name: str) -> dict[str, Any]:
    """Return the JSON document that Grafana imports."""
    title, panels = DASHBOARDS[name]
    variables: list[dict[str, Any]] = [{"name": "datasource", "type": "datasource", "query": "prometheus"}]
    if name == "tenant":
        query = f"label_values({SERVICE}, tenant)"
        variables.append({"name": "tenant", "type": "query", "query": query, "datasource": _SOURCE, "refresh": 2})
    return {
        "uid": f"loramux-{name}",
        "title": title,
        "schemaVersion": 39,
        "editable": True,
        "refresh": "10s",
        "time": {"from": "now-1h", "to": "now"},
        "templating": {"list": variables},
        "panels": [_panel(number, panel) for number, panel in enumerate(panels)],
    }


_SOURCE = {"type": "prometheus", "uid": "${datasource}"}


def _panel(number: int, panel: Panel) -> dict[str, Any]:
    x = number * WIDTH
    return {
        "id": number + 1,
        "type": "timeseries",
        "title": panel.title,
        "datasource": _SOURCE,
        "gridPos": {"h": HEIGHT, "w": WIDTH, "x": x % GRID, "y": x // GRID * HEIGHT},
        "fieldConfig": {"defaults": {"unit": panel.unit}, "overrides": []},
        "targets": [
            {"refId": chr(ord("A") + i), "expr": expression, "legendFormat": legend}
            for i, (legend, expression) in enumerate(panel.queries.items())
        ],
    }


def text(name: str) -> str:
    """Return the file's text."""
    return json.dumps(dashboard(name), indent=1) + "\n"


if __name__ == "__main__":
    for name in DASHBOARDS:
        (Path(sys.argv[1]) / f"{name}.json").write_text(text(name))
