"""The console's pages of customers and operators in a real browser, with data and without."""

from __future__ import annotations

from pathlib import Path

import pytest
from console_site import CUSTOMER, OPERATOR, Visit, upload, visiting
from peft_uploads import CONFIG, WEIGHTS
from playwright.sync_api import Browser, expect
from site_fixture import Site

from loramux_api.controllers.console import ConsoleFiles

MAX_FIRST_LOAD = 300_000
PHONE = {"width": 390, "height": 844}
DESK = {"width": 1280, "height": 860}
LONG = "customer-support-answers-in-the-brand-style-of-region-000042"


@pytest.fixture(scope="module")
def named(site: Site, folders: list[Path]) -> None:
    """An adapter and a key with names of 60 characters."""
    upload(site, "acme", LONG, {name: (folders[0] / name).read_bytes() for name in (CONFIG, WEIGHTS)})
    with site.http("all-scopes") as http:
        http.post("/v1/keys", json={"name": "w" * 60, "scopes": ["read"]}).raise_for_status()


def read(visit: Visit, path: str, heading: str) -> None:
    """Open a page, wait until nothing is a placeholder any more, and demand that everybody can use it."""
    page = visit.go(path, heading)
    expect(page.get_by_label("Loading")).to_have_count(0)
    expect(page.get_by_text("This could not be read")).to_have_count(0)
    visit.faults += [f"{path}: {one}" for one in visit.barriers()]


def test_pages_with_data_in_light_and_dark_and_on_a_phone(browser: Browser, site: Site, named: None) -> None:
    with visiting(browser, site.url, viewport=DESK, color_scheme="light") as visit:
        visit.sign_in(site.keys["all-scopes"])
        for path, heading in ({"/": "acme", f"/adapters/{LONG}": LONG} | CUSTOMER | OPERATOR).items():
            read(visit, path, heading)
            visit.page.emulate_media(color_scheme="dark")
            expect(visit.page.locator("html[data-mantine-color-scheme=dark]")).to_be_attached()
            visit.faults += [f"{path}, dark: {one}" for one in visit.barriers("color-contrast")]
            visit.page.set_viewport_size(PHONE)
            visit.faults += [f"{path}, phone: {one}" for one in visit.misplaced()]
            visit.page.set_viewport_size(DESK)
            visit.page.emulate_media(color_scheme="light")
            expect(visit.page.locator("html[data-mantine-color-scheme=light]")).to_be_attached()
        expect(visit.go("/adapters", "Adapters").get_by_role("link", name="support", exact=True)).to_be_visible()


def test_pages_without_data_say_what_to_do_next(browser: Browser, site: Site) -> None:
    with site.http("all-scopes") as http:
        http.post("/admin/tenants", json={"name": "empty"})
        scopes = [
            "inference",
            "adapters",
            "usage",
            "keys",
            "projects",
            "members",
            "limits",
            "billing",
            "audit",
            "webhooks",
        ]
        key = http.post("/admin/tenants/empty/keys", json={"scopes": scopes}).json()["key"]
    with visiting(browser, site.url) as visit:
        visit.sign_in(key)
        for path, heading in ({"/": "empty"} | CUSTOMER).items():
            read(visit, path, heading)
        expect(visit.go("/adapters", "Adapters").get_by_text("No adapter yet")).to_be_visible()
        expect(visit.go("/webhooks", "Webhooks").get_by_text("No webhook yet")).to_be_visible()
        expect(visit.go("/fine-tuning", "Fine-tuning").get_by_text("No job yet")).to_be_visible()
        expect(visit.page.get_by_role("link", name="System")).to_have_count(0)


def test_first_load_is_small(browser: Browser, site: Site) -> None:
    """Measure the overview with its chart: scripts, styles, font, compressed as on the wire."""
    bodies: dict[str, int] = {}
    with visiting(browser, site.url) as visit:
        visit.page.on("response", lambda answer: bodies.setdefault(answer.url, 0))
        visit.sign_in(site.keys["acme"])
        expect(visit.page.get_by_label("Loading")).to_have_count(0)
    files = ConsoleFiles()
    loaded = [files.file(url.partition("/console/")[2]) for url in bodies if "/console/assets/" in url]
    sizes = [min([len(one.content), *map(len, one.encoded.values())]) for one in loaded if one is not None]
    print(f"{sum(sizes):,} bytes in {len(sizes)} files")
    assert len(sizes) > 3
    assert sum(sizes) <= MAX_FIRST_LOAD
