"""Rights of every kind of credential: a matrix over the application's own routes. A new route without a guard fails
here."""

from __future__ import annotations

import re
from dataclasses import dataclass

import httpx
import pytest
from local_issuer import Issuer
from site_fixture import Site

from loramux.accounts.tenants.authority import ROLE_SCOPES, SCOPES, Role

PUBLIC = {"/", "/health", "/health/live", "/health/ready", "/metrics"}
DESCRIPTION = "/schema"
CONSOLE = "/console"
"""Its pages are public, and its sessions have separate guards (`test_console`)."""
WRONG = {
    "no key": {},
    "empty": {"Authorization": ""},
    "not bearer": {"Authorization": "Basic c2stbG0teA=="},
    "bearer of nothing": {"Authorization": "Bearer"},
    "wrong key": {"Authorization": "Bearer sk-lm-" + "x" * 43},
    "somebody else's": {"Authorization": "Bearer sk-proj-abcdef"},
    "endless": {"Authorization": "Bearer sk-lm-" + "x" * 4000},
    "not text": {"Authorization": "Bearer sk-lm-\xff"},
    "no token": {"Authorization": "Bearer a.b.c"},
}
ADAPTER = ("/{name:str}", "/{owner:str}/{name:str}")
ABOUT_AN_ADAPTER = {
    "": {"ttl_s": 1},
    "/promote": {"revision": 1},
    "/shadow": {"revision": 1, "share": 0.5},
    "/revisions/{revision:str}": {"ttl_s": 1},
    "/aliases/{alias:str}": {"targets": [{"revision": 1, "weight": 1}]},
    "/aliases/{alias:str}/guard": {"measures": ["errors"]},
    "/aliases/{alias:str}/policy": {"policy": {"min_requests": 1}},
}
BODIES = {
    "/v1/webhooks/{webhook_id:str}": {"enabled": True},
    "/v1/requests/{request_id:str}/feedback": {"score": 1},
    "/v1/members/{member_id:str}": {"role": "viewer"},
    **{f"/v1/adapters{at}{rest}": body for at in ADAPTER for rest, body in ABOUT_AN_ADAPTER.items()},
    "/v1/limits/{subject:str}/{name:str}": {"value": 1},
    "/v1/budgets/{subject:str}/{period:str}": {"amount_nano": 1},
}
"""Bodies that pass their own checks on routes with a name in the path."""


@dataclass(frozen=True)
class Route:
    method: str
    path: str
    scopes: tuple[str, ...]
    """Scopes of the route's guards."""

    def ask(self, site: Site, headers: dict[str, str], owner: str = "acme") -> httpx.Response:
        """About a thing of that owner, which need not exist."""
        url = site.url + re.sub(r"{[^}]*}", f"{owner}-thing", re.sub(r"{[^}]*:path}", f"{owner}/thing", self.path))
        encoded = {name: value.encode("latin-1") for name, value in headers.items()}
        body = BODIES.get(self.path, {}) if self.method in ("POST", "PUT", "PATCH") else None
        return httpx.request(self.method, url, headers=encoded, json=body)

    def ask_as(self, site: Site, key: str, **how: str) -> httpx.Response:
        return self.ask(site, {"Authorization": f"Bearer {site.keys[key]}"}, **how)

    def __str__(self) -> str:
        return f"{self.method} {self.path}"


def routes(site: Site) -> list[Route]:
    """Every route of the application that is not public, as the application itself has them."""
    return [
        Route(method, route.path, tuple(getattr(guard, "scope", "") for guard in handler.resolve_guards()))
        for route in site.server.app.routes
        for handler in route.route_handlers
        for method in sorted(handler.http_methods - {"OPTIONS"})
        if route.path not in PUBLIC and not route.path.startswith((DESCRIPTION, CONSOLE))
    ]


def test_every_route_is_either_public_or_has_one_guard_with_a_scope(site: Site) -> None:
    found = routes(site)
    assert len(found) > 15
    assert [str(route) for route in found if len(route.scopes) != 1 or route.scopes[0] not in SCOPES] == []


@pytest.mark.parametrize("kind", WRONG)
def test_without_a_valid_key_every_route_answers_401(site: Site, kind: str) -> None:
    for route in routes(site):
        response = route.ask(site, WRONG[kind])
        assert response.status_code == 401, f"{route}: {response.text}"
        assert response.headers["www-authenticate"] == "Bearer"
    assert site.engine.requests == []


@pytest.mark.parametrize(("kind", "status"), [("revoked", 401), ("expired", 401), ("suspended", 403)])
def test_a_key_that_does_not_count_any_more(site: Site, kind: str, status: int) -> None:
    for route in routes(site):
        response = route.ask_as(site, kind)
        assert response.status_code == status, f"{route}: {response.text}"
    assert site.engine.requests == []


def test_a_key_without_the_scope_gets_403_and_its_name(site: Site) -> None:
    for route in routes(site):
        key = "acme" if route.scopes[0] == "operator" else "no-scopes"
        if route.scopes[0] in ("inference", "adapters", "usage", "read") and key == "acme":
            continue
        response = route.ask_as(site, key)
        assert response.status_code == 403, f"{route}: {response.text}"
        assert f"'{route.scopes[0]}'" in response.text


@pytest.mark.parametrize("role", list(Role))
def test_a_member_without_the_scope_gets_403_and_one_with_it_comes_through(
    site: Site, issuer: Issuer, role: Role
) -> None:
    headers = {"Authorization": f"Bearer {issuer.token(sub=f'the {role}')}"}
    for route in routes(site):
        response = route.ask(site, headers)
        lacks = route.scopes[0] not in ROLE_SCOPES[role]
        assert (response.status_code == 403 and f"'{route.scopes[0]}'" in response.text) == lacks, (
            f"{route}: {response.text}"
        )


@pytest.mark.parametrize(
    ("groups", "status"),
    [
        (["staff", "loramux-operators"], 200),
        ("loramux-operators", 200),
        (["staff"], 403),
        ({"loramux-operators": 1}, 403),
    ],
)
def test_a_member_whom_the_issuer_calls_an_operator(site: Site, issuer: Issuer, groups: object, status: int) -> None:
    headers = {"Authorization": f"Bearer {issuer.token(sub='the viewer', groups=groups)}"}
    assert httpx.get(f"{site.url}/admin/tenants", headers=headers).status_code == status
    assert httpx.get(f"{site.url}/v1/keys", headers=headers).status_code == 403


def test_anothers_things_are_not_there(site: Site) -> None:
    """Whatever can be named in a path; the same answer as for what never was."""
    for route in routes(site):
        if "{" in route.path and not route.path.startswith("/admin"):
            for owner in ("globex", "nobody"):
                response = route.ask_as(site, "all-scopes", owner=owner)
                assert response.status_code == 404, f"{route}: {response.text}"


@pytest.mark.parametrize("model", ["tiny", "acme/thing"])
def test_a_model_outside_the_allow_list_is_not_there(site: Site, model: str) -> None:
    chat = {"model": model, "messages": [{"role": "user", "content": "hi"}]}
    with site.http("no-models") as http:
        for path, body in (("/v1/chat/completions", chat), ("/v1/completions", {"model": model, "prompt": "hi"})):
            assert http.post(path, json=body).json()["error"]["code"] == "model_not_found"
        assert http.get(f"/v1/models/{model}").status_code == 404
        assert http.get("/v1/models").json()["data"] == []
        assert http.delete(f"/v1/adapters/{model}").status_code == 404
    assert site.engine.requests == []


def test_a_key_is_asked_for_before_the_body_is_read(site: Site) -> None:
    too_large = b"x" * (17 << 20)
    assert httpx.post(f"{site.url}/v1/completions", content=too_large).status_code == 401


@pytest.mark.parametrize("path", [*sorted(PUBLIC), DESCRIPTION, f"{DESCRIPTION}/openapi.json"])
def test_public_routes_need_no_key(site: Site, path: str) -> None:
    assert httpx.get(site.url + path).status_code == 200


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/messages", "/v1/responses"])
def test_wrong_key_is_refused_in_a_way_that_ends_the_repetitions_of_agents(site: Site, path: str) -> None:
    answer = httpx.post(f"{site.url}{path}", headers={"Authorization": "Bearer sk-lm-wrong"}, json={}, timeout=60)
    assert (answer.status_code, answer.headers["x-should-retry"]) == (401, "false")
