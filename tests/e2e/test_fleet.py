"""Two bases with two engines each, real processes under load: engines are killed or restarted, and no client
notices."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest
from fleet_site import LENGTH, Fleet, all_serve, check_weights, make_fleet, restarts, survives_kills, until


@pytest.fixture(scope="module")
def fleet(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Fleet]:
    yield from make_fleet(tmp_path_factory.mktemp("fleet"), 4)


def test_killed_and_restarted_engines_cost_no_stream_no_token_and_no_entry(fleet: Fleet) -> None:
    assert survives_kills(fleet, streams=6, kills=1, pause=0.3) == 1
    restarts(fleet, ["birch-1"], streams=6)


def ask(fleet: Fleet, key: str) -> tuple[list[int], int]:
    """Return the answer to a prompt of 300 tokens, and the number of its tokens that were cached."""
    prompt = [3 + number % 50 for number in range(300)]
    body = {"model": "amber", "prompt": prompt, "max_tokens": LENGTH, "ignore_eos": True, "temperature": 0.0}
    headers = {"Authorization": f"Bearer {key}"}
    url = f"{fleet.server.url}/v1/completions"
    answer = httpx.post(url, json=body | {"return_token_ids": True}, headers=headers, timeout=300)
    assert answer.status_code == 200, answer.text
    found = answer.json()
    return found["choices"][0]["token_ids"], found["usage"]["prompt_tokens_details"]["cached_tokens"]


def test_cached_prefix_is_found_again_after_a_restart_and_a_kill_and_only_by_its_tenant(fleet: Fleet) -> None:
    """Another tenant's prompt is computed whole, so its time does not tell that the text is known."""
    other = fleet.place.key_of("globex")
    first, cached = ask(fleet, fleet.key)
    assert cached == 0
    for _ in range(3):
        answer, cached = ask(fleet, fleet.key)
        assert (answer, cached > 250) == (first, True), "the router finds the engine that has it"
    assert ask(fleet, other) == (first, 0)
    starts = {engine["engine"]: engine["starts"] for engine in fleet.engines()}
    for name in ("amber-0", "amber-1"):
        fleet.admin("POST", "/admin/engines/restart", json={"engine": name, "seconds": 0})
        until(lambda: all_serve(fleet))
    assert any(engine["starts"] > starts[engine["engine"]] for engine in fleet.engines())
    assert ask(fleet, fleet.key) == (first, 0), "a new engine has an empty cache"
    assert ask(fleet, fleet.key)[1] > 250
    for pid in fleet.engine_pids():
        os.kill(pid, signal.SIGKILL)
    assert ask(fleet, fleet.key) == (first, 0)
    answer, cached = ask(fleet, fleet.key)
    assert (answer, cached > 250) == (first, True)
    assert ask(fleet, other) == (first, 0)
    until(lambda: all_serve(fleet))


@pytest.mark.slow
def test_sixty_four_streams_over_forty_adapters_survive_ten_kills_and_a_rolling_restart(tmp_path: Path) -> None:
    for fleet in make_fleet(tmp_path, 40):
        check_weights(fleet, fleet.answers(64))
        assert survives_kills(fleet, streams=64, kills=10, pause=3.0) == 10
        restarts(fleet, [engine["engine"] for engine in fleet.engines()], streams=64)
