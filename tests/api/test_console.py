"""Sessions of the web console over HTTP: signing in and out, CSRF, expiry, revocation, an operator's view."""

from __future__ import annotations

import asyncio
import re
import time
from collections.abc import Iterator
from contextlib import contextmanager
from copy import copy
from pathlib import Path

import httpx
import pytest
from site_fixture import Site

from loramux_api.controllers.console import ConsoleFiles

CSRF = "X-CSRF-Token"
VIEW = "X-View-Tenant"


INDEX = """<!doctype html><html><head><meta property="csp-nonce" nonce="NONCE-OF-THIS-ANSWER">
<script type="module" src="/console/assets/index-1.js"></script></head><body></body></html>"""


@pytest.fixture
def built(site: Site, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Pages as the build leaves them, however this checkout is."""
    (tmp_path / "assets").mkdir()
    (tmp_path / "index.html").write_text(INDEX)
    (tmp_path / "assets" / "index-1.js").write_text("console.log(1);" * 200)
    monkeypatch.setattr(site.server.app.state, "console_files", ConsoleFiles(tmp_path))


@contextmanager
def browser(site: Site, name: str = "", **sign_in: str) -> Iterator[httpx.Client]:
    """A client with a cookie jar that has signed in, with the key of that name or as said."""
    with httpx.Client(base_url=site.url, timeout=20) as client:
        answer = client.post("/console/session", json=sign_in or {"key": site.keys[name]})
        assert answer.status_code == 201, answer.text
        client.headers[CSRF] = answer.json()["csrf_token"]
        yield client


def error_of(answer: httpx.Response) -> str:
    return answer.json()["error"]["code"]


def test_sign_in_with_a_key_sets_a_cookie_that_scripts_and_other_sites_do_not_get(site: Site) -> None:
    answer = httpx.post(f"{site.url}/console/session", json={"key": site.keys["acme"]})
    cookie = answer.headers["set-cookie"]
    assert "HttpOnly" in cookie
    assert "SameSite=strict" in cookie
    assert "Path=/" in cookie
    assert "Max-Age" not in cookie
    assert site.keys["acme"] not in answer.text
    assert answer.headers["cache-control"] == "no-store"


@pytest.mark.parametrize(("host", "secure"), [("console.example.com", True), ("127.0.0.1:8000", False)])
def test_cookie_is_secure_everywhere_but_on_this_machine(site: Site, host: str, secure: bool) -> None:
    answer = httpx.post(f"{site.url}/console/session", json={"key": site.keys["acme"]}, headers={"Host": host})
    assert ("Secure" in answer.headers["set-cookie"]) == secure


def test_session_has_the_scopes_of_its_key_and_reads_its_tenant_only(site: Site, newcomer: str) -> None:
    with site.http(newcomer) as http:
        id = http.post("/v1/files", data={"purpose": "batch"}, files={"file": ("mine.jsonl", b"{}")}).json()["id"]
    with browser(site, "acme") as acme, browser(site, newcomer) as other:
        described = acme.get("/console/session").json()
        assert described["tenant"] == "acme"
        assert described["scopes"] == sorted({"inference", "adapters", "usage", "read"})
        assert error_of(acme.get("/v1/keys")) == "insufficient_permissions"
        assert other.get("/console/session").json()["tenant"] == newcomer
        assert [one["id"] for one in other.get("/v1/files").json()["data"]] == [id]
        assert id not in [one["id"] for one in acme.get("/v1/files").json()["data"]]
        assert acme.get(f"/v1/files/{id}").status_code == 404


@pytest.mark.parametrize("kind", ["revoked", "expired"])
def test_sign_in_with_an_invalid_key_is_refused_as_on_every_route(site: Site, kind: str) -> None:
    answer = httpx.post(f"{site.url}/console/session", json={"key": site.keys[kind]})
    assert (answer.status_code, error_of(answer)) == (401, "invalid_api_key")
    assert "set-cookie" not in answer.headers


@pytest.mark.parametrize("body", [{}, {"key": "a", "link": "b"}])
def test_sign_in_without_exactly_one_credential_is_refused(site: Site, body: dict[str, str]) -> None:
    assert httpx.post(f"{site.url}/console/session", json=body).status_code == 400


def test_change_without_the_csrf_token_is_refused(site: Site) -> None:
    with browser(site, "all-scopes") as client:
        token = client.headers.pop(CSRF)
        for wrong in ({}, {CSRF: ""}, {CSRF: token[:-2] + "xx"}):
            answer = client.post("/v1/projects", json={"name": "sneaked-in"}, headers=wrong)
            assert (answer.status_code, error_of(answer)) == (403, "csrf_token_invalid")
        with browser(site, "all-scopes") as other:
            answer = client.post("/v1/projects", json={"name": "sneaked-in"}, headers={CSRF: other.headers[CSRF]})
            assert answer.status_code == 403, "a token belongs to one session"
        names = [one["name"] for one in client.get("/v1/projects").json()["data"]]
        assert "sneaked-in" not in names
        assert client.post("/v1/projects", json={"name": "meant"}, headers={CSRF: token}).status_code == 201


@pytest.mark.parametrize("site_of_page", ["cross-site", "same-site"])
def test_request_of_another_sites_page_is_refused_even_to_read(site: Site, site_of_page: str) -> None:
    with browser(site, "acme") as client:
        answer = client.get("/v1/adapters", headers={"Sec-Fetch-Site": site_of_page})
        assert (answer.status_code, error_of(answer)) == (403, "cross_site_request")


def test_another_sites_page_opens_no_session(site: Site) -> None:
    for headers in ({"Sec-Fetch-Site": "cross-site"}, {"Origin": "https://evil.example"}):
        answer = httpx.post(f"{site.url}/console/session", json={"key": site.keys["acme"]}, headers=headers)
        assert (answer.status_code, error_of(answer)) == (403, "cross_site_request")


@pytest.mark.parametrize(("header", "scheme"), [("Authorization", "Bearer "), ("x-api-key", ""), ("api-key", "")])
def test_key_in_a_header_needs_no_csrf_token_and_wins_over_the_cookie(site: Site, header: str, scheme: str) -> None:
    with browser(site, "acme") as client:
        client.headers.pop(CSRF)
        key = {header: f"{scheme}{site.keys['all-scopes']}"}
        name = f"by-{header.lower()}"
        assert client.post("/v1/projects", json={"name": name}, headers=key).status_code == 201


def test_sign_out_ends_the_session_at_the_server(site: Site) -> None:
    with browser(site, "acme") as client:
        secret = client.cookies["loramux_session"]
        assert client.delete("/console/session").status_code == 200
        assert "loramux_session" not in client.cookies
        stolen = httpx.get(f"{site.url}/v1/adapters", cookies={"loramux_session": secret})
        assert (stolen.status_code, error_of(stolen)) == (401, "invalid_api_key")


def test_sign_out_everywhere_ends_every_session_of_the_key(site: Site) -> None:
    with browser(site, "globex") as one, browser(site, "globex") as other, browser(site, "acme") as neighbour:
        assert one.delete("/console/session", params={"everywhere": "true"}).status_code == 200
        assert other.get("/v1/adapters").status_code == 401
        assert neighbour.get("/v1/adapters").status_code == 200


def test_session_ends_when_its_key_is_revoked(site: Site) -> None:
    with site.http("all-scopes") as http:
        made = http.post("/v1/keys", json={"name": "short", "scopes": ["read"]}).json()
        with browser(site, key=made["key"]) as client:
            assert client.get("/v1/adapters").status_code == 200
            http.delete(f"/v1/keys/{made['id']}")
            assert client.get("/v1/adapters").status_code == 401


@pytest.mark.parametrize(("seconds", "status"), [(7100, 200), (7300, 401)])
def test_session_that_is_not_used_ends(site: Site, monkeypatch: pytest.MonkeyPatch, seconds: int, status: int) -> None:
    with browser(site, "acme") as client:
        later(site, monkeypatch, seconds)
        assert client.get("/v1/adapters").status_code == status


def test_session_that_is_used_all_the_time_ends_too(site: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    with browser(site, "acme") as client:
        answers = []
        for hours in range(1, 14):
            later(site, monkeypatch, hours * 3600)
            answers.append(client.get("/v1/adapters").status_code)
        assert answers == [200] * 11 + [401] * 2


def later(site: Site, monkeypatch: pytest.MonkeyPatch, seconds: int) -> None:
    """Move the sessions' clock to so many seconds from now; the rest of the server keeps its own."""
    platform = site.server.app.state.platform
    database = copy(platform.tenants._database)
    database.now = lambda: int((time.time() + seconds) * 1e6)
    monkeypatch.setattr(platform.tenants.sessions, "_database", database)


def test_sign_in_link_opens_one_session_with_the_keys_rights(site: Site) -> None:
    with site.http("acme") as http:
        path = http.post("/console/links").json()["path"]
    assert path.startswith("/console/#sign-in="), "a fragment is in no log and no Referer header"
    secret = path.partition("=")[2]
    with browser(site, link=secret) as client:
        assert client.get("/console/session").json()["tenant"] == "acme"
    again = httpx.post(f"{site.url}/console/session", json={"link": secret})
    assert (again.status_code, error_of(again)) == (401, "invalid_api_key")


def test_operator_looks_at_a_tenants_pages_read_only_and_audited(site: Site) -> None:
    with browser(site, "all-scopes") as client:
        look = {VIEW: "globex"}
        assert client.get("/v1/keys", headers=look).status_code == 403, "not opened yet"
        assert client.post("/console/views", json={"tenant": "globex"}).json()["viewed"] == ["globex"]
        assert client.post("/console/views", json={"tenant": "globex"}).status_code == 200
        seen = client.get("/v1/keys", headers=look).json()["data"]
        with site.http("all-scopes") as http:
            assert [key["id"] for key in seen] == [
                key["id"] for key in http.get("/admin/tenants/globex/keys").json()["data"]
            ]
        for method, path, body in (
            ("POST", "/v1/keys", {"name": "mine"}),
            ("DELETE", f"/v1/keys/{seen[0]['id']}", None),
            ("POST", "/v1/completions", {"model": "tiny", "prompt": "hi"}),
        ):
            answer = client.request(method, path, json=body, headers=look)
            assert (answer.status_code, error_of(answer)) == (403, "read_only_view")
        log = client.get("/v1/audit", headers=look).json()["data"]
        views = [entry for entry in log if entry["action"] == "session.view"]
        assert len(views) == 1
        assert views[0]["actor"] == client.get("/console/session").json()["holder"]


def test_view_of_a_tenant_is_for_operators_and_for_tenants_that_exist(site: Site) -> None:
    with browser(site, "acme") as customer, browser(site, "all-scopes") as operator:
        assert customer.post("/console/views", json={"tenant": "globex"}).status_code == 400
        assert customer.get("/v1/adapters", headers={VIEW: "globex"}).status_code == 403
        assert operator.post("/console/views", json={"tenant": "nobody"}).status_code == 404


def test_data_that_the_cookie_let_in_is_never_shown_as_a_page(site: Site) -> None:
    with browser(site, "acme") as client:
        headers = client.get("/v1/models").headers
        assert "sandbox" in headers["content-security-policy"]
        assert headers["x-content-type-options"] == "nosniff"


def test_description_with_scripts_of_another_origin_has_no_part_in_a_session(site: Site) -> None:
    with browser(site, "acme") as client:
        assert client.get("/schema").headers["content-security-policy"] == "sandbox allow-scripts"
    assert "content-security-policy" not in httpx.get(f"{site.url}/schema").headers


def test_pages_forbid_inline_scripts_frames_and_third_parties(site: Site, built: None) -> None:
    answers = [httpx.get(f"{site.url}/console/{path}") for path in ("", "adapters/x/y", "no-such-page")]
    for answer in answers:
        policy = answer.headers["content-security-policy"]
        assert "default-src 'none'" in policy
        assert "frame-ancestors 'none'" in policy
        assert "unsafe" not in policy
        assert re.findall(r"https?:", policy) == []
        nonce = re.search("'nonce-([^']+)'", policy)
        assert nonce is not None
        assert nonce[1] in answer.text
        assert re.findall(r"(?:src|href)=\"(?!/console/)", answer.text) == []
    assert len({answer.headers["content-security-policy"] for answer in answers}) == 3, "a nonce is used once"


def test_built_files_are_compressed_and_kept_by_browsers(site: Site, built: None) -> None:
    answer = httpx.get(f"{site.url}/console/assets/index-1.js")
    assert answer.text.startswith("console.log")
    assert answer.headers["content-encoding"] == "gzip"
    assert "immutable" in answer.headers["cache-control"]
    assert httpx.get(f"{site.url}/console/").headers["cache-control"] == "no-cache"


@pytest.mark.parametrize("path", ["../pyproject.toml", "..%2f..%2fapp.py", "assets/../../app.py", "/etc/passwd"])
def test_no_file_outside_the_console_is_sent(site: Site, built: None, path: str) -> None:
    answer = httpx.get(f"{site.url}/console/{path}")
    assert "import" not in answer.text.partition("<script")[0]
    assert "root:" not in answer.text


def test_server_without_built_pages_says_how_to_build_them(
    site: Site, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(site.server.app.state, "console_files", ConsoleFiles(tmp_path / "nothing"))
    answer = httpx.get(f"{site.url}/console/")
    assert answer.status_code == 503
    assert "make console" in answer.text


def test_ended_sessions_do_not_stay_in_the_database(site: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    from sqlalchemy import func, select

    from loramux.data.records.credentials import SessionRow

    database = site.server.app.state.platform.tenants.sessions._database

    async def count() -> int:
        async with database.read() as session:
            return await session.scalar(select(func.count()).select_from(SessionRow)) or 0

    for _ in range(3):
        with browser(site, "acme"):
            pass
    assert asyncio.run_coroutine_threadsafe(count(), site.server.loop).result(20) >= 3
    later(site, monkeypatch, 90_000)
    with browser(site, "acme"):
        pass
    assert asyncio.run_coroutine_threadsafe(count(), site.server.loop).result(20) == 1
