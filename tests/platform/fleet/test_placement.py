"""Homes by predicted step time and room in the pool; few moves."""

from __future__ import annotations

from collections import Counter

import msgspec
from routing_views import ask, changed, engines, route

from loramux.fleet.placement import RoutingPolicy, engine_order
from loramux.fleet.router import Router
from loramux.fleet.view import EngineView

MEASURED = {"at": 1.0, "step_s": 0.010, "page_s": 1e-5, "row_pages": 2.0, "pages": 20_000, "running": 8}


def measured(count: int, **fields: object) -> list[EngineView]:
    """Engines that have measured their steps, and hold an adapter of 100 pages and one of 5."""
    return engines(count, **{**MEASURED, "resident": {"large": 100, "small": 5}, **fields})


def test_adapters_of_high_rank_are_spread_by_their_pages_and_not_by_their_number() -> None:
    """Every fourth adapter has 200 pages, the others 5. The engines' steps become equally long."""
    sizes = {f"a{n}": 200 if n % 4 == 0 else 5 for n in range(160)}
    views, router = measured(4, resident=sizes), Router()
    pages: Counter[str] = Counter()
    for number, digest in enumerate(sizes):
        pages[route(router, ask(number, digest, 1), views, 1.0 + number / 1000)] += sizes[digest]
    assert max(pages.values()) <= 1.25 * min(pages.values())
    hashed: Counter[str] = Counter()
    for digest, size in sizes.items():
        hashed[engine_order(digest, tuple(view.engine for view in views))[0]] += size
    assert max(hashed.values()) > 1.25 * min(hashed.values()), "a hash alone would not do it"


def test_new_adapter_goes_to_an_engine_with_room_in_its_pool() -> None:
    """All other engines' pools are full of the adapters whose home they are."""
    router, digests = Router(), [f"a{n}" for n in range(40)]
    views = measured(4, pages=1100, resident=dict.fromkeys(digests, 100))
    homes: Counter[str] = Counter()
    for number, digest in enumerate(digests):
        homes[route(router, ask(number, digest, 1), views, 1.0)] += 1
        router.ended(f"r{number}", 1.1)
    assert max(homes.values()) <= 11, "pools of 1,100 pages hold ten of 100 pages next to the rows' KV"


def test_server_without_memory_uses_the_engine_that_holds_the_adapter() -> None:
    order = engine_order("large", ("e0", "e1", "e2", "e3", "e4", "e5", "e6", "e7"))
    views = changed(measured(8, resident={}), order[6], resident={"large": 100})
    assert Router().choose(ask(1, "large"), views, 1.0) == order[6]


def loaded(router: Router, count: int) -> list[EngineView]:
    """Give e0 the homes of `count` adapters. A minute later, all of them run, and its steps are eight times as long as
    those of the other engines.
    """
    digests = {f"a{n}": 50 for n in range(count)}
    views = changed(measured(4, resident=digests), "e0", step_s=0.001)
    for number, digest in enumerate(digests):
        route(router, ask(number, digest, 1), changed(views, "e0", resident=digests), 1.0)
    return changed(measured(4, resident=digests, at=61.0), "e0", step_s=0.080)


def test_adapters_leave_the_engine_with_the_longest_steps_slowly() -> None:
    policy = RoutingPolicy(moves_per_minute=12)
    router = Router(policy)
    views = loaded(router, 60)
    for second in range(60):
        route(router, ask(1000 + second, f"a{second}", 1), views, 61.0 + second)
        router.ended(f"r{1000 + second}", 61.0 + second)
    assert 8 <= router.num_moves <= 2 * policy.moves_per_minute, "the first minute's moves, and the second's"


def test_moved_adapter_stays_where_it_is() -> None:
    router = Router()
    views = loaded(router, 60)
    route(router, ask(1000, "a0", 1), views, 61.0)
    moved = {key: demand.homes for key, demand in router.placement._demand.items() if demand.moved_at == 61.0}
    assert moved
    assert all(homes != ["e0"] for homes in moved.values())
    # The other engines' steps are longer now, but the adapters were moved less than a minute ago.
    turned = [
        EngineView(**{**{name: getattr(view, name) for name in view.__struct_fields__}, "at": 80.0})
        for view in changed(changed(views, "e0", step_s=0.001), "e1", step_s=0.09)
    ]
    route(router, ask(1001, "a0", 1), turned, 90.0)
    assert all(router.placement._demand[key].homes == homes for key, homes in moved.items())


def test_move_changes_new_requests_only() -> None:
    router = Router()
    views = loaded(router, 60)
    before = {request_id: sent.engine for request_id, sent in router._open.items()}
    route(router, ask(1000, "a0", 1), views, 61.0)
    key = next(key for key, demand in router.placement._demand.items() if demand.moved_at == 61.0)
    assert router.choose(ask(1001, key, 1), views, 61.1) in router.placement._demand[key].homes
    assert {request_id: router._open[request_id].engine for request_id in before} == before


def test_moved_adapter_is_loaded_only_when_the_engine_that_has_it_would_answer_later() -> None:
    router = Router()
    views = loaded(router, 60)
    route(router, ask(1000, "a0", 1), views, 61.0)
    key = next(key for key, demand in router.placement._demand.items() if demand.moved_at == 61.0)
    for number in range(60):
        router.ended(f"r{number}", 61.0)
    holding = changed([msgspec.structs.replace(view, resident={}) for view in views], "e0", resident={key: 50})
    assert router.placement._demand[key].homes != ["e0"]
    assert router.choose(ask(1001, key, 1), holding, 61.1) == "e0"
    queued = changed(holding, "e0", queue_tokens=5000)
    assert router.choose(ask(1002, key, 1), queued, 61.2) in router.placement._demand[key].homes


def test_no_move_while_steps_are_alike() -> None:
    router = Router()
    views = changed(measured(4, resident={f"a{n}": 50 for n in range(100)}), "e0", step_s=0.0105)
    for number in range(400):
        now = 1.0 + number / 10
        route(router, ask(number, f"a{number % 100}", 1), views, now)
        router.ended(f"r{number}", now + 0.05)
    assert router.num_moves == 0


def test_batch_of_the_base_goes_where_steps_are_shortest() -> None:
    views = changed(measured(4, step_s=0.030), "e2", step_s=0.008)
    for number in range(8):
        batch = ask(number, None, 500, f"t{number}", is_background=True)
        assert Router().choose(batch, views, 1.0) == "e2"


def test_batch_of_an_adapter_gets_no_further_engine() -> None:
    router, views = Router(), measured(8)
    chosen = set()
    for number in range(100):
        chosen.add(route(router, ask(number, "small", 500, is_background=True), views, 1.0 + number / 100))
    assert len(chosen) == 1
