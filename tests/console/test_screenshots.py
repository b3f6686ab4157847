"""The demo, its sign-in links, and screenshots of its pages: `SCREENSHOTS=docs` writes those of the documentation."""

from __future__ import annotations

import asyncio
import io
import os
import random
import re
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import httpx
import pytest
from console_site import Visit, ensure_console, visiting
from PIL import Image
from playwright.sync_api import Browser, Locator, expect

from loramux_demo.assets import adapter_folder, load_prompts
from loramux_demo.drive import drive, plan_calls
from loramux_demo.server import Workspace, console_keys, create_customers, free_port, running_server, sign_in_links
from loramux_demo.tour import tour

pytestmark = pytest.mark.slow
ROOT = Path(__file__).parents[2]
MAX_BYTES = 300_000
PHONE = {"width": 390, "height": 844}
DESK = {"width": 1280, "height": 860}
PICTURES = {
    "fairness-light",
    "ledger-light",
    "overview-light",
    "phone-light",
    "plan-dark",
    "playground-light",
    "release-light",
    "system-dark",
}
"""Screenshots that the documentation shows."""
READINGS = 20
"""Samples of the operator's page before its picture."""


@dataclass(frozen=True)
class Demo:
    """The demo's server after its tour."""

    url: str
    keys: dict[str, str]
    links: Callable[[], dict[str, str]]
    """Makes sign-in links, each of which works once."""

    @contextmanager
    def busy(self) -> Iterator[None]:
        """Send the demo's requests, some at a time, while the block runs."""
        ended = threading.Event()

        def send() -> None:
            calls, chosen = plan_calls(load_prompts()), random.Random(1)
            while not ended.wait(chosen.uniform(0, 0.5)):
                asyncio.run(drive(self.url, self.keys, chosen.sample(calls, chosen.randint(1, 30))))

        thread = threading.Thread(target=send)
        thread.start()
        try:
            yield
        finally:
            ended.set()
            thread.join()

    def release(self) -> None:
        """Give the adapter `upper` a second revision as a canary, with a guard, a policy and requests of many users."""
        with httpx.Client(
            base_url=self.url, headers={"Authorization": f"Bearer {self.keys['acme']}"}, timeout=60
        ) as http:
            alias, folder = "/v1/adapters/upper/aliases/default", adapter_folder("terse")
            files = {file.name: (file.name, file.read_bytes()) for file in folder.iterdir()}
            http.post("/v1/adapters", data={"name": "upper"}, files=files).raise_for_status()
            weights = [{"revision": 1, "weight": 90}, {"revision": 2, "weight": 10}]
            http.put(alias, json={"targets": weights}).raise_for_status()
            http.put(f"{alias}/guard", json={"measures": ["errors", "feedback"]}).raise_for_status()
            policy = {"min_requests": 5, "max_error_rate": 0.01}
            http.put(f"{alias}/policy", json={"policy": policy}).raise_for_status()
            asked = {"model": "acme/upper", "prompt": "Who is Halkodel?", "max_tokens": 32}
            for user in range(100):
                http.post("/v1/completions", json=asked | {"user": f"user-{user}"}).raise_for_status()


@pytest.fixture(scope="module")
def demo(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Demo]:
    ensure_console()
    workspace = Workspace(tmp_path_factory.mktemp("demo"), free_port(None))
    workspace.prepare()
    keys, console = create_customers(workspace), console_keys(workspace)
    with running_server(workspace) as server:
        server.wait_until_ready()
        assert tour(workspace.url, keys, lambda _: None).failures == []
        demo = Demo(workspace.url, keys, lambda: sign_in_links(workspace, console))
        demo.release()
        yield demo


def enter(visit: Visit, link: str) -> None:
    visit.page.goto(link)
    visit.page.get_by_role("button", name="Sign in with this link").click()
    visit.page.get_by_role("button", name=re.compile("Account of")).wait_for()


def shoot(visit: Visit, name: str, folder: Path, above: Locator | None = None) -> None:
    """Write a screenshot that the documentation shows, in 256 colours: a page has no more, and the file is a third.

    The window becomes as high as the rest of the page, or as the part of it `above`, so that nothing is cut.
    """
    page, before = visit.page, visit.page.viewport_size
    assert before is not None
    expect(page.get_by_label("Loading")).to_have_count(0)
    if name not in PICTURES:
        return
    if before != PHONE:
        height = page.evaluate("Math.floor(document.documentElement.scrollHeight - scrollY)")
        if above is not None:
            height = above.evaluate("element => Math.floor(element.getBoundingClientRect().top) - 12")
        page.set_viewport_size({"width": before["width"], "height": max(before["height"], height)})
    page.mouse.move(0, 0)
    page.evaluate("document.activeElement?.blur()")
    page.evaluate("document.fonts.ready")
    page.evaluate("new Promise(done => requestAnimationFrame(() => requestAnimationFrame(done)))")
    picture = Image.open(io.BytesIO(page.screenshot(animations="disabled"))).convert("RGB")
    page.set_viewport_size(before)
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
def test_demo_links_lead_to_its_traffic(demo: Demo, browser: Browser, tmp_path: Path, scheme: str) -> None:
    folder = ROOT / os.environ["SCREENSHOTS"] if "SCREENSHOTS" in os.environ else tmp_path
    links = demo.links()
    with visiting(browser, demo.url, viewport=DESK, color_scheme=scheme) as visit:
        enter(visit, links["acme"])
        expect(visit.page.get_by_text("acme/upper@1").first).to_be_visible()
        shoot(visit, f"overview-{scheme}", folder)
        visit.go("/adapters/upper", "upper")
        shoot(visit, f"release-{scheme}", folder)
        play(visit)
        shoot(visit, f"playground-{scheme}", folder)
        visit.page.set_viewport_size(PHONE)
        visit.go("/", "acme")
        shoot(visit, f"phone-{scheme}", folder)
    with visiting(browser, demo.url, viewport=DESK, color_scheme=scheme) as visit:
        enter(visit, links["operator"])
        page = visit.go("/operator", "System")
        with demo.busy():
            rates = page.get_by_role("figure", name="Tokens per second").locator("tr")
            expect(rates.nth(READINGS)).to_be_attached(timeout=300_000)
            expect(page.get_by_text("All is well")).to_be_visible()
            next_out = page.get_by_text("What leaves the pool next")
            shoot(visit, f"system-{scheme}", folder, above=next_out)
            next_out.evaluate("element => scrollTo(0, element.getBoundingClientRect().top + scrollY - 80)")
            shoot(visit, f"fairness-{scheme}", folder)
        visit.go("/operator/ledger", "Ledger and sinks")
        page.get_by_role("button", name="Reconcile now").click()
        expect(page.get_by_text("agrees", exact=True)).to_be_visible()
        page.get_by_role("alert").get_by_role("button").click()
        expect(page.get_by_role("alert")).to_have_count(0)
        shoot(visit, f"ledger-{scheme}", folder)
        visit.go("/operator/plan", "Planner")
        for knob, steps in (("Requests per second", 2), ("Adapters", 2)):
            for _ in range(steps):
                page.get_by_role("slider", name=knob).press("ArrowLeft")
        page.get_by_role("button", name="Make a plan").click()
        expect(page.get_by_text("per million tokens")).to_be_visible(timeout=120_000)
        shoot(visit, f"plan-{scheme}", folder)
