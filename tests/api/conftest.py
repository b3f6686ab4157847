from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from local_issuer import Issuer
from running_server import running
from scripted_engine import ScriptedEngine
from site_fixture import Site, make_keys, make_settings
from tiny_base import make_base

from loramux_api.app import create_app


@pytest.fixture(scope="session")
def base_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_base(tmp_path_factory.mktemp("base"))


@pytest.fixture(scope="session")
def issuer() -> Iterator[Issuer]:
    issuer = Issuer()
    yield issuer
    issuer.close()


@pytest.fixture(scope="session", params=["granian", "uvicorn"])
def site(
    request: pytest.FixtureRequest, base_dir: Path, issuer: Issuer, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Site]:
    """Both servers: everything that is seen on the wire is tested on each."""
    settings = make_settings(base_dir, tmp_path_factory.mktemp("site"), [issuer.url])
    engine = ScriptedEngine()
    keys = make_keys(settings)
    with running(create_app(settings, engine), request.param) as server:
        yield Site(server, engine, settings, keys)


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
