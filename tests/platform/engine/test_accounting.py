"""The engine's own count, compared with a request's input and output, for every treatment by the scheduler."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st
from scheduler_harness import Harness

from loramux.engine.messages import EngineCount, TokenEvent
from loramux.engine.statistics import RequestAccounting


def play(harness: Harness, cancel: dict[str, int], preempt_at: int = 3) -> dict[str, EngineCount]:
    """Run until nothing is left; those in `cancel` are given up after so many steps, others preempted."""
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
    counts = play(harness, {str(number): at for number, at in cancel.items()})
    assert len(counts) == len(requests)
    for number, (prompt, output, _) in enumerate(requests):
        count, got = counts[str(number)], harness.generated[str(number)]
        assert count.tokens.output == got <= output
        assert count.tokens.prompt == (prompt if got else 0)
        assert 0 <= count.tokens.cached <= count.tokens.prompt
    assert sum(count.adapter_loads for count in counts.values()) <= harness.residency.counters.adapter_loads


def test_a_preempted_request_counts_every_token_once() -> None:
    harness = Harness(num_pages=8, max_num_seqs=4)
    for number in range(4):
        harness.submit(str(number), 4, 16)
    counts = play(harness, {})
    assert harness.scheduler.state.counters.preemptions > 0
    assert {(count.tokens.prompt, count.tokens.output) for count in counts.values()} == {(4, 16)}
