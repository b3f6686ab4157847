"""The server process's own parts: the held address, the limit of connections, readiness."""

from __future__ import annotations

import asyncio
import json
import os
import resource
import socket
import subprocess
import sys
from typing import Any

import httpx
import pytest
from running_server import free_port
from site_fixture import Site

from loramux.common.settings.file import SettingsError
from loramux.common.settings.server import ServerSettings
from loramux_api.listening import (
    MAX_CONNECTIONS,
    MAX_FILES,
    MIN_CONNECTIONS,
    RESERVED_FILES,
    below,
    paths_of,
    reserved_addresses,
)

CODE = """
import json, resource, sys
resource.setrlimit(resource.RLIMIT_NOFILE, (int(sys.argv[1]), int(sys.argv[2])))
import logging; logging.basicConfig()
from loramux_api.listening import connection_limit
print(json.dumps([connection_limit(), resource.getrlimit(resource.RLIMIT_NOFILE)[0]]))
"""


SWITCHING = """
import asyncio, contextlib, sys
from loramux.common.settings.file import Settings
from loramux.common.settings.serving import ModelSettings
from loramux_api import server

@contextlib.asynccontextmanager
async def opened(*_):
    yield

async def answer(*_):
    print(sys.getswitchinterval())
    return 0

server._cancellable_start, server.attached, server._answer = opened, opened, answer
asyncio.run(server._serve(Settings(model=ModelSettings(path=".", served_model_name="tiny")), [], 1, print))
"""


def test_serving_process_gives_the_interpreter_to_its_event_loop_within_a_millisecond() -> None:
    done = subprocess.run([sys.executable, "-c", SWITCHING], capture_output=True, text=True, check=True)
    assert float(done.stdout) <= 0.001


def limit_with(soft: int, hard: int) -> tuple[int, int, str]:
    """The limit of connections and the soft limit afterwards, of a process that starts with these limits."""
    done = subprocess.run(
        [sys.executable, "-c", CODE, str(soft), str(hard)], capture_output=True, text=True, check=True, env=os.environ
    )
    limit, soft_after = json.loads(done.stdout)
    return limit, soft_after, done.stderr


def test_connection_limit_raises_the_soft_limit_of_open_files() -> None:
    wanted = MAX_CONNECTIONS + RESERVED_FILES
    if resource.getrlimit(resource.RLIMIT_NOFILE)[1] < wanted:
        pytest.skip("the hard limit of this machine is lower")
    limit, soft, said = limit_with(1024, wanted)
    assert (limit, soft) == (MAX_CONNECTIONS, wanted)
    assert "connections" not in said


def test_open_files_are_raised_beyond_the_connections_as_far_as_the_hard_limit_allows() -> None:
    """TLS handshakes are not counted as connections, and need descriptors too."""
    hard = min(resource.getrlimit(resource.RLIMIT_NOFILE)[1], MAX_FILES)
    if hard <= MAX_CONNECTIONS + RESERVED_FILES:
        pytest.skip("the hard limit of this machine is lower")
    assert limit_with(1024, hard)[:2] == (MAX_CONNECTIONS, hard)


def test_connection_limit_below_the_hard_limit_is_clamped_and_says_so() -> None:
    limit, soft, said = limit_with(1024, 4096)
    assert (limit, soft) == (4096 - RESERVED_FILES, 4096)
    assert "at most 3584 connections" in said
    assert "LimitNOFILE" in said
    assert limit_with(400, 400)[0] == MIN_CONNECTIONS


@pytest.fixture
def address() -> ServerSettings:
    return ServerSettings(port=free_port())


def connects(address: ServerSettings) -> bool:
    try:
        socket.create_connection((address.host, address.port), timeout=5).close()
    except ConnectionRefusedError:
        return False
    return True


@pytest.mark.parametrize("options", [(), (socket.SO_REUSEADDR,), (socket.SO_REUSEADDR, socket.SO_REUSEPORT)])
def test_reserved_address_cannot_be_bound_by_another_and_refuses_connections(
    address: ServerSettings, options: tuple[int, ...]
) -> None:
    with reserved_addresses(address):
        assert not connects(address)
        with socket.socket() as other:
            for option in options:
                other.setsockopt(socket.SOL_SOCKET, option, 1)
            with pytest.raises(OSError, match="in use"):
                other.bind((address.host, address.port))
        with pytest.raises(SettingsError, match=str(address.port)), reserved_addresses(address):
            pass
    with reserved_addresses(address):
        pass


def test_accepted_connection_sends_an_event_without_a_wait_for_the_last_ones_acknowledgement(
    address: ServerSettings,
) -> None:
    with reserved_addresses(address) as (reserved,):
        reserved.socket.listen()
        with socket.create_connection((address.host, address.port)), reserved.socket.accept()[0] as accepted:
            assert accepted.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY)


def test_readiness_fails_when_the_database_does_not_answer(site: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    async def unreachable(_: object) -> bool:
        return False

    assert httpx.get(f"{site.url}/health/ready").json()["status"] == "ready"
    monkeypatch.setattr(type(site.server.app.state.platform.database), "is_reachable", unreachable)
    ready = httpx.get(f"{site.url}/health/ready")
    assert (ready.status_code, ready.json()["status"]) == (503, "database_unreachable")
    assert httpx.get(f"{site.url}/health/live").status_code == 200


def test_readiness_fails_from_the_signal_on_while_requests_are_served(
    site: Site, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(site.server.app.state, "stopping", True)
    ready = httpx.get(f"{site.url}/health/ready")
    assert (ready.status_code, ready.json()["status"]) == (503, "draining")
    with site.http() as client:
        assert client.post("/v1/completions", json={"model": "tiny", "prompt": "hi"}).status_code == 200


@pytest.mark.parametrize(
    ("path", "reached"),
    [
        ("/llm/v1/models", "/v1/models"),
        ("/v1/models", "/v1/models"),
        ("/llm", "/llm"),
        ("/llmx/v1/models", "/llmx/v1/models"),
        ("/llm/metrics", "/not-on-this-port/metrics"),
        ("/llm//metrics", "/not-on-this-port/metrics"),
        ("/llm/llm/metrics", "/llm/metrics"),
    ],
)
def test_root_path_leads_to_every_path_that_the_port_has(path: str, reached: str) -> None:
    found: list[str] = []

    async def app(scope: Any, *_: Any) -> None:
        found.append(scope["path"])

    served = below(paths_of(app, internal=False), "/llm")
    asyncio.run(served({"type": "http", "path": path, "raw_path": path.encode()}, None, None))
    assert found == [reached]
