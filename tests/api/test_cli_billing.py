"""A month from its price list to its exports, by the commands that an operator types."""

from __future__ import annotations

import csv
import hashlib
import json
import sqlite3
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result
from site_fixture import Site

from loramux.simulator.traffic import read_workload
from loramux_api.cli.main import main
from loramux_api.cli.workloads import usage_log

CONFIGS = Path(__file__).parents[2] / "configs"


@pytest.fixture
def month() -> str:
    """The month that still runs; it may have begun since the tests were collected."""
    return datetime.now(UTC).strftime("%Y-%m")


@pytest.fixture
def config(tmp_path: Path) -> Path:
    file = tmp_path / "loramux.toml"
    file.write_text(
        '[model]\npath = "base"\nserved_model_name = "tiny"\n[records]\nurl = "sqlite:///records.sqlite3"\n'
    )
    return file


def loramux(config: Path, *arguments: str, code: int = 0) -> Result:
    result = CliRunner().invoke(main, [*arguments, "--config", str(config)], env={"LORAMUX_CONFIG": ""})
    assert result.exit_code == code, result.output
    return result


def read(config: Path, *arguments: str) -> Any:
    return json.loads(loramux(config, *arguments, "--json").stdout)


def test_price_and_usage_commands_cover_a_month(config: Path, tmp_path: Path, month: str) -> None:
    loramux(config, "tenant", "create", "acme")
    assert read(config, "price", "apply", "standard") == {"added": 6}
    assert read(config, "price", "apply", str(CONFIGS / "prices" / "standard.toml")) == {"added": 0}
    assert [plan["name"] for plan in read(config, "price", "ls")] == ["standard"]
    loramux(config, "price", "assign", "standard", "--tenant", "acme", "--from", month)
    assert (
        "already; use --replace or a later"
        in loramux(config, "price", "assign", "standard", "--tenant", "acme", "--from", month, code=1).stderr
    )
    draft = read(
        config,
        "usage",
        "invoice",
        "--tenant",
        "acme",
        "--period",
        month,
        "--html",
        str(tmp_path / "i.html"),
        "--pdf",
        str(tmp_path / "i.pdf"),
    )
    assert (draft["status"], draft["total"], draft["currency"]) == ("draft", "0.00", "USD")
    assert f"INV-{month}-acme" in (tmp_path / "i.html").read_text()
    assert (tmp_path / "i.pdf").read_bytes().startswith(b"%PDF-")
    assert "not over yet" in loramux(config, "usage", "close", "--period", month, code=1).stderr
    for focus in ((), ("--focus",)):
        made = read(config, "usage", "export", "--period", month, "--out", str(tmp_path / "out"), *focus)
        data = (tmp_path / "out" / made["file"]).read_bytes()
        assert (made["rows"], made["sha256"]) == (0, hashlib.sha256(data).hexdigest())
    assert read(config, "usage", "reconcile")["entries"] == 0
    assert read(config, "usage", "margin", "--period", month, "--gpu-cost", "12.50") == []
    assert "not an amount" in loramux(config, "usage", "margin", "--period", month, "--gpu-cost", "x", code=2).stderr
    assert read(config, "usage", "margin", "--period", month, "--gpu-cost", "USD=1", "--gpu-cost", "JPY=2") == []
    for wrong in (("USD=1", "USD=2"), ("1", "USD=2"), ("XYZ=1",), ("USD=",)):
        costs = [part for one in wrong for part in ("--gpu-cost", one)]
        assert "--gpu-cost" in loramux(config, "usage", "margin", "--period", month, *costs, code=2).stderr
    assert read(config, "usage", "deliver") == []


def test_focus_export_and_dry_run_of_an_open_month_have_the_issuer_and_the_minimum(
    config: Path, tmp_path: Path, month: str
) -> None:
    config.write_text(config.read_text() + '[billing]\nissuer = "Example GmbH"\n')
    prices = (CONFIGS / "prices" / "standard.toml").read_text()
    (tmp_path / "prices.toml").write_text(prices.replace('minimum = "0.00"', 'minimum = "5.00"'))
    loramux(config, "tenant", "create", "acme")
    read(config, "price", "apply", str(tmp_path / "prices.toml"))
    loramux(config, "price", "assign", "standard", "--tenant", "acme", "--from", month)
    for options, issuer in (((), "Example GmbH"), (("--provider", "Other Ltd"), "Other Ltd")):
        out = tmp_path / issuer
        made = read(config, "usage", "export", "--period", month, "--focus", "--out", str(out), *options)
        with (out / made["file"]).open(newline="") as file:
            [row] = csv.DictReader(file)
        assert row["BilledCost"] == "5.00"
        assert {row[f"{name}Name"] for name in ("Provider", "Publisher", "InvoiceIssuer")} == {issuer}
    shown = loramux(config, "usage", "close", "--period", month, "--dry-run").stdout
    said, _, row = shown.splitlines()
    assert (said, row.split()) == (f"If {month} were closed now:", [f"INV-{month}-acme", "5.00", "USD"])
    assert read(config, "usage", "invoice", "--tenant", "acme", "--period", month)["total"] == "5.00"


def test_reconcile_drift_exits_with_one(config: Path, tmp_path: Path) -> None:
    loramux(config, "tenant", "create", "acme")
    with sqlite3.connect(tmp_path / "records.sqlite3") as records:
        records.execute("INSERT INTO engine_counts VALUES ('server', 'tiny', '', 5, 0, 2)")
    told = loramux(config, "usage", "reconcile", code=1).stderr
    assert "differ by 7 tokens" in told
    assert "tiny" in told


def test_reconcile_altered_ledger_exits_with_one(config: Path, tmp_path: Path) -> None:
    loramux(config, "tenant", "create", "acme")
    with sqlite3.connect(tmp_path / "records.sqlite3") as records:
        records.execute("UPDATE ledger_head SET sequence = 3")
    assert "ledger entry 3" in loramux(config, "usage", "reconcile", code=1).stderr


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (("usage", "invoice", "--tenant", "nobody", "--period", "2026-11"), "there is no tenant 'nobody'"),
        (("usage", "close", "--period", "2026-13"), "a period is a month such as 2026-11"),
        (("usage", "correct", "evt_1", "--change", "output_tokens=1", "--reason", "x"), "no entry 'evt_1'"),
        (("usage", "export", "--period", "1999-01"), "nothing is billed in 1999-01"),
        (("price", "assign", "none", "--tenant", "nobody", "--from", "2026-11"), "there is no tenant 'nobody'"),
        (("price", "apply", "absent.toml"), "cannot be read"),
    ],
)
def test_billing_refusal_names_the_reason(config: Path, arguments: tuple[str, ...], told: str) -> None:
    assert told in loramux(config, *arguments, code=1).stderr


def test_costs_work_with_openais_admin_client(site: Site) -> None:
    import time

    import openai

    site.openai("globex").completions.create(model="tiny", prompt="ab", extra_body={"metadata": {"team": "red"}})
    admin = openai.OpenAI(base_url=f"{site.url}/v1", api_key="x", admin_api_key=site.keys["globex"], max_retries=0)
    page = admin.admin.organization.usage.costs(start_time=int(time.time()) - 60, group_by=["line_item", "project_id"])
    results = [result for bucket in page.data for result in bucket.results]
    assert {"input_uncached, tiny, standard", "output, tiny, standard"} <= {result.line_item for result in results}
    assert {result.amount.value for result in results} == {0.0}
    with site.http("globex") as http:
        for query, param in (
            ("bucket_width=1h", "bucket_width"),
            ("group_by=user_id", "group_by"),
            ("limit=0", "limit"),
        ):
            refused = http.get(f"/v1/organization/costs?start_time=0&{query}")
            assert (refused.status_code, refused.json()["error"]["param"]) == (400, param)


def test_plan_from_usage_reads_sizes_and_times_and_no_names(site: Site, tmp_path: Path) -> None:
    with site.http() as client:
        body = {"model": "tiny", "prompt": "a prompt of some more tokens", "max_tokens": 11}
        used = [client.post("/v1/completions", json=body).json()["usage"] for _ in range(3)]
    file = tmp_path / "loramux.toml"
    file.write_text(
        f'[model]\npath = "base"\nserved_model_name = "tiny"\n[records]\nurl = "{site.settings.records.url}"\n'
    )
    asked = [(usage["prompt_tokens"], usage["completion_tokens"], 11) for usage in used]
    log = usage_log(file, "1h", "tiny")
    log = [one for one in log if (one.prompt_tokens, one.output_tokens, one.max_tokens) in asked]
    assert len(log) == 3
    assert {(one.adapter, one.tenant.partition("-")[0]) for one in log} == {("", "tenant")}
    assert [one.arrival_s for one in log] == sorted(one.arrival_s for one in log)
    assert {one.base for one in log} == {"tiny"}
    for name in ("week.jsonl", "week.toml"):
        saved = tmp_path / name
        loramux(file, *PLAN, "--from-usage", "1h", "--base", "tiny", "--save-workload", str(saved))
        assert "tiny" in saved.read_text()
        assert "a prompt" not in saved.read_text()
        assert len(read_workload(saved)) >= 1
        simulate = ("simulate", "--workload", str(saved), "--gpu", "a10g", "--model", "qwen2.5-0.5b", "--json")
        assert json.loads(CliRunner().invoke(main, simulate).stdout)["accepted"] >= 1
    simulated = loramux(file, "simulate", "--from-usage", "1h", "--base", "tiny", *PLAN[1:])
    assert "first token" in simulated.stdout
    assert "no request" in loramux(file, *PLAN, "--from-usage", "1h", "--base", "absent", code=1).stderr
    assert "7d, 12h or 30m" in loramux(file, *PLAN, "--from-usage", "forever", code=2).stderr
    assert "either --workload" in loramux(file, *PLAN, code=2).stderr


PLAN = ("plan", "--gpu", "a10g", "--model", "qwen2.5-0.5b")
