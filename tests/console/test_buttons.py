"""Buttons for actions that once needed a URL or the command line: releases of any revision, sharing, keys, operators'
work."""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from datetime import date
from pathlib import Path

import httpx
import pytest
from console_site import Visit, page_of, upload, visiting
from listening import until_true
from peft_uploads import CONFIG, WEIGHTS, make_adapter
from playwright.sync_api import Browser, BrowserContext, Page, expect
from site_fixture import Site

from loramux.data.records.database import Database
from loramux.money.billing.catalog import Catalog, PlanSpec, PriceSpec
from loramux.money.limits.definitions import LIMITS
from loramux_api.controllers import plans

PHONE = {"width": 390, "height": 844}
LIMITS_OF_CONSOLE = Path(__file__).parents[2] / "console/src/components/limits.tsx"


@pytest.fixture(scope="module")
def session(browser: Browser, site: Site) -> Iterator[BrowserContext]:
    context = browser.new_context(reduced_motion="reduce")
    with page_of(context, site.url) as visit:
        visit.sign_in(site.keys["all-scopes"])
    yield context
    context.close()


@pytest.fixture
def visit(session: BrowserContext, site: Site) -> Iterator[Visit]:
    with page_of(session, site.url) as visit:
        yield visit


@pytest.fixture(scope="module")
def three(base_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, bytes]]:
    """The files of three revisions."""
    folders = [make_adapter(base_dir, tmp_path_factory.mktemp("revision"), seed=seed) for seed in (51, 52, 53)]
    return [{name: (folder / name).read_bytes() for name in (CONFIG, WEIGHTS)} for folder in folders]


@pytest.fixture(scope="module")
def priced(site: Site) -> str:
    """A price plan in dollars."""

    async def add() -> None:
        database = Database(site.settings.records.url)
        prices = tuple(
            PriceSpec(meter=meter, price="0.60", per=1_000_000, valid_from=date(2023, 1, 1))
            for meter in ("input_uncached", "output")
        )
        await Catalog(database).apply([PlanSpec(name="by-button", currency="USD", prices=prices)])
        await database.close()

    with ThreadPoolExecutor() as threads:  # Playwright's loop runs in this one
        threads.submit(lambda: asyncio.run(add())).result()
    return "by-button"


def add_revisions(site: Site, name: str, files: list[dict[str, bytes]]) -> None:
    for one in files:
        upload(site, "acme", name, one)


def targets(site: Site, name: str, alias: str = "default") -> dict[int, int]:
    with site.http("all-scopes") as http:
        aliases = http.get(f"/v1/adapters/{name}").json()["aliases"]
    (found,) = [one for one in aliases if one["name"] == alias]
    return {target["revision"]: target["weight"] for target in found["targets"]}


def choose(page: Page, label: str, option: str) -> None:
    page.get_by_role("combobox", name=label).last.click()
    page.get_by_role("option", name=option, exact=True).click()


def confirm(page: Page, button: str) -> None:
    page.get_by_role("dialog").get_by_role("button", name=button, exact=True).click()
    expect(page.get_by_role("dialog")).to_have_count(0)


def test_chosen_revision_becomes_a_canary_and_rollback_says_to_what(
    visit: Visit, site: Site, three: list[dict[str, bytes]]
) -> None:
    add_revisions(site, "chosen", three)
    page = visit.load("/adapters/chosen", "chosen")
    choose(page, "Release", "@2")
    page.get_by_role("slider").focus()
    for _ in range(10):
        page.keyboard.press("ArrowRight")
    page.get_by_role("button", name="Give it 10%").click()
    expect(page.get_by_text("@2 gets 10%")).to_be_visible()
    assert targets(site, "chosen") == {3: 90, 2: 10}
    expect(page.get_by_text("before: @3", exact=True)).to_be_visible()
    page.get_by_role("button", name="Roll back", exact=True).click()
    expect(page.get_by_role("dialog")).to_contain_text("Roll back to @3?")
    expect(page.get_by_role("dialog")).to_contain_text("@3 90%, @2 10%")
    confirm(page, "Roll back")
    expect(page.get_by_text("Rolled back", exact=True)).to_be_visible()
    assert list(targets(site, "chosen")) == [3]
    expect(page.get_by_text("before: @2", exact=True)).to_be_visible()
    page.get_by_role("row", name=re.compile("#1 ")).get_by_role("button", name="Restore").click()
    expect(page.get_by_role("dialog")).to_contain_text("Back to @1?")
    confirm(page, "Restore")
    expect(page.get_by_text("@1 answers again")).to_be_visible()
    assert list(targets(site, "chosen")) == [1]


def test_one_revision_is_promoted_deleted_and_restored(visit: Visit, site: Site, three: list[dict[str, bytes]]) -> None:
    add_revisions(site, "single", three)
    page = visit.load("/adapters/single", "single")
    page.get_by_role("tab", name="Revisions").click()
    row = page.get_by_role("row", name=re.compile("@1 "))
    row.get_by_role("button", name="Promote").click()
    dialog = page.get_by_role("dialog")
    dialog.get_by_label("Alias").fill("staging")
    dialog.get_by_label("Alias").press("Enter")
    expect(page.get_by_text("@1 answers alone now")).to_be_visible()
    assert list(targets(site, "single", "staging")) == [1]
    expect(row.get_by_role("button", name="Delete")).to_have_count(0)
    other = page.get_by_role("row", name=re.compile("@2 "))
    other.get_by_role("button", name="Delete").click()
    confirm(page, "Delete")
    expect(other.get_by_text("deleted", exact=True)).to_be_visible()
    with site.http() as http:
        assert http.post("/v1/completions", json={"model": "acme/single@2", "prompt": "hello"}).status_code == 404
    other.get_by_role("button", name="Restore").click()
    expect(other.get_by_text("ready", exact=True)).to_be_visible()


def test_deleted_adapter_is_restored_from_the_list(visit: Visit, site: Site, three: list[dict[str, bytes]]) -> None:
    add_revisions(site, "fetched-back", three[:1])
    page = visit.load("/adapters/fetched-back", "fetched-back")
    page.get_by_role("button", name="Delete", exact=True).click()
    confirm(page, "Delete")
    row = page.get_by_role("table", name="Deleted adapters").get_by_role("row", name=re.compile("fetched-back"))
    row.get_by_role("button", name="Restore").click()
    expect(page.get_by_role("link", name="fetched-back")).to_be_visible()
    assert list(targets(site, "fetched-back")) == [1]


def test_adapter_is_shared_and_shared_no_longer(visit: Visit, site: Site) -> None:
    page = visit.load("/adapters/support", "support")
    page.get_by_role("tab", name="Sharing").click()
    page.get_by_role("button", name="Share it").click()
    page.get_by_role("dialog").get_by_label("Tenant").fill("globex")
    page.get_by_role("dialog").get_by_label("Tenant").press("Enter")
    row = page.get_by_role("row", name=re.compile("globex"))
    expect(row).to_be_visible()
    asked = {"model": "acme/support", "prompt": "hello", "max_tokens": 2}
    with site.http("globex") as http:
        assert http.post("/v1/completions", json=asked).status_code == 200
        row.get_by_role("button", name="Revoke").click()
        confirm(page, "Revoke")
        expect(row).to_have_count(0)
        assert http.post("/v1/completions", json=asked).status_code == 404


def test_pages_name_the_key_of_a_change_without_the_scope_keys(
    browser: Browser, site: Site, three: list[dict[str, bytes]]
) -> None:
    add_revisions(site, "robotic", three[:1])
    with site.http("all-scopes") as http:
        robot, reader = (
            http.post("/v1/keys", json={"name": name, "scopes": scopes}).raise_for_status().json()
            for name, scopes in (("release robot", ["adapters"]), ("reader", ["read", "audit"]))
        )
        changing = {"Authorization": f"Bearer {robot['key']}"}
        http.put("/v1/adapters/robotic/grants/initech", headers=changing).raise_for_status()
        alias = {"targets": [{"revision": 1, "weight": 1}]}
        http.put("/v1/adapters/robotic/aliases/by-robot", json=alias, headers=changing).raise_for_status()
    with visiting(browser, site.url) as visit:
        visit.sign_in(reader["key"])
        page = visit.load("/adapters/robotic", "robotic")
        expect(page.get_by_role("table", name="History of robotic:by-robot")).to_contain_text("release robot")
        page.get_by_role("tab", name="Sharing").click()
        expect(page.get_by_role("row", name=re.compile("initech"))).to_contain_text("release robot")
        page = visit.go("/activity", "Activity")
        page.get_by_role("tab", name="Audit log").click()
        expect(page.get_by_role("row").filter(has_text="robotic:by-robot")).to_contain_text("release robot")


def test_shadow_is_started_and_ended(visit: Visit, site: Site, three: list[dict[str, bytes]]) -> None:
    add_revisions(site, "shadowed", three[:2])
    page = visit.load("/adapters/shadowed", "shadowed")
    page.get_by_role("tab", name="Shadow").click()
    page.get_by_role("button", name="Start a shadow").click()
    dialog = page.get_by_role("dialog")
    dialog.get_by_label("Share of the requests").fill("25")
    dialog.get_by_role("button", name="Start the shadow").click()
    expect(page.get_by_text("running", exact=True)).to_be_visible()
    with site.http() as http:
        shadow = http.get("/v1/adapters/shadowed/shadow").json()
        assert (shadow["revision"], shadow["share"], shadow["ended_at"]) == (1, 0.25, None)
        page.get_by_role("button", name="End the shadow").click()
        confirm(page, "End the shadow")
        expect(page.get_by_text("ended", exact=True)).to_be_visible()
        assert http.get("/v1/adapters/shadowed/shadow").json()["ended_at"] is not None


def test_key_is_rotated_and_its_whole_secret_is_seen_on_a_phone(visit: Visit, site: Site) -> None:
    with site.http("all-scopes") as http:
        old = http.post("/v1/keys", json={"name": "turned", "scopes": ["read"]}).json()["key"]
    visit.page.set_viewport_size(PHONE)
    page = visit.load("/keys", "Keys")
    page.get_by_role("row", name=re.compile("turned")).get_by_role("button", name="Rotate").click()
    choose(page, "The old key ends", "At once")
    page.get_by_role("button", name="Rotate the key").click()
    shown = page.get_by_test_id("secret")
    assert shown.evaluate("one => one.scrollWidth <= one.clientWidth && one.scrollHeight <= one.clientHeight")
    assert visit.misplaced() == []
    new = shown.inner_text()
    statuses = [
        httpx.get(f"{site.url}/v1/models", headers={"Authorization": f"Bearer {key}"}).status_code for key in (old, new)
    ]
    assert statuses == [401, 200]
    page.get_by_role("button", name="I have copied it").click()


def test_member_is_added_changed_and_removed(visit: Visit, site: Site) -> None:
    page = visit.load("/people", "Projects and members")
    page.get_by_role("button", name="Add a member").click()
    dialog = page.get_by_role("dialog")
    dialog.get_by_label("Identity provider").fill(site.settings.issuers[0].issuer)
    dialog.get_by_label("Person").fill("grace")
    dialog.get_by_label("Person").press("Enter")
    row = page.get_by_role("row", name=re.compile("grace"))
    expect(row.get_by_text("viewer", exact=True)).to_be_visible()
    row.get_by_role("button", name="Change the role").click()
    choose(page, "Role", "billing: usage, invoices, limits")
    page.get_by_role("dialog").get_by_role("button", name="Change the role").click()
    expect(row.get_by_text("billing", exact=True)).to_be_visible()
    row.get_by_role("button", name="Remove").click()
    confirm(page, "Remove")
    expect(row).to_have_count(0)


def test_operator_makes_a_tenant_by_enter_and_sets_key_plan_limit_and_budget(
    visit: Visit, site: Site, priced: str
) -> None:
    page = visit.load("/operator/tenants", "Tenants")
    page.get_by_role("button", name="New tenant").click()
    page.get_by_role("dialog").get_by_label("Name").fill("umbrella")
    page.get_by_role("dialog").get_by_label("Name").press("Enter")
    expect(page.get_by_role("heading", name="umbrella", level=1)).to_be_visible()
    page.get_by_role("button", name="Make a key").click()
    page.get_by_role("dialog").get_by_label("Name").fill("first")
    page.get_by_role("dialog").get_by_label("Name").press("Enter")
    secret = page.get_by_test_id("secret").inner_text()
    bearer = {"Authorization": f"Bearer {secret}"}
    assert httpx.get(f"{site.url}/v1/models", headers=bearer).status_code == 200
    page.get_by_role("button", name="I have copied it").click()
    page.get_by_role("button", name="Assign a plan").click()
    page.get_by_role("combobox", name="Plan").click()
    page.get_by_role("option", name=re.compile(priced)).click()
    page.get_by_role("dialog").get_by_role("button", name="Assign the plan").click()
    expect(page.get_by_role("table", name="Price plans").get_by_text(priced)).to_be_visible()
    page.get_by_role("button", name="Set a limit").click()
    page.get_by_role("dialog").get_by_label("Value").fill("7")
    page.get_by_role("dialog").get_by_label("Value").press("Enter")
    expect(page.get_by_text("7 a minute")).to_be_visible()
    page.get_by_role("button", name="Set a budget").click()
    page.get_by_role("dialog").get_by_label("Amount").fill("12.5")
    page.get_by_role("dialog").get_by_label("Amount").press("Enter")
    expect(page.get_by_text("$12.50 left of $12.50")).to_be_visible()
    with site.http("all-scopes") as http:
        budget = http.get("/admin/tenants/umbrella/budgets").json()["data"][0]
        assert (budget["period"], budget["amount_nano"]) == ("month", 12_500_000_000)
        limit = http.get("/admin/tenants/umbrella/limits").json()["data"][0]
        assert (limit["name"], limit["value"]) == ("requests_per_minute", 7)


def test_refusal_of_a_form_stays_in_it(visit: Visit) -> None:
    page = visit.load("/operator/tenants", "Tenants")
    page.get_by_role("button", name="New tenant").click()
    dialog = page.get_by_role("dialog")
    dialog.get_by_label("Name").fill("globex")
    dialog.get_by_label("Name").press("Enter")
    expect(dialog.get_by_role("alert")).to_contain_text("already")
    expect(dialog.get_by_label("Name")).to_have_value("globex")


def test_operator_sets_the_limit_of_a_tier(visit: Visit, site: Site) -> None:
    page = visit.load("/operator/tiers", "Tiers")
    page.get_by_role("button", name="New tier").click()
    page.get_by_role("dialog").get_by_label("Name").fill("gold")
    page.get_by_role("dialog").get_by_label("Name").press("Enter")
    heading = page.get_by_role("heading", name="gold", level=2)
    expect(heading).to_be_visible()
    card = page.locator(".mantine-Card-root", has=heading)
    card.get_by_role("button", name="Set a limit").click()
    choose(page, "Limit", "Requests at the same time")
    page.get_by_role("dialog").get_by_label("Value").fill("3")
    page.get_by_role("dialog").get_by_label("Value").press("Enter")
    expect(card.get_by_text("3 requests")).to_be_visible()
    with site.http("all-scopes") as http:
        (limit,) = http.get("/admin/tiers/gold/limits").json()["data"]
        assert (limit["name"], limit["value"]) == ("concurrent_requests", 3)


def test_operators_own_tenant_has_no_suspend_button(visit: Visit) -> None:
    page = visit.load("/operator/tenants", "Tenants")
    own = page.get_by_role("row", name=re.compile("acme"))
    expect(own.get_by_role("button", name="Look")).to_be_visible()
    expect(own.get_by_role("button", name="Suspend")).to_have_count(0)
    expect(page.get_by_role("row", name=re.compile("globex")).get_by_role("button", name="Suspend")).to_be_visible()


def test_budget_of_a_project_is_set_and_removed(visit: Visit, site: Site, priced: str) -> None:
    with site.http("all-scopes") as http:
        month = "2023-01"
        if not http.get("/admin/tenants/acme/price-plans").json()["data"]:
            http.put(f"/admin/tenants/acme/price-plans/{month}", json={"plan": priced}).raise_for_status()
    page = visit.load("/limits", "Limits")
    page.get_by_role("button", name="Set a budget").click()
    choose(page, "Of", "default")
    page.get_by_role("dialog").get_by_label("Amount").fill("3")
    page.get_by_role("dialog").get_by_label("Amount").press("Enter")
    expect(page.get_by_text("$3.00 left of $3.00")).to_be_visible()
    page.get_by_role("button", name="Remove").first.click()
    confirm(page, "Remove")
    expect(page.get_by_text("$3.00 left of $3.00")).to_have_count(0)


def test_invoice_has_the_words_units_and_prices_of_its_pdf(visit: Visit, site: Site, priced: str) -> None:
    with site.http("all-scopes") as http:
        if not http.get("/admin/tenants/acme/price-plans").json()["data"]:
            http.put("/admin/tenants/acme/price-plans/2023-01", json={"plan": priced}).raise_for_status()
        http.post("/v1/completions", json={"model": "tiny", "prompt": "hello", "max_tokens": 4}).raise_for_status()
    page = visit.load("/invoices", "Invoices")
    lines = page.get_by_role("table", name="Lines")
    expect(lines.get_by_text("Output tokens").first).to_be_visible()
    expect(lines.get_by_text(re.compile(r"^\d+ tokens$")).first).to_be_visible()
    expect(lines.get_by_text("0.6 per 1,000,000 tokens").first).to_be_visible()


def test_operator_lands_on_the_system_page_and_a_customer_on_the_overview(browser: Browser, site: Site) -> None:
    with visiting(browser, site.url) as visit:
        visit.sign_in(site.keys["all-scopes"])
        expect(visit.page.get_by_role("heading", name="System", level=1)).to_be_visible()
        visit.page.get_by_role("link", name="Overview").click()
        expect(visit.page.get_by_role("heading", name="acme", level=1)).to_be_visible()
        visit.load("/", "acme")  # a reload stays where the reader is
    with visiting(browser, site.url) as visit:
        visit.sign_in(site.keys["globex"])
        expect(visit.page.get_by_role("heading", name="globex", level=1)).to_be_visible()


@pytest.mark.slow
def test_plan_shows_its_choice_its_reason_its_settings_and_its_goals(
    visit: Visit, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(plans, "MAX_REQUESTS", 20)
    page = visit.load("/operator/plan", "Planner")
    page.get_by_role("button", name="Make a plan").click()
    rows = page.get_by_role("table", name="Simulations").get_by_role("row")
    expect(rows.nth(1)).to_contain_text("the chosen one", timeout=90_000)
    expect(page.get_by_label("Settings of the plan")).to_contain_text("max_num_seqs = ")
    expect(page.get_by_text(re.compile("the first token's P99 is"))).to_be_visible()
    expect(page.get_by_role("figure", name="Goals by number of GPUs")).to_contain_text("(chosen)")
    texts = rows.all_inner_texts()
    assert len({text.split("\t")[1] + text.split("\t")[0] for text in texts[1:]}) == len(texts) - 1, "lines differ"


def test_search_of_a_page_that_is_left_does_not_block_the_next(
    visit: Visit, site: Site, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(plans, "MAX_REQUESTS", 5_000)
    page = visit.load("/operator/plan", "Planner")
    page.get_by_role("button", name="Make a plan").click()
    expect(page.get_by_role("button", name="Cancel", exact=True)).to_be_visible()
    with site.http("all-scopes") as http:

        def runs() -> bool:
            return http.get("/admin/plan").json()["running_since"] is not None

        visit.go("/operator/ledger", "Ledger and sinks")
        until_true(lambda: not runs())  # the server learns of the page's hanging up a little later
        visit.go("/operator/plan", "Planner")
        expect(page.get_by_text("A search is running")).to_have_count(0)
        page.get_by_role("button", name="Make a plan").click()
        until_true(runs)
        page.get_by_role("button", name="Cancel", exact=True).click()
        expect(page.get_by_text("The search is cancelled")).to_be_visible()
        until_true(lambda: not runs())


def test_console_knows_every_limit_of_the_server() -> None:
    source = LIMITS_OF_CONSOLE.read_text()
    found = re.findall(r"^  (\w+): \{ label: .*everywhere: (true|false) \},$", source, re.MULTILINE)
    assert {name: json.loads(everywhere) for name, everywhere in found} == {
        name: limit.everywhere for name, limit in LIMITS.items()
    }


TABLES = {
    "/adapters": "Adapters",
    "/keys": "Keys",
    "/limits": "Limits",
    "/people": "Projects and members",
    "/batches": "Batches and files",
    "/operator/tenants": "Tenants",
}


def test_actions_of_tables_are_on_the_screen_at_every_width(visit: Visit, site: Site) -> None:
    """Every button of every table lies inside the window; nothing scrolls sideways to it."""
    with site.http("all-scopes") as http:
        files = {"file": ("asked-at-every-width.jsonl", json.dumps({"prompt": "a", "expected": "b"}))}
        http.post("/v1/files", data={"purpose": "evals"}, files=files).raise_for_status()
    beyond = """() => [...document.querySelectorAll('[role=table] button')]
      .filter(one => one.getBoundingClientRect().right > document.documentElement.clientWidth)
      .map(one => one.innerText)"""
    scrolled = """() => [...document.querySelectorAll('.listing')]
      .filter(one => one.scrollWidth > one.clientWidth + 1).map(one => one.ariaLabel)"""
    visit.load("/keys", "Keys")
    for width in (390, 768, 1366, 1920):
        visit.page.set_viewport_size({"width": width, "height": 900})
        for path, heading in TABLES.items():
            page = visit.go(path, heading)
            expect(page.get_by_label("Loading")).to_have_count(0)
            assert (page.evaluate(beyond), page.evaluate(scrolled)) == ([], []), (width, path)
            assert visit.misplaced() == [], (width, path)
