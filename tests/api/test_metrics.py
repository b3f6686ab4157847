"""The exposition at /metrics follows Prometheus' conventions, and the reference pages follow the code."""

from __future__ import annotations

import re
from pathlib import Path

import httpx
import msgspec
import pytest
from prometheus_client import Metric
from prometheus_client.parser import text_string_to_metric_families
from prometheus_client.samples import Sample
from site_fixture import Site

from loramux.engine.messages import EngineMeters, EngineStats, RoutingFacts
from loramux_api import vllm_metrics
from loramux_api.metrics import ENGINE_FAMILIES, FAMILIES
from reference import PAGES, TABLES, with_tables

DOCS = Path(__file__).parents[2] / "docs"
UNITS = re.compile(r"_(ms|milliseconds|minutes|hours|kb|mb|gb|kilobytes|megabytes|gigabytes|percent|secs?|s)(_total)?$")
KINDS = re.compile(r"(^|_)(counter|gauge|histogram|summary)(_|$)")


def lint(family: Metric) -> list[str]:
    """The problems that `promtool check metrics` reports, by its rules."""
    name, problems = family.name, []
    if not family.documentation.strip():
        problems.append("no help text")
    if family.type == "counter" and not all(sample.name.endswith("_total") for sample in family.samples):
        problems.append("counter metrics should have the suffix _total")
    if family.type != "counter" and name.endswith("_total"):
        problems.append("non-counter metrics should not have the suffix _total")
    if family.type not in ("histogram", "summary") and name.endswith(("_count", "_sum", "_bucket")):
        problems.append("only histograms and summaries have the suffixes _count, _sum and _bucket")
    if family.type != "histogram" and any("le" in sample.labels for sample in family.samples):
        problems.append("only histograms have the label le")
    if KINDS.search(name):
        problems.append("the name should not contain the type")
    if UNITS.search(name):
        problems.append("the unit should be a base unit: seconds, bytes")
    if not re.fullmatch(r"[a-z][a-z0-9_]*", name):
        problems.append("the name should be in snake_case")
    return problems


def exposed(site: Site) -> list[Metric]:
    return [family for family in scraped(site) if not family.name.startswith(vllm_metrics.PREFIX)]


def scraped(site: Site) -> list[Metric]:
    with site.http() as client:
        client.post("/v1/completions", json={"model": "tiny", "prompt": "hi"})
    text = httpx.get(f"{site.url}/metrics").text
    return [family for family in text_string_to_metric_families(text) if not family.name.endswith("_created")]


def test_metrics_pass_promtools_rules(site: Site) -> None:
    assert {family.name: problems for family in exposed(site) if (problems := lint(family))} == {}


@pytest.mark.parametrize(
    ("family", "problem"),
    [
        (Metric("loramux_engine_pages_total", "Pages.", "gauge"), "_total"),
        (Metric("loramux_wait_ms", "Waits.", "gauge"), "base unit"),
        (Metric("loramux_step_count", "Steps.", "gauge"), "_count"),
        (Metric("loramux_pages_gauge", "Pages.", "gauge"), "type"),
        (Metric("loramux_pages", " ", "gauge"), "no help"),
    ],
)
def test_lint_reports_what_promtool_reports(family: Metric, problem: str) -> None:
    (found,) = lint(family)
    assert problem in found


def test_metrics_are_exactly_the_documented_families(site: Site) -> None:
    documented = {family.name: (family.kind, family.help) for family in FAMILIES}
    assert {family.name: (family.type, family.documentation) for family in exposed(site)} == documented
    assert all(len(help.split()) >= 3 and help.endswith(".") for _, help in documented.values())
    for name, (_, help) in documented.items():
        assert help.lower().rstrip(".") != name.removeprefix("loramux_").removeprefix("engine_").replace("_", " ")


def test_families_with_vllms_names_have_our_values(site: Site) -> None:
    found = {family.name: family for family in scraped(site)}
    named = {name.removeprefix("vllm:") for name in found if name.startswith("vllm:")}
    assert named == vllm_metrics.FAMILIES.keys()
    for name, family in vllm_metrics.SAME.items():
        ours, theirs = found[family.ours], found[f"vllm:{name}"]
        assert theirs.type == ours.type == family.kind
        assert theirs.samples
        assert sorted(sample.value for sample in theirs.samples) == sorted(sample.value for sample in ours.samples)
        for sample in theirs.samples:
            assert sample.labels["model_name"] == "tiny"
            assert sample.name.startswith(theirs.name)
    for name, family in vllm_metrics.COMPUTED.items():
        assert found[f"vllm:{name}"].type == family.kind


def test_router_reads_load_and_adapters_under_vllms_names(site: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    """Read the metrics as the endpoint picker of the Gateway API inference extension does."""
    keys = [f"sha256:{digit * 64}/tenant_{digit * 32}" for digit in "ab"]
    stats = EngineStats(
        waiting=3, pages_total=100, pages_kv=20, pages_kv_cached=30, pages_adapters=5, pages_adapters_idle=10,
        pages_free=35, prompt_tokens=7, cached_tokens=2, routing=RoutingFacts(max_running=8),
        meters=EngineMeters(running_adapters=keys[:1], waiting_adapters=keys),
    )  # fmt: skip
    monkeypatch.setattr(site.engine, "stats", lambda: stats)
    found = {family.name.removeprefix("vllm:"): family.samples for family in scraped(site)}
    assert [sample.value for sample in found["num_requests_waiting"]] == [3]
    assert [sample.value for sample in found["kv_cache_usage_perc"]] == [0.25]
    assert [sample.value for sample in found["prompt_tokens"]] == [9]
    (lora,) = found["lora_requests_info"]
    assert lora.labels["max_lora"] == "8"
    assert lora.labels["running_lora_adapters"] == "sha256:aaaaaaaaaaaa"
    assert lora.labels["waiting_lora_adapters"] == "sha256:aaaaaaaaaaaa,sha256:bbbbbbbbbbbb"
    assert "tenant_" not in str(lora)


def test_waits_are_counted_by_service_tier(site: Site) -> None:
    """Else a batch that waits for hours would burn the budget of people's waits."""
    before = {sample.labels["service_tier"]: sample.value for sample in first_tokens(site)}
    with site.http() as client:
        client.post(
            "/v1/completions", json={"model": "tiny", "prompt": "hi", "service_tier": "flex"}
        ).raise_for_status()
    after = {sample.labels["service_tier"]: sample.value for sample in first_tokens(site)}
    assert after["flex"] == before.get("flex", 0) + 1


def first_tokens(site: Site) -> list[Sample]:
    (family,) = [one for one in exposed(site) if one.name == "loramux_first_token_seconds"]
    return [sample for sample in family.samples if sample.name.endswith("_count")]


def test_every_statistic_of_the_engine_has_a_family() -> None:
    fields = set(EngineStats.__struct_fields__) - {"meters", "ended", "routing"}
    counted = {f"ended_{name}_tokens" for name in msgspec.structs.asdict(EngineStats().ended) if name != "image"}
    assert fields | counted == ENGINE_FAMILIES.keys()


@pytest.mark.parametrize("page", PAGES)
def test_generated_page_is_current(page: str) -> None:
    assert (DOCS / page).read_text() == PAGES[page](), "run: python tools/reference.py docs"


@pytest.mark.parametrize("page", TABLES)
def test_generated_tables_of_a_written_page_are_current(page: str) -> None:
    text = (DOCS / page).read_text()
    assert text == with_tables(page, text), "run: python tools/reference.py docs"


def test_every_setting_is_documented() -> None:
    empty = [line for line in (DOCS / "settings.md").read_text().splitlines() if re.search(r"\|\s*\|$", line)]
    assert empty == []
