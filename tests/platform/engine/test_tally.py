"""The engine's own count, against what a request asked and got, whatever the scheduler did with it meanwhile."""

from __future__ import annotations

from house import House
from hypothesis import given, settings
from hypothesis import strategies as st

from loramux.engine.messages import EngineCount, TokenEvent
from loramux.engine.tally import Tallies


def play(house: House, cancel: dict[str, int], preempt_at: int = 3) -> dict[str, EngineCount]:
    """Run until nothing is left; those in `cancel` are given up after so many steps, others preempted."""
    tallies, counts = Tallies(), {}
    for number in range(2000):
        if house.scheduler.idle:
            return counts
        house.store.finish_all()
        for name in [name for name, at in cancel.items() if at == number]:
            house.scheduler.cancel(name)
        if number % 5 == preempt_at and house.scheduler.running:
            house.scheduler._admission.preempt(house.scheduler.running[-1])
        step = house.scheduler.plan()
        events = house.scheduler.take_news()
        if not step.empty:
            tallies.note(step)
            sampled = [TokenEvent(request_id=chunk.sequence.id, token_id=7) for chunk in step.sampling]
            events += house.scheduler.commit(step, sampled)
        for event in tallies.tell(events):
            house.generated[event.request_id] = house.generated.get(event.request_id, 0) + (event.token_id is not None)
            if event.finish_reason is not None:
                assert event.count is not None
                counts[event.request_id] = event.count
    raise AssertionError("the house did not come to rest")


REQUESTS = st.lists(
    st.tuples(st.integers(1, 20), st.integers(1, 20), st.sampled_from([None, "a"])), min_size=1, max_size=8
)


@settings(max_examples=60, deadline=None)
@given(REQUESTS, st.dictionaries(st.integers(0, 7), st.integers(0, 40), max_size=3))
def test_every_token_counts_once(requests: list[tuple[int, int, str | None]], cancel: dict[int, int]) -> None:
    house = House(num_pages=14)
    for number, (prompt, output, adapter) in enumerate(requests):
        house.submit(str(number), prompt, output, adapter)
    counts = play(house, {str(number): at for number, at in cancel.items()})
    assert len(counts) == len(requests)
    for number, (prompt, output, _) in enumerate(requests):
        count, got = counts[str(number)], house.generated[str(number)]
        assert count.output_tokens == got <= output
        assert count.prompt_tokens == (prompt if got else 0)
        assert 0 <= count.cached_tokens <= count.prompt_tokens
    assert sum(count.adapter_loads for count in counts.values()) <= house.residency.counters.loads


def test_a_preempted_request_counts_every_token_once() -> None:
    house = House(num_pages=8, max_num_seqs=4)
    for number in range(4):
        house.submit(str(number), 4, 16)
    counts = play(house, {})
    assert house.scheduler.num_preemptions > 0
    assert {(count.prompt_tokens, count.output_tokens) for count in counts.values()} == {(4, 16)}
