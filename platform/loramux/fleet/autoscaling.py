"""The number of engines of a base, computed from the wait of a new request and from the memory that requests hold.

Out: the predicted wait for a first token, over all ready engines, is above the target, or the pools are nearly full.
Engines are added immediately, in proportion to the excess. In: with one engine less, wait and memory would both stay
well below their targets. After a cool-down, one engine at a time is drained: the engine whose end costs least gets no
more requests and ends after its last request. A base with `min` = 0 has no engine after `idle_s` without a request, and
gets one with the next request.

`decide` changes nothing: the caller starts and drains engines, and reports by `requested` and `changed`.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import msgspec

from loramux.fleet.view import EngineState, EngineView


@dataclass(frozen=True, slots=True)
class ScalingPolicy:
    """Limits of one base, and the times of scaling, in seconds."""

    min_engines: int = 1
    max_engines: int = 1
    target_wait_s: float = 1.0
    """Predicted wait for a first token, in seconds, above which more engines are started."""
    target_memory: float = 0.9
    """Share of the pools that requests hold, above which more engines are started."""
    spare: float = 0.6
    """Share of both targets, and of the rows, below which the remaining engines must be after an engine is drained."""
    cooldown_s: float = 120.0
    """Seconds after any change before an engine is drained."""
    idle_s: float = 600.0
    """Seconds without a request after which a base with a minimum of zero has no engine."""


class ScalingDecision(msgspec.Struct, frozen=True, kw_only=True):
    """Changes to make now."""

    start: int = 0
    """Engines to start."""
    drain: tuple[str, ...] = ()
    """Engines to drain."""
    reason: str = ""
    """Reason of the changes, which is logged."""


class Autoscaler:
    """The scaling of one base. The scaler decides from views, and remembers the times of changes and of requests."""

    def __init__(self, policy: ScalingPolicy, now: float) -> None:
        self.policy = policy
        self._changed_at = -math.inf
        self._requested_at = now

    # questions

    def decide(self, base: str, views: Sequence[EngineView], now: float) -> ScalingDecision:
        """Return the engines of `base` to start or drain now."""
        engines = [view for view in views if view.base == base]
        ready = [view for view in engines if view.state is EngineState.READY]
        coming = len(ready) + sum(view.state is EngineState.STARTING for view in engines)
        wanted = max(self._least(now), min(self.policy.max_engines, self._wanted(ready)))
        if wanted > coming:
            return ScalingDecision(start=wanted - coming, reason=f"{base}: {_pressure(ready)}, {wanted} engines needed")
        leaving = self._leaving(ready, coming, now)
        reason = f"{base}: {_pressure(ready)}, {len(leaving)} to spare" if leaving else ""
        return ScalingDecision(drain=tuple(view.engine for view in leaving), reason=reason)

    # events

    def requested(self, now: float) -> None:
        """Note a request for the base, even if it cannot be served."""
        self._requested_at = now

    def changed(self, now: float) -> None:
        """Note that an engine was started or drained, or has become ready."""
        self._changed_at = now

    # estimates

    def _least(self, now: float) -> int:
        """Return the minimum number of engines: at least one if the base had a request within `idle_s`."""
        asked = now - self._requested_at < self.policy.idle_s
        return max(self.policy.min_engines, int(asked and self.policy.max_engines > 0))

    def _wanted(self, ready: Sequence[EngineView]) -> int:
        """Return the number of engines with which wait and memory would be at their targets."""
        if not ready:
            return 0
        policy, count = self.policy, len(ready)
        wait = sum(view.wait_s for view in ready) / count
        memory = sum(view.pages_used for view in ready if view.waiting) / count
        # A backlog of w seconds over n engines is w * n / m seconds over m engines.
        by_wait = math.ceil(count * wait / policy.target_wait_s) if wait > policy.target_wait_s else 0
        by_memory = math.ceil(count * memory / policy.target_memory) if memory > policy.target_memory else 0
        return min(max(by_wait, by_memory), 2 * count)  # the queue says little about the effect of more engines

    def _leaving(self, ready: Sequence[EngineView], coming: int, now: float) -> Sequence[EngineView]:
        """Return the engines to drain: engines above the maximum, all engines of an unused base, or one engine if the
        others are enough.
        """
        policy, by_loss = self.policy, sorted(ready, key=_loss)
        if coming > policy.max_engines:
            return by_loss[: coming - policy.max_engines]
        if coming > len(ready) or not ready:
            return ()
        if not policy.min_engines and self._is_unused(ready, now):
            return by_loss
        settled = now - self._changed_at >= policy.cooldown_s
        if settled and len(ready) > max(1, policy.min_engines) and self._can_spare_one(ready):
            return by_loss[:1]
        return ()

    def _can_spare_one(self, ready: Sequence[EngineView]) -> bool:
        """Return whether the same work on one engine less would stay well below every target."""
        policy, others = self.policy, len(ready) - 1
        rows = sum(view.requests / view.max_running for view in ready) / others
        wait = sum(view.wait_s for view in ready) / others
        memory = sum(view.pages_used for view in ready) / others
        limits = ((rows, 1.0), (wait, policy.target_wait_s), (memory, policy.target_memory))
        return all(expected < policy.spare * target for expected, target in limits)

    def _is_unused(self, ready: Sequence[EngineView], now: float) -> bool:
        quiet = now - self._requested_at >= self.policy.idle_s
        return quiet and not any(view.requests for view in ready)


def _loss(view: EngineView) -> tuple[int, int, int, str]:
    """Rank an engine by the cost of draining it: pins to move, then requests, then adapters."""
    return len(view.pinned), view.requests, len(view.resident), view.engine


def _pressure(ready: Sequence[EngineView]) -> str:
    count = max(1, len(ready))
    wait = sum(view.wait_s for view in ready) / count
    memory = sum(view.pages_used for view in ready) / count
    return f"{wait:.1f} s of wait, {memory:.0%} of the pools in use on {len(ready)} engines"
