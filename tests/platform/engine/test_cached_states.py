"""Cached states of linear attention and Mamba 2, on plain numbers: which are kept, found and evicted."""

from __future__ import annotations

import pytest
from scheduler_harness import Harness, ManualHost

from loramux.engine.memory.pages import PageUse
from loramux.engine.scheduling.policy import Policy

TEXT = list(range(100, 140))
STATE_PAGES = 2


def a_harness(num_pages: int = 80, *, slots: int = 0, cache_answers: bool = True, **keywords: object) -> Harness:
    policy = Policy(prefix_cache=True, cache_answers=cache_answers)
    host = ManualHost(slots, block_size=4)
    return Harness(num_pages, block_size=4, policy=policy, host=host, state_pages=STATE_PAGES, **keywords)


def ask(harness: Harness, name: str, prompt: list[int], **keywords: object) -> int:
    """Return the cached tokens of one request that runs to its end."""
    harness.submit(name, prompt, output=keywords.pop("output", 3), **keywords)
    harness.run()
    return harness.cached[name]


def num_states(harness: Harness) -> int:
    return harness.scheduler.memory.cache.num_of_states // STATE_PAGES


def test_cached_state_next_turn_starts_after_the_last_whole_page_of_the_answer() -> None:
    harness = a_harness()
    assert ask(harness, "turn 1", TEXT, output=10) == 0
    assert num_states(harness) == 2, "one after the prompt's last page, one after the answer's"
    assert ask(harness, "turn 2", [*TEXT, *[7] * 10, 1, 2, 3]) == 48
    assert ask(harness, "another answer", [*TEXT, 1, 2, 3]) == 36


def test_cached_state_of_an_answer_is_not_kept_if_the_model_tells_answers_apart() -> None:
    harness = a_harness(cache_answers=False)
    ask(harness, "turn 1", TEXT, output=10)
    assert ask(harness, "turn 2", [*TEXT, *[7] * 10, 1, 2, 3]) == 40


def test_cached_state_is_made_where_two_prompts_have_differed_before() -> None:
    harness = a_harness()
    for name, found in (("first", 0), ("second", 0), ("third", 20)):
        assert ask(harness, name, [*TEXT[:22], len(harness.order), 1, 2, 3, 4]) == found
    assert ask(harness, "other beginning", [1, *TEXT[1:]]) == 0


@pytest.mark.parametrize(
    ("one", "other"),
    [
        ({"tenant": "t"}, {"tenant": "u"}),
        ({"adapter": "a"}, {"adapter": "b"}),
        ({"adapter": "a"}, {}),
        ({"scope": "p"}, {"scope": "q"}),
    ],
)
def test_cached_state_of_another_identity_is_not_found(one: dict[str, str], other: dict[str, str]) -> None:
    harness = a_harness()
    ask(harness, "one", TEXT, **one)
    assert ask(harness, "the same", TEXT, **one) == 36
    assert ask(harness, "other", TEXT, **other) == 0


def test_cached_state_leaves_with_its_retired_revision() -> None:
    harness = a_harness()
    ask(harness, "old", TEXT, adapter="a")
    assert num_states(harness) > 0
    harness.scheduler.memory.retire("a")
    assert num_states(harness) == 0
    assert harness.pool.num_free == harness.pool.num_pages


@pytest.mark.parametrize("budget", [13, 7, 3])
def test_cached_state_chunks_end_at_pages_if_a_step_has_room_for_one(budget: int) -> None:
    harness = a_harness(max_tokens=budget)
    harness.submit("long", TEXT[:39], output=2)
    ends = []
    while not harness.scheduler.is_idle:
        ends += [sequence.num_computed for sequence in harness.scheduler.running]
        harness.step()
    assert 36 in ends
    assert all(end % 4 == 0 for end in ends if budget >= 4 and end < 39)


def test_cached_state_preempted_sequence_resumes_from_the_newest() -> None:
    harness = a_harness()
    harness.submit("patient", TEXT, output=20)
    while not (harness.scheduler.running and harness.scheduler.running[0].num_computed == 50):
        harness.step()
    (sequence,) = harness.scheduler.running
    harness.scheduler.state.preempt(sequence)
    assert not sequence.swap_slots
    harness.step()
    assert sequence.num_computed == 51, "48 were found, and the other three were computed in one step"
    harness.run()
    assert harness.cached["patient"] == 0, "what it computed itself was not found"
    (flow,) = harness.scheduler.queue.flows
    assert flow.received == 40 + 2 * 20, "each token once"


def test_cached_state_swapped_sequence_continues_at_its_next_token_with_its_states() -> None:
    harness = a_harness(slots=20)
    harness.scheduler.memory.swap.pays = lambda _: True
    harness.submit("patient", TEXT, output=20)
    while not (harness.scheduler.running and harness.scheduler.running[0].num_computed == 50):
        harness.step()
    (sequence,) = harness.scheduler.running
    harness.scheduler.state.preempt(sequence)
    counters = harness.residency.counters
    assert counters.kv_pages_swapped_out == STATE_PAGES + 13
    harness.step()
    assert sequence.num_computed == 51
    assert counters.kv_pages_swapped_in == STATE_PAGES + 1, "twelve pages were in the cache"
    harness.run()
    assert harness.scheduler.memory.swap.num_held == 0


def test_cached_state_is_moved_to_the_sequence_if_there_is_no_room_for_a_copy() -> None:
    harness = a_harness(num_pages=9)
    ask(harness, "first", TEXT[:9])
    assert num_states(harness) == 1
    others = harness.pool.take(harness.pool.num_free - 1, PageUse.KV)
    assert ask(harness, "again", TEXT[:9]) == 8
    harness.pool.give_back(others, PageUse.KV)


def test_cached_states_are_evicted_before_any_sequence_is_preempted() -> None:
    harness = a_harness(num_pages=32)
    for turn in range(12):
        for tenant in "tuv":
            prompt = [*range(1000 * turn, 1000 * turn + 20), 1, 2]
            harness.submit(f"{turn} {tenant}", prompt, output=12, tenant=tenant)
        harness.run()
    counters = harness.residency.counters
    assert counters.preemptions == 0
    assert counters.kv_evictions > 0
    assert harness.scheduler.memory.counts.kv == 0


def test_cached_state_that_is_used_often_outlives_traffic_without_repetition() -> None:
    harness = a_harness(num_pages=40, max_tokens=64)
    for turn in range(10):
        ask(harness, f"often {turn}", [*TEXT[:20], turn])
    for number in range(40):
        ask(harness, f"once {number}", [1000 + 50 * number + i for i in range(21)], tenant="u")
    assert ask(harness, "often again", [*TEXT[:20], 1, 2]) == 20


def test_cached_state_takes_no_pages_of_an_adapter_that_a_request_waits_for() -> None:
    harness = a_harness(num_pages=10)
    ask(harness, "weights", TEXT[:3], adapter="b", output=1)  # 3 pages of weights, no full page of KV
    memory = harness.scheduler.memory
    resident = memory.residency._known["b"]
    resident.wanted_by, resident.recency = 1, resident.recency - 20
    ask(harness, "text", TEXT[:17], output=3)  # 7 pages
    assert memory.counts.adapters_idle == 3
    assert num_states(harness) == 0
