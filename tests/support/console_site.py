"""A server with a console, tenants with traffic, and a browser that is signed in to it."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import httpx
import pytest
from playwright.sync_api import Browser, ConsoleMessage, Page, Playwright, expect
from site_fixture import Site

from loramux_api.console_files import ConsoleFiles

AXE = Path(__file__).parents[2] / "console/node_modules/axe-core/axe.min.js"
CHROMIUM = ("chromium", "chromium-browser", "google-chrome")
WAIT_MS = 30_000
"""Generous: a machine that runs other tests is slow."""
expect.set_options(timeout=WAIT_MS)


def ensure_console() -> None:
    """Skip the test where the pages are not built: that needs npm."""
    if not ConsoleFiles().is_built:
        pytest.skip("the console is not built: make console")


def launch(playwright: Playwright) -> Browser:
    """Start Debian's Chromium, or skip the test where there is none."""
    found = next((path for name in CHROMIUM if (path := shutil.which(name))), None)
    if found is None:
        pytest.skip("there is no Chromium: apt-get install chromium")
    return playwright.chromium.launch(executable_path=found, args=["--no-sandbox", "--disable-gpu"])


CUSTOMER = {
    "/adapters": "Adapters",
    "/playground": "Playground",
    "/batches": "Batches and files",
    "/usage": "Usage and cost",
    "/limits": "Limits",
    "/invoices": "Invoices",
    "/keys": "Keys",
    "/people": "Projects and members",
    "/webhooks": "Webhooks",
    "/activity": "Activity",
}
"""Pages of customers, with their headings."""
OPERATOR = {
    "/operator": "System",
    "/operator/tenants": "Tenants",
    "/operator/ledger": "Ledger and sinks",
    "/operator/plan": "Planner",
}


class Visit:
    """A page of one browser context, and what went wrong in it."""

    def __init__(self, page: Page, url: str) -> None:
        self.page = page
        self.url = url
        self.faults: list[str] = []
        page.set_default_timeout(WAIT_MS)
        page.on("pageerror", lambda error: self.faults.append(f"error: {error}"))
        page.on("console", self._note)
        page.on("dialog", lambda dialog: (self.faults.append(f"dialog: {dialog.message}"), dialog.dismiss()))

    def _note(self, message: ConsoleMessage) -> None:
        """Keep what the policy has refused, and what React complains about; refused requests are expected."""
        if message.type in ("error", "warning") and "Failed to load resource" not in message.text:
            self.faults.append(f"{message.type}: {message.text}")

    def sign_in(self, key: str) -> None:
        """Sign in with a key, by the form."""
        self.page.goto(f"{self.url}/console/")
        self.page.get_by_label("API key").fill(key)
        self.page.get_by_role("button", name="Sign in").click()
        self.page.get_by_role("button", name="Account of").wait_for()

    def go(self, path: str, heading: str) -> Page:
        """Open a page of the console and wait for its heading."""
        self.page.goto(f"{self.url}/console{path}")
        self.page.get_by_role("heading", name=heading, exact=True, level=1).wait_for()
        return self.page

    def barriers(self) -> list[str]:
        """Return the findings of axe on the page that are serious or critical."""
        self.page.evaluate(AXE.read_text())  # through the debugger, which the page's policy does not bind
        found = self.page.evaluate("axe.run(document, {resultTypes: ['violations']})")
        return [
            f"{one['id']}: {one['help']}: {[node['html'][:200] for node in one['nodes'][:3]]}"
            for one in found["violations"]
            if one["impact"] in ("serious", "critical")
        ]


@contextmanager
def visiting(browser: Browser, url: str, **context: object) -> Iterator[Visit]:
    """Yield a page of a new context, with cookies of its own; fail if anything went wrong in it."""
    opened = browser.new_context(**context)  # type: ignore[arg-type]
    try:
        visit = Visit(opened.new_page(), url)
        yield visit
        assert visit.faults == []
    finally:
        opened.close()


def upload(site: Site, key: str, name: str, files: dict[str, bytes]) -> None:
    """Upload an adapter's revision with the form."""
    parts = {file: (file, content) for file, content in files.items()}
    with site.http(key) as http:
        answer = http.post("/v1/adapters", data={"name": name}, files=parts)
        assert answer.is_success, answer.text


def completed(site: Site, key: str, model: str) -> httpx.Response:
    """Ask a model, and fail if it does not answer."""
    with site.http(key) as http:
        answer = http.post("/v1/completions", json={"model": model, "prompt": "hello", "max_tokens": 4})
        assert answer.is_success, answer.text
        return answer
