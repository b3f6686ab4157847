"""Actions of customers and operators in the console, in a real browser against the real server."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator
from pathlib import Path

import httpx
import pytest
import sqlalchemy as sa
from console_site import Visit, completed, page_of, upload, visiting
from peft_uploads import CONFIG, WEIGHTS
from playwright.sync_api import Browser, BrowserContext, Page, expect
from site_fixture import Site

from loramux.data.records.credentials import SessionRow
from loramux_api.controllers import plans


@pytest.fixture(scope="module")
def session(browser: Browser, site: Site) -> Iterator[BrowserContext]:
    """Cookies of a session with every right."""
    context = browser.new_context()
    with page_of(context, site.url) as visit:
        visit.sign_in(site.keys["all-scopes"])
    yield context
    context.close()


@pytest.fixture
def visit(session: BrowserContext, site: Site) -> Iterator[Visit]:
    """A page of that session."""
    with page_of(session, site.url) as visit:
        yield visit


@pytest.fixture(scope="module")
def judged(site: Site, folders: list[Path]) -> None:
    """A guarded canary whose answers are rated badly, and those of the revision before well."""
    for folder in folders:
        upload(site, "acme", "guarded", files_of(folder))
    weights = [{"revision": 1, "weight": 90}, {"revision": 2, "weight": 10}]
    path = "/v1/adapters/guarded/aliases/default"
    with site.http("all-scopes") as http:
        http.put(path, json={"targets": weights}).raise_for_status()
        http.put(f"{path}/guard", json={"measures": ["feedback"]}).raise_for_status()
        for revision, score in ((1, 1.0), (2, 0.0)) * 20:
            answer = completed(site, "all-scopes", f"acme/guarded@{revision}").json()
            http.post(f"/v1/requests/{answer['id']}/feedback", json={"score": score}).raise_for_status()


def files_of(folder: Path) -> dict[str, bytes]:
    return {name: (folder / name).read_bytes() for name in (CONFIG, WEIGHTS)}


def dropped(files: dict[str, bytes]) -> list[dict[str, object]]:
    return [{"name": name, "mimeType": "application/octet-stream", "buffer": data} for name, data in files.items()]


def targets(site: Site, name: str) -> dict[int, int]:
    with site.http("all-scopes") as http:
        alias = http.get(f"/v1/adapters/{name}").json()["aliases"][0]
    return {target["revision"]: target["weight"] for target in alias["targets"]}


def test_upload_by_keyboard_shows_the_checks_of_a_good_adapter(visit: Visit, site: Site, folders: list[Path]) -> None:
    page = visit.load("/adapters", "Adapters")
    visit.press(page.get_by_role("button", name="Upload an adapter").first)
    visit.tab_to(page.get_by_label("Name", exact=False).first)
    page.keyboard.type("by-hand")
    with page.expect_file_chooser() as chooser:
        visit.press(page.get_by_role("dialog").locator(".drop"))
    chooser.value.set_files(dropped(files_of(folders[0])))
    visit.press(page.get_by_role("button", name="Upload", exact=True))
    expect(page.get_by_text("acme/by-hand@1 is ready")).to_be_visible()
    expect(page.get_by_label("Checks").get_by_text("passed").first).to_be_visible()
    assert targets(site, "by-hand") == {1: 100} or targets(site, "by-hand") == {1: 1}


def test_upload_of_a_bad_adapter_says_why_it_was_rejected(visit: Visit, site: Site, folders: list[Path]) -> None:
    config = json.loads((folders[0] / CONFIG).read_text()) | {"r": 5}
    bad = files_of(folders[0]) | {CONFIG: json.dumps(config).encode()}
    page = visit.load("/adapters", "Adapters")
    page.get_by_role("button", name="Upload an adapter").first.click()
    page.get_by_label("Name", exact=False).first.fill("broken")
    page.locator("input[type=file]").set_input_files(dropped(bad))
    page.get_by_role("button", name="Upload", exact=True).click()
    expect(page.get_by_text("The adapter was rejected")).to_be_visible()
    expect(page.get_by_role("button", name="Try other files")).to_be_visible()
    with site.http("all-scopes") as http:
        assert http.get("/v1/adapters/broken").status_code == 404


def test_canary_is_released_promoted_and_rolled_back_by_keyboard(visit: Visit, site: Site, folders: list[Path]) -> None:
    for folder in folders:
        upload(site, "acme", "released", files_of(folder))
    page = visit.load("/adapters/released", "released")
    visit.press(page.get_by_role("button", name="Roll back"))
    visit.press(page.get_by_role("dialog").get_by_role("button", name="Roll back"))
    expect(page.get_by_text("Rolled back")).to_be_visible()
    assert list(targets(site, "released")) == [1]
    visit.tab_to(page.get_by_role("slider"))
    for _ in range(5):
        page.keyboard.press("ArrowRight")
    visit.press(page.get_by_role("button", name="Give it 5%"))
    expect(page.get_by_text("canary", exact=True)).to_be_visible()
    assert targets(site, "released") == {1: 95, 2: 5}
    visit.press(page.get_by_role("button", name="Promote @2"))
    expect(page.get_by_text("@2 answers alone now")).to_be_visible()
    assert list(targets(site, "released")) == [2]


def test_key_is_made_by_keyboard_shown_once_and_revoked(visit: Visit, site: Site) -> None:
    page = visit.load("/keys", "Keys")
    visit.press(page.get_by_role("button", name="Make a key").first)
    visit.tab_to(page.get_by_role("dialog").get_by_label("Name"))
    page.keyboard.type("checkout")
    visit.press(page.get_by_role("button", name="Make the key"))
    secret = page.get_by_test_id("secret").inner_text()
    bearer = {"Authorization": f"Bearer {secret}"}
    assert httpx.get(f"{site.url}/v1/models", headers=bearer).status_code == 200
    visit.press(page.get_by_role("button", name="I have copied it"))
    expect(page.get_by_text(secret)).to_have_count(0)
    visit.press(page.get_by_role("row", name=re.compile("checkout")).get_by_role("button", name="Revoke"))
    visit.press(page.get_by_role("dialog").get_by_role("button", name="Revoke"))
    expect(page.get_by_text("The key is revoked")).to_be_visible()
    assert httpx.get(f"{site.url}/v1/models", headers=bearer).status_code == 401


def test_playground_streams_two_models_at_once(visit: Visit, site: Site) -> None:
    page = visit.load("/playground", "Playground")
    page.get_by_label("Prompt").fill("good morning")
    before = len(site.engine.requests)
    page.get_by_role("button", name="Run both").click()
    for side in ("first", "second"):
        expect(page.get_by_label(f"Answer of the {side} model")).to_contain_text("good morning")
    expect(page.get_by_text("first token")).to_have_count(2)
    assert len(site.engine.requests) - before == 2


def test_invoice_of_the_open_month_is_shown(visit: Visit, site: Site) -> None:
    page = visit.load("/invoices", "Invoices")
    expect(page.get_by_role("heading", name=re.compile("INV-.*acme"))).to_be_visible()
    with page.expect_download() as download:
        page.get_by_role("button", name="JSON").click()
    assert download.value.suggested_filename.endswith("acme.json")


def test_two_tenants_side_by_side_see_their_own(browser: Browser, site: Site) -> None:
    with visiting(browser, site.url) as acme, visiting(browser, site.url) as globex:
        acme.sign_in(site.keys["acme"])
        globex.sign_in(site.keys["globex"])
        expect(acme.go("/adapters", "Adapters").get_by_role("link", name="support", exact=True)).to_be_visible()
        expect(globex.go("/adapters", "Adapters").get_by_text("No adapter yet")).to_be_visible()
        page = globex.page
        page.goto(f"{site.url}/console/adapters/support")
        expect(page.get_by_text("This could not be read").first).to_be_visible()


def test_operator_looks_at_a_tenant_and_can_change_nothing(visit: Visit, site: Site) -> None:
    page = visit.load("/operator/tenants", "Tenants")
    page.get_by_role("row", name=re.compile("globex")).get_by_role("button", name="Look").click()
    expect(page.get_by_role("status").get_by_text("read-only")).to_be_visible()
    expect(page.get_by_role("heading", name="globex", level=1)).to_be_visible()
    page.get_by_role("link", name="Keys").click()
    expect(page.get_by_role("heading", name="Keys", level=1)).to_be_visible()
    expect(page.get_by_role("row")).not_to_have_count(0)
    expect(page.get_by_role("button", name="Make a key")).to_have_count(0)
    expect(page.get_by_role("button", name="Revoke")).to_have_count(0)
    page.get_by_role("button", name="Back to my own tenant").click()
    expect(page.get_by_role("button", name="Make a key").first).to_be_visible()


def test_sign_in_link_signs_in_after_a_click_and_leaves_the_address(browser: Browser, site: Site) -> None:
    with site.http("acme") as http:
        path = http.post("/console/links").json()["path"]
    with visiting(browser, site.url) as visit:
        visit.page.goto(site.url + path)
        visit.page.get_by_role("button", name="Sign in with this link").click()
        visit.page.get_by_role("heading", name="acme", level=1).wait_for()
        assert "sign-in" not in visit.page.url


def sign_in_by_hand(visit: Visit, key: str) -> None:
    visit.tab_to(visit.page.get_by_label("API key"))
    visit.page.keyboard.type(key)
    visit.press(visit.page.get_by_role("button", name="Sign in"))


def test_wrong_key_is_refused_and_the_right_one_signs_in_and_out_by_keyboard(browser: Browser, site: Site) -> None:
    with visiting(browser, site.url) as visit:
        page = visit.page
        page.goto(f"{site.url}/console/")
        sign_in_by_hand(visit, site.keys["revoked"])
        expect(page.get_by_role("alert")).to_contain_text("revoked")
        page.reload()
        sign_in_by_hand(visit, site.keys["globex"])
        page.get_by_role("heading", name="globex", level=1).wait_for()
        cookie = next(one for one in page.context.cookies() if one["name"] == "loramux_session")
        assert cookie["httpOnly"]
        assert cookie["sameSite"] == "Strict"
        assert page.evaluate("document.cookie") == ""
        visit.press(page.get_by_role("button", name="Account of globex"))
        page.locator("[role=menu]:focus-within").wait_for()  # the focus moves there after it is drawn
        page.keyboard.press("ArrowDown")
        expect(page.get_by_role("menuitem", name="Sign out", exact=True)).to_be_focused()
        page.keyboard.press("Enter")
        expect(page.get_by_label("API key")).to_be_visible()
        page.reload()
        expect(page.get_by_label("API key")).to_be_visible()


def lose_cookie(visit: Visit, site: Site, key: str) -> None:
    visit.page.context.clear_cookies()


def expire(visit: Visit, site: Site, key: str) -> None:
    engine = sa.create_engine(site.settings.records.url)
    with engine.begin() as connection:
        newest = sa.select(sa.func.max(SessionRow.created_at)).scalar_subquery()
        connection.execute(sa.update(SessionRow).where(SessionRow.created_at == newest).values(expires_at=1))
    engine.dispose()


def revoke_key(visit: Visit, site: Site, key: str) -> None:
    with site.http("all-scopes") as http:
        http.delete(f"/v1/keys/{key}").raise_for_status()


@pytest.mark.parametrize("end", [lose_cookie, expire, revoke_key])
def test_session_that_has_ended_leads_to_the_sign_in_page(
    browser: Browser, site: Site, end: Callable[[Visit, Site, str], None]
) -> None:
    with site.http("all-scopes") as http:
        made = http.post("/v1/keys", json={"name": "short-lived", "scopes": ["read", "usage"]}).json()
    with visiting(browser, site.url) as visit:
        visit.sign_in(made["key"])
        end(visit, site, made["id"])
        visit.page.evaluate("history.pushState(null, '', '/console/adapters')")
        expect(visit.page.get_by_label("API key")).to_be_visible()


def question_files(site: Site, name: str) -> None:
    """Upload the questions of an evaluation as a customer's script would."""
    lines = [json.dumps({"prompt": f"question {number}", "expected": f"question {number}"}) for number in range(4)]
    with site.http("all-scopes") as http:
        form = {"purpose": "evals"}
        http.post("/v1/files", data=form, files={"file": (name, "\n".join(lines))}).raise_for_status()


@pytest.mark.slow
def test_release_is_protected_by_a_policy_a_guard_and_an_evaluation(
    visit: Visit, site: Site, folders: list[Path]
) -> None:
    for folder in folders:
        upload(site, "acme", "protected", files_of(folder))
    with site.http("all-scopes") as http:
        http.post("/v1/adapters/protected/aliases/default/rollback").raise_for_status()
    question_files(site, "questions.jsonl")
    page = visit.load("/adapters/protected", "protected")
    page.get_by_role("button", name="Set a policy").click()
    policy = page.get_by_role("dialog")
    expect(policy.get_by_role("button", name="Save")).to_be_disabled()
    policy.get_by_label("Answered requests, at least").fill("1000")
    policy.get_by_label("Failed requests, at most").fill("2.5")
    policy.get_by_role("switch", name="Its newest evaluation must not find it worse").check(force=True)
    assert visit.barriers() == []
    policy.get_by_role("button", name="Save").click()
    expect(page.get_by_text("@2 may not take most requests")).to_be_visible()
    with site.http("all-scopes") as http:
        kept = http.get("/v1/adapters/protected/aliases/default/policy").json()["policy"]
    assert kept == {"evaluation": {"margin": 0}, "min_requests": 1000, "max_error_rate": 0.025}

    slider = page.get_by_role("slider")
    slider.focus()
    slider.press("End")
    page.get_by_role("button", name="Promote @2").click()
    expect(page.get_by_text("does not pass the release policy")).to_be_visible()
    assert list(targets(site, "protected")) == [1]

    page.get_by_role("switch", name="Take a canary back that is found worse").click(force=True)
    expect(page.get_by_text("is taken back by itself")).to_be_visible()

    page.get_by_role("tab", name="Evaluations").click()
    page.get_by_role("button", name="Evaluate").click()
    page.get_by_role("dialog").get_by_role("combobox", name="Questions").click()
    page.get_by_role("option", name="questions.jsonl").click()
    page.get_by_role("dialog").get_by_role("button", name="Evaluate").click()
    expect(page.get_by_text("on 4 questions")).to_be_visible()

    page.get_by_role("tab", name="Release").click()
    page.get_by_role("button", name="Edit the policy").click()
    expect(policy.get_by_label("Failed requests, at most")).to_have_value("2.5 %")
    policy.get_by_role("button", name="Remove the policy").click()
    expect(page.get_by_text("No release policy")).to_be_visible()


@pytest.mark.slow
def test_batch_is_made_watched_downloaded_and_cancelled(visit: Visit, site: Site) -> None:
    def body(number: int) -> dict[str, object]:
        return {"model": "tiny", "messages": [{"role": "user", "content": f"line {number}"}], "max_tokens": 9}

    def line(number: int) -> str:
        request = {"custom_id": f"r{number}", "method": "POST", "url": "/v1/chat/completions", "body": body(number)}
        return json.dumps(request)

    def run(page: Page, name: str, text: str) -> None:
        page.locator("input[type=file]").set_input_files({"name": name, "mimeType": "", "buffer": text.encode()})
        page.get_by_role("row", name=re.compile(name)).get_by_role("button", name="Run").click()
        page.get_by_role("dialog").get_by_role("button", name="Run").click()
        expect(page.get_by_text("The batch is being checked").last).to_be_visible()

    page = visit.load("/batches", "Batches and files")
    run(page, "good.jsonl", "\n".join(map(line, range(6))))
    expect(page.get_by_text("6 of 6")).to_be_visible()
    with page.expect_download() as download:
        page.get_by_role("button", name="Answers").first.click()
    answers = [json.loads(text) for text in Path(download.value.path()).read_text().splitlines()]
    assert {one["custom_id"] for one in answers} == {f"r{number}" for number in range(6)}
    run(page, "wrong.jsonl", line(1) + "\nnot JSON")
    expect(page.get_by_text(re.compile("line 2", re.IGNORECASE)).first).to_be_visible()
    site.engine.pause = 0.5
    try:
        run(page, "slow.jsonl", "\n".join(map(line, range(200))))
        page.get_by_role("button", name="Cancel it").click()
        page.get_by_role("dialog").get_by_role("button", name="Cancel it").click()
        expect(page.get_by_text(re.compile("cancell(ing|ed)")).first).to_be_visible()
    finally:
        site.engine.pause = 0.0


def test_operator_reconciles_the_ledger(visit: Visit, site: Site) -> None:
    page = visit.load("/operator/ledger", "Ledger and sinks")
    page.get_by_role("button", name="Reconcile now").click()
    expect(page.get_by_text("entries verified")).to_be_visible()
    expect(page.get_by_text("agrees", exact=True)).to_be_visible()
    with site.http("all-scopes") as http:
        head = http.get("/admin/ledger").json()["hash"]
    expect(page.get_by_text(head)).to_be_visible()


@pytest.mark.slow
def test_operator_asks_the_planner_by_sliders(visit: Visit, site: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(plans, "MAX_REQUESTS", 20)
    page = visit.load("/operator/plan", "Planner")
    for knob in ("Requests per second", "Adapters"):
        slider = page.get_by_role("slider", name=knob)
        slider.focus()
        slider.press("Home")
        slider.press("ArrowRight")
    expect(page.get_by_text("Requests per second: 1", exact=True)).to_be_visible()
    page.get_by_role("button", name="Make a plan").click()
    expect(page.get_by_text("per million tokens")).to_be_visible(timeout=90_000)
    assert page.get_by_label("Simulations").get_by_role("row").count() > 1


def test_request_of_another_site_with_the_sessions_cookie_changes_nothing(browser: Browser, site: Site) -> None:
    """A page of another origin posts a form and fetches with the victim's cookies; the token is not among them."""
    with visiting(browser, site.url) as visit:
        visit.sign_in(site.keys["all-scopes"])
        own = "/v1/keys', {method: 'POST', headers: {'Content-Type': 'application/json'}, body: '{\"name\": \"csrf\"}'}"
        without_token = f"fetch('{own}).then(answer => answer.status)"
        assert visit.page.evaluate(without_token) == 403
        attacker = visit.page.context.new_page()
        attacker.route(
            "http://attacker.test/**", lambda route: route.fulfill(body="<p>hello</p>", content_type="text/html")
        )
        attacker.goto("http://attacker.test/")
        attacker.evaluate(
            f"fetch('{site.url}{own.replace('application/json', 'text/plain')[:-1]}, mode: 'no-cors', "
            "credentials: 'include'}).catch(() => 0)"
        )
    with site.http("all-scopes") as http:
        assert "csrf" not in [key["name"] for key in http.get("/v1/keys").json()["data"]]


@pytest.mark.slow
def test_canary_that_its_guard_has_taken_back_is_in_the_history(visit: Visit, site: Site, judged: None) -> None:
    """The last test: the guard has had the time of the others to look."""
    page = visit.load("/adapters/guarded", "guarded")
    expect(page.get_by_text("#4")).to_be_visible(timeout=60_000)
    expect(page.get_by_text("@1 × 90", exact=True)).to_be_visible()
    expect(page.get_by_text("canary", exact=True)).to_have_count(0)
    expect(visit.go("/activity", "Activity").get_by_text("canary.rolled_back").first).to_be_visible()


def test_operator_makes_a_trainers_key_and_its_tenant_sees_the_pushed_versions(
    visit: Visit, browser: Browser, site: Site, folders: list[Path]
) -> None:
    with site.http("all-scopes") as http:
        http.post("/admin/tenants", json={"name": "lab"}).raise_for_status()
        reader = http.post("/admin/tenants/lab/keys", json={"scopes": ["read"]}).json()["key"]
    page = visit.load("/operator/tenants/lab", "lab")
    page.get_by_role("button", name="Make a key").click()
    dialog = page.get_by_role("dialog")
    dialog.get_by_label("Name").fill("trainer")
    dialog.get_by_role("checkbox", name="push").check()
    dialog.get_by_role("button", name="Make the key").click()
    bearer = {"Authorization": f"Bearer {page.get_by_test_id('secret').inner_text()}"}
    page.get_by_role("button", name="I have copied it").click()
    for folder in folders:
        files = {name: (name, data) for name, data in files_of(folder).items()}
        pushed = {"lora_name": "policy", "load_inplace": "true"}
        httpx.post(f"{site.url}/v1/load_lora_adapter", headers=bearer, data=pushed, files=files).raise_for_status()
    with visiting(browser, site.url) as own:
        own.sign_in(reader)
        table = own.load("/adapters", "Adapters").get_by_role("table", name="Training adapters")
        expect(table.get_by_role("row").nth(1)).to_contain_text("policy@2")
        expect(table.get_by_role("row").nth(2)).to_contain_text("policy@1")
