"""The demo, its sign-in links, and screenshots of its pages: `SCREENSHOTS=docs` writes those of the documentation."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from pathlib import Path

import pytest
from console_site import Visit, ensure_console, visiting
from playwright.sync_api import Browser, expect

from loramux_demo.server import Workspace, console_keys, create_customers, free_port, running_server, sign_in_links
from loramux_demo.tour import tour

pytestmark = pytest.mark.slow
ROOT = Path(__file__).parents[2]
MAX_BYTES = 300_000
PHONE = {"width": 390, "height": 844}
DESK = {"width": 1280, "height": 860}


@pytest.fixture(scope="module")
def demo(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, str]]:
    """The demo's server after its tour: a sign-in link of each tenant, and more traffic to look at."""
    ensure_console()
    workspace = Workspace(tmp_path_factory.mktemp("demo"), free_port(None))
    workspace.prepare()
    keys, console = create_customers(workspace), console_keys(workspace)
    with running_server(workspace) as server:
        server.wait_until_ready()
        assert tour(workspace.url, keys, lambda _: None).failures == []
        yield sign_in_links(workspace, console)


def enter(visit: Visit, link: str) -> None:
    visit.page.goto(link)
    visit.page.get_by_role("button", name="Sign in with this link").click()
    visit.page.get_by_role("button", name=re.compile("Account of")).wait_for()


def shoot(visit: Visit, name: str, folder: Path) -> None:
    """Write a screenshot of what stands still."""
    expect(visit.page.get_by_label("Loading")).to_have_count(0)
    visit.page.evaluate("document.fonts.ready")
    visit.page.evaluate("new Promise(done => requestAnimationFrame(() => requestAnimationFrame(done)))")
    target = folder / f"console-{name}.png"
    visit.page.screenshot(path=target, animations="disabled")
    assert target.stat().st_size < MAX_BYTES


def test_demo_links_lead_to_its_traffic(demo: dict[str, str], browser: Browser, tmp_path: Path) -> None:
    folder = ROOT / os.environ["SCREENSHOTS"] if "SCREENSHOTS" in os.environ else tmp_path
    url = demo["acme"].partition("/console/")[0]
    with visiting(browser, url, viewport=DESK, color_scheme="light") as visit:
        enter(visit, demo["acme"])
        expect(visit.page.get_by_text("acme/upper@1").first).to_be_visible()
        shoot(visit, "overview", folder)
        visit.go("/adapters/upper", "upper")
        shoot(visit, "release", folder)
        page = visit.go("/playground?model=acme/pirate", "Playground")
        page.get_by_label("Prompt").fill("Who is Halkodel?")
        page.get_by_role("combobox", name="First model").click()
        page.get_by_role("option", name="acme/json").click()
        page.get_by_role("combobox", name="Second model").click()
        page.get_by_role("option", name="acme/upper").click()
        page.get_by_role("button", name="Run both").click()
        expect(page.get_by_text("tokens/s")).to_have_count(2)
        shoot(visit, "playground", folder)
        visit.page.set_viewport_size(PHONE)
        visit.go("/", "acme")
        shoot(visit, "phone", folder)
    with visiting(browser, url, viewport=DESK, color_scheme="dark") as visit:
        enter(visit, demo["operator"])
        visit.go("/operator", "System")
        expect(visit.page.get_by_text("All is well")).to_be_visible()
        expect(visit.page.get_by_text("Service by tenant since the start")).to_be_visible()
        shoot(visit, "system-dark", folder)
