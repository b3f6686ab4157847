"""The engine's own count, compared with a request's input and output, for every treatment by the scheduler."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st
from scheduler_harness import Harness

from loramux.common.units import TokenCounts
from loramux.engine.messages import EngineCount, TokenEvent
from loramux.engine.statistics import RequestAccounting


def play(
    harness: Harness, cancel: dict[str, int], preempt_at: int = 3, rows: dict[str, set[int]] | None = None
) -> dict[str, EngineCount]:
    """Run until nothing is left; those in `cancel` are given up after so many steps, others preempted. The positions
    that each request's steps computed are added to `rows`."""
    tallies, counts = RequestAccounting(), {}
    for number in range(2000):
        if harness.scheduler.is_idle:
            return counts
        harness.store.finish_all()
        for name in [name for name, at in cancel.items() if at == number]:
            harness.scheduler.cancel(name)
        if number % 5 == preempt_at and harness.scheduler.running:
            harness.scheduler.state.preempt(harness.scheduler.running[-1])
        step = harness.scheduler.plan()
        events = harness.scheduler.drain_events()
        if not step.empty:
            tallies.count_step(step)
            for chunk in step.chunks if rows is not None else ():
                rows.setdefault(chunk.sequence.id, set()).update(range(chunk.start, chunk.end))
            sampled = [TokenEvent(request_id=chunk.sequence.id, token_id=7) for chunk in step.sampling]
            events += harness.scheduler.commit(step, sampled)
        for event in tallies.count_events(events):
            harness.generated[event.request_id] = harness.generated.get(event.request_id, 0) + (
                event.token_id is not None
            )
            if event.finish_reason is not None:
                assert event.count is not None
                counts[event.request_id] = event.count
    raise AssertionError("the harness did not come to rest")


REQUESTS = st.lists(
    st.tuples(st.integers(1, 20), st.integers(1, 20), st.sampled_from([None, "a"])), min_size=1, max_size=8
)


@settings(max_examples=60, deadline=None)
@given(REQUESTS, st.dictionaries(st.integers(0, 7), st.integers(0, 40), max_size=3))
def test_every_token_counts_once(requests: list[tuple[int, int, str | None]], cancel: dict[int, int]) -> None:
    harness = Harness(num_pages=14)
    for number, (prompt, output, adapter) in enumerate(requests):
        harness.submit(str(number), prompt, output, adapter)
    rows: dict[str, set[int]] = {}
    counts = play(harness, {str(number): at for number, at in cancel.items()}, rows=rows)
    assert len(counts) == len(requests)
    for number, (prompt, output, _) in enumerate(requests):
        count, got = counts[str(number)], harness.generated[str(number)]
        computed = rows.get(str(number), set())
        reached = min(prompt, max(computed, default=-1) + 1)
        assert count.tokens.output == got <= output
        assert reached == prompt or not got
        assert count.tokens.prompt == reached
        assert count.tokens.prompt - count.tokens.cached == sum(position < prompt for position in computed)
    assert sum(count.adapter_loads for count in counts.values()) <= harness.residency.counters.adapter_loads


def test_a_preempted_request_counts_every_token_once() -> None:
    harness = Harness(num_pages=8, max_num_seqs=4)
    for number in range(4):
        harness.submit(str(number), 4, 16)
    counts = play(harness, {})
    assert harness.scheduler.state.counters.preemptions > 0
    assert {(count.tokens.prompt, count.tokens.output) for count in counts.values()} == {(4, 16)}


def test_request_cancelled_during_prefill_counts_the_prompt_as_far_as_it_was_computed() -> None:
    harness = Harness(num_pages=16, max_tokens=8)
    harness.submit("left", 30, 4)
    counts = play(harness, {"left": 2}, preempt_at=9)
    assert counts["left"].tokens == TokenCounts(prompt=16)


def test_request_preempted_and_cancelled_during_prefill_counts_every_token_once() -> None:
    harness = Harness(num_pages=16, max_tokens=8)
    harness.submit("left", 30, 4)
    counts = play(harness, {"left": 4}, preempt_at=3)
    assert harness.scheduler.state.counters.preemptions == 1
    assert counts["left"].tokens == TokenCounts(prompt=24)
