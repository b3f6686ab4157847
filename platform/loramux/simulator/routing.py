"""The routing of a simulated fleet: the platform's own router, or a baseline to compare it with."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Sequence
from typing import Protocol

from loramux.fleet.router import Router, RoutingRequest
from loramux.fleet.view import EngineState, EngineView


class Routing(Protocol):
    """One front's choices, as `loramux.fleet.router.Router` makes them."""

    def choose(self, request: RoutingRequest, engines: Sequence[EngineView], now: float) -> str | None:
        """Return the engine for `request`."""
        ...

    def sent(self, request: RoutingRequest, engine: str, now: float) -> None:
        """Note that `request` was sent."""
        ...

    def started(self, request_id: str, now: float) -> None:
        """Note a first token."""
        ...

    def ended(self, request_id: str, now: float) -> None:
        """Note an end."""
        ...

    def forget(self, engine: str) -> None:
        """Forget a lost engine."""
        ...


class LeastLoaded:
    """The engine with the fewest requests of this front, wherever the adapter is: perfect balance, and no affinity."""

    def __init__(self) -> None:
        self._engine_of: dict[str, str] = {}
        self._requests: Counter[str] = Counter()

    def choose(self, request: RoutingRequest, engines: Sequence[EngineView], now: float) -> str | None:  # noqa: ARG002
        """Return the engine with the fewest requests."""
        ready = [view.engine for view in engines if view.state is EngineState.READY]
        return min(ready, key=lambda engine: self._requests[engine], default=None)

    def sent(self, request: RoutingRequest, engine: str, now: float) -> None:  # noqa: ARG002
        """Count a request."""
        self._engine_of[request.id] = engine
        self._requests[engine] += 1

    def started(self, request_id: str, now: float) -> None:
        """Do nothing."""

    def ended(self, request_id: str, now: float) -> None:  # noqa: ARG002
        """Count an end."""
        if engine := self._engine_of.pop(request_id, None):
            self._requests[engine] -= 1

    def forget(self, engine: str) -> None:
        """Count its requests no more."""
        self._engine_of = {key: other for key, other in self._engine_of.items() if other != engine}
        del self._requests[engine]


class RandomChoice(LeastLoaded):
    """Any engine: the baseline for loads."""

    def __init__(self) -> None:
        super().__init__()
        self._random = random.Random(0)  # noqa: S311  a simulation, repeatable

    def choose(self, request: RoutingRequest, engines: Sequence[EngineView], now: float) -> str | None:  # noqa: ARG002
        """Return a random engine."""
        ready = [view.engine for view in engines if view.state is EngineState.READY]
        return self._random.choice(ready) if ready else None


def make_routing(kind: str) -> Routing:
    """`router`, `random` or `least-loaded`."""
    return {"router": Router, "random": RandomChoice, "least-loaded": LeastLoaded}[kind]()
