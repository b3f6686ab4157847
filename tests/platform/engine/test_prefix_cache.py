"""The prefix cache on plain numbers: who finds whose KV, what is charged, what goes when the room is needed."""

from __future__ import annotations

import pytest
from house import INVOCATION, House, ManualHost
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from loramux.engine.policy import Policy
from loramux.engine.request import ServiceClass

TEXT = list(range(100, 140))


def a_house(num_pages: int = 40, **keywords: object) -> House:
    return House(num_pages, block_size=4, policy=Policy(prefix_cache=True), **keywords)


def ask(house: House, name: str, prompt: list[int], **keywords: object) -> int:
    """The cached tokens of one request that runs to its end."""
    house.submit(name, prompt, output=keywords.pop("output", 3), **keywords)
    house.run()
    return house.cached[name]


def test_the_same_words_are_found_again_in_whole_pages_and_one_token_is_left() -> None:
    house = a_house()
    assert ask(house, "first", TEXT) == 0
    assert ask(house, "again", TEXT) == 36, "40 are cached, and one of the last page must be computed"
    assert ask(house, "longer", [*TEXT, 7, 7, 5]) == 40, "the first answer was 7 7 7, of which two were computed"
    assert ask(house, "other ending", [*TEXT[:22], 1, 2, 3]) == 20
    assert ask(house, "other beginning", [1, *TEXT[1:]]) == 0


def test_answers_are_found_too() -> None:
    house = a_house()
    ask(house, "turn 1", TEXT, output=9)
    assert ask(house, "turn 2", [*TEXT, *[7] * 9, 1, 2, 3]) == 48


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
def test_nobody_finds_what_another_identity_computed(one: dict[str, str], other: dict[str, str]) -> None:
    house = a_house()
    ask(house, "one", TEXT, **one)
    assert ask(house, "the same", TEXT, **one) == 36
    assert ask(house, "other", TEXT, **other) == 0


@pytest.mark.parametrize(("tenant", "scope", "found"), [("t", "p", 36), ("u", "p", 0), ("t", "q", 0)])
def test_before_its_invocation_an_activated_adapter_finds_the_bases_kv_of_its_tenant_and_project(
    tenant: str, scope: str, found: int
) -> None:
    house = a_house()
    ask(house, "base", [*TEXT, 1], tenant="t", scope="p")
    prompt = [*TEXT[:38], *INVOCATION, 1, 2, 3, 4, 5]
    assert ask(house, "switched", prompt, adapter="switched", tenant=tenant, scope=scope) == found
    assert ask(house, "again", prompt, adapter="switched", tenant=tenant, scope=scope) == 36, "nothing from there on"


def test_the_base_finds_what_an_activated_adapter_left_before_its_invocation() -> None:
    house = a_house()
    ask(house, "switched", [*TEXT[:20], *INVOCATION, *TEXT[23:]], adapter="switched")
    assert ask(house, "base", [*TEXT[:20], *INVOCATION, *TEXT[23:]]) == 20
    assert ask(house, "plain", TEXT, adapter="a") == 0


def test_a_prompt_without_the_invocation_is_the_bases_answer_and_all() -> None:
    house = a_house()
    ask(house, "switched", TEXT, adapter="switched", output=9)
    assert ask(house, "base", [*TEXT, *[7] * 9, 1]) == 48


def test_the_last_invocation_counts_and_no_chunk_spans_it() -> None:
    house = a_house(max_tokens=100)
    prompt = [1, *INVOCATION, 2, 3, *INVOCATION, 4]
    house.submit("switched", prompt, output=2, adapter="switched")
    house.store.finish_all()
    starts = []
    while not house.scheduler.idle:
        house.store.finish_all()
        house.step()
        starts += [s.num_computed for s in house.scheduler.running]
    assert starts == [6, 10]


def test_without_it_nothing_is_kept() -> None:
    house = House(num_pages=40, block_size=4)
    ask(house, "first", TEXT)
    assert ask(house, "again", TEXT) == 0
    assert house.pool.counts.kv == 0


def test_found_tokens_are_not_charged() -> None:
    house = a_house()
    ask(house, "first", TEXT)
    (flow,) = house.scheduler.queue.flows
    before = flow.received
    ask(house, "again", TEXT)
    assert flow.received - before == 4 + 2 * 3
    assert flow.booked == pytest.approx(flow.served)


def test_two_that_run_at_once_share_pages_and_room() -> None:
    house = a_house(num_pages=15)
    house.submit("first", TEXT, output=8)
    for _ in range(4):
        house.step()
    house.submit("second", TEXT, output=8)  # alone 12 pages each
    house.step()
    first, second = house.scheduler.running
    assert first.pages[:10] == second.pages[:10], "nine were found, and the tenth was computed to the same"
    assert first.pages[10:] != second.pages[10:]
    house.run()
    assert house.cached == {"first": 0, "second": 36}


def test_a_prompt_too_long_for_one_step_is_computed_once_for_all_choices() -> None:
    house = a_house()
    for choice in range(3):
        house.submit(f"choice {choice}", TEXT, output=2)
    house.run()
    assert house.cached == {"choice 0": 0, "choice 1": 32, "choice 2": 36}


def test_two_that_compute_the_same_at_once_end_up_with_one_copy() -> None:
    house = a_house(max_tokens=64)
    house.submit("one", TEXT[:8], output=6)
    house.submit("two", TEXT[:8], output=6)
    house.step()
    one, two = house.scheduler.running
    assert one.pages == two.pages
    house.run()
    assert house.scheduler.memory.counts.kv_cached == 3


def test_a_preempted_request_finds_its_own_pages() -> None:
    house = a_house()
    house.submit("patient", TEXT, output=10)
    for _ in range(5):
        house.step()
    (sequence,) = house.scheduler.running
    done = sequence.num_computed
    house.scheduler._admission.preempt(sequence)
    house.step()
    assert sequence.num_computed == done + 1
    assert sequence.num_seen == done
    house.run()
    assert house.cached["patient"] == 0, "what it computed itself was not found"
    (flow,) = house.scheduler.queue.flows
    assert flow.received == 40 + 2 * 10, "each token once"


def test_a_retired_revision_takes_its_kv_with_it() -> None:
    house = a_house()
    ask(house, "old", TEXT, adapter="a")
    ask(house, "base", TEXT)
    kept = house.scheduler.memory.counts.kv_cached
    house.scheduler.memory.retire("a")
    assert house.scheduler.memory.counts.kv_cached == kept - 10
    assert house.pool.counts.adapters == 0
    assert ask(house, "base again", TEXT) == 36


def test_a_revision_retired_in_use_leaves_with_its_last_request_even_when_that_was_preempted() -> None:
    house = a_house()
    house.submit("last", TEXT, output=10, adapter="a")
    for _ in range(8):
        house.store.finish_all()
        house.step()
    (sequence,) = house.scheduler.running
    house.scheduler.memory.retire("a")
    assert sequence.pages, "what is in use stays"
    house.scheduler._admission.preempt(sequence)
    assert house.pool.counts.kv == 0
    house.run()
    assert house.finished["last"] == "length"
    assert house.pool.num_free == house.pool.num_pages


def test_kv_goes_before_the_revision_it_lies_on_even_where_it_is_worth_more() -> None:
    house = a_house(num_pages=12)
    for turn in range(20):
        ask(house, f"hot {turn}", TEXT[:12], adapter="b")  # 3 pages of KV, 3 of weights
    memory = house.scheduler.memory
    assert memory.residency.worth(memory.residency.least_worthy) < memory.cache.worth(memory.cache.least_worthy)
    ask(house, "large", list(range(32)), output=4)  # leaves room for 3
    assert memory.counts.adapters_idle == 3
    assert memory.cache.num_evictions > 0
    assert house.residency.counters.evictions == 0


def test_what_saves_least_goes_first() -> None:
    house = a_house(num_pages=17, max_tokens=64)
    for _ in range(3):
        ask(house, f"often {house.time}", TEXT[:16])
    ask(house, "once", TEXT[20:36], tenant="u")
    ask(house, "new", list(range(48)), tenant="v", output=4)
    assert ask(house, "often again", TEXT[:16]) == 12
    assert ask(house, "once again", TEXT[20:36], tenant="u") == 0


def test_an_idle_adapter_that_costs_less_than_hot_kv_goes_first() -> None:
    house = a_house(num_pages=14)
    ask(house, "weights", TEXT[:3], adapter="b")  # 3 pages of weights, no full page of KV
    for turn in range(20):
        ask(house, f"hot {turn}", TEXT[:20])
    assert house.scheduler.memory.counts.adapters_idle == 3
    ask(house, "new", list(range(28)), output=4)
    assert house.residency.counters.evictions == 1
    assert ask(house, "hot again", TEXT[:20]) == 16


def test_an_identity_without_cached_pages_is_forgotten() -> None:
    house = a_house(num_pages=14)
    for tenant in "abc":
        ask(house, tenant, TEXT[:20], tenant=tenant)
        ask(house, f"{tenant} fills the pool", list(range(53)), tenant="z")
    identities = {identity.tenant for identity in house.scheduler.memory.cache._trees}
    assert identities == {"z"}


@pytest.mark.parametrize(("seconds_per_page", "first"), [(1e-6, "adapter"), (1.0, "kv")])
def test_what_goes_first_is_decided_by_what_the_machine_measured(seconds_per_page: float, first: str) -> None:
    """Four tokens take 4 ms to compute here: dear beside a quick link, nothing beside a slow one."""
    host = ManualHost(num_places=0, block_size=4)
    host.seconds_per_page = seconds_per_page
    house = House(14, block_size=4, policy=Policy(prefix_cache=True), pace=(0.01, 0.001), host=host)
    for i in range(5):
        ask(house, f"warm {i}", [1000 * (i + 1) + j for j in range(3 * i + 2)], tenant="w")
    ask(house, "weights", TEXT[:3], adapter="b", output=1)
    ask(house, "kv", TEXT[:20])
    before = house.scheduler.memory.cache.num_evictions
    while not (house.residency.counters.evictions or house.scheduler.memory.cache.num_evictions > before):
        ask(house, f"new {len(house.order)}", [7000 + 100 * len(house.order) + j for j in range(20)])
    assert first == ("adapter" if house.residency.counters.evictions else "kv")


class CacheMachine(RuleBasedStateMachine):
    """Any order of arrivals, ends, preemptions, loads and retirements, over texts that often begin alike."""

    prefix_cache = True

    def __init__(self) -> None:
        super().__init__()
        host = ManualHost(num_places=7, block_size=4)
        policy = Policy(prefix_cache=self.prefix_cache)
        self.house = House(18, block_size=4, max_num_seqs=5, max_tokens=12, policy=policy, host=host)
        self.house.scheduler.memory.swap.pays = lambda _: True
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
        self.house.submit(name, prompt, output, adapter, service_class, tenant)

    @precondition(lambda self: self.sent)
    @rule(pick=st.integers(0, 1000))
    def cancel(self, pick: int) -> None:
        self.house.scheduler.cancel(f"r{pick % len(self.sent)}")

    @precondition(lambda self: self.house.scheduler.running)
    @rule(pick=st.integers(0, 1000))
    def preempt(self, pick: int) -> None:
        running = self.house.scheduler.running
        self.house.scheduler._admission.preempt(running[pick % len(running)])

    @precondition(lambda self: self.house.store.pending)
    @rule()
    def load(self) -> None:
        self.house.store.finish()

    @rule(digest=st.sampled_from(["a", "b", "switched"]))
    def retire(self, digest: str) -> None:
        self.house.scheduler.memory.retire(digest)

    @rule(count=st.sampled_from([1, 1, 4, 30]))
    def step(self, count: int) -> None:
        for _ in range(count):
            self.house.step()

    @property
    def cached(self) -> list:
        trees = {id(tree): tree for tree in self.house.scheduler.memory.cache._trees.values()}
        trees |= {id(page.tree): page.tree for s in self.house.scheduler.running for page in s.trail}
        for tree in trees.values():
            assert len(list(tree)) == tree.num_pages
        return [page for tree in trees.values() for page in tree]

    @invariant()
    def every_page_is_somewhere_once(self) -> None:
        house, cached = self.house, self.cached
        own = [page for s in house.scheduler.running for page in s.pages[len(s.trail) :]]
        weights = [page for r in house.residency._known.values() for page in r.pages]
        held = [*own, *weights, *(page.page for page in cached)]
        assert sorted([*held, *house.pool._free]) == list(range(house.pool.num_pages))
        counts = house.scheduler.memory.counts
        assert counts.kv == len(own) + sum(page.users > 0 for page in cached)
        assert counts.kv_cached == sum(page.users == 0 for page in cached)
        assert counts.kv + counts.kv_cached + counts.adapters + counts.adapters_idle + counts.free == counts.total

    @invariant()
    def every_place_of_the_host_is_somebodys_or_free(self) -> None:
        swap = self.house.scheduler.memory.swap
        alive = self.house.scheduler._sequences.values()
        held = [place for s in alive for place in s.places]
        assert sorted([*held, *swap._free]) == list(range(swap.num_places))
        for s in alive:
            assert len(s.places) == -(-s.num_saved // 4)
            assert not (s.places and s.pages), "in one memory or in the other"

    @invariant()
    def users_are_counted_and_leaves_are_known(self) -> None:
        house, cached = self.house, self.cached
        trails = [page for s in house.scheduler.running for page in s.trail]
        for page in cached:
            assert page.users == trails.count(page)
        assert set(house.scheduler.memory.cache._leaves) == {page for page in cached if page.leaf}
        for digest, resident in house.residency._known.items():
            trees = {id(page.tree) for page in cached if page.tree.identity.digest == digest}
            assert resident.num_trees == len(trees)
            assert resident.pages or not trees, "KV lies on weights that are there"

    @invariant()
    def block_tables_begin_with_their_trails(self) -> None:
        for s in self.house.scheduler.running:
            assert [page.page for page in s.trail] == s.pages[: len(s.trail)]
            assert not any(page.evicted for page in s.trail)
            assert [token for page in s.trail for token in page.tokens] == s.token_ids[: 4 * len(s.trail)]
            assert {page.tree.identity for page in s.trail} <= {s.kv_identity}
            assert s.activation is None or 4 * len(s.trail) <= s.activation

    def teardown(self) -> None:
        self.house.run(3000)
        assert set(self.house.finished) == set(self.sent)
        assert self.house.scheduler.memory.counts.kv == self.house.scheduler.memory.swap.num_held == 0


class SwapMachine(CacheMachine):
    """The same without the cache: what is carried out and back is all that is left."""

    prefix_cache = False


TestSwapMachine = SwapMachine.TestCase
TestSwapMachine.settings = settings(max_examples=40, stateful_step_count=40, deadline=None)

TestCacheMachine = CacheMachine.TestCase
TestCacheMachine.settings = settings(max_examples=80, stateful_step_count=40, deadline=None)
