"""A request's target: exact shares, the same for the same caller, and few change over."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from loramux.records.reach import Reached
from loramux.registry.choosing import PLACES, at, chosen

shares = st.lists(st.integers(1, 1_000_000), min_size=1, max_size=10)


def targets(weights: list[int], key: str = "alias_1") -> list[Reached]:
    return [
        Reached(adapter_id="a", number=number, digest=f"d{number}", base="b", key=key, weight=weight)
        for number, weight in enumerate(weights, start=1)
    ]


@given(shares)
def test_the_places_are_divided_by_weight_exactly(weights: list[int]) -> None:
    """The first and the last place of every share: together they are all 2**64."""
    total, start = sum(weights), 0
    for number, weight in enumerate(weights, start=1):
        first, end = -(-(start << 64) // total), -(-((start + weight) << 64) // total)
        assert at(targets(weights), first).number == at(targets(weights), end - 1).number == number
        start += weight
    assert end == PLACES


@given(shares, st.text())
def test_a_caller_sticks_and_other_totals_of_the_same_shares_change_nothing(weights: list[int], caller: str) -> None:
    got = chosen(targets(weights), caller)
    assert got == chosen(targets(weights), caller)
    assert got.number == chosen(targets([3 * weight for weight in weights]), caller).number


@given(st.integers(1, 99), st.integers(1, 99), st.text())
def test_who_has_the_canary_keeps_it_while_it_grows(few: int, more: int, caller: str) -> None:
    few, more = sorted((few, more))
    if chosen(targets([100 - few, few]), caller).number == 2:
        assert chosen(targets([100 - more, more]), caller).number == 2


def test_callers_spread_by_the_shares_and_in_another_way_under_another_alias() -> None:
    callers = [f"user {number}" for number in range(4000)]
    canary = [{c for c in callers if chosen(targets([95, 5], key), c).number == 2} for key in ("alias_1", "alias_2")]
    assert all(140 <= len(some) <= 260 for some in canary), [len(some) for some in canary]
    assert len(canary[0] & canary[1]) < 40
