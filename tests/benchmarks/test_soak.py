"""The soak: its verdict finds what grows, and a tenth of its time passes it."""

from __future__ import annotations

from pathlib import Path

import pytest
from soak import soak
from soak_watch import FLAT, grown


def samples(**growing: float) -> list[dict[str, float]]:
    """A hundred samples: every series begins at 100 and is flat, but those that grow by so much each."""
    return [{name: 100 + growing.get(name, 0) * number for name in FLAT} for number in range(100)]


def test_soak_of_flat_series_finds_nothing() -> None:
    assert grown(samples()) == []
    assert grown(samples(server_mib=0.1)) == [], "memory may settle"


@pytest.mark.parametrize("name", sorted(FLAT))
def test_soak_finds_a_series_that_grows(name: str) -> None:
    (sentence,) = grown(samples(**{name: 1.0}))
    assert sentence.startswith(f"{name} grew from")


@pytest.mark.slow
def test_soak_of_twelve_minutes_is_flat_and_exact(tmp_path: Path) -> None:
    summary = soak(tmp_path / "work", tmp_path / "out", seconds=720, rate=4, change_seconds=5)
    print(summary)
    assert summary["faults"] == []
    assert summary["requests"]["checked"] > 100
    assert (tmp_path / "out/soak.png").stat().st_size > 10_000
