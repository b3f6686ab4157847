"""The scheduler on plain numbers: pages are conserved, everything ends, heads hold their place."""

import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule
from msgspec.structs import replace
from scheduler_harness import Harness, answer

from loramux.common.settings.serving import EngineSettings
from loramux.engine.memory.pages import OutOfPages, PagePool, PageUse
from loramux.engine.messages import Request, SamplingParams, ServiceClass, StepLimits
from loramux.engine.scheduling.policy import Policy, SchedulerLimits, limits_with_images, step_limits
from loramux.engine.scheduling.sequence import Sequence, StepBuilder

GB = 10**9


def test_prefill_is_chunked_under_the_token_budget_and_decode_goes_first() -> None:
    harness = Harness(num_pages=40, max_tokens=8)
    harness.submit("short", prompt=3, output=10)
    harness.step()
    harness.submit("long", prompt=20, output=1)
    step = harness.scheduler.plan()
    assert {c.sequence.id: c.length for c in step.chunks} == {"short": 1, "long": 7}


def test_prompts_with_decoding_rows_have_their_own_limit() -> None:
    """Prompts get those tokens for any number of decoding rows; if no row decodes, they get the whole step."""
    harness = Harness(num_pages=200, max_num_seqs=16, max_tokens=32, max_mixed=5)
    for number in range(8):
        harness.submit(f"row {number}", prompt=2, output=20)
    assert harness.step() == 8
    harness.submit("long", prompt=30, output=1)
    harness.submit("next", prompt=30, output=1)
    steps = []
    for _ in range(3):
        step = harness.scheduler.plan()
        steps.append({c.sequence.id: c.length for c in step.chunks if not c.sequence.id.startswith("row")})
        harness.scheduler.commit(step, answer(step, harness.choose))
    assert steps == [{"long": 5}, {"long": 5}, {"long": 5}]
    for number in range(8):
        harness.scheduler.cancel(f"row {number}")
    step = harness.scheduler.plan()
    assert {c.sequence.id: c.length for c in step.chunks} == {"long": 15, "next": 17}


def test_prompt_has_fewer_tokens_with_decoding_rows_after_a_long_context() -> None:
    """Its attention then counts as much as the tokens that are left out."""
    harness = Harness(num_pages=200, max_num_seqs=16, max_tokens=200, max_mixed=20, token_context=16.0)
    harness.submit("row", prompt=2, output=50)
    harness.step()
    harness.submit("long", prompt=300, output=1)
    start, lengths = 0, []
    for _ in range(8):
        step = harness.scheduler.plan()
        (length,) = (chunk.length for chunk in step.chunks if chunk.sequence.id == "long")
        costs = [count * (1 + (start + count / 2) / 16) for count in (length, length + 1)]
        assert costs[0] <= 20 < costs[1]
        start += length
        lengths.append(length)
        harness.scheduler.commit(step, answer(step, harness.choose))
    assert lengths == [13, 9, 7, 6, 5, 5, 5, 4]
    harness.scheduler.cancel("row")
    assert [chunk.length for chunk in harness.scheduler.plan().chunks] == [200]


def test_prompts_with_decoding_rows_go_on_after_any_context() -> None:
    """Also if attention to the context of one token costs more than all tokens that the step may have."""
    harness = Harness(num_pages=200, max_num_seqs=16, max_tokens=200, max_mixed=4, token_context=0.5)
    harness.submit("row", prompt=2, output=50)
    harness.step()
    for name in ("long", "next"):
        harness.submit(name, prompt=30, output=1)
    steps = []
    for _ in range(3):
        step = harness.scheduler.plan()
        steps.append({c.sequence.id: c.length for c in step.chunks if c.sequence.id != "row"})
        harness.scheduler.commit(step, answer(step, harness.choose))
    assert steps == [{"long": 1, "next": 1}, {"long": 1}, {"long": 1}]


@settings(deadline=None)
@given(
    context=st.integers(0, 20_000),
    tokens=st.integers(1, 2048),
    token_context=st.sampled_from([0.5, 16.0, 800.0, 13_000.0]),
)
def test_prompt_with_decoding_rows_takes_the_most_tokens_whose_cost_the_step_has_left(
    context: int, tokens: int, token_context: float
) -> None:
    """The next prompt gets no token that the step does not have, not even because a cost was rounded."""
    sampling = SamplingParams(max_tokens=1)
    request = Request(id="r", tenant="t", prompt_token_ids=[5] * (context + 2 * tokens), sampling=sampling)
    sequence = Sequence(request, 0.0)
    sequence.num_computed = context

    def left_after(length: int) -> int:
        """Return the tokens that are left of four times as many."""
        builder = StepBuilder(4 * tokens, 8, token_context=token_context)
        builder.add(sequence, length)
        return builder.tokens_left

    length = StepBuilder(tokens, 8, token_context=token_context).room_for(sequence)
    assert left_after(length + 1) < 3 * tokens
    assert left_after(length) >= 3 * tokens or length == 1
    if left_after(length):
        cost = length + length * (2 * context + length) / (2 * token_context)
        assert 0 <= 4 * tokens - left_after(length) - cost < 1, "rounded up"


def test_limit_of_prompts_with_decoding_rows_follows_the_device() -> None:
    """A step of a CPU is as efficient with 256 rows as with 1,024; a GPU reads 16 GB of weights for the first one, and
    takes twice as long for 512."""
    engine = EngineSettings(max_num_seqs=200, max_num_batched_tokens=1024)
    cpu = SchedulerLimits.of(step_limits(engine, None), 4096, on_cpu=True)
    gpu = SchedulerLimits.of(step_limits(engine, 80 * GB), 4096, on_cpu=False)
    assert [cpu.prefill_tokens(rows) for rows in (0, 1, 200, 1000)] == [1024, 256, 256, 24]
    assert [gpu.prefill_tokens(rows) for rows in (0, 1, 128, 200, 1024)] == [1024, 511, 512, 440, 0]
    asked = replace(engine, max_mixed_prefill_tokens=7)
    assert SchedulerLimits.of(step_limits(asked, 80 * GB), 4096, on_cpu=False).prefill_tokens(1) == 7


@pytest.mark.parametrize(
    ("gpu_bytes", "expected"),
    [
        (None, (64, 1024, 256)),
        (24 * GB, (64, 1024, 512)),
        (40 * GB - 1, (64, 1024, 512)),
        (48 * GB, (256, 2048, 512)),
        (80 * GB, (256, 2048, 512)),
        (141 * GB, (256, 2048, 512)),
        (192 * GB, (256, 2048, 512)),
    ],
)
def test_step_limits_follow_the_memory_of_the_device(gpu_bytes: int | None, expected: tuple[int, int, int]) -> None:
    assert step_limits(EngineSettings(), gpu_bytes) == StepLimits(*expected)


@pytest.mark.parametrize("name", ["max_num_seqs", "max_num_batched_tokens", "max_mixed_prefill_tokens"])
@pytest.mark.parametrize("gpu_bytes", [None, 24 * GB, 192 * GB])
def test_step_limits_that_are_set_are_kept(name: str, gpu_bytes: int | None) -> None:
    default = step_limits(EngineSettings(), gpu_bytes)
    assert step_limits(EngineSettings(**{name: 77}), gpu_bytes) == replace(default, **{name: 77})


def test_prompts_with_decoding_rows_fill_whole_tiles_of_a_gpus_products() -> None:
    """At most a quarter of them is left for the next step."""
    engine = EngineSettings(max_num_batched_tokens=1024)
    limits = SchedulerLimits.of(step_limits(engine, 24 * GB), 4096, on_cpu=False)
    for decoding in range(1, 500):
        assert 384 < limits.prefill_tokens(decoding) <= 512
        assert (limits.prefill_tokens(decoding) + decoding) % 128 == 0
    few = SchedulerLimits.of(StepLimits(64, 1024, 128), 4096, on_cpu=False)
    assert few.prefill_tokens(100) == 128, "28 of 128 would be too few"


@pytest.mark.parametrize("on_cpu", [True, False], ids=["cpu", "gpu"])
@pytest.mark.parametrize("whole_tokens", [1, 100, 256, 280, 560, 1120, 3000])
def test_whole_image_has_room_next_to_any_number_of_decoding_rows(whole_tokens: int, *, on_cpu: bool) -> None:
    """Also if the rows then begin a tile. Otherwise the image would wait until rows end."""
    for tokens, mixed in ((8, 4), (1024, 64), (1024, 256), (1024, 300), (1024, 512), (2048, 600), (8192, 1500)):
        asked = limits_with_images(StepLimits(256, tokens, mixed), whole_tokens)
        limits = SchedulerLimits.of(asked, 4096, on_cpu=on_cpu, whole_tokens=whole_tokens)
        rooms = [limits.prefill_tokens(rows) for rows in range(257)]
        assert min(rooms) >= whole_tokens
        assert max(rooms[1:]) <= max(mixed, whole_tokens)


def test_whole_image_takes_room_of_whole_tiles_only_if_it_needs_it() -> None:
    limits = SchedulerLimits.of(StepLimits(64, 1024, 512), 4096, on_cpu=False, whole_tokens=500)
    assert [limits.prefill_tokens(rows) for rows in (1, 12, 13, 128)] == [511, 500, 512, 512]


def test_too_long_is_answered_at_once_with_the_numbers() -> None:
    harness = Harness(num_pages=12, block_size=4)
    harness.submit("big", prompt=40, output=9)
    (event,) = harness.scheduler.drain_events()
    assert event.fault is not None
    assert event.fault.code == "context_length_exceeded"
    assert "40" in event.fault.message
    assert "48" in event.fault.message


def test_an_adapter_that_leaves_no_room_is_refused_not_waited_for() -> None:
    harness = Harness()
    harness.submit("never", prompt=4, output=4, adapter="huge")
    harness.submit("after", prompt=4, output=4)
    harness.run()
    assert harness.finished == {"never": "error", "after": "length"}


def test_a_head_that_does_not_fit_holds_its_place() -> None:
    harness = Harness(num_pages=12, block_size=4)
    harness.submit("running", prompt=4, output=20)
    harness.step()
    harness.submit("head", prompt=30, output=10)
    harness.submit("small", prompt=1, output=1)
    harness.run()
    assert harness.order[0] == "running", "the small one would have fitted beside it, and must not overtake"


def test_base_traffic_does_not_wait_for_a_load() -> None:
    harness = Harness()
    harness.submit("cold", prompt=4, output=2, adapter="a")
    harness.submit("base", prompt=4, output=2)
    for _ in range(4):
        harness.step()
    assert harness.finished == {"base": "length"}
    assert harness.scheduler.next_plan_at == math.inf, "only the load can change anything"
    harness.run()
    assert harness.finished["cold"] == "length"


def test_a_failed_load_fails_its_own_requests_only_and_is_tried_again() -> None:
    harness = Harness()
    harness.submit("bad", prompt=4, output=2, adapter="a")
    harness.submit("good", prompt=4, output=2, adapter="b")
    harness.store.finish(0, RuntimeError("disk on fire"))
    harness.run()
    assert harness.finished == {"bad": "error", "good": "length"}
    harness.submit("again", prompt=4, output=2, adapter="a")
    harness.run()
    assert harness.finished["again"] == "length"


def test_cancelling_frees_the_pages() -> None:
    harness = Harness()
    harness.submit("gone", prompt=8, output=20)
    harness.step()
    assert harness.pool.num_taken(PageUse.KV) == 2
    harness.scheduler.cancel("gone")
    assert harness.pool.num_taken(PageUse.KV) == 0
    harness.step()
    assert harness.finished == {"gone": "cancelled"}


def test_idle_adapters_make_room_and_retired_ones_leave() -> None:
    harness = Harness(num_pages=6, block_size=4)
    harness.submit("x", prompt=4, output=2, adapter="a")
    harness.run()
    assert harness.pool.num_taken(PageUse.ADAPTER) == 2
    harness.submit("y", prompt=16, output=8)
    harness.run()
    assert harness.pool.num_taken(PageUse.ADAPTER) == 0
    harness.submit("z", prompt=4, output=2, adapter="b")
    harness.run()
    harness.residency.retire("b")
    assert harness.pool.num_taken(PageUse.ADAPTER) == 0
    assert not harness.store.live


def test_a_pool_gives_no_page_twice() -> None:
    pool = PagePool(3)
    first = pool.take(2, PageUse.KV)
    with pytest.raises(OutOfPages):
        pool.take(2, PageUse.ADAPTER)
    pool.give_back(first, PageUse.KV)
    assert sorted(pool.take(3, PageUse.ADAPTER)) == [0, 1, 2]


class SchedulerMachine(RuleBasedStateMachine):
    """Any order of arrivals, cancellations, loads and steps: memory adds up and everybody is answered."""

    def __init__(self) -> None:
        super().__init__()
        policy = Policy(background_prefill_tokens=3)
        self.harness = Harness(
            num_pages=14, block_size=4, max_num_seqs=5, max_tokens=12, policy=policy, max_mixed=4, token_context=9.0
        )
        self.sent: dict[str, int] = {}
        self.serving: dict[str, tuple[int, list[int]]] = {}

    @rule(
        prompt=st.integers(1, 30),
        output=st.integers(1, 20),
        adapter=st.sampled_from([None, "a", "b", "huge"]),
        service_class=st.sampled_from(list(ServiceClass)),
        tenant=st.sampled_from(["t", "u"]),
    )
    def arrive(self, prompt: int, output: int, adapter: str | None, service_class: ServiceClass, tenant: str) -> None:
        name = f"r{len(self.sent)}"
        self.sent[name] = output
        self.harness.submit(name, prompt, output, adapter, service_class, tenant)

    @precondition(lambda self: self.sent)
    @rule(pick=st.integers(0, 1000))
    def cancel(self, pick: int) -> None:
        self.harness.scheduler.cancel(f"r{pick % len(self.sent)}")

    @precondition(lambda self: self.harness.store.pending)
    @rule(pick=st.integers(0, 1000), fails=st.booleans())
    def load(self, pick: int, fails: bool) -> None:
        self.harness.store.finish(pick % len(self.harness.store.pending), RuntimeError("no") if fails else None)

    @rule(digest=st.sampled_from(["a", "b"]))
    def retire(self, digest: str) -> None:
        self.harness.residency.retire(digest)

    @rule()
    def step(self) -> None:
        self.harness.step()

    @invariant()
    def pages_have_one_holder(self) -> None:
        harness = self.harness
        held = [page for sequence in harness.scheduler.running for page in sequence.pages]
        held += [page for r in harness.residency._known.values() for page in r.pages]
        assert len(held) == len(set(held))
        assert len(held) + harness.pool.num_free == harness.pool.num_pages
        assert harness.pool.num_taken(PageUse.KV) == sum(len(s.pages) for s in harness.scheduler.running)

    @invariant()
    def what_runs_keeps_the_weights_it_began_with(self) -> None:
        """Nothing in use is evicted, and no revision is swapped under a request: same slot, same pages, to its end."""
        serving = {}
        for sequence in self.harness.scheduler.running:
            if sequence.digest is not None:
                resident = self.harness.residency._known[sequence.digest]
                assert resident.users > 0
                assert resident.slot == sequence.slot
                assert self.harness.store.live[sequence.slot] is resident.pages
                serving[sequence.id] = (sequence.slot, list(resident.pages))
        for name in serving.keys() & self.serving.keys():
            assert serving[name] == self.serving[name]
        self.serving = serving

    def teardown(self) -> None:
        self.harness.run(2000)
        assert set(self.harness.finished) == set(self.sent)
        for name, reason in self.harness.finished.items():
            if reason == "length":
                assert self.harness.generated[name] == self.sent[name]
        assert self.harness.pool.num_taken(PageUse.KV) == 0


TestSchedulerMachine = SchedulerMachine.TestCase
TestSchedulerMachine.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)
