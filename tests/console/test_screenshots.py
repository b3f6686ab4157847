"""The demo, its sign-in links, and screenshots of its pages: `SCREENSHOTS=docs` writes those of the documentation."""

from __future__ import annotations

import io
import os
import re
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from console_site import Visit, ensure_console, visiting
from PIL import Image
from playwright.sync_api import Browser, expect

from loramux_demo.server import Workspace, console_keys, create_customers, free_port, running_server, sign_in_links
from loramux_demo.tour import tour

pytestmark = pytest.mark.slow
ROOT = Path(__file__).parents[2]
MAX_BYTES = 300_000
PHONE = {"width": 390, "height": 844}
DESK = {"width": 1280, "height": 860}


@pytest.fixture(scope="module")
def toured(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Callable[[], dict[str, str]]]:
    """The demo's server after its tour: it makes sign-in links, each of which works once."""
    ensure_console()
    workspace = Workspace(tmp_path_factory.mktemp("demo"), free_port(None))
    workspace.prepare()
    keys, console = create_customers(workspace), console_keys(workspace)
    with running_server(workspace) as server:
        server.wait_until_ready()
        assert tour(workspace.url, keys, lambda _: None).failures == []
        yield lambda: sign_in_links(workspace, console)


@pytest.fixture
def demo(toured: Callable[[], dict[str, str]]) -> dict[str, str]:
    return toured()


def enter(visit: Visit, link: str) -> None:
    visit.page.goto(link)
    visit.page.get_by_role("button", name="Sign in with this link").click()
    visit.page.get_by_role("button", name=re.compile("Account of")).wait_for()


def shoot(visit: Visit, name: str, folder: Path) -> None:
    """Write a screenshot of what stands still, in 256 colours: a page has no more, and the file is a third."""
    expect(visit.page.get_by_label("Loading")).to_have_count(0)
    visit.page.evaluate("document.fonts.ready")
    visit.page.evaluate("new Promise(done => requestAnimationFrame(() => requestAnimationFrame(done)))")
    picture = Image.open(io.BytesIO(visit.page.screenshot(animations="disabled"))).convert("RGB")
    target = folder / f"console-{name}.png"
    picture.quantize(256, dither=Image.Dither.NONE).save(target, optimize=True)
    assert target.stat().st_size < MAX_BYTES


def play(visit: Visit) -> None:
    """Ask two models in the playground, and wait until both have answered."""
    page = visit.go("/playground?model=acme/pirate", "Playground")
    page.get_by_label("Prompt").fill("Who is Halkodel?")
    for place, model in (("First", "acme/json"), ("Second", "acme/upper")):
        page.get_by_role("combobox", name=f"{place} model").click()
        page.get_by_role("option", name=model).click()
    page.get_by_role("button", name="Run both").click()
    expect(page.get_by_text("tokens/s")).to_have_count(2)


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_demo_links_lead_to_its_traffic(demo: dict[str, str], browser: Browser, tmp_path: Path, scheme: str) -> None:
    folder = ROOT / os.environ["SCREENSHOTS"] if "SCREENSHOTS" in os.environ else tmp_path
    url = demo["acme"].partition("/console/")[0]
    with visiting(browser, url, viewport=DESK, color_scheme=scheme) as visit:
        enter(visit, demo["acme"])
        expect(visit.page.get_by_text("acme/upper@1").first).to_be_visible()
        shoot(visit, f"overview-{scheme}", folder)
        visit.go("/adapters", "Adapters")
        shoot(visit, f"adapters-{scheme}", folder)
        visit.go("/adapters/upper", "upper")
        shoot(visit, f"release-{scheme}", folder)
        play(visit)
        shoot(visit, f"playground-{scheme}", folder)
        visit.go("/usage", "Usage and cost")
        expect(visit.page.get_by_text("Input tokens")).to_be_visible()
        shoot(visit, f"usage-{scheme}", folder)
        visit.page.set_viewport_size(PHONE)
        visit.go("/", "acme")
        shoot(visit, f"phone-{scheme}", folder)
        assert visit.faults == []
    with visiting(browser, url, viewport=DESK, color_scheme=scheme) as visit:
        enter(visit, demo["operator"])
        visit.go("/operator", "System")
        expect(visit.page.get_by_text("All is well")).to_be_visible()
        expect(visit.page.get_by_text("Service by tenant since the start")).to_be_visible()
        shoot(visit, f"system-{scheme}", folder)
        visit.page.get_by_text("Service by tenant since the start").scroll_into_view_if_needed()
        shoot(visit, f"fairness-{scheme}", folder)
        visit.go("/operator/ledger", "Ledger and sinks")
        visit.page.get_by_role("button", name="Reconcile now").click()
        expect(visit.page.get_by_text("agrees", exact=True)).to_be_visible()
        shoot(visit, f"ledger-{scheme}", folder)
        visit.go("/operator/plan", "Planner")
        shoot(visit, f"plan-{scheme}", folder)
