"""A server with a console, tenants with traffic, and a browser that is signed in to it."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import httpx
import pytest
from playwright.sync_api import Browser, BrowserContext, ConsoleMessage, Dialog, Locator, Page, Playwright, expect
from site_fixture import Site

from loramux_api.controllers.console import ConsoleFiles

AXE = Path(__file__).parents[2] / "console/node_modules/axe-core/axe.min.js"
CHROMIUM = ("chromium", "chromium-browser", "google-chrome")
WAIT_MS = 30_000
"""Generous: a machine that runs other tests is slow."""
MOST_TABS = 80
"""More than any page has places to stop at before its first dialog."""
expect.set_options(timeout=WAIT_MS)


def ensure_console() -> None:
    """Skip the test if the pages are not built: building needs npm."""
    if not ConsoleFiles().is_built:
        pytest.skip("the console is not built: make console")


def launch(playwright: Playwright) -> Browser:
    """Start Debian's Chromium, or skip the test if there is none."""
    found = next((path for name in CHROMIUM if (path := shutil.which(name))), None)
    if found is None:
        pytest.skip("there is no Chromium: apt-get install chromium")
    return playwright.chromium.launch(executable_path=found, args=["--no-sandbox", "--disable-gpu"])


CUSTOMER = {
    "/adapters": "Adapters",
    "/playground": "Playground",
    "/batches": "Batches and files",
    "/fine-tuning": "Fine-tuning",
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


DRAWN = """async () => {
  const frame = () => new Promise(requestAnimationFrame)
  const moves = one => one.playState === 'running' && one.effect.getComputedTiming().endTime < Infinity
  do { await frame(); await frame() } while (document.getAnimations().some(moves))
}"""
"""Settles when a change of size or colours is drawn: an inherited colour moves on from element to element."""
MISPLACED = """() => {
  // Returns what a reader would call broken: a page that scrolls sideways, text that is cut, texts on each other.
  const UNSEEN = '[aria-hidden=true], .mantine-VisuallyHidden-root, .skip, script, noscript'
  const SCROLLED = '[role=region], [role=tablist], pre, .mantine-ScrollArea-viewport'
  const found = [], root = document.documentElement
  if (root.scrollWidth > root.clientWidth) found.push(`sideways: ${root.scrollWidth} > ${root.clientWidth}`)
  const dialog = document.querySelector('[role=dialog]')
  const walker = document.createTreeWalker(dialog ?? document.body, NodeFilter.SHOW_TEXT)
  const texts = []
  for (let node = walker.nextNode(); node; node = walker.nextNode()) {
    const owner = node.parentElement
    if (!node.data.trim() || owner.closest(UNSEEN)) continue
    if (!owner.checkVisibility({opacityProperty: true, visibilityProperty: true})) continue
    const range = document.createRange()
    range.selectNodeContents(node)
    for (const whole of range.getClientRects()) {
      let seen = {left: whole.left, right: whole.right, top: whole.top, bottom: whole.bottom}
      let scrolls = false, fixed = false
      for (let one = owner; one && one !== document.body; one = one.parentElement) {
        const style = getComputedStyle(one)
        fixed ||= style.position === 'fixed'
        if (style.overflowX === 'visible') continue
        const box = one.getBoundingClientRect()
        const shortened = style.textOverflow === 'ellipsis'
        if (one.matches(SCROLLED)) scrolls = true
        if (!scrolls && !shortened && (seen.right > box.right + 1 || seen.left < box.left - 1))
          found.push(`cut: ${node.data.trim().slice(0, 60)}`)
        seen = {left: Math.max(seen.left, box.left), right: Math.min(seen.right, box.right),
                top: Math.max(seen.top, box.top), bottom: Math.min(seen.bottom, box.bottom)}
      }
      if (!scrolls && seen.left < root.clientWidth && seen.right > root.clientWidth + 1)
        found.push(`beyond the screen: ${node.data.trim().slice(0, 60)}`)
      if (seen.right - seen.left > 2 && seen.bottom - seen.top > 2)
        texts.push({...seen, owner, fixed, data: node.data.trim().slice(0, 60)})
    }
  }
  for (const [place, a] of texts.entries())
    for (const b of texts.slice(place + 1)) {
      if (a.owner === b.owner || a.fixed !== b.fixed) continue
      const width = Math.min(a.right, b.right) - Math.max(a.left, b.left)
      const height = Math.min(a.bottom, b.bottom) - Math.max(a.top, b.top)
      if (width > 2 && height > 4) found.push(`on each other: ${a.data} | ${b.data}`)
    }
  return found
}"""


class Visit:
    """A page of one browser context, and what went wrong in it."""

    def __init__(self, page: Page, url: str) -> None:
        self.page = page
        self.url = url
        self.faults: list[str] = []
        page.set_default_timeout(WAIT_MS)
        page.on("pageerror", lambda error: self.faults.append(f"error: {error}"))
        page.on("console", self._note)
        page.on("dialog", self._refuse)

    def _refuse(self, dialog: Dialog) -> None:
        self.faults.append(f"dialog: {dialog.message}")
        dialog.dismiss()

    def _note(self, message: ConsoleMessage) -> None:
        """Keep what the policy has refused, and what React complains about; refused requests are expected."""
        if message.type in ("error", "warning") and "Failed to load resource" not in message.text:
            self.faults.append(f"{message.type}: {message.text}")

    def sign_in(self, key: str) -> None:
        """Open a session with a key, without the form, and the overview with it."""
        answer = self.page.request.post(f"{self.url}/console/session", data={"key": key})
        assert answer.ok, answer.text()
        self.page.goto(f"{self.url}/console/")
        self.page.get_by_role("button", name="Account of").wait_for()

    def go(self, path: str, heading: str) -> Page:
        """Go to a page without loading it again, as a link of the console does, and wait for its heading."""
        self.page.evaluate("path => history.pushState(null, '', path)", f"/console{path}")
        return self._await(heading)

    def load(self, path: str, heading: str) -> Page:
        """Load a page by its address, as a browser does after a reload."""
        self.page.goto(f"{self.url}/console{path}")
        return self._await(heading)

    def _await(self, heading: str) -> Page:
        self.page.get_by_role("heading", name=heading, exact=True, level=1).wait_for()
        return self.page

    def press(self, target: Locator) -> None:
        """Reach a button or link with the tab key alone, and press it with enter. Fails if it cannot be reached."""
        self.tab_to(target)
        self.page.keyboard.press("Enter")

    def tab_to(self, target: Locator) -> None:
        expect(target).to_be_enabled()
        for _ in range(MOST_TABS):
            if target.evaluate("element => element === document.activeElement"):
                return
            self.page.keyboard.press("Tab")
        raise AssertionError(f"the tab key does not reach {target}")

    def misplaced(self) -> list[str]:
        """Return elements that are cut, overlap others, or make the page scroll sideways."""
        self.page.evaluate(DRAWN)
        return self.page.evaluate(MISPLACED)

    def barriers(self, *rules: str) -> list[str]:
        """Return the findings of axe on the page that are serious or critical, of all rules or of `rules`."""
        only = {"runOnly": rules} if rules else {}
        if not self.page.evaluate("'axe' in window"):
            self.page.evaluate(AXE.read_text())  # through the debugger, which the page's policy does not bind
        self.page.evaluate(DRAWN)
        found = self.page.evaluate("only => axe.run(document, {resultTypes: ['violations'], ...only})", only)
        return [
            f"{one['id']}: {one['help']}: {[node['html'][:200] for node in one['nodes'][:3]]}"
            for one in found["violations"]
            if one["impact"] in ("serious", "critical")
        ]


@contextmanager
def visiting(browser: Browser, url: str, **options: object) -> Iterator[Visit]:
    """Yield a page of a new context, with its own cookies; fail if anything went wrong in it.

    The page has no animations, so measured positions are final.
    """
    context = browser.new_context(reduced_motion="reduce", **options)  # type: ignore[arg-type]
    try:
        with page_of(context, url) as visit:
            yield visit
    finally:
        context.close()


@contextmanager
def page_of(context: BrowserContext, url: str) -> Iterator[Visit]:
    """Yield a new page of a context, with its cookies; fail if anything went wrong in it."""
    visit = Visit(context.new_page(), url)
    try:
        yield visit
        if visit.faults:
            raise AssertionError("\n".join(visit.faults))
    finally:
        visit.page.close()


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
