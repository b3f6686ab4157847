"""The exposition at /metrics follows Prometheus' conventions, and the reference pages follow the code."""

from __future__ import annotations

import re
from pathlib import Path

import httpx
import msgspec
import pytest
from prometheus_client import Metric
from prometheus_client.parser import text_string_to_metric_families
from site_fixture import Site

from loramux.engine.messages import EngineStats
from loramux_api.metrics import ENGINE_FAMILIES, FAMILIES
from loramux_api.reference import PAGES

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


def test_every_statistic_of_the_engine_has_a_family() -> None:
    fields = set(EngineStats.__struct_fields__) - {"meters", "ended", "routing"}
    counted = {f"ended_{name}_tokens" for name in msgspec.structs.asdict(EngineStats().ended)}
    assert fields | counted == ENGINE_FAMILIES.keys()


@pytest.mark.parametrize("page", PAGES)
def test_generated_page_is_current(page: str) -> None:
    assert (DOCS / page).read_text() == PAGES[page](), "run: python -m loramux_api.reference docs"


def test_every_setting_is_documented() -> None:
    empty = [line for line in (DOCS / "settings.md").read_text().splitlines() if re.search(r"\|\s*\|$", line)]
    assert empty == []
