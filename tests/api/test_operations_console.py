"""/admin/activity, /admin/ledger and /admin/plan, and the searches that the console's pages use."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import msgspec
import pytest
from peft_uploads import CONFIG, WEIGHTS, make_adapter
from site_fixture import Site

from loramux.engine.messages import (
    BatchRows,
    EngineMeters,
    EngineStats,
    Evictable,
    RoutingFacts,
    ServiceClass,
    StepSample,
)
from loramux_api.controllers import plans
from loramux_api.controllers.plans import PlanBody, PlanFailed, WhatIf

QUESTION = {"gpu": "h100", "model": "qwen2.5-0.5b", "rate": 2, "adapters": 2, "output_tokens": 5, "prompt_tokens": 20}


def test_activity_has_steps_and_what_leaves_the_pool_next(site: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    rows = [BatchRows(None, ServiceClass.STANDARD, 7, 2), BatchRows("sha256:unknown", ServiceClass.BATCH, 0, 3)]
    meters = EngineMeters(
        timeline=[StepSample(1000.5, 12, 300, 40, rows)],
        evictable=[Evictable(None, "sha256:unknown", True, 5, 0.5, -1.0, False)],
    )
    monkeypatch.setattr(site.engine, "stats", lambda: EngineStats(steps=13, meters=meters))
    with site.http("all-scopes") as http:
        (one,) = http.get("/admin/activity").json()["data"]
    (step,) = one["timeline"]
    assert (step["steps"], step["prompt_tokens"], step["output_tokens"]) == (12, 300, 40)
    assert [(row["model"], row["prefill"], row["decode"]) for row in step["rows"]] == [
        ("tiny", 7, 2),
        ("sha256:unknown", 0, 3),
    ]
    (next_,) = one["evictable"]
    assert (next_["kind"], next_["pages"], next_["value"]) == ("adapter", 5, 0.5)


def test_activity_names_an_adapter_as_its_tenant_does(
    site: Site, base_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with site.http("all-scopes") as http:
        folder = make_adapter(base_dir, tmp_path, seed=179)  # no other test's bytes, which have their own name
        files = {name: (name, (folder / name).read_bytes()) for name in (CONFIG, WEIGHTS)}
        http.post("/v1/adapters", data={"name": "named"}, files=files).raise_for_status()
        asked = http.post("/v1/completions", json={"model": "acme/named", "prompt": "hello", "max_tokens": 2})
        assert asked.is_success
        adapter = site.engine.requests[-1].adapter
        assert adapter is not None
        rows = [BatchRows(adapter.digest, ServiceClass.STANDARD, 1, 0)]
        meters = EngineMeters(timeline=[StepSample(1.0, 1, 1, 0, rows)])
        monkeypatch.setattr(site.engine, "stats", lambda: EngineStats(steps=1, meters=meters))
        (step,) = http.get("/admin/activity").json()["data"][0]["timeline"]
    assert [row["model"] for row in step["rows"]] == ["acme/named@1"]


def test_engine_shows_the_format_of_its_linears_and_the_floor_of_a_step(
    site: Site, monkeypatch: pytest.MonkeyPatch
) -> None:
    measured = {"format": "panels", "gflops": 400.0, "memory_gb_per_s": 20.0, "floor_ms": 25.0}
    with site.http("all-scopes") as http:
        monkeypatch.setattr(site.engine, "stats", EngineStats)
        (before,) = http.get("/admin/engines").json()["data"]
        monkeypatch.setattr(site.engine, "stats", lambda: EngineStats(routing=RoutingFacts(weights_s=0.05)))
        (shown,) = http.get("/admin/overview").json()["engines"]
    assert before["linears"] == {**measured, "reading_ms": None}
    assert shown["engine"]["linears"] == {**measured, "reading_ms": 50.0}


def test_engine_shows_the_limits_of_its_steps(site: Site) -> None:
    with site.http("all-scopes") as http:
        (engine,) = http.get("/admin/engines").json()["data"]
    assert engine["step_limits"] == msgspec.structs.asdict(site.engine.facts.limits)


def test_operators_pages_are_for_operators(site: Site) -> None:
    with site.http("acme") as http:
        for path in ("/admin/activity", "/admin/ledger", "/admin/plan"):
            assert http.get(path).status_code == 403
        assert http.post("/admin/plan", json=QUESTION).status_code == 403
        assert http.post("/admin/ledger/reconcile").status_code == 403


def test_ledger_shows_its_head_and_the_last_reconciliation(site: Site) -> None:
    with site.http("all-scopes") as http:
        asked = http.post("/v1/completions", json={"model": "tiny", "prompt": "hello", "max_tokens": 2})
        assert asked.is_success
        outcome = http.post("/admin/ledger/reconcile").json()
        assert outcome["problems"] == []
        found = http.get("/admin/ledger").json()
    assert found["sequence"] >= outcome["entries"] > 0
    assert len(found["hash"]) == 64
    assert found["reconciliation"]["entries"] == outcome["entries"]


@pytest.mark.parametrize(
    ("change", "field"),
    [
        ({"gpu": "abacus"}, "gpu"),
        ({"model": "../etc"}, "model"),
        ({"rate": 10**6}, "rate"),
        ({"profile": "abacus"}, "gpu"),
        ({"profile": "../etc", "gpu": None}, "profile"),
        ({"bases": [{"name": "a", "model": "qwen2.5-0.5b"}]}, "model"),
        ({"bases": [{"name": "a", "model": "../etc"}], "model": None}, "bases"),
        ({"bases": [{"name": "a", "model": "qwen2.5-0.5b"}] * 2, "model": None}, "bases"),
        ({"bases": [{"name": "a=b", "model": "qwen2.5-0.5b"}], "model": None}, "name"),
        ({"quantization": "int3"}, "quantization"),
    ],
)
def test_plan_refuses_what_it_cannot_simulate(site: Site, change: dict[str, object], field: str) -> None:
    with site.http("all-scopes") as http:
        answer = http.post("/admin/plan", json=QUESTION | change)
    assert answer.status_code == 400
    assert field in answer.text


def test_plans_are_searched_one_at_a_time_in_a_separate_process(site: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(plans, "MAX_REQUESTS", 20)
    with site.http("all-scopes") as http:
        choices = http.get("/admin/plan").json()
        assert "h100" in choices["gpus"]
        with ThreadPoolExecutor() as pool:
            answers = list(pool.map(lambda _: http.post("/admin/plan", json=QUESTION), range(2)))
    assert sorted(answer.status_code for answer in answers) == [200, 429]
    plan = next(answer.json() for answer in answers if answer.status_code == 200)
    assert plan["goals_met"]
    [base] = plan["bases"]
    assert base["recommended"]["gpus"] == 1
    assert len(base["tried"]) > 1
    assert "ESTIMATED" in base["times"]


def test_plan_of_two_bases_has_forms_ranks_and_static_batching(site: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(plans, "MAX_REQUESTS", 20)
    models = {"chat": "qwen2.5-0.5b", "code": "llama-3.1-8b"}
    question = {name: value for name, value in QUESTION.items() if name != "model"} | {
        "bases": [{"name": name, "model": model, "share": 0.5} for name, model in models.items()],
        "quantization": "int8",
        "kv_cache_dtype": "fp8",
        "ranks": [8, 64],
        "compare_static": True,
    }
    with site.http("all-scopes") as http:
        plan = http.post("/admin/plan", json=question).raise_for_status().json()
    assert [base["base"] for base in plan["bases"]] == list(models)
    assert plan["dollars_per_hour"] == sum(base["dollars_per_hour"] for base in plan["bases"])
    for base in plan["bases"]:
        assert 'quantization = "int8"' in base["settings"]
        assert 'kv_cache_dtype = "fp8"' in base["settings"]
        assert base["static"]
        assert all(one["dollars_per_hour"] < base["dollars_per_hour"] for one in base["alternatives"])


def test_form_of_a_plan_reaches_its_simulation(site: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two ranks of one adapter list are other bytes than one rank: the figures differ."""
    monkeypatch.setattr(plans, "MAX_REQUESTS", 20)
    with site.http("all-scopes") as http:
        found = [
            http.post("/admin/plan", json=QUESTION | more).raise_for_status().json()["bases"][0]["recommended"]
            for more in ({}, {"ranks": [256]}, {"quantization": "int4"})
        ]
    assert len({one["itl_ms_p50"] for one in found}) == 3


@pytest.mark.anyio
async def test_plan_that_takes_too_long_is_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(plans, "MAX_SECONDS", 0.01)
    body = {"rank": 16, "tenants": 1, "ttft_ms": 1000, "itl_ms": 100} | QUESTION
    with pytest.raises(PlanFailed, match="no plan was found"):
        await WhatIf().plan(PlanBody(**body))  # type: ignore[arg-type]


def test_adapters_and_models_are_searched_by_name(site: Site) -> None:
    with site.http("all-scopes") as http:
        assert http.get("/v1/adapters", params={"search": "no-such"}).json()["data"] == []
        assert [one["id"] for one in http.get("/v1/models", params={"search": "TIN"}).json()["data"]] == ["tiny"]
        assert http.get("/v1/models", params={"search": "%", "limit": 5}).json()["data"] == []
        assert http.get("/v1/adapters", params={"search": "x" * 65}).status_code == 400
