"""Two bases with two engines each, real processes under load: engines are killed or restarted, and no client
notices."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from fleet_site import Fleet, check_weights, make_fleet, restarts, survives_kills


@pytest.fixture(scope="module")
def fleet(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Fleet]:
    yield from make_fleet(tmp_path_factory.mktemp("fleet"), 4)


def test_killed_and_restarted_engines_cost_no_stream_no_token_and_no_entry(fleet: Fleet) -> None:
    assert survives_kills(fleet, streams=6, kills=1, pause=0.3) == 1
    restarts(fleet, ["birch-1"], streams=6)


@pytest.mark.slow
def test_sixty_four_streams_over_forty_adapters_survive_ten_kills_and_a_rolling_restart(tmp_path: Path) -> None:
    for fleet in make_fleet(tmp_path, 40):
        check_weights(fleet, fleet.answers(64))
        assert survives_kills(fleet, streams=64, kills=10, pause=3.0) == 10
        restarts(fleet, [engine["engine"] for engine in fleet.engines()], streams=64)
