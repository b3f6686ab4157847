"""Scaling: out at once under pressure, in slowly by draining, to zero and back."""

from __future__ import annotations

import msgspec
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from loramux.fleet.autoscaling import Autoscaler, ScalingDecision, ScalingPolicy
from loramux.fleet.view import EngineState, EngineView

POLICY = ScalingPolicy(min_engines=1, max_engines=8)


def engines(count: int, **fields: object) -> list[EngineView]:
    common = {"base": "base", "max_running": 64, "pages": 1000, "free_pages": 900}
    return [EngineView(engine=f"e{n}", **{**common, **fields}) for n in range(count)]


def scaler(policy: ScalingPolicy = POLICY) -> Autoscaler:
    scaling = Autoscaler(policy, 0.0)
    scaling.requested(1000.0)
    scaling.changed(0.0)
    return scaling


def test_idle_fleet_at_its_least_stays() -> None:
    assert scaler().decide("base", engines(1), 1000.0) == ScalingDecision()


def test_base_below_its_least_gets_engines_and_those_that_start_count() -> None:
    policy = ScalingPolicy(min_engines=3, max_engines=8)
    assert scaler(policy).decide("base", engines(1), 1000.0).start == 2
    coming = [*engines(1), *engines(2, state=EngineState.STARTING)]
    assert scaler(policy).decide("base", coming, 1000.0) == ScalingDecision()
    lost = [*engines(2), *engines(1, state=EngineState.LOST), *engines(4, base="another")]
    assert scaler(policy).decide("base", lost, 1000.0).start == 1


@pytest.mark.parametrize(("wait", "start"), [(0.9, 0), (1.2, 1), (3.0, 2), (60.0, 2)])
def test_wait_above_the_target_starts_engines_in_proportion(wait: float, start: int) -> None:
    decision = scaler().decide("base", engines(2, wait_s=wait, waiting=50, running=64), 1000.0)
    assert decision.start == start
    assert bool(decision.reason) == bool(start)


def test_full_pools_start_engines_only_where_requests_wait_for_room() -> None:
    full = engines(2, free_pages=20, running=40)
    assert scaler().decide("base", full, 1000.0).start == 0
    waiting = [msgspec.structs.replace(view, waiting=5, wait_s=0.5) for view in full]
    assert scaler().decide("base", waiting, 1000.0).start == 1


def test_there_are_never_more_than_the_most() -> None:
    assert scaler().decide("base", engines(8, wait_s=100.0, waiting=500), 1000.0) == ScalingDecision()
    too_many = engines(10, running=60)
    assert len(scaler().decide("base", too_many, 1000.0).drain) == 2


def test_engine_to_spare_is_drained_after_the_cooldown_the_one_with_least_to_lose() -> None:
    views = engines(3, running=10, resident=frozenset("abc"))
    views[0] = msgspec.structs.replace(views[0], running=4, pinned=frozenset("a"))
    views[2] = msgspec.structs.replace(views[2], running=7)
    scaling = scaler()
    scaling.changed(950.0)
    assert scaling.decide("base", views, 1000.0) == ScalingDecision()
    assert scaling.decide("base", views, 1071.0).drain == ("e2",), "e0 has pins, that would have to move"


@pytest.mark.parametrize("fields", [{"running": 40}, {"wait_s": 0.5}, {"free_pages": 500}])
def test_engine_is_not_drained_where_the_others_would_be_near_a_target(fields: dict[str, object]) -> None:
    assert scaler().decide("base", engines(2, **fields), 1000.0) == ScalingDecision()


def test_base_that_is_not_asked_for_goes_to_zero_and_comes_back() -> None:
    policy = ScalingPolicy(min_engines=0, max_engines=4)
    scaling = scaler(policy)
    assert scaling.decide("base", engines(1), 1100.0) == ScalingDecision()
    assert scaling.decide("base", engines(1, running=1), 1700.0) == ScalingDecision(), "a long answer is still given"
    assert scaling.decide("base", engines(1), 1700.0).drain == ("e0",)
    assert scaling.decide("base", [], 1700.0) == ScalingDecision()
    scaling.requested(1750.0)
    assert scaling.decide("base", [], 1750.0).start == 1
    coming = engines(1, state=EngineState.STARTING, at=1750.0)
    assert scaling.decide("base", coming, 1751.0) == ScalingDecision()


def test_scaling_does_not_swing() -> None:
    """A load that needs three engines gets three and keeps them: four would be spared, and two would be too few."""
    policy = ScalingPolicy(min_engines=1, max_engines=8, cooldown_s=60.0)
    scaling, count, seen = scaler(policy), 1, []
    for now in range(1000, 3000, 5):
        scaling.requested(now)
        per_engine = 110 / count
        wait = max(0.0, (per_engine - 64) / 20)
        views = engines(count, running=int(min(64, per_engine)), waiting=int(max(0, per_engine - 64)), wait_s=wait)
        decision = scaling.decide("base", views, float(now))
        if decision.start or decision.drain:
            count += decision.start - len(decision.drain)
            scaling.changed(float(now))
        seen.append(count)
    assert len(set(seen[20:])) == 1
    assert seen[-1] in (2, 3)


@settings(deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(
    waits=st.lists(st.floats(0, 100), min_size=1, max_size=12),
    least=st.integers(0, 4),
    most=st.integers(1, 8),
    now=st.integers(0, 5000),
    state=st.sampled_from(EngineState),
)
def test_every_decision_stays_within_the_limits(
    waits: list[float], least: int, most: int, now: int, state: EngineState
) -> None:
    policy = ScalingPolicy(min_engines=min(least, most), max_engines=most)
    views = [
        EngineView(engine=f"e{n}", base="base", wait_s=wait, waiting=5, running=9, max_running=9, pages=10)
        for n, wait in enumerate(waits)
    ]
    views[0] = msgspec.structs.replace(views[0], state=state)
    decision = Autoscaler(policy, 0.0).decide("base", views, now)
    ready = {view.engine for view in views if view.state is EngineState.READY}
    coming = len(ready) + (state is EngineState.STARTING)
    assert set(decision.drain) <= ready
    assert not (decision.start and decision.drain)
    assert coming + decision.start <= max(most, coming)
    assert coming - len(decision.drain) >= min(policy.min_engines, coming)
