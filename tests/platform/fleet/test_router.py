"""Routing: near to adapters and prefixes, away from queues, the same for every server."""

from __future__ import annotations

from collections import Counter

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from routing_views import ask, changed, engines, route

from loramux.engine.memory.prefix_digests import DEPTHS, identity_mask, prefix_digests
from loramux.engine.messages import KvIdentity
from loramux.fleet.placement import engine_order, place_pins
from loramux.fleet.router import Router
from loramux.fleet.view import EngineState, EngineView, RoutingRequest


def copies(router: Router, digest: str, views: list[EngineView], now: float) -> int:
    """On how many engines a revision should be at `now`."""
    return router._copies(digest, router._estimate(views), now)


def predict(router: Router, request: RoutingRequest, view: EngineView) -> float:
    """The seconds to the first token of `request` on one engine."""
    fleet = router._estimate([view])
    return router._predict(request, fleet.loads[view.engine], fleet)


def test_adapter_stays_on_one_engine_for_every_server() -> None:
    views = engines(8)
    chosen = set()
    for front in range(3):
        router = Router()
        for number in range(20):
            chosen.add(route(router, ask(100 * front + number), views, number))
            router.ended(f"r{100 * front + number}", number + 0.5)
    assert chosen == {engine_order("a", tuple(f"e{n}" for n in range(8)))[0]}


def test_engine_that_leaves_moves_only_its_own_adapters() -> None:
    names = tuple(f"e{n}" for n in range(8))
    for digest in map(str, range(200)):
        home = engine_order(digest, names)[0]
        without = tuple(name for name in names if name != "e3")
        assert engine_order(digest, without)[0] == (home if home != "e3" else engine_order(digest, names)[1])


def test_adapters_spread_evenly_over_engines() -> None:
    names = tuple(f"e{n}" for n in range(8))
    homes = Counter(engine_order(str(number), names)[0] for number in range(2000))
    assert max(homes.values()) < 1.2 * 250 < 1.5 * min(homes.values())


def test_only_ready_engines_are_chosen_and_none_means_wait() -> None:
    home = engine_order("a", ("e0", "e1", "e2"))[0]
    for state in (EngineState.STARTING, EngineState.DRAINING, EngineState.LOST):
        assert Router().choose(ask(1), changed(engines(3), home, state=state), 0.0) != home
    assert Router().choose(ask(1), engines(2, state=EngineState.STARTING), 0.0) is None
    assert Router().choose(ask(1), [], 0.0) is None


def test_engine_that_came_back_and_is_gone_again_is_not_chosen() -> None:
    router = Router()
    route(router, ask(1), tuple(engines(2)))
    router.forget("e0")
    assert router.choose(ask(2), (), 1.0) is None


def test_hot_adapter_gets_engines_at_once_and_loses_them_by_half_lives() -> None:
    router, views = Router(), engines(8)
    for number in range(40):
        route(router, ask(number), views, number / 10)
    assert copies(router, "a", views, 4.0) == 8
    for number in range(40):
        router.ended(f"r{number}", 5.0)
    route(router, ask(99), views, 5.0)
    assert copies(router, "a", views, 5.0) == 8, "one short silence does not take them away"
    assert copies(router, "a", views, 25.0) <= 3
    assert copies(router, "a", views, 60.0) == 1


def test_requests_of_a_hot_adapter_are_shared_by_its_homes_and_go_nowhere_else() -> None:
    """Ten at a time have three homes of eight engines; each request goes to the better of two of them."""
    router, views, chosen = Router(), engines(8), Counter()
    for number in range(400):
        if number >= 10:
            router.ended(f"r{number - 10}", number / 100)
        chosen[route(router, ask(number), views, number / 100)] += 1
        router.started(f"r{number}", number / 100)
    homes = engine_order("a", tuple(view.engine for view in views))[:3]
    assert set(chosen) == set(homes)
    assert max(chosen.values()) <= 1.3 * min(chosen.values())


def test_copies_do_not_flap_while_load_swings_around_a_threshold() -> None:
    router, views = Router(), engines(8)
    seen = []
    for number in range(200):
        route(router, ask(number), views, number / 10)
        if number >= 8 + number % 3:
            router.ended(f"r{number - 8 - number % 3}", number / 10)
        if number > 50:
            seen.append(copies(router, "a", views, number / 10))
    assert len(set(seen)) == 1


def test_no_engine_is_full_while_another_idles() -> None:
    """One adapter, then many that hash to one engine: what one holds is bounded by what all hold."""
    names = tuple(f"e{n}" for n in range(8))
    same_home = [str(n) for n in range(4000) if engine_order(str(n), names)[0] == "e0"][:200]
    for digests in (["a"] * 200, same_home):
        router, views = Router(), engines(8)
        sent = Counter(route(router, ask(number, digest), views) for number, digest in enumerate(digests))
        assert max(sent.values()) <= 1.5 * 200 / 8 + 2
        assert len(sent) == 8


def test_cold_adapter_goes_past_an_engine_that_a_hot_one_fills() -> None:
    home, second = engine_order("cold", ("e0", "e1", "e2", "e3"))[:2]
    views = changed(engines(4, at=1.0), home, running=64, waiting=50, wait_s=8.0, queue_tokens=40_000)
    assert Router().choose(ask(1, "cold"), views, 1.5) == second


def test_request_leaves_its_home_where_a_long_queue_of_few_requests_waits() -> None:
    """Two prompts of 100,000 tokens are ten seconds, though they are two requests."""
    home = engine_order("a", ("e0", "e1", "e2"))[0]
    busy = changed(engines(3, at=1.0, resident={"a": 4}), home, running=2, queue_tokens=200_000)
    assert Router().choose(ask(1), busy, 1.1) != home
    slightly = changed(engines(3, at=1.0), home, running=2, queue_tokens=300, resident={"a": 4})
    assert Router().choose(ask(1), slightly, 1.1) == home


def test_old_view_is_corrected_by_the_servers_own_requests_and_reports() -> None:
    router, views = Router(), engines(2)
    for number in range(30):
        route(router, ask(number, None), views, 0.1)
    sent = Counter(sent.engine for sent in router._open.values())
    assert abs(sent["e0"] - sent["e1"]) <= 2
    # A view that has those requests does not count them twice.
    later = changed(engines(2, at=1.0), "e0", running=sent["e0"], queue_tokens=500 * sent["e0"])
    later = changed(later, "e1", running=sent["e1"], queue_tokens=500 * sent["e1"])
    before = predict(router, ask(99, None), later[0])
    assert before == (500 * sent["e0"] + 500) / 10_000
    router.started("r0", 1.1)
    router.ended("r0", 1.2)
    engine = next(view for view in later if predict(router, ask(99, None), view) < before)
    assert predict(router, ask(99, None), engine) == before - 500 / 10_000


def test_two_servers_with_old_views_do_not_choose_the_same_engine() -> None:
    """For five seconds both see e0 idle and the others a little busy, and know nothing of each other."""
    views = changed(engines(8, running=6, queue_tokens=1500), "e0", running=0, queue_tokens=0)
    fronts = [Router(), Router()]
    sent = Counter(route(fronts[n % 2], ask(n, None, tenant=f"t{n}"), views, n / 100) for n in range(400))
    assert sent["e0"] <= 2.2 * 400 / 8
    assert min(sent.values()) >= 0.5 * 400 / 8


def test_pinned_adapter_is_placed_on_one_engine_and_served_there() -> None:
    names = [f"e{n}" for n in range(4)]
    placed = place_pins((str(n) for n in range(40)), names, {})
    assert sorted(digest for digests in placed.values() for digest in digests) == sorted(map(str, range(40)))
    assert max(map(len, placed.values())) <= 13
    elsewhere = engine_order("a", tuple(names))[2]
    views = changed(engines(4), elsewhere, pinned=frozenset({"a"}), resident={"a": 4})
    assert Router().choose(ask(1), views, 0.0) == elsewhere


def prompt_of(number: int, identity: KvIdentity, tokens: list[int]) -> RoutingRequest:
    """A request with the digests of its prompt, in pages of 16 tokens."""
    mask = identity_mask(identity)
    prefix = tuple(digest ^ mask for digest in prefix_digests(b"key", identity.tenant, tokens, 16))
    return RoutingRequest(id=f"r{number}", identity=identity, prompt_tokens=len(tokens), prefix=prefix, block_size=16)


def reported(request: RoutingRequest) -> frozenset[int]:
    """The digests that an engine reports after the request."""
    return frozenset(request.prefix)


def test_chat_returns_to_the_engine_that_has_its_prefix() -> None:
    identity = KvIdentity("t", None, "project")
    first = list(range(1000))
    router, views, chosen = Router(), engines(8), set()
    for number in range(8):
        request = prompt_of(number, identity, first + list(range(2000, 2000 + 300 * number)))
        engine = route(router, request, views, float(number))
        chosen.add(engine)
        router.ended(request.id, number + 0.5)
        views = changed(engines(8, at=number + 0.9, running=2), engine, prefixes=reported(request), running=3)
    assert len(chosen) == 1


def test_prefix_of_one_tenant_says_nothing_of_another() -> None:
    tokens = list(range(200))
    ours, theirs = (prefix_digests(b"key", tenant, tokens, 16) for tenant in "tu")
    assert len(ours) == len([depth for depth in DEPTHS if 16 * depth <= 200])
    assert not set(ours) & set(theirs)
    assert not set(ours) & set(prefix_digests(b"another key", "t", tokens, 16))
    assert prefix_digests(b"key", "t", tokens[:100] + [7] * 100, 16)[:5] == ours[:5]
    assert prefix_digests(b"key", "t", tokens[:15], 16) == ()


@pytest.mark.parametrize("digest", [None, "a"])
def test_routing_of_a_tenant_does_not_depend_on_what_another_tenant_has_asked(digest: str | None) -> None:
    """Tenant u guesses the prompt of tenant t, which engines have reported and this server has sent."""
    guess, choices = list(range(4000)), []
    for asked in (guess, list(range(4000, 8000))):
        router, views = Router(), engines(8, resident={"a": 4})
        views = changed(views, "e3", prefixes=reported(prompt_of(0, KvIdentity("t", digest, ""), asked)))
        for number in range(12):
            route(router, prompt_of(number, KvIdentity("t", "a", ""), asked), views)
        for number in range(12, 24):
            probe = prompt_of(number, KvIdentity("u", digest, ""), guess)
            fleet = router._estimate(views)
            seconds = [router._predict(probe, load, fleet) for load in fleet.loads.values()]
            choices.append((route(router, probe, views), seconds))
    assert choices[:12] == choices[12:]


def test_prefix_that_another_server_sent_is_found_by_the_engines_report() -> None:
    identity, tokens = KvIdentity("t", "a", ""), list(range(4000))
    request = prompt_of(1, identity, tokens)
    holding, empty = engines(1, prefixes=reported(request)), engines(1)
    assert predict(Router(), request, holding[0]) < 0.4 * predict(Router(), request, empty[0])
    stranger = prompt_of(1, KvIdentity("u", "a", ""), tokens)
    assert predict(Router(), stranger, holding[0]) == predict(Router(), stranger, empty[0])


def test_prefix_that_another_server_has_elsewhere_is_used_and_not_computed_twice() -> None:
    """Both servers have sent the prompt before a report, to engines of their choice."""
    identity, tokens, router = KvIdentity("t", None, ""), list(range(4000)), Router()
    mine = route(router, prompt_of(1, identity, tokens), engines(8))
    router.ended("r1", 5.0)
    theirs = next(view.engine for view in engines(8) if view.engine != mine)
    request = prompt_of(2, identity, [*tokens, 7])
    views = changed(engines(8, at=20.0), theirs, prefixes=reported(prompt_of(1, identity, tokens)))
    assert router.choose(request, views, 20.0) == theirs
    assert router.choose(request, changed(views, theirs, queue_tokens=9000), 20.0) == mine


def test_evicted_prefix_attracts_nothing() -> None:
    """A beginning that was sent counts until the engine has had time to report it."""
    identity = KvIdentity("t", None, "")
    router, request = Router(), prompt_of(1, identity, list(range(4000)))
    new = engines(1)[0]
    router.choose(request, [new], 0.0)
    router.sent(request, "e0", 0.0)
    router.started("r1", 0.5)
    router.ended("r1", 0.5)
    holding = engines(1, at=9.0, prefixes=reported(request))[0]
    soon, evicted = engines(1, at=1.0)[0], engines(1, at=9.0)[0]
    assert predict(router, request, soon) == predict(router, request, holding)
    assert predict(router, request, holding) < 0.3 * predict(router, request, evicted)


def test_base_kv_of_an_activated_lora_counts_for_all_its_adapters() -> None:
    base, own = (prompt_of(1, KvIdentity("t", digest, ""), list(range(4000))) for digest in (None, "a"))
    adapter = msgspec.structs.replace(own, base_identity=base.identity)
    plain, activated = (
        engines(1, prefixes=reported(base), resident={"a": 4}, activated=frozenset(names))[0] for names in ("", "a")
    )
    assert predict(Router(), adapter, activated) < 0.4 * predict(Router(), adapter, plain)


def test_activated_lora_goes_to_the_engine_that_has_the_base_kv_of_its_context() -> None:
    """Its own home holds the adapter and has not cached the context, which costs more than the adapter's load."""
    base, own = (prompt_of(1, KvIdentity("t", digest, ""), list(range(4000))) for digest in (None, "a"))
    adapter, router = msgspec.structs.replace(own, base_identity=base.identity), Router()
    home = route(router, ask(0, "a", 50), engines(8))
    views = changed(engines(8, at=9.0), home, resident={"a": 4}, activated=frozenset({"a"}))
    context = next(view.engine for view in views if view.engine != home)
    views = changed(views, context, prefixes=reported(base))
    assert router.choose(adapter, views, 9.0) == context
    plain = changed(views, home, resident={"a": 4}, activated=frozenset())
    assert router.choose(adapter, plain, 9.0) == home, "only an activated LoRA reads KV of the base"


def test_lost_engine_is_forgotten_with_its_requests() -> None:
    router, views = Router(), engines(2)
    for number in range(10):
        route(router, ask(number, str(number)), views)
    router.forget("e0")
    for number in range(10):
        router.ended(f"r{number}", 1.0)
    assert not router._open


@settings(max_examples=60, deadline=None)
@given(
    count=st.integers(1, 9),
    events=st.lists(st.tuples(st.integers(0, 2), st.integers(0, 5), st.integers(1, 3000)), max_size=120),
    loads=st.lists(st.integers(0, 90), min_size=9, max_size=9),
)
def test_every_choice_is_a_ready_engine_within_the_bound(
    count: int,
    events: list[tuple[int, int, int]],
    loads: list[int],
) -> None:
    """Whatever comes and ends, no engine is chosen above the bound, and the router's books stay in balance."""
    router = Router()
    views = [
        msgspec.structs.replace(view, running=min(64, load), waiting=max(0, load - 64), at=0.0)
        for view, load in zip(engines(count), loads, strict=False)
    ]
    opened: list[tuple[str, str]] = []
    sent: Counter[str] = Counter()
    for number, (kind, adapter, tokens) in enumerate(events):
        now = 0.01 * (number + 1)
        if kind < 2 or not opened:
            total = sum(loads[:count]) + sum(sent.values())
            engine = route(router, ask(number, str(adapter) if kind else None, tokens), views, now)
            held = loads[int(engine[1:])] + sent[engine]
            assert count == 1 or held + 1 <= max(8, 1.5 * (total + 1) / count)
            opened.append((f"r{number}", engine))
            sent[engine] += 1
        else:
            request_id, engine = opened.pop(adapter % len(opened))
            router.ended(request_id, now)
            sent[engine] -= 1
    for request_id, _ in opened:
        router.ended(request_id, 10.0)
    traffics = [load.traffic for load in router._engines.values()]
    assert all(traffic.requests == traffic.tokens == 0 and not traffic.loading for traffic in traffics)
