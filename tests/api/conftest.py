from __future__ import annotations

from collections.abc import AsyncGenerator, Iterator
from pathlib import Path

import pytest
from local_issuer import Issuer
from peft_uploads import make_adapter
from running_server import running
from scripted_engine import ScriptedEngine
from site_fixture import Site, leave_things, make_keys, make_settings
from tiny_base import make_base

from loramux.accounts.tenants import secrets
from loramux_api.app import create_app
from loramux_api.bodies import ApiRequest

ON_THE_WIRE = {
    "test_adapters",
    "test_http",
    "test_openai_client",
    "test_operations",
    "test_refusals",
    "test_streams",
    "test_uploads",
}
WHAT_DIFFERS = {"test_http", "test_openai_client", "test_streams"}
"""Modules that run on the other server in every run: they test how bodies and streams begin and end."""


@pytest.fixture(scope="session")
def base_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_base(tmp_path_factory.mktemp("base"))


@pytest.fixture(scope="session")
def issuer() -> Iterator[Issuer]:
    issuer = Issuer()
    yield issuer
    issuer.close()


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """Run the tests on the shipped server; tests of the layer between HTTP and the application also on another one."""
    if "site" in metafunc.fixturenames:
        module = metafunc.module.__name__.rpartition(".")[2]
        other = pytest.param("uvicorn", marks=[] if module in WHAT_DIFFERS else [pytest.mark.slow])
        servers = ["granian", other] if module in ON_THE_WIRE else ["granian"]
        metafunc.parametrize("site", servers, indirect=True, scope="session")


@pytest.fixture(scope="session")
def site(
    request: pytest.FixtureRequest, base_dir: Path, issuer: Issuer, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Site]:
    """The application with an engine that answers by a script, and keys for every kind of caller.

    The tests of a run share it in any order, so acme and globex have things from the start. A test that asserts all
    that a tenant has asks for `newcomer`.
    """
    settings = make_settings(base_dir, tmp_path_factory.mktemp("site"), [issuer.url])
    engine = ScriptedEngine()
    keys = make_keys(settings)
    with running(create_app(settings, engine), request.param) as server:
        site = Site(server, engine, settings, keys)
        leave_things(site, make_adapter(base_dir, tmp_path_factory.mktemp("leftover"), seed=99))
        yield site


@pytest.fixture
def newcomer(site: Site) -> str:
    """A tenant that no other test knows; its name is that of its key too."""
    return site.enrol()


@pytest.fixture
def read_parts(monkeypatch: pytest.MonkeyPatch) -> list[bytes]:
    """Parts of bodies that handlers have read. What no handler has read is dropped unseen when its client leaves."""
    parts, stream = list[bytes](), ApiRequest.stream

    async def noted(request: ApiRequest) -> AsyncGenerator[bytes, None]:
        async for part in stream(request):
            parts.append(part)
            yield part

    monkeypatch.setattr(ApiRequest, "stream", noted)
    return parts


@pytest.fixture(autouse=True)
def no_throttle(monkeypatch: pytest.MonkeyPatch) -> None:
    """All tests come from one address, and many send invalid keys on purpose."""
    monkeypatch.setattr(secrets, "MAX_FAILURES", 10**6)


@pytest.fixture(autouse=True)
def fresh_engine(request: pytest.FixtureRequest) -> None:
    """Every test finds an engine that echoes at once."""
    if "site" in request.fixturenames:
        engine = request.getfixturevalue("site").engine
        blank = ScriptedEngine()
        engine.script, engine.pause = blank.script, blank.pause
        engine.requests.clear()
        engine.cancelled.clear()
        engine.retired.clear()
