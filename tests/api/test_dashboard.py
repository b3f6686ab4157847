"""The shipped dashboards: what the script writes, over metrics that exist, and none empty on a real Prometheus."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import httpx
import pytest
from prometheus_client.parser import text_string_to_metric_families
from running_server import free_port
from server_process import Place, served
from site_fixture import Site

from dashboards import DASHBOARDS, EMPTY_AT_FIRST, text

ROOT = Path(__file__).parents[2]
FOLDER = ROOT / "configs/dashboards"


NAMES = list(DASHBOARDS)


def queries(name: str) -> list[tuple[str, str]]:
    """(panel, expression) of a dashboard."""
    panels = json.loads((FOLDER / f"{name}.json").read_text())["panels"]
    return [(panel["title"], target["expr"]) for panel in panels for target in panel["targets"]]


def test_files_are_what_the_script_writes() -> None:
    assert {file.stem for file in FOLDER.glob("*.json")} == set(NAMES)
    for name in NAMES:
        assert (FOLDER / f"{name}.json").read_text() == text(name), "run: python tools/dashboards.py configs/dashboards"


def test_dashboard_queries_use_exported_metrics(site: Site) -> None:
    with site.http() as client:
        client.post("/v1/completions", json={"model": "tiny", "prompt": "hi"})
    exported = set()
    for family in text_string_to_metric_families(httpx.get(f"{site.url}/metrics").text):
        ending = {"counter": "_total"}.get(family.type, "")
        exported |= {family.name + ending} | {sample.name for sample in family.samples}
    for name in NAMES:
        for _, expression in queries(name):
            names = re.findall(r"loramux_\w+", expression)
            assert names
            assert set(names) <= exported


@contextmanager
def prometheus(folder: Path, target: str) -> Iterator[str]:
    """A real Prometheus that scrapes `target` every second."""
    port = free_port()
    job = {"job_name": "loramux", "scrape_interval": "1s", "static_configs": [{"targets": [target]}]}
    (folder / "prometheus.yml").write_text(json.dumps({"scrape_configs": [job]}))
    command = ["prometheus", f"--config.file={folder}/prometheus.yml", f"--storage.tsdb.path={folder}/data"]
    with (folder / "log").open("w") as log:
        process = subprocess.Popen([*command, f"--web.listen-address=127.0.0.1:{port}"], stdout=log, stderr=log)
    try:
        yield f"http://127.0.0.1:{port}"
    finally:
        process.terminate()
        process.wait(30)


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("prometheus") is None, reason="needs Prometheus (Debian: prometheus)")
def test_no_panel_is_empty_on_a_prometheus_that_scraped_a_server_under_load(base_dir: Path, tmp_path: Path) -> None:
    place = Place(tmp_path, base_dir, in_process=True).prepare()
    key = place.key_of("acme")
    with served(place) as child, prometheus(tmp_path, child.url.removeprefix("http://")) as url:
        until = time.monotonic() + 30
        body = {"model": "tiny", "prompt": "hi", "max_tokens": 4}
        with child.http(key) as client:
            while time.monotonic() < until:
                client.post("/v1/completions", json=body).raise_for_status()
                time.sleep(0.05)
        tenants = httpx.get(f"{url}/api/v1/label/tenant/values", timeout=20).json()["data"]
        empty = []
        for name in NAMES:
            for panel, expression in queries(name):
                asked = expression.replace("$__rate_interval", "15s").replace("$tenant", tenants[0])
                answer = httpx.get(f"{url}/api/v1/query", params={"query": asked}, timeout=20)
                assert answer.status_code == 200, (expression, answer.text)
                if not answer.json()["data"]["result"] and panel not in EMPTY_AT_FIRST:
                    empty.append((name, panel, asked))
        assert empty == []
