"""Sign-in at an identity provider, in a real browser, with a provider that is another project's."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest
from console_site import ensure_console, visiting
from mock_provider import mock_provider
from playwright.sync_api import Browser, Page, expect
from running_server import free_port, running
from scripted_engine import ScriptedEngine
from site_fixture import Site, make_keys, make_settings

from loramux.common.settings.file import Settings
from loramux.common.settings.server import ConsoleSettings, IssuerSettings, SignInSettings
from loramux.server.platform import open_tenants
from loramux_api.app import create_app

PEOPLE = (
    {"sub": "alice", "email": "alice@example.com", "email_verified": True},
    {"sub": "bob", "email": "bob@example.com", "email_verified": True},
    {"sub": "olga", "email": "olga@example.com", "email_verified": True, "groups": ["staff"]},
    {"sub": "eve", "email": "alice@example.com", "email_verified": False},
    {"sub": "mallory", "email": "mallory@example.com", "email_verified": True},
)


@pytest.fixture(scope="module")
def place(base_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Site]:
    """A server whose members are known by their e-mail address."""
    ensure_console()
    folder, port = tmp_path_factory.mktemp("oidc"), free_port()
    (folder / "client-secret").write_text("any, for this provider")
    with mock_provider(*PEOPLE) as url:
        issuer = IssuerSettings(
            issuer=url,
            audience="loramux",
            identity_claim="email",
            operators=("staff",),
            sign_in=SignInSettings(
                client_id="loramux-console", secret_file=f"{folder}/client-secret", label="Example ID"
            ),
        )
        settings = msgspec.structs.replace(
            make_settings(base_dir, folder),
            issuers=(issuer,),
            console=ConsoleSettings(url=f"http://127.0.0.1:{port}"),
        )
        engine, keys = ScriptedEngine(), make_keys(settings)
        asyncio.run(add_members(settings, url))
        with running(create_app(settings, engine), "granian", port) as server:
            yield Site(server, engine, settings, keys)


async def add_members(settings: Settings, issuer: str) -> None:
    async with open_tenants(settings) as tenants:
        acme, globex = [(await tenants.account(name)).members for name in ("acme", "globex")]
        await acme.add(issuer, "alice@example.com", "owner")
        await acme.add(issuer, "olga@example.com", "viewer")
        for members in (acme, globex):
            await members.add(issuer, "bob@example.com", "developer")


def authorize(page: Page, subject: str) -> None:
    """Sign in at the provider's page."""
    page.get_by_role("button", name="Sign in with Example ID").click()
    page.get_by_placeholder("sub", exact=True).fill(subject)
    page.get_by_role("button", name="Authorize").click()


def test_member_signs_in_at_the_provider_and_out(place: Site, browser: Browser) -> None:
    with visiting(browser, place.url) as visit:
        page = visit.page
        page.goto(f"{place.url}/console/")
        expect(page.get_by_role("button", name="Sign in with Example ID")).to_be_visible()
        assert visit.barriers() == []
        authorize(page, "alice")
        page.get_by_role("heading", name="acme", level=1).wait_for()
        assert page.url == f"{place.url}/console/"
        kept = page.evaluate("JSON.stringify([document.cookie, {...localStorage}, {...sessionStorage}])")
        assert "eyJ" not in kept, "no token reaches the browser"
        assert page.evaluate("document.cookie") == ""
        expect(page.get_by_role("link", name="System")).to_have_count(0)
        page.get_by_role("button", name="Account of acme").click()
        page.get_by_role("menuitem", name="Sign out", exact=True).click()
        expect(page.get_by_label("API key")).to_be_visible()


def test_operator_by_claim_sees_the_system(place: Site, browser: Browser) -> None:
    with visiting(browser, place.url) as visit:
        visit.page.goto(f"{place.url}/console/")
        authorize(visit.page, "olga")
        visit.page.get_by_role("link", name="System").click()
        expect(visit.page.get_by_role("heading", name="System", level=1)).to_be_visible()


def test_member_of_two_tenants_chooses_one(place: Site, browser: Browser) -> None:
    with visiting(browser, place.url) as visit:
        page = visit.page
        page.goto(f"{place.url}/console/")
        authorize(page, "bob")
        expect(page.get_by_text("You are a member of several tenants")).to_be_visible()
        page.get_by_role("button", name="globex").click()
        page.get_by_placeholder("sub", exact=True).fill("bob")
        page.get_by_role("button", name="Authorize").click()
        page.get_by_role("heading", name="globex", level=1).wait_for()


@pytest.mark.parametrize(
    ("subject", "said"),
    [("mallory", "no tenant here has you as a member"), ("eve", "did not pass this server's checks")],
)
def test_stranger_is_told_why_there_is_no_way_in(place: Site, browser: Browser, subject: str, said: str) -> None:
    with visiting(browser, place.url) as visit:
        visit.page.goto(f"{place.url}/console/")
        authorize(visit.page, subject)
        expect(visit.page.get_by_role("alert")).to_contain_text(said)
        assert "refused" not in visit.page.url


def test_denial_at_the_provider_leads_back(place: Site, browser: Browser) -> None:
    with visiting(browser, place.url) as visit:
        visit.page.goto(f"{place.url}/console/")
        visit.page.get_by_role("button", name="Sign in with Example ID").click()
        visit.page.get_by_role("button", name="Deny").click()
        expect(visit.page.get_by_role("alert")).to_be_visible()
        expect(visit.page.get_by_role("button", name="Sign in with Example ID")).to_be_visible()
