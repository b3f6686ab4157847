"""The alert rules: each fires and stays quiet in promtool, asks for metrics that exist, and has a runbook."""

from __future__ import annotations

import re
import shutil
import subprocess
from pathlib import Path

import pytest
import yaml

from loramux_api.metrics import FAMILIES

ROOT = Path(__file__).parents[1]
RULES = ROOT / "configs/prometheus/alerts.yaml"
TESTS = ROOT / "configs/prometheus/alerts.test.yaml"
RUNBOOKS = (ROOT / "docs/operations/alerts.md").read_text()
ALERTS = [rule for group in yaml.safe_load(RULES.read_text())["groups"] for rule in group["rules"] if "alert" in rule]


@pytest.mark.skipif(shutil.which("promtool") is None, reason="needs promtool (Debian: prometheus)")
def test_rules_fire_and_stay_quiet_in_promtool() -> None:
    done = subprocess.run(["promtool", "test", "rules", str(TESTS)], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr


def test_every_alert_is_tested_both_ways() -> None:
    quiet, loud = yaml.safe_load(TESTS.read_text())["tests"]
    names = {rule["alert"] for rule in ALERTS}
    assert {test["alertname"] for test in quiet["alert_rule_test"]} == names
    (firing,) = loud["promql_expr_test"]
    assert {re.findall('"(.*)"', sample["labels"])[0] for sample in firing["exp_samples"]} == names


def test_rules_ask_for_metrics_that_are_exported() -> None:
    exported = {
        family.name + ending
        for family in FAMILIES
        for ending in {"counter": ("_total",), "gauge": ("",), "histogram": ("_bucket", "_count", "_sum")}[family.kind]
    }
    used = set(re.findall(r"\bloramux_\w+", RULES.read_text()))
    assert used
    assert used <= exported


@pytest.mark.parametrize("rule", ALERTS, ids=lambda rule: rule["alert"])
def test_alert_has_a_runbook_with_four_parts(rule: dict) -> None:
    anchor = rule["annotations"]["runbook_url"].partition("#")[2]
    sections = {part.split("\n")[0].lower(): part for part in RUNBOOKS.split("\n## ")[1:]}
    for word in ("**Means.**", "**Look here.**", "**Do this.**", "**Over when**"):
        assert word in sections[anchor]
    assert rule["labels"]["severity"] in ("page", "ticket")
