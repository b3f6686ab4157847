"""The budget's peak against a step-by-step simulation of the same sequences."""

from hypothesis import given
from hypothesis import strategies as st

from loramux.engine.budget import Budget
from loramux.engine.request import Request, SamplingParams
from loramux.engine.sequence import Sequence


def sequence(prompt: int, output: int, done: int = 0) -> Sequence:
    request = Request(
        id="r", tenant="t", prompt_token_ids=[1] * prompt, sampling=SamplingParams(max_tokens=output, temperature=0)
    )
    made = Sequence(request, 0.0)
    made.token_ids += [1] * done
    return made


sequences = st.lists(
    st.tuples(st.integers(1, 50), st.integers(1, 50)).flatmap(
        lambda pair: st.tuples(st.just(pair[0]), st.just(pair[1]), st.integers(0, pair[1] - 1))
    ),
    max_size=8,
)


@given(sequences, st.sampled_from([1, 4, 16]))
def test_peak_equals_a_run_in_lockstep(shapes: list[tuple[int, int, int]], block_size: int) -> None:
    budget = Budget(num_pages=1000, block_size=block_size)
    running = [sequence(*shape) for shape in shapes]
    peak = max(
        (sum(budget.pages_for(len(s.token_ids) + t) for s in running if s.likely_left >= t) for t in range(60)),
        default=0,
    )
    assert budget.kv_peak(running) == peak


def test_a_lone_candidate_may_fill_the_pool_exactly() -> None:
    budget = Budget(num_pages=10, block_size=16, watermark_share=0.2)
    assert budget.admits(sequence(100, 60), [], adapter_pages=0)
    assert not budget.admits(sequence(100, 61), [], adapter_pages=0)
    assert not budget.admits(sequence(100, 60), [], adapter_pages=1)


def test_the_watermark_counts_beside_others() -> None:
    budget = Budget(num_pages=10, block_size=16, watermark_share=0.2)
    running = [sequence(16, 16)]
    assert budget.admits(sequence(80, 16), running, adapter_pages=0)
    assert not budget.admits(sequence(96, 16), running, adapter_pages=0)
