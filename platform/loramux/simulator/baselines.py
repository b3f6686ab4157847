"""Ways of choosing an engine that the router is compared with."""

from __future__ import annotations

import random
from collections import Counter, OrderedDict
from collections.abc import Iterable, Sequence

import msgspec

from loramux.fleet.placement import RoutingPolicy, draw, engine_order
from loramux.fleet.router import FleetEstimate, Router, key_of
from loramux.fleet.view import EngineLoad, EngineState, EngineView, RoutingRequest

MAX_PREFIXES = 65_536
"""Maximum number of beginnings of prompts that `ResidencyRouter` remembers."""


class LeastLoaded:
    """A baseline instead of the router: the engine with the fewest requests of this server, independently of the
    adapter's place.

    This baseline balances perfectly and has no affinity.
    """

    num_moves = 0

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
        """Stop counting the requests of an engine."""
        self._engine_of = {key: other for key, other in self._engine_of.items() if other != engine}
        del self._requests[engine]


class RandomChoice(LeastLoaded):
    """A baseline that chooses a random engine."""

    def __init__(self) -> None:
        super().__init__()
        self._random = random.Random(0)  # noqa: S311  a simulation, repeatable

    def choose(self, request: RoutingRequest, engines: Sequence[EngineView], now: float) -> str | None:  # noqa: ARG002
        """Return a random engine."""
        ready = [view.engine for view in engines if view.state is EngineState.READY]
        return self._random.choice(ready) if ready else None


class ResidencyRouter(Router):
    """The router before placement: homes by rendezvous hashing and the number of requests, and no reports of prefixes.

    It remembers to which engines a beginning was sent, and believes that it is cached there while anything of the
    identity's prompts is.
    """

    def __init__(self) -> None:
        super().__init__(RoutingPolicy(moves_per_minute=0))
        self._sent_to: OrderedDict[tuple[str, int], None] = OrderedDict()
        """Engines and beginnings of prompts that were sent to them."""

    def choose(self, request: RoutingRequest, engines: Sequence[EngineView], now: float) -> str | None:
        """Return the engine; class batch is treated as all others."""
        return super().choose(msgspec.structs.replace(request, is_background=False), engines, now)

    def _homes(self, request: RoutingRequest, fleet: FleetEstimate, now: float) -> list[str]:
        return list(engine_order(key_of(request), fleet.names)[: self._copies(key_of(request), fleet, now)])

    def _candidates(self, request: RoutingRequest, homes: Sequence[str], fleet: FleetEstimate) -> Iterable[str]:
        digest = request.identity.digest
        pool = homes if digest else list(fleet.loads)
        cached = {engine: self._cached(request, fleet.loads[engine], fleet) for engine in pool}
        near = [engine for engine in pool if cached[engine] and cached[engine] == max(cached.values())]
        near += fleet.pinned.get(digest, ()) if digest else ()
        drawn, others = draw(request.id), list(fleet.loads) if digest is None and len(homes) == 1 else homes
        first, second = drawn % len(others), drawn // len(others) % max(1, len(others) - 1)
        two = dict.fromkeys([others[first], others[(second + (second >= first)) % len(others)]])
        return dict.fromkeys([*near, *homes, *two] if len(homes) < 3 else [*near, *two])

    def _cached(self, request: RoutingRequest, load: EngineLoad, fleet: FleetEstimate) -> int:
        known = request.prefix
        if known and (known[0] in load.view.prefixes or super()._cached(request, load, fleet)):
            for place in range(len(known) - 1, -1, -1):
                if (load.view.engine, known[place]) in self._sent_to:
                    return request.tokens_at(place)
        return 0

    def sent(self, request: RoutingRequest, engine: str, now: float) -> None:
        """Remember the beginnings of the prompt."""
        super().sent(request, engine, now)
        for digest in request.prefix:
            self._sent_to[engine, digest] = None
            self._sent_to.move_to_end((engine, digest))
        while len(self._sent_to) > MAX_PREFIXES:
            self._sent_to.popitem(last=False)


ROUTERS: dict[str, type[Router] | type[LeastLoaded]] = {
    "router": Router,
    "residency": ResidencyRouter,
    "random": RandomChoice,
    "least-loaded": LeastLoaded,
}
"""Classes of routers by `Scenario.routing`."""
