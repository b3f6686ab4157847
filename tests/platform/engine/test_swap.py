"""KV of preempted sequences goes to the host's memory and back, where that is cheaper; nothing is lost on the way."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from house import House, ManualHost
from late_runner import late_engine
from zoo import RECIPES, Asked, Zoo, serve

from loramux.engine.engine import Engine
from loramux.engine.host_kv import HostPages
from loramux.engine.policy import Policy
from loramux.engine.sequence import Sequence

PACE = (0.01, 0.001)
EVERY_MODEL = [None, *RECIPES]


def a_house(num_places: int = 20, seconds_per_page: float = 0.0, *, prefix_cache: bool = False) -> House:
    """Whose pace is known by steps of different lengths."""
    host = ManualHost(num_places, block_size=4)
    host.seconds_per_page = seconds_per_page
    house = House(40, block_size=4, policy=Policy(prefix_cache=prefix_cache), pace=PACE, host=host)
    for i in range(5):
        house.submit(f"warm {i}", prompt=list(range(1000 * i, 1000 * i + 2 + 3 * i)), output=3)
        house.run()
    return house


def interrupted(house: House) -> Sequence:
    """One that has computed 14 tokens, and just lost its place."""
    house.submit("patient", prompt=list(range(100, 110)), output=10)
    for _ in range(5):
        house.step()
    (sequence,) = house.scheduler.running
    assert sequence.num_computed == 14
    house.scheduler._admission.preempt(sequence)
    assert house.scheduler.memory.counts.kv == 0
    return sequence


@pytest.mark.parametrize("prefix_cache", [False, True])
def test_it_goes_on_where_it_was(prefix_cache: bool) -> None:
    house = a_house(prefix_cache=prefix_cache)
    swap = house.scheduler.memory.swap
    sequence = interrupted(house)
    assert (swap.num_out, swap.num_held, sequence.num_computed) == (4, 4, 0)
    began = house.time
    house.step()
    assert sequence.num_computed == 15
    assert house.time - began == pytest.approx(0.011), "one row, and none for what had been computed"
    assert swap.num_held == 0
    assert swap.num_back == (1 if prefix_cache else 4), "what the cache still has is not carried"
    house.run()
    assert house.finished["patient"] == "length"


@pytest.mark.parametrize(
    ("places", "seconds_per_page", "saved"),
    [(4, 0.0, True), (3, 0.0, False), (0, 0.0, False), (9, 0.0016, True), (9, 0.0019, False)],
)
def test_only_where_there_is_room_and_where_it_pays(places: int, seconds_per_page: float, saved: bool) -> None:
    """14 tokens take 14 ms to compute; 4 pages cross the link twice."""
    house = a_house(places, seconds_per_page)
    interrupted(house)
    assert house.scheduler.memory.swap.num_out == 4 * saved
    began = house.time
    house.step()
    assert house.time - began == pytest.approx(0.01 + 0.001 * (1 if saved else 15)), "rows of the step"
    house.run()
    assert house.scheduler.memory.swap.num_held == 0


def test_before_the_pace_is_known_everything_is_computed_again() -> None:
    host = ManualHost(20, block_size=4)
    house = House(40, block_size=4, pace=PACE, host=host)
    house.submit("first", prompt=10, output=3)
    house.step()
    house.scheduler._admission.preempt(house.scheduler.running[0])
    assert house.scheduler.memory.swap.num_out == 0


def test_who_leaves_while_it_waits_leaves_the_hosts_memory_too() -> None:
    house = a_house()
    sequence = interrupted(house)
    house.scheduler.cancel(sequence.id)
    assert house.scheduler.memory.swap.num_held == 0


def test_a_retired_adapters_request_ends_with_what_it_had() -> None:
    house = a_house()
    house.submit("patient", prompt=10, output=10, adapter="a")
    for _ in range(4):
        house.store.finish_all()
        house.step()
    (sequence,) = house.scheduler.running
    house.scheduler._admission.preempt(sequence)
    house.scheduler.memory.retire("a")
    house.run()
    assert house.finished["patient"] == "length"
    assert house.scheduler.memory.swap.num_back > 0
    assert house.pool.num_free == house.pool.num_pages


def preempting(engine: Engine) -> Engine:
    """Every third step sends somebody back, and carrying pays always."""
    scheduler = engine.scheduler
    plan = scheduler.plan
    scheduler.memory.swap.pays = lambda _: True

    def preempting_plan():
        if scheduler.running and engine.stats().steps % 3 == 2:
            scheduler._admission.preempt(scheduler.running[-1])
        return plan()

    scheduler.plan = preempting_plan
    return engine


@pytest.mark.parametrize("make", [Zoo.engine, lambda *a, **k: late_engine(*a, **k)[0]], ids=["in turn", "one ahead"])
@pytest.mark.parametrize("prefix_cache", [False, True])
def test_tokens_are_pefts_and_nothing_is_computed_twice(
    zoo_of, make: Callable[..., Engine], prefix_cache: bool
) -> None:
    zoo = zoo_of("mistral")
    engine = preempting(make(zoo, prefix_cache=prefix_cache, max_num_batched_tokens=13))
    asked = [Asked(f"p{i}", model, (7 + i, *range(11, 30)), 20) for i, model in enumerate(EVERY_MODEL)]
    got = serve(zoo, engine, asked)
    for request in asked:
        assert got[request.name] == zoo.answer(request), request
    stats = engine.stats()
    assert stats.preemptions >= 6
    assert stats.kv_pages_swapped_out >= stats.kv_pages_swapped_in > 0
    assert stats.recomputed_tokens == stats.kv_pages_in_host == 0


def test_pages_come_back_bit_for_bit_and_no_more_are_kept_than_may_be() -> None:
    pool = torch.arange(10 * 8 + 3, dtype=torch.float32)
    before = pool.clone()
    host = HostPages(pool, 8, num_bytes=5 * 8 * 4 + 31)
    assert host.num_places == 5
    assert host.seconds_per_page > 0
    assert torch.equal(pool, before), "measuring changes nothing"
    host.save([7, 2], [4, 0])
    pool.zero_()
    host.restore([0, 4], [9, 1])
    assert torch.equal(pool[72:80], before[16:24])
    assert torch.equal(pool[8:16], before[56:64])
    assert pool.count_nonzero() == 16
    assert HostPages(pool, 8, num_bytes=1 << 30).num_places == 10
    assert HostPages(pool, 8, num_bytes=0).num_places == 0
