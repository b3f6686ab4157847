"""Sign-in to the console at an OIDC provider, and what a hostile or broken one can do: nothing."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from urllib.parse import parse_qs, urlsplit

import httpx
import msgspec
import pytest
from local_provider import CLIENT, SECRET, Provider
from running_server import free_port, running
from scripted_engine import ScriptedEngine
from site_fixture import Site, make_keys, make_settings

from loramux.common.settings.file import Settings, SettingsError, load_settings
from loramux.common.settings.server import ConsoleSettings, IssuerSettings, SignInSettings
from loramux.server.platform import open_tenants
from loramux_api.app import create_app

COOKIE = "loramux_sign_in"


@pytest.fixture(scope="module")
def provider() -> Iterator[Provider]:
    made = Provider()
    yield made
    made.close()


@pytest.fixture(scope="module")
def place(base_dir: Path, provider: Provider, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Site]:
    """A server whose console signs people in at the provider: alice of acme, bob of acme and globex."""
    folder, port = tmp_path_factory.mktemp("oidc"), free_port()
    (folder / "client-secret").write_text(SECRET + "\n")
    client = SignInSettings(client_id=CLIENT, secret_file=f"{folder}/client-secret", label="Example ID")
    issuer = IssuerSettings(issuer=provider.url, audience="loramux", operators=("staff",), sign_in=client)
    settings = msgspec.structs.replace(
        make_settings(base_dir, folder), issuers=(issuer,), console=ConsoleSettings(url=f"http://127.0.0.1:{port}/")
    )
    engine, keys = ScriptedEngine(), make_keys(settings)
    asyncio.run(add_members(settings, provider.url))
    with running(create_app(settings, engine), "granian", port) as server:
        yield Site(server, engine, settings, keys)


async def add_members(settings: Settings, issuer: str) -> None:
    async with open_tenants(settings) as tenants:
        await (await tenants.account("acme")).members.add(issuer, "alice", "developer")
        for tenant in ("acme", "globex"):
            await (await tenants.account(tenant)).members.add(issuer, "bob", "viewer")


@pytest.fixture(autouse=True)
def well_behaved(provider: Provider) -> Iterator[None]:
    yield
    provider.person, provider.wrong, provider.wrong_answer, provider.up = {"sub": "alice"}, {}, {}, True


@contextmanager
def browser(place: Site) -> Iterator[httpx.Client]:
    with httpx.Client(base_url=place.url, timeout=60) as client:
        yield client


def begin(client: httpx.Client, provider: Provider, **body: str) -> str:
    """Begin to sign in; return the provider's page."""
    answer = client.post("/console/oidc", json={"issuer": provider.url} | body)
    assert answer.status_code == 201, answer.text
    return str(answer.json()["location"])


def callback_of(provider: Provider, page: str) -> str:
    """Let the provider sign the person in; return the callback's address."""
    assert page.startswith(provider.url)
    return httpx.get(page).headers["location"]


def signed_in(client: httpx.Client, provider: Provider, **body: str) -> httpx.Response:
    return client.get(callback_of(provider, begin(client, provider, **body)))


def refused_for(answer: httpx.Response) -> str:
    """Return the reason of a refusal, after which there is no session."""
    assert answer.status_code == 303
    assert "loramux_session" not in answer.headers.get("set-cookie", "")
    where, _, reason = answer.headers["location"].partition("#refused=")
    assert where == "/console/"
    return str(reason)


def test_member_signs_in_at_the_provider_and_the_browser_gets_no_token(place: Site, provider: Provider) -> None:
    with browser(place) as client:
        listed = client.get("/console/oidc/providers").json()["data"]
        assert [(one["issuer"], one["label"]) for one in listed] == [(provider.url, "Example ID")]
        answer = signed_in(client, provider)
        assert (answer.status_code, answer.headers["location"]) == (303, "/console/")
        cookies = answer.headers.get_list("set-cookie")
        assert any("loramux_session=" in one and "HttpOnly" in one and "SameSite=strict" in one for one in cookies)
        assert not any("eyJ" in one for one in [*cookies, answer.text, *client.cookies.values()])
        assert COOKIE not in client.cookies, "the sign-in's cookie goes when it has served"
        described = client.get("/console/session").json()
        assert (described["tenant"], described["role"]) == ("acme", "developer")
        assert "operator" not in described["scopes"]
        assert client.get("/v1/adapters").status_code == 200


def test_operator_is_one_by_the_providers_claim(place: Site, provider: Provider) -> None:
    provider.person = {"sub": "alice", "groups": ["staff"]}
    with browser(place) as client:
        signed_in(client, provider)
        assert "operator" in client.get("/console/session").json()["scopes"]
        assert client.get("/admin/overview").status_code == 200


def test_member_of_two_tenants_chooses_one(place: Site, provider: Provider) -> None:
    provider.person = {"sub": "bob"}
    with browser(place) as client:
        where = urlsplit(signed_in(client, provider).headers["location"])
        assert parse_qs(where.fragment) == {"issuer": [provider.url], "tenant": ["acme", "globex"]}
        assert client.get("/console/session").status_code == 401
        assert signed_in(client, provider, tenant="globex").headers["location"] == "/console/"
        assert client.get("/console/session").json()["tenant"] == "globex"


def test_person_who_is_no_member_is_refused(place: Site, provider: Provider) -> None:
    provider.person = {"sub": "mallory", "groups": ["staff"]}
    with browser(place) as client:
        assert refused_for(signed_in(client, provider)) == "not_a_member"
        provider.person = {"sub": "alice"}
        assert refused_for(signed_in(client, provider, tenant="globex")) == "not_a_member"


def test_session_of_a_member_ends_when_the_member_is_removed(place: Site, provider: Provider) -> None:
    provider.person = {"sub": "carol"}
    with place.http("all-scopes") as http, browser(place) as client:
        body = {"issuer": provider.url, "subject": "carol", "role": "viewer"}
        made = http.post("/v1/members", json=body).json()
        signed_in(client, provider)
        assert client.get("/v1/adapters").status_code == 200
        assert http.delete(f"/v1/members/{made['id']}").is_success
        assert client.get("/v1/adapters").status_code == 401


@pytest.mark.parametrize(
    "claims",
    [
        {"nonce": "another"},
        {"nonce": None},
        {"aud": "loramux"},
        {"aud": [CLIENT, "other"], "azp": "other"},
        {"iss": "https://evil.example"},
        {"exp": 1_000},
        {"exp": None},
        {"sub": None},
    ],
    ids=lambda claims: "-".join(f"{name}-{value}" for name, value in claims.items()),
)
def test_id_token_that_was_not_made_for_this_sign_in_is_refused(
    place: Site, provider: Provider, claims: dict[str, object]
) -> None:
    provider.wrong = claims
    given = provider.tokens_given
    with browser(place) as client:
        assert refused_for(signed_in(client, provider)) == "sign_in_refused"
    assert provider.tokens_given == given + 1


def test_token_signed_by_another_key_is_refused(
    place: Site, provider: Provider, monkeypatch: pytest.MonkeyPatch
) -> None:
    stranger = Provider()
    monkeypatch.setattr(provider, "token", lambda **claims: stranger.token(**({"iss": provider.url} | claims)))
    with browser(place) as client:
        assert refused_for(signed_in(client, provider)) == "sign_in_refused"
    stranger.close()


@pytest.mark.parametrize("answer", [{"state": "wrong"}, {"state": ""}, {"iss": "https://evil.example"}])
def test_callback_that_is_not_the_answer_to_this_sign_in_is_refused(
    place: Site, provider: Provider, answer: dict[str, str]
) -> None:
    provider.wrong_answer = answer
    given = provider.tokens_given
    with browser(place) as client:
        assert refused_for(signed_in(client, provider)) == "sign_in_expired"
    assert provider.tokens_given == given, "its code was not even redeemed"


def test_callback_in_another_browser_opens_no_session(place: Site, provider: Provider) -> None:
    with browser(place) as attacker, browser(place) as victim:
        callback = callback_of(provider, begin(attacker, provider))
        assert refused_for(victim.get(callback)) == "sign_in_expired"
        begin(victim, provider)
        assert refused_for(victim.get(callback)) == "sign_in_expired"


def test_code_counts_once(place: Site, provider: Provider) -> None:
    with browser(place) as client:
        callback = callback_of(provider, begin(client, provider))
        secret = client.cookies[COOKIE]
        assert client.get(callback).headers["location"] == "/console/"
        with browser(place) as thief:
            assert refused_for(thief.get(callback, headers={"Cookie": f"{COOKIE}={secret}"})) == "sign_in_refused"


def test_sign_in_that_took_too_long_is_refused(
    place: Site, provider: Provider, monkeypatch: pytest.MonkeyPatch
) -> None:
    with browser(place) as client:
        callback = callback_of(provider, begin(client, provider))
        sign_ins = place.server.app.state.platform.tenants.sign_ins
        monkeypatch.setattr(sign_ins._database, "now", lambda: int((time.time() + 601) * 1_000_000))
        assert refused_for(client.get(callback)) == "sign_in_expired"


def test_longer_life_written_into_the_cookie_does_not_count(place: Site, provider: Provider) -> None:
    with browser(place) as client:
        callback = callback_of(provider, begin(client, provider))
        forged = "9999999999." + client.cookies[COOKIE].partition(".")[2]
        client.cookies.clear()
        assert refused_for(client.get(callback, headers={"Cookie": f"{COOKIE}={forged}"})) == "sign_in_expired"


@pytest.mark.parametrize("cookie", ["", ".", "9" * 400 + ".a.b", "\xb2.a.b", "x.y.z"])
def test_cookie_that_is_no_sign_in_is_refused(place: Site, cookie: str) -> None:
    sent = {"Cookie": f"{COOKIE}={cookie}".encode("latin-1")}
    with browser(place) as client:
        answer = client.get("/console/oidc/callback", params={"state": "a", "code": "b"}, headers=sent)
        assert refused_for(answer) == "sign_in_expired"


def test_refusal_at_the_provider_is_said_on_the_sign_in_page(place: Site, provider: Provider) -> None:
    provider.wrong_answer = {"error": "access_denied", "error_description": "<script>alert(1)</script>"}
    with browser(place) as client:
        answer = signed_in(client, provider)
        assert refused_for(answer) == "sign_in_denied"
        assert "script" not in answer.text + answer.headers["location"]


def test_provider_that_is_down_is_no_fault_of_the_server(place: Site, provider: Provider) -> None:
    with browser(place) as client:
        callback = callback_of(provider, begin(client, provider))
        provider.up = False
        assert refused_for(client.get(callback)) == "issuer_unreachable"
        provider.up = True
        provider.redeem = lambda *_: {"id_token": 5}  # type: ignore[method-assign]
        callback = callback_of(provider, begin(client, provider))
        assert refused_for(client.get(callback)) == "sign_in_refused"
        provider.redeem = lambda *_: 1 / 0  # type: ignore[method-assign,return-value]
        callback = callback_of(provider, begin(client, provider))
        assert refused_for(client.get(callback)) == "issuer_unreachable"
        del provider.redeem


def test_sign_in_begins_only_on_the_servers_own_page_and_at_its_providers(place: Site, provider: Provider) -> None:
    with browser(place) as client:
        body = {"issuer": provider.url}
        for headers in ({"Sec-Fetch-Site": "cross-site"}, {"Origin": "https://evil.example"}):
            assert client.post("/console/oidc", json=body, headers=headers).status_code == 403
        elsewhere = client.post("/console/oidc", json=body, headers={"Host": "evil.example"})
        assert elsewhere.status_code == 400
        assert place.url in elsewhere.json()["error"]["message"]
        assert client.post("/console/oidc", json={"issuer": "https://evil.example"}).status_code == 403
        assert client.post("/console/oidc", json=body | {"tenant": "../x"}).status_code == 403
        assert COOKIE not in client.cookies


def test_sign_in_without_the_servers_address_is_refused_at_the_start(tmp_path: Path) -> None:
    file = tmp_path / "loramux.toml"
    file.write_text(
        '[model]\npath = "."\nserved_model_name = "tiny"\n[[issuers]]\nissuer = "https://id.example"\naudience = "a"\n'
        '[issuers.sign_in]\nclient_id = "console"\n'
    )
    with pytest.raises(SettingsError, match=r"console\.url"):
        load_settings(file)
