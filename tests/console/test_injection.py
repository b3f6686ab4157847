"""HTML and scripts in every text that a tenant or its users can choose: shown as text on every page."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import httpx
import pytest
from console_site import CUSTOMER, OPERATOR, Visit, visiting
from playwright.sync_api import Browser, expect
from site_fixture import Site

MARK = "injected"
HOSTILE = f"<img src=x onerror=alert('{MARK}')><script>alert('{MARK}')</script>\"'>{{{{1}}}}"
SHORT = f"<svg/onload=alert`{MARK}`>"
WATCH = f"""
document.addEventListener('securitypolicyviolation', event => console.error('{MARK}: ' + event.violatedDirective));
new MutationObserver(() => {{
  if (document.querySelector('img[src="x"], svg[onload], script:not([src])')) console.error('{MARK}: element');
}}).observe(document, {{childList: true, subtree: true}});
"""


def accepted(answer: httpx.Response) -> bool:
    """Return whether the server has taken the text; a refusal is as good, a failure is not."""
    assert answer.status_code < 500, answer.text
    return answer.is_success


def plant(site: Site) -> dict[str, bool]:
    """Put the text into every field; return the fields that the server accepted."""
    line = {"custom_id": SHORT, "method": "POST", "url": "/v1/chat/completions"}
    line["body"] = {"model": "tiny", "messages": [{"role": "user", "content": HOSTILE}], "max_tokens": 2}
    question = json.dumps({"prompt": HOSTILE, "expected": HOSTILE}).encode()
    key: dict[str, Any] = {"name": HOSTILE[:128], "scopes": ["read"]}
    guard = {"measures": [SHORT]}
    policy = {"policy": {"evaluation": {"file_id": HOSTILE}}}
    with site.http("all-scopes") as http:
        file = {"file": (f"{SHORT}.jsonl", json.dumps(line).encode())}
        uploaded = http.post("/v1/files", data={"purpose": "batch"}, files=file)
        batch = {"endpoint": "/v1/chat/completions", "metadata": {"note": HOSTILE[:64], SHORT: "x"}}
        batch["input_file_id"] = uploaded.json().get("id", "none")
        chat = {"model": "tiny", "messages": line["body"]["messages"], "max_tokens": 2}
        asked = http.post("/v1/chat/completions", json=chat | {"user": HOSTILE, "metadata": {"note": HOSTILE[:64]}})
        feedback = f"/v1/requests/{asked.headers['x-request-id']}/feedback"
        aliases, base = "/v1/adapters/support/aliases", "/v1/adapters"
        parts = {"adapter_config.json": ("adapter_config.json", HOSTILE.encode())}
        tries: dict[str, httpx.Response] = {
            "key": http.post("/v1/keys", json=key),
            "member": http.post(
                "/v1/members", json={"issuer": "https://id.example", "subject": HOSTILE, "role": "viewer"}
            ),
            "issuer": http.post("/v1/members", json={"issuer": f"https://{SHORT}", "subject": "a", "role": "viewer"}),
            "project": http.post("/v1/projects", json={"name": SHORT}),
            "webhook": http.post("/v1/webhooks", json={"url": "https://example.com/'-alert(1)-'"}),
            "adapter": http.post(base, data={"name": SHORT}, files=parts),
            "bad upload": http.post(base, data={"name": "odd"}, files=parts),
            "alias": http.put(f"{aliases}/{SHORT.replace('/', '')}", json={"targets": [{"revision": 1, "weight": 1}]}),
            "guard": http.put(f"{aliases}/default/guard", json=guard),
            "policy": http.put(f"{aliases}/default/policy", json=policy),
            "file": uploaded,
            "batch": http.post("/v1/batches", json=batch),
            "evals": http.post("/v1/files", data={"purpose": "evals"}, files={"file": (f"{SHORT}.txt", question)}),
            "label": http.post(feedback, json={"score": 1, "label": SHORT}),
            "idempotency": http.post("/v1/chat/completions", json=chat, headers={"Idempotency-Key": SHORT}),
            "request id": http.get("/v1/models", headers={"X-Request-ID": SHORT}),
            "tenant": http.post("/admin/tenants", json={"name": SHORT}),
            "tier": http.put("/admin/tiers/odd", json={"service_class": SHORT}),
            "user": asked,
        }
    return {name: accepted(answer) for name, answer in tries.items()}


@pytest.fixture(scope="module")
def planted(site: Site) -> dict[str, bool]:
    return plant(site)


def watched(browser: Browser, site: Site) -> Iterator[Visit]:
    with visiting(browser, site.url) as visit:
        visit.page.add_init_script(WATCH)
        visit.sign_in(site.keys["all-scopes"])
        yield visit


@pytest.fixture(scope="module")
def visit(browser: Browser, site: Site, planted: dict[str, bool]) -> Iterator[Visit]:
    yield from watched(browser, site)


def test_texts_that_have_no_grammar_are_taken(planted: dict[str, bool]) -> None:
    free = {"key", "member", "webhook", "file", "batch", "evals", "user"}
    assert {name for name, taken in planted.items() if taken} >= free
    assert not any(planted[name] for name in ("project", "adapter", "tenant", "tier", "alias"))


@pytest.mark.parametrize(("path", "heading"), list((CUSTOMER | OPERATOR).items()))
def test_page_shows_hostile_texts_as_text(visit: Visit, path: str, heading: str) -> None:
    page = visit.go(path, heading)
    expect(page.get_by_label("Loading")).to_have_count(0)
    assert page.locator("img[src=x], script:not([src]), svg[onload]").count() == 0
    assert visit.faults == []


def test_adapter_page_and_its_tabs_show_hostile_texts_as_text(visit: Visit) -> None:
    page = visit.go("/adapters/support", "support")
    for tab in ("Revisions", "Evaluations", "Metrics", "Requests"):
        page.get_by_role("tab", name=tab).click()
        expect(page.get_by_label("Loading")).to_have_count(0)
        assert page.locator("img[src=x], script:not([src]), svg[onload]").count() == 0
    page.get_by_role("tab", name="Evaluations").click()
    page.get_by_role("button", name="Evaluate").click()
    page.get_by_role("combobox", name="Questions").click()
    expect(page.get_by_role("option", name=f"{SHORT}.txt")).to_be_visible()
    assert visit.faults == []


def test_hostile_texts_are_there_to_be_seen(visit: Visit) -> None:
    expect(visit.go("/keys", "Keys").get_by_text("onerror").first).to_be_visible()
    expect(visit.go("/people", "Projects and members").get_by_text("onerror").first).to_be_visible()
    expect(visit.go("/batches", "Batches and files").get_by_text(f"{SHORT}.jsonl").first).to_be_visible()
    expect(visit.go("/webhooks", "Webhooks").get_by_text("alert(1)").first).to_be_visible()


def test_search_and_address_show_hostile_texts_as_text(visit: Visit) -> None:
    page = visit.go("/adapters", "Adapters")
    page.get_by_label("Search adapters").fill(SHORT)
    expect(page.get_by_text("No adapter has")).to_contain_text(MARK)
    page.goto(f"{visit.url}/console/adapters/{SHORT.replace('/', '%2F')}")
    expect(page.get_by_text("This could not be read").first).to_be_visible()
    page.goto(f"{visit.url}/console/playground?model={HOSTILE}")
    expect(page.get_by_role("heading", name="Playground", level=1)).to_be_visible()
    page.get_by_label("Prompt").fill(HOSTILE)
    page.get_by_role("button", name="Run both").click()
    expect(page.get_by_label("Answer of the second model")).to_contain_text("onerror")
    assert page.locator("img[src=x], script:not([src]), svg[onload]").count() == 0
    assert visit.faults == []
