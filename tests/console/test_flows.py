"""What customers and operators do in the console, in a real browser against the real server."""

from __future__ import annotations

import json
import re
from pathlib import Path

import httpx
from console_site import upload, visiting
from peft_uploads import CONFIG, WEIGHTS
from playwright.sync_api import Browser, expect
from site_fixture import Site

SCRIPT = "<img src=x onerror=alert(1)>"


def files_of(folder: Path) -> dict[str, bytes]:
    return {name: (folder / name).read_bytes() for name in (CONFIG, WEIGHTS)}


def dropped(files: dict[str, bytes]) -> list[dict[str, object]]:
    return [{"name": name, "mimeType": "application/octet-stream", "buffer": data} for name, data in files.items()]


def targets(site: Site, name: str) -> dict[int, int]:
    with site.http("all-scopes") as http:
        alias = http.get(f"/v1/adapters/{name}").json()["aliases"][0]
    return {target["revision"]: target["weight"] for target in alias["targets"]}


def test_upload_of_a_good_adapter_shows_its_checks_and_it_answers(
    browser: Browser, site: Site, folders: list[Path]
) -> None:
    with visiting(browser, site.url) as visit:
        visit.sign_in(site.keys["all-scopes"])
        page = visit.go("/adapters", "Adapters")
        page.get_by_role("button", name="Upload an adapter").first.click()
        page.get_by_label("Name", exact=False).first.fill("by-hand")
        page.locator("input[type=file]").set_input_files(dropped(files_of(folders[0])))
        page.get_by_role("button", name="Upload", exact=True).click()
        expect(page.get_by_text("acme/by-hand@1 is ready")).to_be_visible()
        expect(page.get_by_label("Checks").get_by_text("passed").first).to_be_visible()
    assert targets(site, "by-hand") == {1: 100} or targets(site, "by-hand") == {1: 1}


def test_upload_of_a_bad_adapter_says_why_it_was_rejected(browser: Browser, site: Site, folders: list[Path]) -> None:
    config = json.loads((folders[0] / CONFIG).read_text()) | {"r": 5}
    bad = files_of(folders[0]) | {CONFIG: json.dumps(config).encode()}
    with visiting(browser, site.url) as visit:
        visit.sign_in(site.keys["all-scopes"])
        page = visit.go("/adapters", "Adapters")
        page.get_by_role("button", name="Upload an adapter").first.click()
        page.get_by_label("Name", exact=False).first.fill("broken")
        page.locator("input[type=file]").set_input_files(dropped(bad))
        page.get_by_role("button", name="Upload", exact=True).click()
        expect(page.get_by_text("The adapter was rejected")).to_be_visible()
        expect(page.get_by_role("button", name="Try other files")).to_be_visible()
    with site.http("all-scopes") as http:
        assert http.get("/v1/adapters/broken").status_code == 404


def test_canary_is_released_promoted_and_rolled_back(browser: Browser, site: Site, folders: list[Path]) -> None:
    for folder in folders:
        upload(site, "acme", "released", files_of(folder))
    with visiting(browser, site.url) as visit:
        visit.sign_in(site.keys["all-scopes"])
        page = visit.go("/adapters/released", "released")
        page.get_by_role("button", name="Roll back").click()
        page.get_by_role("dialog").get_by_role("button", name="Roll back").click()
        expect(page.get_by_text("Rolled back")).to_be_visible()
        assert list(targets(site, "released")) == [1]
        slider = page.get_by_role("slider")
        slider.focus()
        for _ in range(5):
            slider.press("ArrowRight")
        page.get_by_role("button", name="Give it 5%").click()
        expect(page.get_by_text("canary", exact=True)).to_be_visible()
        assert targets(site, "released") == {1: 95, 2: 5}
        page.get_by_role("button", name="Promote @2").click()
        expect(page.get_by_text("@2 answers alone now")).to_be_visible()
        assert list(targets(site, "released")) == [2]


def test_key_is_shown_once_works_and_is_revoked(browser: Browser, site: Site) -> None:
    with visiting(browser, site.url) as visit:
        visit.sign_in(site.keys["all-scopes"])
        page = visit.go("/keys", "Keys")
        page.get_by_role("button", name="Make a key").first.click()
        page.get_by_role("dialog").get_by_label("Name").fill("checkout")
        page.get_by_role("button", name="Make the key").click()
        secret = page.get_by_test_id("secret").inner_text()
        bearer = {"Authorization": f"Bearer {secret}"}
        assert httpx.get(f"{site.url}/v1/models", headers=bearer).status_code == 200
        page.get_by_role("button", name="I have copied it").click()
        expect(page.get_by_text(secret)).to_have_count(0)
        page.get_by_role("row", name=re.compile("checkout")).get_by_role("button", name="Revoke").click()
        page.get_by_role("dialog").get_by_role("button", name="Revoke").click()
        expect(page.get_by_text("The key is revoked")).to_be_visible()
        assert httpx.get(f"{site.url}/v1/models", headers=bearer).status_code == 401


def test_playground_streams_two_models_at_once(browser: Browser, site: Site) -> None:
    with visiting(browser, site.url) as visit:
        visit.sign_in(site.keys["all-scopes"])
        page = visit.go("/playground", "Playground")
        page.get_by_label("Prompt").fill("good morning")
        before = len(site.engine.requests)
        page.get_by_role("button", name="Run both").click()
        for side in ("first", "second"):
            expect(page.get_by_label(f"Answer of the {side} model")).to_contain_text("good morning")
        expect(page.get_by_text("first token")).to_have_count(2)
        assert len(site.engine.requests) - before == 2


def test_invoice_of_the_open_month_is_shown(browser: Browser, site: Site) -> None:
    with visiting(browser, site.url) as visit:
        visit.sign_in(site.keys["all-scopes"])
        page = visit.go("/invoices", "Invoices")
        expect(page.get_by_role("heading", name=re.compile("INV-.*acme"))).to_be_visible()
        with page.expect_download() as download:
            page.get_by_role("button", name="JSON").click()
        assert download.value.suggested_filename.endswith("acme.json")


def test_names_that_are_html_are_shown_as_text_on_every_page(browser: Browser, site: Site) -> None:
    with site.http("all-scopes") as http:
        http.post("/v1/keys", json={"name": SCRIPT, "scopes": ["read"]}).raise_for_status()
        http.post("/v1/members", json={"issuer": "https://id.example", "subject": SCRIPT, "role": "viewer"})
        http.post("/v1/webhooks", json={"url": f"https://example.com/{SCRIPT.replace(' ', '')}"})
    with visiting(browser, site.url) as visit:
        visit.sign_in(site.keys["all-scopes"])
        expect(visit.go("/keys", "Keys").get_by_text(SCRIPT)).to_be_visible()
        for path, heading in (
            ("/people", "Projects and members"),
            ("/webhooks", "Webhooks"),
            ("/activity", "Activity"),
            ("/limits", "Limits"),
            ("/usage", "Usage and cost"),
        ):
            page = visit.go(path, heading)
            expect(page.get_by_label("Loading")).to_have_count(0)
            assert page.locator("img[src=x]").count() == 0
        page = visit.go("/playground", "Playground")
        page.get_by_label("Prompt").fill(SCRIPT)
        page.get_by_role("button", name="Run both").click()
        expect(page.get_by_label("Answer of the first model")).to_contain_text("onerror")
        assert page.locator("img[src=x]").count() == 0


def test_two_tenants_side_by_side_see_their_own(browser: Browser, site: Site) -> None:
    with visiting(browser, site.url) as acme, visiting(browser, site.url) as globex:
        acme.sign_in(site.keys["acme"])
        globex.sign_in(site.keys["globex"])
        expect(acme.go("/adapters", "Adapters").get_by_role("link", name="support")).to_be_visible()
        expect(globex.go("/adapters", "Adapters").get_by_text("No adapter yet")).to_be_visible()
        page = globex.page
        page.goto(f"{site.url}/console/adapters/support")
        expect(page.get_by_text("This could not be read").first).to_be_visible()


def test_operator_looks_at_a_tenant_and_can_change_nothing(browser: Browser, site: Site) -> None:
    with visiting(browser, site.url) as visit:
        visit.sign_in(site.keys["all-scopes"])
        page = visit.go("/operator/tenants", "Tenants")
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


def test_session_that_has_ended_leads_to_the_sign_in_page(browser: Browser, site: Site) -> None:
    with visiting(browser, site.url) as visit:
        visit.sign_in(site.keys["globex"])
        cookie = next(one for one in visit.page.context.cookies() if one["name"] == "loramux_session")
        assert cookie["httpOnly"]
        assert cookie["sameSite"] == "Strict"
        assert visit.page.evaluate("document.cookie") == ""
        visit.page.context.clear_cookies()
        visit.page.get_by_role("link", name="Adapters", exact=True).click()
        expect(visit.page.get_by_label("API key")).to_be_visible()


def test_sign_out_ends_the_session(browser: Browser, site: Site) -> None:
    with visiting(browser, site.url) as visit:
        visit.sign_in(site.keys["globex"])
        visit.page.get_by_role("button", name="Account of globex").click()
        visit.page.get_by_role("menuitem", name="Sign out", exact=True).click()
        expect(visit.page.get_by_label("API key")).to_be_visible()
        visit.page.reload()
        expect(visit.page.get_by_label("API key")).to_be_visible()


def test_wrong_key_is_refused_in_words(browser: Browser, site: Site) -> None:
    with visiting(browser, site.url) as visit:
        visit.page.goto(f"{site.url}/console/")
        visit.page.get_by_label("API key").fill(site.keys["revoked"])
        visit.page.get_by_role("button", name="Sign in").click()
        expect(visit.page.get_by_role("alert")).to_contain_text("revoked")
