"""The prefix cache on plain numbers: which requests find which KV, the charges, and the order of eviction."""

from __future__ import annotations

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule
from scheduler_harness import INVOCATION, Harness, ManualHost

from loramux.engine.memory.pages import PageUse
from loramux.engine.memory.prefix_digests import identity_mask, prefix_digests
from loramux.engine.memory.ranking import RankedItems
from loramux.engine.messages import KvIdentity, ServiceClass
from loramux.engine.scheduling.policy import Policy

TEXT = list(range(100, 140))


def a_harness(num_pages: int = 40, **keywords: object) -> Harness:
    return Harness(num_pages, block_size=4, policy=Policy(prefix_cache=True), **keywords)


def ask(harness: Harness, name: str, prompt: list[int], **keywords: object) -> int:
    """The cached tokens of one request that runs to its end."""
    harness.submit(name, prompt, output=keywords.pop("output", 3), **keywords)
    harness.run()
    return harness.cached[name]


def test_the_same_words_are_found_again_in_whole_pages_and_one_token_is_left() -> None:
    harness = a_harness()
    assert ask(harness, "first", TEXT) == 0
    assert ask(harness, "again", TEXT) == 36, "40 are cached, and one of the last page must be computed"
    assert ask(harness, "longer", [*TEXT, 7, 7, 5]) == 40, "the first answer was 7 7 7, of which two were computed"
    assert ask(harness, "other ending", [*TEXT[:22], 1, 2, 3]) == 20
    assert ask(harness, "other beginning", [1, *TEXT[1:]]) == 0


def test_answers_are_found_too() -> None:
    harness = a_harness()
    ask(harness, "turn 1", TEXT, output=9)
    assert ask(harness, "turn 2", [*TEXT, *[7] * 9, 1, 2, 3]) == 48


@pytest.mark.parametrize(
    ("one", "other"),
    [
        ({"tenant": "t"}, {"tenant": "u"}),
        ({"adapter": "a"}, {"adapter": "b"}),
        ({"adapter": "a"}, {}),
        ({}, {"adapter": "a"}),
        ({"scope": "p"}, {"scope": "q"}),
        ({"scope": "p"}, {}),
        ({"adapter": "a", "tenant": "t"}, {"adapter": "a", "tenant": "u"}),
    ],
)
def test_prefix_of_another_identity_is_not_found(one: dict[str, str], other: dict[str, str]) -> None:
    harness = a_harness()
    ask(harness, "one", TEXT, **one)
    assert ask(harness, "the same", TEXT, **one) == 36
    assert ask(harness, "other", TEXT, **other) == 0


@pytest.mark.parametrize(("tenant", "scope", "found"), [("t", "p", 36), ("u", "p", 0), ("t", "q", 0)])
def test_activated_adapter_finds_base_kv_before_its_invocation(tenant: str, scope: str, found: int) -> None:
    harness = a_harness()
    ask(harness, "base", [*TEXT, 1], tenant="t", scope="p")
    prompt = [*TEXT[:38], *INVOCATION, 1, 2, 3, 4, 5]
    assert ask(harness, "switched", prompt, adapter="switched", tenant=tenant, scope=scope) == found
    assert ask(harness, "again", prompt, adapter="switched", tenant=tenant, scope=scope) == 36, "nothing from there on"


def test_the_base_finds_what_an_activated_adapter_left_before_its_invocation() -> None:
    harness = a_harness()
    ask(harness, "switched", [*TEXT[:20], *INVOCATION, *TEXT[23:]], adapter="switched")
    assert ask(harness, "base", [*TEXT[:20], *INVOCATION, *TEXT[23:]]) == 20
    assert ask(harness, "plain", TEXT, adapter="a") == 0


def test_a_prompt_without_the_invocation_is_the_bases_answer_and_all() -> None:
    harness = a_harness()
    ask(harness, "switched", TEXT, adapter="switched", output=9)
    assert ask(harness, "base", [*TEXT, *[7] * 9, 1]) == 48


def test_the_last_invocation_counts_and_no_chunk_spans_it() -> None:
    harness = a_harness(max_tokens=100)
    prompt = [1, *INVOCATION, 2, 3, *INVOCATION, 4]
    harness.submit("switched", prompt, output=2, adapter="switched")
    harness.store.finish_all()
    starts = []
    while not harness.scheduler.is_idle:
        harness.store.finish_all()
        harness.step()
        starts += [s.num_computed for s in harness.scheduler.running]
    assert starts == [6, 10]


def test_without_it_nothing_is_kept() -> None:
    harness = Harness(num_pages=40, block_size=4)
    ask(harness, "first", TEXT)
    assert ask(harness, "again", TEXT) == 0
    assert harness.pool.num_taken(PageUse.KV) == 0


def test_found_tokens_are_not_charged() -> None:
    harness = a_harness()
    ask(harness, "first", TEXT)
    (flow,) = harness.scheduler.queue.flows
    before = flow.received
    ask(harness, "again", TEXT)
    assert flow.received - before == 4 + 2 * 3
    assert flow.projected_service == pytest.approx(flow.served)


def test_two_that_run_at_once_share_pages_and_room() -> None:
    harness = a_harness(num_pages=15)
    harness.submit("first", TEXT, output=8)
    for _ in range(4):
        harness.step()
    harness.submit("second", TEXT, output=8)  # alone 12 pages each
    harness.step()
    first, second = harness.scheduler.running
    assert first.pages[:10] == second.pages[:10], "nine were found, and the tenth was computed to the same"
    assert first.pages[10:] != second.pages[10:]
    harness.run()
    assert harness.cached == {"first": 0, "second": 36}


def test_a_prompt_too_long_for_one_step_is_computed_once_for_all_choices() -> None:
    harness = a_harness()
    for choice in range(3):
        harness.submit(f"choice {choice}", TEXT, output=2)
    harness.run()
    assert harness.cached == {"choice 0": 0, "choice 1": 32, "choice 2": 36}


def test_two_that_compute_the_same_at_once_end_up_with_one_copy() -> None:
    harness = a_harness(max_tokens=64)
    harness.submit("one", TEXT[:8], output=6)
    harness.submit("two", TEXT[:8], output=6)
    harness.step()
    one, two = harness.scheduler.running
    assert one.pages == two.pages
    harness.run()
    assert harness.scheduler.memory.counts.kv_cached == 3


def test_a_preempted_request_finds_its_own_pages() -> None:
    harness = a_harness()
    harness.submit("patient", TEXT, output=10)
    for _ in range(5):
        harness.step()
    (sequence,) = harness.scheduler.running
    done = sequence.num_computed
    harness.scheduler.state.preempt(sequence)
    harness.step()
    assert sequence.num_computed == done + 1
    assert sequence.num_ever_computed == done
    harness.run()
    assert harness.cached["patient"] == 0, "what it computed itself was not found"
    (flow,) = harness.scheduler.queue.flows
    assert flow.received == 40 + 2 * 10, "each token once"


def test_a_retired_revision_takes_its_kv_with_it() -> None:
    harness = a_harness()
    ask(harness, "old", TEXT, adapter="a")
    ask(harness, "base", TEXT)
    kept = harness.scheduler.memory.counts.kv_cached
    harness.scheduler.memory.retire("a")
    assert harness.scheduler.memory.counts.kv_cached == kept - 10
    assert harness.pool.num_taken(PageUse.ADAPTER) == 0
    assert ask(harness, "base again", TEXT) == 36


def test_a_revision_retired_in_use_leaves_with_its_last_request_even_when_that_was_preempted() -> None:
    harness = a_harness()
    harness.submit("last", TEXT, output=10, adapter="a")
    for _ in range(8):
        harness.store.finish_all()
        harness.step()
    (sequence,) = harness.scheduler.running
    harness.scheduler.memory.retire("a")
    assert sequence.pages, "what is in use stays"
    harness.scheduler.state.preempt(sequence)
    assert harness.pool.num_taken(PageUse.KV) == 0
    harness.run()
    assert harness.finished["last"] == "length"
    assert harness.pool.num_free == harness.pool.num_pages


def test_eviction_takes_kv_before_the_revision_under_it() -> None:
    harness = a_harness(num_pages=12)
    for turn in range(20):
        ask(harness, f"hot {turn}", TEXT[:12], adapter="b")  # 3 pages of KV, 3 of weights
    memory = harness.scheduler.memory
    assert memory.residency.retention_score(memory.residency.eviction_candidate) < memory.cache.retention_score(
        memory.cache.eviction_candidate
    )
    ask(harness, "large", list(range(32)), output=4)  # leaves room for 3
    assert memory.counts.adapters_idle == 3
    assert harness.residency.counters.kv_evictions > 0
    assert harness.residency.counters.adapter_evictions == 0


def test_eviction_takes_the_page_that_saves_least() -> None:
    harness = a_harness(num_pages=17, max_tokens=64)
    for _ in range(3):
        ask(harness, f"often {harness.time}", TEXT[:16])
    ask(harness, "once", TEXT[20:36], tenant="u")
    ask(harness, "new", list(range(48)), tenant="v", output=4)
    assert ask(harness, "often again", TEXT[:16]) == 12
    assert ask(harness, "once again", TEXT[20:36], tenant="u") == 0


def test_an_idle_adapter_that_costs_less_than_hot_kv_goes_first() -> None:
    harness = a_harness(num_pages=14)
    ask(harness, "weights", TEXT[:3], adapter="b")  # 3 pages of weights, no full page of KV
    for turn in range(20):
        ask(harness, f"hot {turn}", TEXT[:20])
    assert harness.scheduler.memory.counts.adapters_idle == 3
    ask(harness, "new", list(range(28)), output=4)
    assert harness.residency.counters.adapter_evictions == 1
    assert ask(harness, "hot again", TEXT[:20]) == 16


def test_an_identity_without_cached_pages_is_forgotten() -> None:
    harness = a_harness(num_pages=14)
    for tenant in "abc":
        ask(harness, tenant, TEXT[:20], tenant=tenant)
        ask(harness, f"{tenant} fills the pool", list(range(53)), tenant="z")
    identities = {identity.tenant for identity in harness.scheduler.memory.cache._trees}
    assert identities == {"z"}


@pytest.mark.parametrize(("seconds_per_page", "first"), [(1e-6, "adapter"), (1.0, "kv")])
def test_eviction_order_follows_measured_costs(seconds_per_page: float, first: str) -> None:
    """Four tokens take 4 ms to compute here: much compared with a fast link, nothing compared with a slow one."""
    host = ManualHost(num_slots=0, block_size=4)
    host.seconds_per_page = seconds_per_page
    harness = Harness(14, block_size=4, policy=Policy(prefix_cache=True), pace=(0.01, 0.001), host=host)
    for i in range(5):
        ask(harness, f"warm {i}", [1000 * (i + 1) + j for j in range(3 * i + 2)], tenant="w")
    ask(harness, "weights", TEXT[:3], adapter="b", output=1)
    ask(harness, "kv", TEXT[:20])
    before = harness.residency.counters.kv_evictions
    while not (harness.residency.counters.adapter_evictions or harness.residency.counters.kv_evictions > before):
        ask(harness, f"new {len(harness.order)}", [7000 + 100 * len(harness.order) + j for j in range(20)])
    assert first == ("adapter" if harness.residency.counters.adapter_evictions else "kv")


class CacheMachine(RuleBasedStateMachine):
    """Any order of arrivals, ends, preemptions, loads and retirements, over texts that often begin alike."""

    prefix_cache = True
    cache_answers = True
    num_pages = 18
    state_pages = 0

    def __init__(self) -> None:
        super().__init__()
        host = ManualHost(num_slots=7, block_size=4)
        policy = Policy(prefix_cache=self.prefix_cache, cache_answers=self.cache_answers)
        pages, states = self.num_pages, self.state_pages
        self.harness = Harness(
            pages, block_size=4, max_num_seqs=5, max_tokens=12, policy=policy, host=host, state_pages=states
        )
        self.harness.scheduler.memory.swap.pays = lambda _: True
        self.sent: dict[str, int] = {}

    @rule(
        words=st.lists(st.sampled_from([7, 8]), min_size=1, max_size=4),
        cut=st.integers(0, 4),
        output=st.integers(1, 20),
        adapter=st.sampled_from([None, None, "a", "b", "switched"]),
        service_class=st.sampled_from(list(ServiceClass)),
        tenant=st.sampled_from(["t", "u"]),
    )
    def arrive(
        self,
        words: list[int],
        cut: int,
        output: int,
        adapter: str | None,
        service_class: ServiceClass,
        tenant: str,
    ) -> None:
        name = f"r{len(self.sent)}"
        self.sent[name] = output
        prompt = [word for word in words for _ in range(5)][cut:]
        self.harness.submit(name, prompt, output, adapter, service_class, tenant)

    @precondition(lambda self: self.sent)
    @rule(pick=st.integers(0, 1000))
    def cancel(self, pick: int) -> None:
        self.harness.scheduler.cancel(f"r{pick % len(self.sent)}")

    @precondition(lambda self: self.harness.scheduler.running)
    @rule(pick=st.integers(0, 1000))
    def preempt(self, pick: int) -> None:
        running = self.harness.scheduler.running
        self.harness.scheduler.state.preempt(running[pick % len(running)])

    @precondition(lambda self: self.harness.store.pending)
    @rule()
    def load(self) -> None:
        self.harness.store.finish()

    @rule(digest=st.sampled_from(["a", "b", "switched"]))
    def retire(self, digest: str) -> None:
        self.harness.scheduler.memory.retire(digest)

    @rule(count=st.sampled_from([1, 1, 4, 30]))
    def step(self, count: int) -> None:
        for _ in range(count):
            self.harness.step()

    @property
    def cached(self) -> list:
        trees = {id(tree): tree for tree in self.harness.scheduler.memory.cache._trees.values()}
        trees |= {id(page.tree): page.tree for s in self.harness.scheduler.running for page in s.prefix_pages}
        for tree in trees.values():
            assert len(list(tree)) == tree.num_pages
        return [page for tree in trees.values() for page in tree]

    @invariant()
    def every_page_is_somewhere_once(self) -> None:
        harness, cached, first = self.harness, self.cached, self.state_pages
        own = [page for s in harness.scheduler.running for page in s.pages[first + len(s.prefix_pages) :]]
        own += [page for s in harness.scheduler.running for page in s.pages[:first]]
        weights = [page for r in harness.residency._known.values() for page in r.pages]
        states = [number for page in cached for number in page.state]
        held = [*own, *weights, *states, *(page.page for page in cached)]
        assert sorted([*held, *harness.pool._free]) == list(range(harness.pool.num_pages))
        counts = harness.scheduler.memory.counts
        assert counts.kv == len(own) + sum(page.users > 0 for page in cached)
        assert counts.kv_cached == len(states) + sum(page.users == 0 for page in cached)
        assert harness.scheduler.memory.cache.num_of_states == len(states)
        assert counts.kv + counts.kv_cached + counts.adapters + counts.adapters_idle + counts.free == counts.total

    @invariant()
    def every_place_of_the_host_is_somebodys_or_free(self) -> None:
        swap = self.harness.scheduler.memory.swap
        alive = self.harness.scheduler.state.sequences.values()
        held = [place for s in alive for place in s.swap_slots]
        assert sorted([*held, *swap._free]) == list(range(swap.num_slots))
        for s in alive:
            assert len(s.swap_slots) == (s.num_saved > 0) * self.state_pages - (-s.num_saved // 4)
            assert not (s.swap_slots and s.pages), "in one memory or in the other"

    @invariant()
    def users_are_counted_and_leaves_are_known(self) -> None:
        harness, cached = self.harness, self.cached
        trails = [page for s in harness.scheduler.running for page in s.prefix_pages]
        for page in cached:
            assert page.users == trails.count(page)
        assert set(harness.scheduler.memory.cache._evictable) == {page for page in cached if page.is_evictable}
        for digest, resident in harness.residency._known.items():
            trees = {id(page.tree) for page in cached if page.tree.identity.digest == digest}
            assert resident.num_trees == len(trees)
            assert resident.pages or not trees, "KV lies on weights that are there"

    @invariant()
    def block_tables_begin_with_their_trails(self) -> None:
        first = self.state_pages
        for s in self.harness.scheduler.running:
            assert [page.page for page in s.prefix_pages] == list(s.pages[first : first + len(s.prefix_pages)])
            assert not any(page.is_evicted for page in s.prefix_pages)
            assert [token for page in s.prefix_pages for token in page.tokens] == s.token_ids[: 4 * len(s.prefix_pages)]
            assert {page.tree.identity for page in s.prefix_pages} <= {s.kv_identity}
            assert s.activation is None or 4 * len(s.prefix_pages) <= s.activation
            assert self.cache_answers or 4 * len(s.prefix_pages) <= s.num_prompt_tokens

    def teardown(self) -> None:
        self.harness.run(3000)
        assert set(self.harness.finished) == set(self.sent)
        assert self.harness.scheduler.memory.counts.kv == self.harness.scheduler.memory.swap.num_held == 0


class SwapMachine(CacheMachine):
    """The same without the prefix cache: only KV that was copied out and back is reused."""

    prefix_cache = False


class StateMachine(CacheMachine):
    """The same with states in two pages before the KV of each sequence, and copies of them in the cache."""

    num_pages = 24
    state_pages = 2


class PromptStateMachine(StateMachine):
    """The same, and no page of an answer is kept."""

    cache_answers = False


TestStateMachine = StateMachine.TestCase
TestStateMachine.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)

TestPromptStateMachine = PromptStateMachine.TestCase
TestPromptStateMachine.settings = settings(max_examples=20, stateful_step_count=40, deadline=None)

TestSwapMachine = SwapMachine.TestCase
TestSwapMachine.settings = settings(max_examples=40, stateful_step_count=40, deadline=None)

TestCacheMachine = CacheMachine.TestCase
TestCacheMachine.settings = settings(max_examples=80, stateful_step_count=40, deadline=None)


def test_eviction_preview_names_what_goes_next_and_changes_nothing() -> None:
    harness = a_harness(num_pages=40)
    for number in range(4):
        ask(harness, f"r{number}", [number] * 9, tenant=f"t{number}")
    harness.submit("cold", 1, 1, adapter="a")  # too short to leave a page of KV, under which it would stay
    harness.run()
    memory = harness.scheduler.memory
    before = memory.counts
    preview = memory.next_evictions(100)
    assert [(one.digest, one.tenant, one.pages) for one in memory.next_evictions(100)] == [
        (one.digest, one.tenant, one.pages) for one in preview
    ]
    assert memory.counts == before
    assert sum(one.pages for one in preview if one.is_adapter) == before.adapters_idle
    gone = []
    while (page := memory.cache.eviction_candidate) is not None or memory.residency.eviction_candidate is not None:
        resident = memory.residency.eviction_candidate
        counts = memory.counts
        memory._evict_one()
        is_adapter = memory.counts.adapters_idle < counts.adapters_idle
        gone.append((is_adapter, resident.ref.digest if is_adapter else page.tree.identity.tenant))
    first_of_each = list(dict.fromkeys(gone))
    assert [(one.is_adapter, one.digest if one.is_adapter else one.tenant) for one in preview] == first_of_each
    assert [one.score for one in preview] == sorted(one.score for one in preview)


def test_ranking_peek_is_what_first_would_give_in_turn() -> None:
    ranks = {item: (item * 37) % 101 for item in range(101)}
    ranking: RankedItems[int, int] = RankedItems(ranks.__getitem__)
    for item in ranks:
        ranking.put(item)
    for item in range(0, 100, 3):
        ranks[item] += 50
    for item in range(0, 100, 7):
        ranking.drop(item)
    peeked = ranking.peek(20)
    taken = []
    for _ in range(20):
        item = ranking.first()
        assert item is not None
        taken.append(item)
        ranking.drop(item)
    assert [ranks[item] for item in peeked] == [ranks[item] for item in taken]


def reported(harness: Harness, limit: int = 100) -> set[int]:
    return set(harness.scheduler.memory.cache.recent_digests(limit))


def digests(tenant: str, tokens: list[int], adapter: str | None = None, scope: str = "") -> set[int]:
    mask = identity_mask(KvIdentity(tenant, adapter, scope))
    return {digest ^ mask for digest in prefix_digests(b"", tenant, tokens, 4)}


def test_digests_of_cached_beginnings_are_reported_under_their_identity() -> None:
    """TEXT has ten pages: digests of the first 1, 2, 3, 4, 6 and 8."""
    harness = a_harness()
    ask(harness, "base", TEXT)
    assert reported(harness) == digests("t", TEXT)
    ask(harness, "adapter", TEXT, adapter="a")
    assert reported(harness) == digests("t", TEXT) | digests("t", TEXT, "a")
    assert not digests("t", TEXT) & digests("u", TEXT)
    ask(harness, "activated", [*TEXT, *INVOCATION, 1], adapter="switched")
    assert reported(harness) >= digests("t", TEXT)
    assert not reported(harness) & digests("t", [*TEXT, *INVOCATION], "switched"), "it is the base's KV"


def test_digest_of_an_evicted_page_is_reported_no_more() -> None:
    harness = a_harness(num_pages=14)
    ask(harness, "first", TEXT)
    ask(harness, "other", [1, *TEXT[1:]])
    held = reported(harness)
    assert held < digests("t", TEXT) | digests("t", [1, *TEXT[1:]])
    harness.scheduler.memory.cache.retire("a")
    ask(harness, "last", [2, *TEXT[1:]])
    assert reported(harness) >= digests("t", [2, *TEXT[1:36]])


def test_digests_of_one_tenant_leave_room_for_others() -> None:
    harness = a_harness(num_pages=100)
    ask(harness, "modest", TEXT, tenant="u")
    for number in range(5):
        ask(harness, f"flood {number}", [number, *TEXT], tenant="t")
    assert digests("u", TEXT) <= reported(harness, 24)
    assert len(reported(harness, 24)) == 24
