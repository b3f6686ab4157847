"""The console's pages in a real browser: with data and without, for customers and operators."""

from __future__ import annotations

import pytest
from console_site import CUSTOMER, OPERATOR, Visit, visiting
from playwright.sync_api import Browser, expect
from site_fixture import Site

from loramux_api.console_files import ConsoleFiles

MAX_FIRST_LOAD = 300_000


def read_all(visit: Visit, places: dict[str, str]) -> None:
    """Open every page, wait until nothing is a placeholder any more, and demand that everybody can use it."""
    for path, heading in places.items():
        page = visit.go(path, heading)
        expect(page.get_by_label("Loading")).to_have_count(0)
        expect(page.get_by_text("This could not be read")).to_have_count(0)
        assert visit.barriers() == [], path


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_pages_with_data_show_it(browser: Browser, site: Site, scheme: str) -> None:
    with visiting(browser, site.url, color_scheme=scheme) as visit:
        visit.sign_in(site.keys["all-scopes"])
        adapter = {"/": "acme", "/adapters/support": "support"}
        read_all(visit, adapter | CUSTOMER | OPERATOR)
        expect(visit.go("/adapters", "Adapters").get_by_role("link", name="support")).to_be_visible()


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
        read_all(visit, {"/": "empty"} | CUSTOMER)
        expect(visit.go("/adapters", "Adapters").get_by_text("No adapter yet")).to_be_visible()
        expect(visit.go("/webhooks", "Webhooks").get_by_text("No webhook yet")).to_be_visible()
        expect(visit.page.get_by_role("link", name="System")).to_have_count(0)


def test_overview_on_a_phone_does_not_scroll_sideways(browser: Browser, site: Site) -> None:
    with visiting(browser, site.url, viewport={"width": 390, "height": 844}) as visit:
        visit.sign_in(site.keys["all-scopes"])
        for path, heading in ({"/": "acme"} | OPERATOR).items():
            page = visit.go(path, heading)
            expect(page.get_by_label("Loading")).to_have_count(0)
            assert page.evaluate("document.documentElement.scrollWidth <= innerWidth"), path


def test_first_load_is_small(browser: Browser, site: Site) -> None:
    """Of the overview with its chart: scripts, styles, font; compressed as they go over the wire."""
    bodies: dict[str, int] = {}
    with visiting(browser, site.url) as visit:
        visit.page.on("response", lambda answer: bodies.setdefault(answer.url, 0))
        visit.sign_in(site.keys["acme"])
        expect(visit.page.get_by_label("Loading")).to_have_count(0)
    files = ConsoleFiles()
    loaded = [files.file(url.partition("/console/")[2]) for url in bodies if "/console/assets/" in url]
    sizes = [min([len(one.content), *map(len, one.encoded.values())]) for one in loaded if one is not None]
    assert len(sizes) > 3
    assert sum(sizes) <= MAX_FIRST_LOAD
