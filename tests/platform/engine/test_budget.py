"""The budget's peak against a step-by-step simulation of the same sequences."""

from hypothesis import given
from hypothesis import strategies as st

from loramux.engine.memory.pages import CachedPage, PrefixTree
from loramux.engine.messages import KvIdentity, Request, SamplingParams
from loramux.engine.scheduling.policy import PageBudget
from loramux.engine.scheduling.sequence import Sequence


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
    budget = PageBudget(num_pages=1000, block_size=block_size)
    running = [sequence(*shape) for shape in shapes]
    peak = max(
        (sum(budget.pages_for(len(s.token_ids) + t) for s in running if s.likely_left >= t) for t in range(60)),
        default=0,
    )
    assert budget.kv_peak(running) == peak


def trail(tree: PrefixTree, words: list[int], users: int) -> list[CachedPage]:
    """The pages of `words`, one word a page, used `users` times more."""
    pages: list[CachedPage] = []
    for word in words:
        siblings = pages[-1].children if pages else tree.children
        parent = pages[-1] if pages else None
        pages.append(siblings.setdefault((word,), CachedPage(tree, parent, (word,), page=0)))
        pages[-1].users += users
    return pages


@given(
    st.lists(st.tuples(st.lists(st.integers(0, 1), max_size=4), st.integers(0, 20), st.integers(1, 20)), min_size=1),
    st.sampled_from([1, 4, 16]),
)
def test_a_shared_page_counts_once_until_its_last_user_ends(
    shapes: list[tuple[list[int], int, int]], block_size: int
) -> None:
    budget = PageBudget(num_pages=1000, block_size=block_size)
    tree = PrefixTree(KvIdentity("t", None, ""))
    everybody = []
    for number, (words, own, output) in enumerate(shapes):
        made = sequence(len(words) * block_size + own + 1, output)
        made.prefix_pages = trail(tree, words, users=number > 0)
        everybody.append(made)
    candidate, *running = everybody

    def held(alive: list[Sequence], t: int) -> int:
        shared = {page for s in alive for page in s.prefix_pages}
        return len(shared) + sum(budget.pages_for(len(s.token_ids) + t) - len(s.prefix_pages) for s in alive)

    def peak(sequences: list[Sequence]) -> int:
        return max((held([s for s in sequences if s.likely_left >= t], t) for t in range(30)), default=0)

    assert budget.kv_peak(running) == peak(running)
    found = [page for page in candidate.prefix_pages if page.users]
    assert budget.kv_peak([*running, candidate], found) == peak(everybody)


def test_a_lone_candidate_may_fill_the_pool_exactly() -> None:
    budget = PageBudget(num_pages=10, block_size=16, watermark_share=0.2)
    assert budget.admits(sequence(100, 60), [], adapter_pages=0)
    assert not budget.admits(sequence(100, 61), [], adapter_pages=0)
    assert not budget.admits(sequence(100, 60), [], adapter_pages=1)


def test_watermark_counts_if_other_sequences_run() -> None:
    budget = PageBudget(num_pages=10, block_size=16, watermark_share=0.2)
    running = [sequence(16, 16)]
    assert budget.admits(sequence(80, 16), running, adapter_pages=0)
    assert not budget.admits(sequence(96, 16), running, adapter_pages=0)
