"""KV of preempted sequences goes to the host's memory and back, if that is cheaper; no KV is lost."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import pytest
import torch
from adapter_zoo import RECIPES, Asked, Zoo, serve
from delayed_runner import late_engine
from scheduler_harness import Harness, ManualHost

from loramux.engine.engine import Engine
from loramux.engine.memory.host_memory import HostPages
from loramux.engine.scheduling.policy import Policy
from loramux.engine.scheduling.sequence import Sequence

PACE = (0.01, 0.001)
EVERY_MODEL = [None, *RECIPES]


def a_harness(num_slots: int = 20, seconds_per_page: float = 0.0, *, prefix_cache: bool = False) -> Harness:
    """Whose pace is known by steps of different lengths."""
    host = ManualHost(num_slots, block_size=4)
    host.seconds_per_page = seconds_per_page
    harness = Harness(40, block_size=4, policy=Policy(prefix_cache=prefix_cache), pace=PACE, host=host)
    for i in range(5):
        harness.submit(f"warm {i}", prompt=list(range(1000 * i, 1000 * i + 2 + 3 * i)), output=3)
        harness.run()
    return harness


def interrupted(harness: Harness) -> Sequence:
    """One that has computed 14 tokens, and just lost its place."""
    harness.submit("patient", prompt=list(range(100, 110)), output=10)
    for _ in range(5):
        harness.step()
    (sequence,) = harness.scheduler.running
    assert sequence.num_computed == 14
    harness.scheduler.state.preempt(sequence)
    assert harness.scheduler.memory.counts.kv == 0
    return sequence


@pytest.mark.parametrize("prefix_cache", [False, True])
def test_swapped_sequence_continues_at_its_next_token(prefix_cache: bool) -> None:
    harness = a_harness(prefix_cache=prefix_cache)
    swap = harness.scheduler.memory.swap
    sequence = interrupted(harness)
    counters = harness.residency.counters
    assert (counters.kv_pages_swapped_out, swap.num_held, sequence.num_computed) == (4, 4, 0)
    began = harness.time
    harness.step()
    assert sequence.num_computed == 15
    assert harness.time - began == pytest.approx(0.011), "one row, and none for what had been computed"
    assert swap.num_held == 0
    assert counters.kv_pages_swapped_in == (1 if prefix_cache else 4), "what the cache still has is not carried"
    harness.run()
    assert harness.finished["patient"] == "length"


@pytest.mark.parametrize(
    ("places", "seconds_per_page", "saved"),
    [(4, 0.0, True), (3, 0.0, False), (0, 0.0, False), (9, 0.0016, True), (9, 0.0019, False)],
)
def test_swap_happens_only_with_free_slots_and_where_it_pays(places: int, seconds_per_page: float, saved: bool) -> None:
    """14 tokens take 14 ms to compute; 4 pages cross the link twice."""
    harness = a_harness(places, seconds_per_page)
    interrupted(harness)
    assert harness.residency.counters.kv_pages_swapped_out == 4 * saved
    began = harness.time
    harness.step()
    assert harness.time - began == pytest.approx(0.01 + 0.001 * (1 if saved else 15)), "rows of the step"
    harness.run()
    assert harness.scheduler.memory.swap.num_held == 0


def test_swap_needs_a_known_step_time() -> None:
    host = ManualHost(20, block_size=4)
    harness = Harness(40, block_size=4, pace=PACE, host=host)
    harness.submit("first", prompt=10, output=3)
    harness.step()
    harness.scheduler.state.preempt(harness.scheduler.running[0])
    assert harness.residency.counters.kv_pages_swapped_out == 0


def test_cancelled_waiting_sequence_frees_its_swap_slots() -> None:
    harness = a_harness()
    sequence = interrupted(harness)
    harness.scheduler.cancel(sequence.id)
    assert harness.scheduler.memory.swap.num_held == 0


def test_a_retired_adapters_request_ends_with_what_it_had() -> None:
    harness = a_harness()
    harness.submit("patient", prompt=10, output=10, adapter="a")
    for _ in range(4):
        harness.store.finish_all()
        harness.step()
    (sequence,) = harness.scheduler.running
    harness.scheduler.state.preempt(sequence)
    harness.scheduler.memory.retire("a")
    harness.run()
    assert harness.finished["patient"] == "length"
    assert harness.residency.counters.kv_pages_swapped_in > 0
    assert harness.pool.num_free == harness.pool.num_pages


def preempting(engine: Engine) -> Engine:
    """Make every third step preempt a sequence, and let swapping always pay."""
    scheduler = engine.scheduler
    plan = scheduler.plan
    scheduler.memory.swap.pays = lambda _: True

    def preempting_plan():
        if scheduler.running and engine.stats().steps % 3 == 2:
            scheduler.state.preempt(scheduler.running[-1])
        return plan()

    scheduler.plan = preempting_plan
    return engine


WAYS = [
    pytest.param(Zoo.engine, id="in turn"),
    pytest.param(lambda *a, **k: late_engine(*a, **k)[0], id="one ahead"),
    pytest.param(partial(Zoo.engine, tensor_parallel_size=2), id="two ranks", marks=pytest.mark.slow),
]


@pytest.mark.parametrize("make", WAYS)
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
    engine.close()


def test_pages_come_back_bit_for_bit_and_no_more_are_kept_than_may_be() -> None:
    pool = torch.arange(10 * 8 + 3, dtype=torch.float32)
    before = pool.clone()
    host = HostPages(pool, 8, num_bytes=5 * 8 * 4 + 31)
    assert host.num_slots == 5
    assert host.seconds_per_page > 0
    assert torch.equal(pool, before), "measuring changes nothing"
    host.save([7, 2], [4, 0])
    pool.zero_()
    host.restore([0, 4], [9, 1])
    assert torch.equal(pool[72:80], before[16:24])
    assert torch.equal(pool[8:16], before[56:64])
    assert pool.count_nonzero() == 16
    assert HostPages(pool, 8, num_bytes=1 << 30).num_slots == 10
    assert HostPages(pool, 8, num_bytes=0).num_slots == 0
