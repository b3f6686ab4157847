"""Cookies, headers and connections: what a browser or a silent client can do with them."""

from __future__ import annotations

import asyncio
import os
from pathlib import Path
from typing import Any

import httpx
import pytest
from click.testing import CliRunner
from litestar.connection import ASGIConnection
from site_fixture import Site

import loramux.fleet.serving
from loramux_api.cli.main import main
from loramux_api.controllers.console import session_cookie, sign_in_cookie
from loramux_api.headers import SESSION_COOKIE, cookie_name, send_transport_policy


def connection(scheme: str, host: str) -> ASGIConnection[Any, Any, Any, Any]:
    return ASGIConnection({"type": "http", "scheme": scheme, "headers": [(b"host", host.encode())]})  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("scheme", "host", "has_prefix"),
    [
        ("http", "127.0.0.1:8000", False),
        ("http", "localhost", False),
        ("https", "127.0.0.1:8443", True),
        ("https", "models.example.com", True),
        ("http", "models.example.com", True),
    ],
    ids=["this machine", "this machine by name", "TLS on this machine", "TLS", "behind a proxy with TLS"],
)
def test_cookies_are_of_one_host_except_on_this_machine(scheme: str, host: str, has_prefix: bool) -> None:
    request = connection(scheme, host)
    assert cookie_name(SESSION_COOKIE, request).startswith("__Host-") == has_prefix
    for cookie in (session_cookie(request, "s"), sign_in_cookie(request, "s", 60)):  # type: ignore[arg-type]
        # what a browser demands of the prefix: Secure, the path /, no domain
        assert (cookie.key.startswith("__Host-"), cookie.secure) == (has_prefix, has_prefix)
        assert (cookie.path, cookie.domain) == ("/", None)


def test_a_cookie_without_the_prefix_opens_no_session_of_a_host_with_tls(site: Site) -> None:
    """Another host of the same domain can set it."""
    with httpx.Client(base_url=site.url) as browser:
        opened = browser.post("/console/session", json={"key": site.keys["all-scopes"]})
        assert opened.status_code in (200, 201), opened.text
        secret = opened.cookies[SESSION_COOKIE]
        named = {"host": "models.example.com", "cookie": f"{SESSION_COOKIE}={secret}"}
        assert httpx.get(f"{site.url}/v1/models", headers=named).status_code == 401
        named["cookie"] = f"__Host-{SESSION_COOKIE}={secret}"
        assert httpx.get(f"{site.url}/v1/models", headers=named).status_code == 200


@pytest.mark.parametrize(("scheme", "is_sent"), [("https", True), ("http", False)])
def test_hsts_is_sent_under_tls(scheme: str, is_sent: bool) -> None:
    message: dict[str, Any] = {"type": "http.response.start", "headers": []}
    asyncio.run(send_transport_policy(message, {"scheme": scheme}))  # type: ignore[arg-type]
    assert [name for name, _ in message["headers"]] == [b"strict-transport-security"] * is_sent


def test_what_an_engine_writes_is_for_its_own_user(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, base_dir: Path
) -> None:
    written = tmp_path / "written"

    def serve(*_: object) -> None:
        written.write_text("an adapter")

    class Ended(Exception):
        """The process would end here."""

    def end(_: int) -> None:
        raise Ended

    settings = tmp_path / "loramux.toml"
    settings.write_text(f'[model]\npath = "{base_dir}"\nserved_model_name = "base"\n')
    monkeypatch.setattr(loramux.fleet.serving, "serve_engine", serve)
    monkeypatch.setattr(os, "_exit", end)
    before = os.umask(0o022)
    try:
        CliRunner().invoke(main, ["engine", "serve", "--config", str(settings)])
    finally:
        os.umask(before)
    assert written.stat().st_mode & 0o077 == 0


def test_keys_are_listed_by_pages(site: Site) -> None:
    with site.http("all-scopes") as client:
        for _ in range(5):
            assert client.post("/v1/keys", json={"name": "paged"}).status_code == 201
        everything = [key["id"] for key in client.get("/v1/keys").json()["data"]]
        found, after = list[str](), None
        while True:
            page = client.get("/v1/keys", params={"limit": 2} | ({"after": after} if after else {})).json()
            assert len(page["data"]) <= 2
            assert page["last_id"] == page["data"][-1]["id"]
            found += [key["id"] for key in page["data"]]
            if not page["has_more"]:
                break
            after = page["last_id"]
        assert client.get("/v1/keys", params={"limit": 501}).status_code == 400
    assert found == everything
    assert len(found) == len(set(found)) >= 5
