"""Names of 60 characters on every page, wide and on a phone: nothing is cut, nothing overlaps."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from console_fleet import MEMBER, NAMES, NOTE, WEBHOOK, ConsoleFleet
from console_site import CUSTOMER, OPERATOR, Visit, visiting
from playwright.sync_api import Browser, Page, expect

pytestmark = pytest.mark.slow

PHONE = {"width": 390, "height": 844}
DESK = {"width": 1280, "height": 860}
ADAPTER = f"/adapters/{NAMES['adapter']}"
TABS = ("Release", "Revisions", "Evaluations", "Metrics", "Requests")
SHOWN = {
    "/": NAMES["adapter"],
    "/adapters": NAMES["adapter"],
    "/batches": f"{NAMES['file']}.jsonl",
    "/usage": NAMES["adapter"],
    "/limits": NAMES["project"],
    "/invoices": NAMES["base"],
    "/keys": NAMES["key"],
    "/people": MEMBER,
    "/webhooks": WEBHOOK,
    "/activity": NAMES["adapter"],
    "/operator": NAMES["base"],
    "/operator/tenants": NAMES["neighbour"],
}
"""A long name that a page must show."""


def look(visit: Visit, screen: str, name: str) -> None:
    """Wait until all is there, take a picture if one is requested, and measure."""
    page = visit.page
    expect(page.get_by_label("Loading")).to_have_count(0)
    expect(page.get_by_text("This could not be read")).to_have_count(0)
    if "SCREENSHOTS" in os.environ:
        page.screenshot(path=Path(os.environ["SCREENSHOTS"]) / f"long-{screen}-{name}.png", full_page=True)
    visit.faults += [f"{name}: {one}" for one in visit.misplaced()]


def tabs(visit: Visit, screen: str, whose: str) -> None:
    visit.go(ADAPTER, NAMES["adapter"])
    for tab in TABS:
        visit.page.get_by_role("tab", name=tab).click()
        look(visit, screen, f"{whose}-{tab.lower()}")


@pytest.mark.parametrize(("screen", "size"), [("desk", DESK), ("phone", PHONE)])
def test_pages_hold_names_of_60_characters(
    long_fleet: ConsoleFleet, browser: Browser, screen: str, size: dict[str, int]
) -> None:
    with visiting(browser, long_fleet.url, viewport=size) as visit:
        visit.sign_in(long_fleet.key)
        for path, heading in ({"/": NAMES["tenant"]} | CUSTOMER | OPERATOR).items():
            page = visit.go(path, heading)
            if path in SHOWN:
                expect(page.locator("main").get_by_text(SHOWN[path]).first).to_be_visible()
            look(visit, screen, path.strip("/").replace("/", "-") or "overview")
        tabs(visit, screen, "adapter")


@pytest.mark.parametrize(("screen", "size"), [("desk", DESK), ("phone", PHONE)])
def test_operators_view_of_a_tenant_holds_names_of_60_characters(
    long_fleet: ConsoleFleet, browser: Browser, screen: str, size: dict[str, int]
) -> None:
    with visiting(browser, long_fleet.url, viewport=size) as visit:
        visit.sign_in(long_fleet.key)
        page = visit.go("/operator/tenants", "Tenants")
        page.get_by_role("row", name=NAMES["tenant"]).get_by_role("button", name="Look").click()
        expect(page.get_by_role("status").get_by_text("read-only")).to_be_visible()
        for path, heading in ({"/": NAMES["tenant"]} | CUSTOMER).items():
            if path in ("/playground", "/batches", "/fine-tuning"):
                continue  # they need the scopes "inference" and "adapters", which a view has not
            visit.go(path, heading)
            look(visit, screen, f"view-{path.strip('/') or 'overview'}")
        tabs(visit, screen, "view")


def opened(page: Page, button: str) -> None:
    page.get_by_role("button", name=button, exact=True, disabled=False).first.click()
    expect(page.get_by_role("dialog")).to_have_css("opacity", "1")


@pytest.mark.parametrize(("screen", "size"), [("desk", DESK), ("phone", PHONE)])
def test_dialogs_hold_names_of_60_characters(
    long_fleet: ConsoleFleet, browser: Browser, screen: str, size: dict[str, int]
) -> None:
    buttons = {
        ADAPTER: ("Delete", "Roll back", "Edit the policy"),
        "/keys": ("Make a key", "Revoke"),
        "/people": ("Archive", "Remove"),
        "/limits": ("Limit a key or project", "Remove"),
        "/batches": ("Run", "Delete"),
        "/operator/tenants": ("Suspend",),
        "/operator": ("Drain",),
    }
    headings = {ADAPTER: NAMES["adapter"]} | CUSTOMER | OPERATOR
    with visiting(browser, long_fleet.url, viewport=size) as visit:
        visit.sign_in(long_fleet.key)
        for path, names in buttons.items():
            page = visit.go(path, headings[path])
            for name in names:
                opened(page, name)
                look(visit, screen, f"dialog-{name.lower().replace(' ', '-')}-{path.strip('/').replace('/', '-')[:20]}")
                page.keyboard.press("Escape")
                expect(page.get_by_role("dialog")).to_have_count(0)


def test_answer_without_spaces_stays_in_its_card(long_fleet: ConsoleFleet, browser: Browser) -> None:
    with visiting(browser, long_fleet.url, viewport=PHONE) as visit:
        visit.sign_in(long_fleet.key)
        page = visit.go("/playground", "Playground")
        page.get_by_label("Prompt").fill(NOTE)
        page.get_by_role("button", name="Run both").click()
        expect(page.get_by_text("tokens/s")).to_have_count(2)
        look(visit, "phone", "playground-answered")
