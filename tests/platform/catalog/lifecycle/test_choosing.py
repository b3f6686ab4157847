"""The choice of an alias's target: exact shares, the same for the same caller, and few change over."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from loramux.catalog.registry.resolver import POINTS, choose_target, target_at
from loramux.data.records.access import AccessibleRevision

shares = st.lists(st.integers(1, 1_000_000), min_size=1, max_size=10)


def targets(weights: list[int], key: str = "alias_1") -> list[AccessibleRevision]:
    return [
        AccessibleRevision(
            tenant_id="t",
            revision_id="r",
            adapter_id="a",
            number=number,
            digest=f"d{number}",
            base="b",
            base_model="tiny",
            key=key,
            weight=weight,
        )
        for number, weight in enumerate(weights, start=1)
    ]


@given(shares)
def test_points_are_divided_by_weight_exactly(weights: list[int]) -> None:
    """The first and the last point of every share: together they are all 2**64."""
    total, start = sum(weights), 0
    for number, weight in enumerate(weights, start=1):
        first, end = -(-(start << 64) // total), -(-((start + weight) << 64) // total)
        assert target_at(targets(weights), first).number == target_at(targets(weights), end - 1).number == number
        start += weight
    assert end == POINTS


@given(shares, st.text())
def test_canary_is_sticky_by_caller_and_scale_free(weights: list[int], caller: str) -> None:
    got = choose_target(targets(weights), caller)
    assert got == choose_target(targets(weights), caller)
    assert got.number == choose_target(targets([3 * weight for weight in weights]), caller).number


@given(st.integers(1, 99), st.integers(1, 99), st.text())
def test_canary_keeps_its_callers_while_it_grows(few: int, more: int, caller: str) -> None:
    few, more = sorted((few, more))
    if choose_target(targets([100 - few, few]), caller).number == 2:
        assert choose_target(targets([100 - more, more]), caller).number == 2


def test_callers_spread_by_share_and_independently_per_alias() -> None:
    callers = [f"user {number}" for number in range(4000)]
    canary = [
        {c for c in callers if choose_target(targets([95, 5], key), c).number == 2} for key in ("alias_1", "alias_2")
    ]
    assert all(140 <= len(some) <= 260 for some in canary), [len(some) for some in canary]
    assert len(canary[0] & canary[1]) < 40
