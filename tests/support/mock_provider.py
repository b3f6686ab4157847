"""The OIDC provider of the package oidc-provider-mock, in a separate process, with a page to sign in on."""

from __future__ import annotations

import json
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager

import httpx
from running_server import free_port


@contextmanager
def mock_provider(*people: dict[str, object]) -> Iterator[str]:
    """Yield the issuer's address while it runs; `people` are their claims."""
    port = free_port()
    url = f"http://127.0.0.1:{port}"
    claims = [f"--user-claims={json.dumps(person)}" for person in people]
    command = [sys.executable, "-m", "oidc_provider_mock", "--port", str(port), "--host", "127.0.0.1", *claims]
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        _await_discovery(url, process)
        yield url
    finally:
        process.terminate()
        process.wait(30)


def _await_discovery(url: str, process: subprocess.Popen[bytes]) -> None:
    for _ in range(1200):
        assert process.poll() is None, "the provider ended while it was starting"
        try:
            httpx.get(f"{url}/.well-known/openid-configuration").raise_for_status()
            return
        except httpx.TransportError:
            threading.Event().wait(0.05)
    raise AssertionError("the provider did not start")
