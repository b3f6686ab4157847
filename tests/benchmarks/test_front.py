"""The front is measured with a stand-in for the engine: every token arrives, streamed or whole, in every kind."""

from pathlib import Path

import pytest
from front import CALLS, KINDS, MODEL_PATH, measure, measure_calls, parts, site
from request_parts import PARTS


@pytest.fixture(scope="module")
def running(tmp_path_factory: pytest.TempPathFactory):
    with site(MODEL_PATH, tmp_path_factory.mktemp("front") / "site", workers=1) as at:
        yield at


@pytest.mark.parametrize("kind", KINDS)
def test_every_kind_is_measured(running, kind: str) -> None:
    row = measure(running, kind, 2, 4, 1, 100.0, latency=True)
    assert row["carries"] > 0
    assert row["us_per_request"] > 0
    assert ("latency_ms" in row) == KINDS[kind].stream


@pytest.mark.parametrize("kind", CALLS)
def test_every_call_is_measured(running, kind: str) -> None:
    row = measure_calls(running, kind, 2, 1)
    assert row["us_per_request"] > 0
    assert row["requests_per_s"] > 0


def test_parts_of_a_request_are_timed(tmp_path: Path) -> None:
    with site(MODEL_PATH, tmp_path / "site", workers=1, has_parts=True) as at:
        row = measure_calls(at, "adapter", 2, 1)
    assert row["parts_us"].keys() == PARTS.keys()
    assert sum(row["parts_us"].values()) > 0


@pytest.mark.parametrize("kind", [kind for kind in KINDS if KINDS[kind].stream])
def test_each_token_is_an_event_at_a_rate_that_the_client_follows(running, kind: str) -> None:
    with running.client(KINDS[kind], 2) as send:
        assert send(KINDS[kind].body(4), True, 20.0).events >= 2 * 4


def test_parts_cost_something() -> None:
    assert all(value > 0 for value in parts(Path(MODEL_PATH)).values())
