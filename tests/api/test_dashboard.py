"""The shipped dashboard asks for nothing that the server does not export."""

from __future__ import annotations

import json
import re
from pathlib import Path

import httpx
from prometheus_client.parser import text_string_to_metric_families
from site_fixture import Site

DASHBOARD = Path(__file__).parents[2] / "configs/dashboards/loramux.json"


def test_every_query_of_the_dashboard_names_exported_metrics(site: Site) -> None:
    with site.http() as client:
        client.post("/v1/completions", json={"model": "tiny", "prompt": "hi"})
    exported = set()
    for family in text_string_to_metric_families(httpx.get(f"{site.url}/metrics").text):
        ending = {"counter": "_total"}.get(family.type, "")
        exported |= {family.name + ending} | {sample.name for sample in family.samples}
    panels = json.loads(DASHBOARD.read_text())["panels"]
    queries = [target["expr"] for panel in panels for target in panel["targets"]]
    assert len(queries) >= 20
    for query in queries:
        names = re.findall(r"loramux_\w+", query)
        assert names
        assert set(names) <= exported
