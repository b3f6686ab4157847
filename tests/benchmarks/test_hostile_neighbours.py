"""Hostile requests of every kind on the real server: each is refused or waits, and another tenant is served."""

from __future__ import annotations

from pathlib import Path

import hostile_neighbours
import hostile_requests
import pytest

HELD = {"unread download", "lines that wait", "encoded judge", "silent webhook", "silent connection"}


def test_wide_body_has_its_size_and_its_field() -> None:
    wide = hostile_requests.WideBody("x", "/", 1000, "a.b", value='"z"', is_map=True, around={"c": 1})
    body = wide.encode()
    assert 900 < len(body) < 1100
    assert body.startswith(b'{"c": 1, "a":{"b":{"0000000":"z",')
    assert body.endswith(b"}}}")


@pytest.mark.slow
def test_hostile_requests_of_every_kind_are_refused_or_wait(tmp_path: Path) -> None:
    found = hostile_neighbours.run(tmp_path, hostile_neighbours.Plan(rounds=1, seconds=4.0))
    assert set(found["p99_over_baseline"]) == {"formats", "bodies", "pools"}
    ended = found["ended"]
    refused = {outcome.rpartition(": ")[::2] for outcome in ended["bodies"] if outcome != "unfinished"}
    assert {name for name, _ in refused} <= {body.name for body in hostile_requests.WIDE_BODIES}
    assert refused
    assert not [one for one in refused if one[1].startswith(("2", "5"))]
    slow = {f"slow body of {path}" for path in hostile_requests.SLOW_BODIES}
    assert {name.removeprefix("pools ") for name in ended if name.startswith("pools")} == HELD | slow
    assert not [name for name, outcomes in ended.items() if any(one.startswith("5") for one in outcomes)]
