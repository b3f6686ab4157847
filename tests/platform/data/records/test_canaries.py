"""The canary of an alias, by its history."""

from __future__ import annotations

import json

import pytest

from loramux.data.records.aliases import AliasVersionRow, canary_of


def history(*versions: dict[int, int] | tuple[dict[int, int], int]) -> list[AliasVersionRow]:
    """Versions from targets, newest first; a pair has the version that it restores."""
    rows = []
    for number, version in enumerate(versions, start=1):
        targets, restores = version if isinstance(version, tuple) else (version, None)
        rows.append(AliasVersionRow(version=number, targets=json.dumps(targets), restores=restores))
    return rows[::-1]


@pytest.mark.parametrize(
    ("versions", "canary"),
    [
        (({3: 100}, {3: 95, 4: 5}), 4),
        (({3: 100}, {3: 95, 2: 5}), 2),
        (({3: 100}, {3: 95, 2: 5}, {3: 50, 2: 50}), 2),
        (({3: 100}, {3: 95, 2: 5}, {3: 1, 2: 99}), 2),
        (({3: 100}, {3: 90, 2: 10}, {3: 80, 2: 10, 1: 10}), 1),
        (({1: 90, 2: 10},), 2),
        (({1: 10, 2: 90},), 1),
        (({1: 50, 2: 50},), 2),
        (({2: 100}, {}, {1: 50, 2: 50}), 2),
        (({3: 100}, {3: 90, 4: 10}, {4: 100}, ({3: 90, 4: 10}, 2)), 4),
        (({3: 90, 2: 10}, {3: 100}, {3: 50, 2: 50}), 2),
    ],
    ids=str,
)
def test_canary_is_the_target_that_was_added_last(
    versions: tuple[dict[int, int] | tuple[dict[int, int], int], ...], canary: int
) -> None:
    assert canary_of(history(*versions)) == canary


def test_canary_of_a_history_whose_beginning_was_removed_is_known_by_its_share() -> None:
    assert canary_of(history(({3: 95, 2: 5}, 7))) == 2
