"""Routes of the console's buttons: price plans of tenants, deleted adapters, invoices as texts, cancelled plans."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from datetime import date
from pathlib import Path

import httpx
import pytest
from peft_uploads import form, make_adapter
from site_fixture import Site

from loramux.data.records.database import Database
from loramux.money.billing.catalog import Catalog, PlanSpec, PriceSpec
from loramux_api.controllers import plans

QUESTION = {"gpu": "h100", "model": "qwen2.5-0.5b", "rate": 50, "adapters": 20}


@pytest.fixture
def operator(site: Site) -> Iterator[httpx.Client]:
    with site.http("all-scopes") as http:
        yield http


@pytest.fixture
def priced(site: Site) -> None:
    """Two plans in dollars, one in yen."""
    prices = (PriceSpec(meter="output", price="0.60", per=1_000_000, valid_from=date(2023, 1, 1)),)
    specs = [
        PlanSpec(name="console-usd", currency="USD", minimum="12.50", prices=prices),
        PlanSpec(name="console-usd-2", currency="USD", prices=prices),
        PlanSpec(name="console-jpy", currency="JPY", prices=prices),
    ]

    async def add() -> None:
        database = Database(site.settings.records.url)
        await Catalog(database).apply(specs)
        await database.close()

    asyncio.run(add())


def make_tenant(http: httpx.Client, name: str) -> str:
    http.post("/admin/tenants", json={"name": name}).raise_for_status()
    return f"/admin/tenants/{name}/price-plans"


def test_price_plans_are_listed_with_currency_minimum_and_meters(operator: httpx.Client, priced: None) -> None:
    found = {one["name"]: one for one in operator.get("/admin/price-plans").json()["data"]}
    assert (found["console-usd"]["currency"], found["console-usd"]["minimum"]) == ("USD", "12.50")
    assert found["console-usd"]["meters"] == ["output"]
    assert (found["console-jpy"]["currency"], found["console-jpy"]["minimum"]) == ("JPY", "0")


def test_price_plan_is_assigned_replaced_and_taken_back_by_the_operator(operator: httpx.Client, priced: None) -> None:
    path = make_tenant(operator, "billed-1")
    assigned = operator.put(f"{path}/2999-01", json={"plan": "console-usd"}).json()["data"]
    assert [(one["plan"], one["currency"], one["month"]) for one in assigned] == [("console-usd", "USD", "2999-01")]
    again = operator.put(f"{path}/2999-01", json={"plan": "console-usd-2"})
    assert (again.status_code, again.json()["param"]) == (400, "month")
    replaced = operator.put(f"{path}/2999-01", json={"plan": "console-usd-2", "replace": True}).json()["data"]
    assert [one["plan"] for one in replaced] == ["console-usd-2"]
    entry = operator.get("/admin/audit", params={"tenant": "billed-1", "limit": 1}).json()["data"][0]
    assert (entry["action"], entry["actor"].startswith("key_")) == ("plan.replace", True)
    assert operator.delete(f"{path}/2999-01").json()["data"] == []
    assert operator.get(path).json()["data"] == []


@pytest.mark.parametrize(
    ("month", "body", "param"),
    [
        ("2999-13", {"plan": "console-usd"}, "period"),
        ("2999-02", {"plan": "no-such"}, "plan"),
        ("2999-02", {"plan": "console-jpy"}, "plan"),
        ("2999-02", {"plan": "x" * 64}, "plan"),
    ],
)
def test_price_plan_that_cannot_be_assigned_names_the_field(
    operator: httpx.Client, priced: None, month: str, body: dict[str, str], param: str
) -> None:
    path = make_tenant(operator, f"billed-{abs(hash((month, body['plan']))):x}"[:40])
    operator.put(f"{path}/2999-01", json={"plan": "console-usd"}).raise_for_status()
    refused = operator.put(f"{path}/{month}", json=body)
    assert (refused.status_code, refused.json()["param"]) == (400, param), refused.text
    assert [one["month"] for one in operator.get(path).json()["data"]] == ["2999-01"]


def test_price_plans_are_for_operators(site: Site) -> None:
    with site.http("acme") as http:
        assert http.get("/admin/price-plans").status_code == 403
        assert http.put("/admin/tenants/acme/price-plans/2999-01", json={"plan": "console-usd"}).status_code == 403


def test_deleted_adapters_are_listed_until_they_are_restored(
    site: Site, newcomer: str, base_dir: Path, tmp_path: Path
) -> None:
    with site.http(newcomer) as http:
        http.post("/v1/adapters", **form(make_adapter(base_dir, tmp_path, seed=31), "gone-by-hand")).raise_for_status()
        http.post("/v1/adapters", **form(make_adapter(base_dir, tmp_path, seed=31), "kept")).raise_for_status()
        assert http.get("/v1/deleted_adapters").json()["data"] == []
        http.delete("/v1/adapters/gone-by-hand").raise_for_status()
        (found,) = http.get("/v1/deleted_adapters").json()["data"]
        assert (found["name"], found["revisions"]) == (f"{newcomer}/gone-by-hand", 1)
        assert found["undo_until"] > found["deleted_at"] > time.time() - 600
        http.delete("/v1/adapters/kept").raise_for_status()
        (first,) = http.get("/v1/deleted_adapters", params={"limit": 1}).json()["data"]
        (other,) = http.get("/v1/deleted_adapters", params={"search": "gone-by"}).json()["data"]
        assert (first["name"], other["name"]) == (f"{newcomer}/kept", f"{newcomer}/gone-by-hand")
        with site.http(site.enrol()) as stranger:
            assert stranger.get("/v1/deleted_adapters").json()["data"] == []
        with site.http("globex") as stranger:
            names = [one["name"] for one in stranger.get("/v1/deleted_adapters").json()["data"]]
            assert {name.partition("/")[0] for name in names} == {"globex"}
        for name in ("gone-by-hand", "kept"):
            http.post(f"/v1/adapters/{name}/undelete").raise_for_status()
        assert http.get("/v1/deleted_adapters").json()["data"] == []


def test_deleted_revision_alone_is_no_deleted_adapter(site: Site, base_dir: Path, tmp_path: Path) -> None:
    with site.http() as http:
        for seed in (32, 33):
            folder = make_adapter(base_dir, tmp_path / f"{seed}", seed=seed)
            http.post("/v1/adapters", **form(folder, "half-gone")).raise_for_status()
        http.delete("/v1/adapters/half-gone/revisions/1").raise_for_status()
        assert http.get("/v1/deleted_adapters", params={"search": "half-gone"}).json()["data"] == []


def test_invoice_as_texts_says_what_the_page_says(site: Site) -> None:
    month = time.strftime("%Y-%m", time.gmtime())
    path = f"/v1/organization/invoices/{month}"
    with site.http("all-scopes") as http:
        http.post("/v1/completions", json={"model": "tiny", "prompt": "hello", "max_tokens": 2}).raise_for_status()
        printed = http.get(f"{path}/printed").json()
        page = http.get(path, params={"format": "html"}).text
        assert http.get("/v1/organization/invoices/1999-12/printed").status_code == 404
    assert (printed["id"], printed["status"]) == (f"INV-{month}-acme", "draft")
    for line in printed["lines"]:
        for text in (line["description"], line["quantity"], line["amount"], *line["prices"]):
            assert text in page
    assert [name in page and amount in page for name, amount in printed["totals"]] == [True] * len(printed["totals"])


def await_search(http: httpx.Client, *, runs: bool) -> None:
    until = time.monotonic() + 60
    while (http.get("/admin/plan").json()["running_since"] is not None) != runs:
        assert time.monotonic() < until, "the search's state does not change"
        time.sleep(0.05)


def test_plan_that_is_cancelled_makes_room_for_the_next(site: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(plans, "MAX_REQUESTS", 5_000)
    with site.http("all-scopes") as http, ThreadPoolExecutor() as pool:
        assert http.delete("/admin/plan").json()["cancelled"] is False
        searching = pool.submit(http.post, "/admin/plan", json=QUESTION)
        await_search(http, runs=True)
        assert http.delete("/admin/plan").json()["cancelled"] is True
        refused = searching.result(timeout=60)
        assert (refused.status_code, refused.json()["code"]) == (409, "plan_cancelled")
        await_search(http, runs=False)


def test_plan_whose_caller_has_left_ends(site: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(plans, "MAX_REQUESTS", 5_000)
    with site.http("all-scopes") as http:
        with pytest.raises(httpx.ReadTimeout):
            http.post("/admin/plan", json=QUESTION, timeout=httpx.Timeout(60, read=1.5))
        await_search(http, runs=False)


def test_plan_has_its_reason_and_its_settings_to_copy(site: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(plans, "MAX_REQUESTS", 20)
    small = QUESTION | {"rate": 2, "adapters": 2, "output_tokens": 5, "prompt_tokens": 20}
    with site.http("all-scopes") as http:
        plan = http.post("/admin/plan", json=small).json()
    [base] = plan["bases"]
    best = base["recommended"]
    assert f"max_num_seqs = {best['max_num_seqs']}" in base["settings"]
    assert "[engine]" in base["settings"]
    assert base["reason"]["bound_by"] in ("first_token", "inter_token")
    assert f"{best['ttft_ms_p99']:,.0f} ms of {plan['goals']['ttft_ms']:,g} ms" in base["reason"]["text"]
    assert best in base["tried"]
    assert len({str(one) for one in base["tried"]}) == len(base["tried"]), "no line is there twice"


def test_operators_own_tenant_cannot_be_suspended(site: Site) -> None:
    with site.http("all-scopes") as http:
        refused = http.patch("/admin/tenants/acme", json={"suspended": True})
        assert (refused.status_code, refused.json()["param"]) == (409, "suspended")
        assert "your own tenant" in refused.json()["detail"]
        assert http.get("/admin/tenants/acme").json()["suspended_at"] is None
        make_tenant(http, "not-own")
        assert http.patch("/admin/tenants/not-own", json={"suspended": True}).json()["suspended_at"]
