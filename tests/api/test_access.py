"""Every route of the application asks for a key, but for those that are listed here."""

from __future__ import annotations

import re

import httpx
import pytest
from site_fixture import Site

PUBLIC = {"/health/live", "/health/ready", "/metrics"}
DESCRIPTION = "/schema"
SCOPES = {
    "/v1/chat/completions": "inference",
    "/v1/completions": "inference",
    "/v1/models": "inference",
    "/v1/models/{name:path}": "inference",
    "/v1/adapters": "adapters",
    "/v1/adapters/{name:path}": "adapters",
    "/v1/organization/usage/completions": "usage",
}
WRONG = {
    "no key": {},
    "empty": {"Authorization": ""},
    "not bearer": {"Authorization": "Basic c2stbG0teA=="},
    "bearer of nothing": {"Authorization": "Bearer"},
    "wrong key": {"Authorization": "Bearer sk-lm-" + "x" * 43},
    "somebody else's": {"Authorization": "Bearer sk-proj-abcdef"},
    "endless": {"Authorization": "Bearer sk-lm-" + "x" * 4000},
    "not text": {"Authorization": "Bearer sk-lm-\xff"},
}


def guarded(site: Site) -> list[tuple[str, str]]:
    """Every (method, path) of the application that is not public, as the application itself has them."""
    routes = [(method, route.path) for route in site.server.app.routes for method in sorted(route.methods)]
    return [(method, path) for method, path in routes if path not in PUBLIC and not path.startswith(DESCRIPTION)]


def ask(site: Site, method: str, path: str, headers: dict[str, str]) -> httpx.Response:
    url = site.url + re.sub(r"{[^}]*}", "acme/thing", path)
    encoded = {name: value.encode("latin-1") for name, value in headers.items()}
    return httpx.request(method, url, headers=encoded, json={} if method == "POST" else None)


def test_every_route_is_either_public_or_has_a_scope(site: Site) -> None:
    assert {path for _, path in guarded(site)} == set(SCOPES)


@pytest.mark.parametrize("kind", WRONG)
def test_without_a_valid_key_every_route_answers_401(site: Site, kind: str) -> None:
    for method, path in guarded(site):
        response = ask(site, method, path, WRONG[kind])
        assert response.status_code == 401, f"{method} {path}: {response.text}"
        assert response.headers["www-authenticate"] == "Bearer"
        assert list(response.json()["error"]) == ["message", "type", "param", "code"]
        assert response.json()["error"]["code"] == "invalid_api_key"
    assert site.engine.requests == []


def test_a_key_without_the_scope_gets_403_and_its_name(site: Site) -> None:
    for method, path in guarded(site):
        response = ask(site, method, path, {"Authorization": f"Bearer {site.keys['no-scopes']}"})
        assert response.status_code == 403, f"{method} {path}"
        assert f"'{SCOPES[path]}'" in response.json()["error"]["message"]
        assert response.json()["error"]["code"] == "insufficient_permissions"


def test_a_key_is_asked_for_before_the_body_is_read(site: Site) -> None:
    too_large = b"x" * (17 << 20)
    assert httpx.post(f"{site.url}/v1/completions", content=too_large).status_code == 401


@pytest.mark.parametrize("path", [*sorted(PUBLIC), DESCRIPTION, f"{DESCRIPTION}/openapi.json"])
def test_public_routes_need_no_key(site: Site, path: str) -> None:
    assert httpx.get(site.url + path).status_code == 200
