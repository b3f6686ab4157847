"""Speculative decoding changes no token, no bill and no page; it only changes how many steps an answer takes."""

from __future__ import annotations

import random
import zlib
from collections import Counter
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
from adapter_zoo import ON_RANKS, RECIPES, Asked, Zoo, serve, to_request
from delayed_runner import late_engine
from eager_drafts import draft_always
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from sampler_alone import SamplerAlone
from scheduler_harness import Harness, ManualHost

from loramux.engine.engine import Engine
from loramux.engine.execution.device_sampler import SampledRows, accepted
from loramux.engine.execution.sampler import Sampler
from loramux.engine.messages import Request, SamplingParams, TokenEvent
from loramux.engine.scheduling.estimates import (
    LONGEST_MATCH,
    SHORTEST_MATCH,
    Acceptance,
    DecodeTimes,
    PromptLookup,
    StepTimeModel,
)
from loramux.engine.scheduling.policy import Policy
from loramux.engine.scheduling.sequence import Chunk, Sequence, Step
from loramux.engine.scheduling.speculation import Speculation
from loramux.engine.statistics import OTHERS, labelled_drafts

EVERY_MODEL = [None, *RECIPES]
EOS = 9

# ---- drafts


def naive_lookup(tokens: list[int], most: int) -> list[int]:
    """Find drafts by definition: the tokens after the latest of the longest matches of the end, repeated if they are
    too few."""
    for length in range(LONGEST_MATCH, SHORTEST_MATCH - 1, -1):
        for end in range(len(tokens) - 1, length - 1, -1):
            if tokens[end - length : end] == tokens[-length:]:
                return [tokens[end + i % (len(tokens) - end)] for i in range(most)]
    return []


@settings(max_examples=150, deadline=None)
@given(st.lists(st.integers(0, 3), min_size=1, max_size=600), st.integers(1, 9))
def test_prompt_lookup_equals_its_definition(tokens: list[int], most: int) -> None:
    assert PromptLookup().draft(tokens, most) == naive_lookup(tokens, most)


@settings(max_examples=100, deadline=None)
@given(st.lists(st.integers(0, 3), min_size=2, max_size=200), st.integers(1, 9))
def test_prompt_lookup_of_a_text_whose_last_token_is_unknown_drafts_as_without_it(tokens: list[int], most: int) -> None:
    lookup = PromptLookup()
    assert lookup.draft([*tokens, -1], most, len(tokens)) == naive_lookup(tokens, most)
    assert lookup.draft([*tokens, 2], most) == naive_lookup([*tokens, 2], most)


def test_prompt_lookup_goes_on_from_the_place_that_it_found() -> None:
    """Between two calls tokens are appended that were found there; a copy of a copy changes nothing."""
    text = [5, 6, 7, 8, 9, 10, 11, 12, 13, 14]
    lookup = PromptLookup()
    tokens = [*text, 1, 5, 6]
    assert lookup.draft(tokens, 3) == [7, 8, 9]
    tokens += [7, 8, 9, 10]
    assert lookup.draft(tokens, 3) == [11, 12, 13]
    tokens += [99]
    assert lookup.draft(tokens, 3) == []
    tokens += [8, 9]
    assert lookup.draft(tokens, 2) == [10, 99]


# ---- when a draft pays


def speculation(seconds_of) -> Speculation:
    """Return the speculation of a device whose measured steps take `seconds_of(rows)`."""
    harness = Harness(policy=Policy(max_draft_tokens=8))
    found = harness.scheduler.speculation
    for _ in range(100):
        for rows in (1, 2, 4, 8, 12, 16, 24, 32, 48, 64, 96, 128):
            found.times.observe(rows, seconds_of(rows))
            harness.scheduler.state.step_time.observe(rows, seconds_of(rows))
    return found


def test_draft_is_as_long_as_may_be_where_rows_are_free() -> None:
    memory_bound = speculation(lambda rows: 0.02)
    assert memory_bound.count_paying(0.3, rows=16, expected=16.0, most=8) == 8


def test_draft_is_none_where_a_row_costs_what_a_token_takes() -> None:
    compute_bound = speculation(lambda rows: 0.001 * rows)
    assert compute_bound.count_paying(0.95, rows=64, expected=64.0, most=8) == 0


@pytest.mark.parametrize("rows", [1, 16, 64])
def test_draft_lengths_raise_the_tokens_per_second_as_far_as_they_can(rows: int) -> None:
    """Against every other length, by the definition."""
    found = speculation(lambda n: 0.01 + 0.0004 * n)
    for rate in (0.2, 0.5, 0.8, 0.95):
        speed = [(rows + sum(rate**i for i in range(1, k + 1))) / found.times.seconds(rows + k) for k in range(9)]
        assert found.count_paying(rate, rows, float(rows), 8) == speed.index(max(speed))


def test_decode_times_never_fall_and_go_on_as_tokens_cost() -> None:
    step_time = StepTimeModel()
    for rows in (10, 1000):
        for _ in range(9):
            step_time.observe(rows, 0.01 + 0.001 * rows)
    times = DecodeTimes(step_time)
    for rows, seconds in ((4, 0.02), (8, 0.01), (16, 0.04)):
        times.observe(rows, seconds)
    assert times.seconds(1) == times.seconds(4) == times.seconds(8) == pytest.approx(0.015)
    assert times.seconds(12) == pytest.approx(0.0275)
    assert times.seconds(26) == pytest.approx(0.04 + 0.01, rel=0.05)
    for _ in range(200):
        times.observe(16, 100.0)
    assert times.seconds(16) > 1.0, "a lasting change is followed"


def test_times_of_steps_that_run_ahead_are_those_of_one_step_each() -> None:
    """A step takes ten seconds; one with drafts takes twelve, and a second more until the host has launched the next.

    The host launches the first steps at 0 and 1, and then one whenever one has ended."""
    harness = Harness(100, pace=(0.0, 0.0))
    harness.submit("r", prompt=1, output=90)
    scheduler, seen = harness.scheduler, []
    observe = scheduler.speculation.times.observe
    scheduler.speculation.times.observe = lambda rows, seconds, ahead: (
        seen.append((rows, seconds)) or observe(rows, seconds)
    )

    def step(at: float, *, drafts: int = 0) -> None:
        harness.time = at
        plan = scheduler.plan()
        (chunk,) = plan.chunks
        token = TokenEvent(request_id="r", token_id=7)
        if not drafts:
            scheduler.commit_ahead(plan)
            return
        chunk = Chunk(chunk.sequence, chunk.start, 1 + drafts, drafts=(7,) * drafts)
        scheduler.state.extend(chunk.sequence, len(chunk.sequence.token_ids) + drafts)
        scheduler.commit(Step((chunk,)), [token] * (1 + drafts))

    for at in (0, 1, 10, 20, 30, 40, 50):  # the prompt, and then one token a step
        step(at)
    assert seen == [(1, 9.0), *[(1, 10.0)] * 4]
    seen.clear()
    step(60, drafts=3)  # the step before ends at 70, this one at 82
    assert seen == [(1, 10.0)]
    step(83, drafts=3)
    assert seen[1:] == [(4, pytest.approx(13.0, abs=0.2))]
    step(96)
    assert seen[2:] == [(4, 13.0)]
    step(97)
    assert len(seen) == 3, "the step that was launched at 96 has not ended"
    step(106)
    step(116)
    assert seen[3:] == [(1, 9.0), (1, 10.0)]


def test_acceptance_follows_the_latest_drafts_and_fades_to_its_first_guess() -> None:
    acceptance = Acceptance(keep=0.8)
    assert acceptance.rate(0.5) == 0.5
    for _ in range(20):
        acceptance.add(drafted=4, accepted=4)
    assert acceptance.rate(0.5) > 0.9
    for _ in range(20):
        acceptance.add(drafted=4, accepted=0)
    assert acceptance.rate(0.5) < 0.2
    for _ in range(400):
        acceptance.fade(0.98)
    assert acceptance.rate(0.5) == pytest.approx(0.5, abs=0.01)
    assert (acceptance.num_drafted, acceptance.num_accepted) == (160, 80)


# ---- the sampler accepts what it would have drawn


def sequence(name: str, prompt: list[int], output: list[int], params: dict[str, object]) -> Sequence:
    sampling = SamplingParams(**{"max_tokens": 50} | params)
    made = Sequence(Request(id=name, tenant="t", prompt_token_ids=prompt, sampling=sampling), 0.0)
    made.token_ids += output
    return made


SAMPLING = st.fixed_dictionaries(
    {
        "temperature": st.sampled_from([0.0, 0.7, 1.5]),
        "seed": st.integers(0, 5),
        "top_k": st.sampled_from([0, 3]),
        "top_p": st.sampled_from([1.0, 0.8]),
        "repetition_penalty": st.sampled_from([1.0, 1.7]),
        "presence_penalty": st.sampled_from([0.0, 1.5]),
        "frequency_penalty": st.sampled_from([0.0, 0.8]),
        "logit_bias": st.sampled_from([{}, {3: 4.0, 5: -4.0}]),
        "min_tokens": st.sampled_from([0, 4]),
        "allowed_token_ids": st.sampled_from([(), (2, 3, 5)]),
        "stop_token_ids": st.sampled_from([(), (2,)]),
        "logprobs": st.sampled_from([None, 0, 2]),
    }
)


class DeviceRows:
    """Samples chunks as a GPU's runner does."""

    def __init__(self, eos_token_ids: tuple[int, ...]) -> None:
        self._sampler = SamplerAlone(eos_token_ids, vocab=10, max_rows=24)

    def sample(self, logits: torch.Tensor, chunks: list[Chunk]) -> list[TokenEvent]:
        return accepted(self._sampler.launch(logits.clone(), SampledRows.of(chunks)).events(), chunks)


@pytest.mark.parametrize("make_sampler", [Sampler, DeviceRows])
@settings(max_examples=150, deadline=None)
@given(
    params=st.lists(SAMPLING, min_size=1, max_size=3),
    seed=st.integers(0, 1000),
    wrong=st.lists(st.integers(0, 7), min_size=3, max_size=3),
)
def test_sampler_run_equals_one_token_after_the_other(
    make_sampler: type[Sampler | DeviceRows], params: list[dict[str, object]], seed: int, wrong: list[int]
) -> None:
    """Tokens, log probabilities and ends, whatever steers the choice, and the generator goes on from the same place."""
    vocab, length = 10, 7
    tables = [torch.randn(length + 1, vocab, generator=torch.Generator().manual_seed(seed + i)) for i in range(3)]

    def one_by_one(number: int) -> list[TokenEvent]:
        own, sampler, events = sequence(str(number), [1, 3], [4], params[number]), make_sampler((EOS,)), []
        for row in tables[number]:
            events += sampler.sample(row[None], [Chunk(own, len(own.token_ids) - 1, 1)])
            if events[-1].finish_reason:
                break
            own.token_ids.append(events[-1].token_id)
        return events

    expected = [one_by_one(number) for number in range(len(params))]
    sampler, chunks, rows = make_sampler((EOS,)), [], []
    for number, events in enumerate(expected):
        right = [event.token_id for event in events][:length]
        drafts = [token if i < wrong[number] else (token + 1) % vocab for i, token in enumerate(right)]
        own = sequence(str(number), [1, 3], [4], params[number])
        chunks.append(Chunk(own, len(own.token_ids) - 1, 1 + len(drafts), drafts=tuple(drafts)))
        rows.append(tables[number][: 1 + len(drafts)])
    got = sampler.sample(torch.cat(rows), chunks)
    for number, events in enumerate(expected):
        told = [event for event in got if event.request_id == str(number)]
        accepted = min(wrong[number], len(chunks[number].drafts))
        assert told == events[: accepted + 1]
        if not told[-1].finish_reason and len(told) < len(events):  # the next step goes on as if nothing had been
            chunks[number].sequence.token_ids += [event.token_id for event in told]
            after = Chunk(chunks[number].sequence, len(chunks[number].sequence.token_ids) - 1, 1)
            assert sampler.sample(tables[number][len(told)][None], [after]) == [events[len(told)]]


def test_sampler_with_drafts_follows_the_distribution() -> None:
    """Chi-square of pairs of tokens, the second drawn from the row after a draft of the first."""
    probs = torch.tensor([[0.5, 0.3, 0.2], [0.2, 0.2, 0.6]])
    sampler, drawn = Sampler(()), Counter()
    for seed in range(6000):
        own = sequence(str(seed), [1, 2], [], {"seed": seed})
        events = sampler.sample(probs.log(), [Chunk(own, 1, 2, drafts=(0,))])
        drawn[tuple(event.token_id for event in events)] += 1
    expected = {(0, second): 0.5 * float(probs[1, second]) for second in range(3)} | {(1,): 0.3, (2,): 0.2}
    assert set(drawn) <= set(expected)
    chi_squared = sum((drawn[pair] - 6000 * p) ** 2 / (6000 * p) for pair, p in expected.items())
    assert chi_squared < 18.47, "four degrees of freedom, p = 0.001, and the seeds are fixed"


# ---- pages, charges and events


def follow(sequence: Sequence, token_ids: list[int]) -> int:
    """A small model: the next token is a function of all tokens before it."""
    return zlib.crc32(repr((sequence.request.tenant, sequence.digest, token_ids)).encode()) % 3


def written(own: Sequence, length: int) -> list[int]:
    token_ids = list(own.request.prompt_token_ids)
    for _ in range(length):
        token_ids.append(follow(own, token_ids))
    return token_ids[own.num_prompt_tokens :]


REQUESTS = st.lists(
    st.tuples(st.integers(1, 20), st.integers(1, 25), st.sampled_from([None, "a", "switched"]), st.integers(0, 2)),
    min_size=1,
    max_size=8,
)
LONGEST_PAGES = 12
"""Pages of four tokens of the longest of `REQUESTS`, with its invocation."""


class Ledger:
    """Events of a harness's requests; checks the invariants of their pages after every commit."""

    def __init__(self, harness: Harness) -> None:
        self.told: dict[str, list[int | None]] = {}
        self._scheduler = harness.scheduler
        self._commit = harness.scheduler.commit
        harness.scheduler.commit = self.commit

    def commit(self, step: Step, sampled: list[TokenEvent]) -> list[TokenEvent]:
        events = self._commit(step, sampled)
        for event in events:
            self.told.setdefault(event.request_id, []).append(event.token_id)
        state = self._scheduler.state
        for running in state.running:
            assert running.num_computed < len(running.token_ids)
            assert len(running.pages) <= state.budget.pages_for(len(running.token_ids))
            for page, tokens in enumerate(running.prefix_pages):
                assert tokens.tokens == tuple(running.token_ids[4 * page : 4 * page + 4])
        assert sum(flow.num_pages for flow in state.queue.flows) == sum(len(s.pages) for s in state.running)
        return events


@settings(max_examples=120, deadline=None)
@given(
    requests=REQUESTS,
    seed=st.integers(0, 1000),
    spare_pages=st.integers(0, 18),
    swaps=st.booleans(),
    preempt_every=st.sampled_from([1000, 3, 5]),
    cancelled=st.sets(st.integers(0, 7), max_size=2),
    state_pages=st.sampled_from([0, 2]),
)
def test_drafts_change_no_answer_and_no_charge_and_leave_no_page(
    requests, seed, spare_pages, swaps, preempt_every, cancelled, state_pages
) -> None:
    """Every row reads only KV and states of the tokens before it (`KvOracle`), whatever is preempted, swapped, cached
    or cancelled."""
    host = ManualHost(8, 4) if swaps else None
    harness = Harness(
        LONGEST_PAGES + state_pages + spare_pages,
        policy=Policy(prefix_cache=True, max_draft_tokens=5),
        pace=(0.01, 0.001),
        host=host,
        state_pages=state_pages,
    )
    harness.choose = follow
    draft_always(harness.scheduler, lambda own: written(own, own.request.sampling.max_tokens), seed)
    ledger, sequences, scheduler = Ledger(harness), [], harness.scheduler
    for number, (prompt, output, adapter, tenant) in enumerate(requests):
        words = [random.Random(number).randrange(3) for _ in range(prompt)]
        invocation = [8, 8, 7] if number % 2 and adapter == "switched" else []
        harness.submit(str(number), words + invocation, output, adapter, tenant=f"t{tenant}")
        sequences.append(scheduler.state.sequences[str(number)])
    for turn in range(3000):
        if scheduler.is_idle:
            break
        harness.store.finish_all()
        # At last preemptions end: a context may take more steps to compute again than there are between two of them.
        if turn % preempt_every == 2 and turn < 1000 and scheduler.running:
            scheduler.state.preempt(scheduler.running[-1])
        if turn == 6:
            for number in cancelled:
                scheduler.cancel(str(number))
        harness.step()
    assert scheduler.is_idle
    assert scheduler.memory.counts.kv == 0
    for own in sequences:
        expected = written(own, own.request.sampling.max_tokens)
        told = ledger.told.get(own.id, [])
        assert told == (expected if harness.finished[own.id] == "length" else expected[: len(told)])
    assert scheduler.state.counters.accepted_tokens <= scheduler.state.counters.drafted_tokens
    if not cancelled and preempt_every == 1000:
        ran = [own for own in sequences if harness.finished[own.id] == "length"]  # the others do not fit into the pool
        loads = sum(own.num_loads * scheduler.state.residency.num_pages(own.digest) for own in ran if own.digest)
        found = sum(own.num_cached for own in ran)
        units = sum(own.num_prompt_tokens + 2 * own.num_output_tokens for own in ran)
        assert sum(group.executed for group in scheduler.queue.groups) == units - found + loads


def test_draft_takes_no_page_that_another_sequence_or_a_waited_for_adapter_needs() -> None:
    harness = Harness(num_pages=4, block_size=4, max_num_seqs=4, max_tokens=64)
    harness.choose = lambda own, token_ids: len(token_ids) % 3
    draft_always(harness.scheduler, lambda own: [(own.num_prompt_tokens + i) % 3 for i in range(40)])
    harness.scheduler.speculation.count_paying = lambda rate, rows, expected, most, ahead_seconds=0.0: most
    harness.submit("a", 3, 5)
    harness.submit("b", 3, 5)
    while not harness.scheduler.is_idle:
        harness.step()
    assert harness.scheduler.state.counters.preemptions == 0
    assert harness.generated == {"a": 5, "b": 5}


def test_sequence_whose_drafts_are_accepted_is_counted_at_its_end_in_the_peak() -> None:
    harness = Harness(num_pages=100, block_size=4)
    budget = harness.scheduler.state.budget
    first, second = (sequence(name, [1] * 4, [], {"max_tokens": 8}) for name in "ab")
    second.max_len = second.likely_len = 24
    slow = budget.kv_peak([first, second])
    drafter = harness.scheduler.speculation._drafter(second)
    drafter.acceptance.add(4, 4)
    assert second.outruns_others
    assert slow == 6
    assert budget.kv_peak([first, second]) == 6 + 3


# ---- an engine


def eager_engine(zoo: Zoo, asked: list[Asked], seed: int = 0, **engine_settings: object) -> Engine:
    engine = zoo.engine(**engine_settings)
    answers = {one.name: zoo.answer(one) for one in asked}
    draft_always(engine.scheduler, lambda own: answers[own.id], seed)
    return engine


def some_requests(seed: int, count: int) -> list[Asked]:
    rng = random.Random(seed)
    prompts = [tuple(rng.randrange(3, 97) for _ in range(rng.choice([1, 2, 5, 16, 17, 33]))) for _ in range(count)]
    return [Asked(f"r{i}", EVERY_MODEL[i % len(EVERY_MODEL)], p, rng.randrange(1, 20)) for i, p in enumerate(prompts)]


def check(zoo: Zoo, asked: list[Asked], got: dict[str, list[int]]) -> None:
    for request in asked:
        assert got[request.name] == zoo.answer(request), request


@ON_RANKS
@pytest.mark.parametrize("family", ["llama", "mistral", "gemma2", "qwen3", "gemma4_e2b"])
def test_speculation_in_mixed_batches_answers_as_peft_does(zoo_of, family: str, ranks: int) -> None:
    zoo, asked = zoo_of(family), some_requests(seed=1, count=18)
    engine = eager_engine(zoo, asked, max_num_batched_tokens=29, tensor_parallel_size=ranks)
    check(zoo, asked, serve(zoo, engine, asked, arrivals=[i // 2 for i in range(len(asked))]))
    stats = engine.stats()
    assert 0 < stats.accepted_tokens < stats.drafted_tokens
    assert stats.output_tokens == stats.ended.output == sum(one.output for one in asked)
    assert stats.pages_kv == stats.waiting == stats.running == 0
    engine.close()


@settings(
    max_examples=10, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow]
)
@given(
    seed=st.integers(0, 10_000),
    arrivals=st.lists(st.integers(0, 12), min_size=7, max_size=7),
    budget=st.integers(8, 40),
    preempt_every=st.sampled_from([3, 1000]),
)
def test_speculation_while_steps_run_ahead_answers_as_peft_does(
    zoo_of, seed: int, arrivals: list[int], budget: int, preempt_every: int
) -> None:
    """Drafts follow tokens that the host does not know yet, and sequences end while such a step is launched."""
    zoo, asked = zoo_of("llama"), some_requests(seed, count=7)
    engine, runner = late_engine(zoo, max_num_batched_tokens=budget)
    answers = {one.name: zoo.answer(one) for one in asked}
    draft_always(engine.scheduler, lambda own: answers[own.id], seed)
    scheduler, plan = engine.scheduler, engine.scheduler.plan

    def preempting_plan():
        if scheduler.running and engine.stats().steps % preempt_every == 2:
            scheduler.state.preempt(scheduler.running[-1])
        return plan()

    scheduler.plan = preempting_plan
    check(zoo, asked, serve(zoo, engine, asked, arrivals))
    assert runner.pending or all(one.output == 1 for one in asked), "no step was planned ahead"
    stats = engine.stats()
    assert stats.output_tokens == stats.ended.output == sum(one.output for one in asked)
    assert stats.pages_kv == stats.waiting == stats.running == 0
    assert engine.is_idle


@pytest.mark.parametrize("at", range(1, 9))
def test_speculation_while_steps_run_ahead_ends_an_answer_at_its_stop_token(zoo_of, at: int) -> None:
    """The token ends it as a draft, as the token after a draft, or while the next step with drafts is launched."""
    zoo = zoo_of("llama")
    stopping, other = Asked("s", None, (5, 6, 7), 9), Asked("o", "plain", (9, 8), 9)
    answers = {one.name: zoo.answer(one) for one in (stopping, other)}
    tokens, stop = answers["s"], answers["s"][at - 1]
    engine, _ = late_engine(zoo)
    draft_always(engine.scheduler, lambda own: answers[own.id], at, most=2)
    engine.submit(to_request(zoo, stopping, stop_token_ids=(stop,)))
    engine.submit(to_request(zoo, other))
    told: dict[str, list[TokenEvent]] = {"s": [], "o": []}
    while not engine.is_idle:
        for event in report.events if (report := engine.step()) else []:
            told[event.request_id].append(event)
    assert [event.token_id for event in told["s"]] == tokens[: tokens.index(stop) + 1]
    assert told["s"][-1].finish_reason == "stop"
    assert [event.token_id for event in told["o"]] == answers["o"]
    assert engine.stats().pages_kv == 0


def test_drafts_of_text_that_repeats_are_found_while_steps_run_ahead(zoo_of) -> None:
    """The drafter guesses the token that only the device knows, and leaves it out."""
    zoo = zoo_of("llama")
    asked = Asked("r", "plain", (5, 6, 7), 30)
    answer = zoo.answer(asked)
    copied = Asked("c", "plain", (5, 6, 7, *answer[:20]), 9)
    engine, _ = late_engine(zoo, speculation="ngram", max_draft_tokens=4)
    engine.scheduler.speculation.count_paying = lambda rate, rows, expected, most, ahead_seconds=0.0: most
    engine.scheduler.speculation.times = cast(
        Any, SimpleNamespace(is_known=True, is_measured=lambda rows: True, ahead_seconds=0.0, observe=lambda *_: None)
    )
    check(zoo, [copied], serve(zoo, engine, [copied]))
    assert engine.stats().drafted_tokens > 0


@ON_RANKS
@settings(
    max_examples=8, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow]
)
@given(
    seed=st.integers(0, 10_000),
    arrivals=st.lists(st.integers(0, 12), min_size=7, max_size=7),
    budget=st.integers(8, 40),
    block_size=st.sampled_from([8, 11, 16]),
    preempt_every=st.sampled_from([3, 1000]),
)
def test_speculation_in_any_order_of_arrivals_answers_as_peft_does(
    zoo_of, seed: int, arrivals: list[int], budget: int, block_size: int, preempt_every: int, ranks: int
) -> None:
    zoo, asked = zoo_of("llama"), some_requests(seed, count=7)
    sizes = {"max_num_batched_tokens": budget, "block_size": block_size * ranks}  # a rank's pages hold half of a token
    engine = eager_engine(zoo, asked, seed, tensor_parallel_size=ranks, **sizes)
    scheduler, plan = engine.scheduler, engine.scheduler.plan

    def preempting_plan():
        if scheduler.running and engine.stats().steps % preempt_every == 2:
            scheduler.state.preempt(scheduler.running[-1])
        return plan()

    scheduler.plan = preempting_plan
    check(zoo, asked, serve(zoo, engine, asked, arrivals))
    engine.close()


@ON_RANKS
@pytest.mark.parametrize("params", [{}, {"temperature": 1.3, "seed": 3}, {"temperature": 1.0, "seed": 5, "top_p": 0.9}])
def test_speculation_gives_the_same_seeded_answer_log_probabilities_and_end(zoo_of, params: dict, ranks: int) -> None:
    zoo, asked = zoo_of("llama"), Asked("r", "plain", (5, 6, 7), 24)
    steer = {"repetition_penalty": 1.2, "presence_penalty": 0.3, "logit_bias": {9: 1.5}, "logprobs": 2} | params

    def run(engine: Engine) -> list[TokenEvent]:
        engine.submit(to_request(zoo, asked, **steer))
        events = []
        while not engine.is_idle:
            report = engine.step()
            events += report.events if report else []
        return events

    alone = run(zoo.engine())
    engine = zoo.engine(tensor_parallel_size=ranks)
    draft_always(engine.scheduler, lambda own: [event.token_id for event in alone])
    drafted = run(engine)
    assert [event.token_id for event in drafted] == [event.token_id for event in alone]
    assert [event.logprob for event in drafted] == pytest.approx([event.logprob for event in alone], abs=1e-4)
    assert drafted[-1].count == alone[-1].count
    assert engine.stats().accepted_tokens > 5
    assert engine.stats().steps < 24
    engine.close()


def test_speculation_stops_at_a_stop_token_inside_an_accepted_run(zoo_of) -> None:
    zoo, asked = zoo_of("llama"), Asked("r", None, (5, 6, 7), 12)
    answer = zoo.answer(asked)
    place = next(i for i in range(4, 12) if answer.index(answer[i]) == i)
    engine = zoo.engine()
    draft_always(engine.scheduler, lambda own: answer)
    engine.scheduler.speculation.guess = lambda own, count: answer[own.num_output_tokens :][:count]
    engine.scheduler.speculation.count_paying = lambda rate, rows, expected, most, ahead_seconds=0.0: most
    engine.submit(to_request(zoo, asked, stop_token_ids=(answer[place],)))
    events = []
    while not engine.is_idle:
        report = engine.step()
        events += report.events if report else []
    assert [event.token_id for event in events] == answer[: place + 1]
    assert [event.finish_reason for event in events] == [None] * place + ["stop"]
    assert events[-1].count is not None
    assert events[-1].count.tokens.output == place + 1
    assert engine.stats().pages_kv == 0


def test_speculation_by_itself_finds_a_text_that_repeats_and_takes_fewer_steps() -> None:
    """Real lookups under the real rule, on a device on which a row costs a hundredth of a step."""
    steps = []
    for most in (0, 8):
        harness = Harness(100, policy=Policy(max_draft_tokens=most), pace=(0.1, 0.001), max_tokens=64)
        harness.choose = lambda own, token_ids: len(token_ids) % 7
        harness.submit("warm", 9, 9)
        harness.run()
        harness.submit("copies", 9, 150)
        commits = harness.scheduler.state.num_commits
        harness.run()
        assert harness.generated["copies"] == 150
        steps.append(harness.scheduler.state.num_commits - commits)
    assert steps[0] == 150
    assert steps[1] < 40


class ConstantHead:
    """A head that always drafts the token 7."""

    def knows(self, sequence: Sequence) -> bool:
        return True

    def draft(self, asked: list[tuple[Sequence, int]]) -> list[list[int]]:
        return [[7] * count for _, count in asked]


def decoding_seconds(
    most: int, head: ConstantHead | None, choose: Callable[[Sequence, list[int]], int], count: int = 1
) -> tuple[float, Harness, Counter[int]]:
    """Return the virtual seconds of `count` answers, under the real rule where a row costs a tenth of a step, and the
    steps by their drafts."""
    harness = Harness(4000, max_num_seqs=8, policy=Policy(max_draft_tokens=most), pace=(0.1, 0.01), max_tokens=64)
    harness.choose = choose
    harness.scheduler.speculation.head = head
    lengths: Counter[int] = Counter()
    plan = harness.scheduler.plan

    def counting() -> Step:
        step = plan()
        lengths[sum(len(chunk.drafts) for chunk in step.chunks)] += 1
        return step

    harness.scheduler.plan = counting
    for number in range(count):
        harness.submit(f"r{number}", 5, 700)
    harness.run(1000)
    return harness.time, harness, lengths


def unlike_any_draft(own: Sequence, token_ids: list[int]) -> int:
    """Return a token that neither prompt lookup nor `ConstantHead` drafts, in a text full of repetitions."""
    drafted = naive_lookup(token_ids[-40:], 1)
    return next(token for token in (1, 2, 3) if token not in drafted)


@pytest.mark.parametrize("count", [1, 4])
@pytest.mark.parametrize("head", [None, ConstantHead()], ids=["ngram", "mtp"])
def test_drafts_that_are_never_accepted_end_and_are_tried_again_only_rarely(head, count: int) -> None:
    plain, _, _ = decoding_seconds(0, head, unlike_any_draft, count)
    seconds, harness, lengths = decoding_seconds(8, head, unlike_any_draft, count)
    counters, times = harness.scheduler.state.counters, harness.scheduler.speculation.times
    assert counters.drafted_tokens > 0, "it was tried"
    assert sum(lengths.values()) - lengths[0] < 0.03 * sum(lengths.values())
    assert seconds < 1.02 * plain
    assert times.seconds(count) == pytest.approx(0.1 + 0.01 * count)


@pytest.mark.parametrize("head", [None, ConstantHead()], ids=["ngram", "mtp"])
def test_time_of_a_step_without_drafts_stays_measured_while_all_drafts_are_accepted(head) -> None:
    plain, _, _ = decoding_seconds(0, head, lambda own, token_ids: 7)
    seconds, harness, lengths = decoding_seconds(8, head, lambda own, token_ids: 7)
    assert seconds < 0.3 * plain
    assert harness.scheduler.speculation.times.is_measured(1)
    assert 2 < lengths[0] < 0.2 * sum(lengths.values())


class SlowHead(ConstantHead):
    """A head that takes time for each draft of all sequences."""

    def __init__(self, seconds: float) -> None:
        self.seconds = seconds
        self.harness: Harness | None = None

    def draft(self, asked: list[tuple[Sequence, int]]) -> list[list[int]]:
        assert self.harness is not None
        self.harness.time += self.seconds * max(count for _, count in asked)
        return super().draft(asked)


@pytest.mark.parametrize("state_pages", [0, 2])
@pytest.mark.parametrize("count", [1, 4])
@pytest.mark.parametrize("head_seconds", [0.01, 0.04, 0.1])
def test_drafts_of_a_head_pay_for_its_time(head_seconds: float, count: int, state_pages: int) -> None:
    """Half of the drafts are right. Steps that compute accepted drafts again have as many rows as steps with drafts,
    and take less time."""
    taken = []
    for most in (0, 5):
        harness = Harness(
            4000, max_num_seqs=8, policy=Policy(max_draft_tokens=most), pace=(0.1, 0.01), state_pages=state_pages
        )
        harness.choose = lambda own, token_ids: 7 if zlib.crc32(repr((own.id, len(token_ids))).encode()) % 2 else 1
        harness.scheduler.speculation.head = head = SlowHead(head_seconds)
        head.harness = harness
        for number in range(count):
            harness.submit(f"r{number}", 5, 700)
        harness.run(1000)
        taken.append(harness.time)
        drafted = harness.scheduler.state.counters.drafted_tokens
    assert taken[1] < 1.03 * taken[0]
    if head_seconds == 0.01 and (count, state_pages) != (4, 2):  # there a draft just does not pay
        assert drafted > 500
        assert taken[1] < 0.95 * taken[0]


def test_first_step_with_drafts_that_took_too_long_does_not_forbid_drafts_for_ever() -> None:
    harness = Harness(policy=Policy(max_draft_tokens=1))
    found = harness.scheduler.speculation
    for _ in range(20):
        found.times.observe(1, 0.1)
        harness.scheduler.state.step_time.observe(1, 0.1)
    found.times.observe(2, 5.0)
    assert found.count_paying(0.9, rows=1, expected=1.0, most=1) == 0
    for _ in range(DecodeTimes.FORGOTTEN + 1):
        found.times.observe(1, 0.1)
    assert found.count_paying(0.9, rows=1, expected=1.0, most=1) == 1
    found.times.observe(2, 0.1)
    assert found.times.seconds(2) == pytest.approx(0.1)


def test_slow_first_run_of_a_head_does_not_forbid_the_next_ones() -> None:
    harness = Harness(policy=Policy(max_draft_tokens=1))
    times = harness.scheduler.speculation.times
    for _ in range(20):
        harness.scheduler.state.step_time.observe(1, 0.1)
        times.observe(1, 0.1)
    times.observe(2, 9.0, 2)
    assert times.ahead_seconds == 0.0
    for _ in range(DecodeTimes.KEPT - 1):
        times.observe(2, times.seconds(2) + 0.04, 2)
    assert times.ahead_seconds == pytest.approx(0.02)
    times.observe(2, 9.0, 2)
    assert times.ahead_seconds < 0.06, "one slow step"
    for _ in range(DecodeTimes.FORGOTTEN + 1):
        times.observe(1, 0.1)
    assert times.ahead_seconds == 0.0, "it is tried again"


def test_times_are_measured_for_the_latest_steps_alone() -> None:
    times = DecodeTimes(StepTimeModel())
    assert not times.is_measured(1)
    times.observe(4, 0.1)
    assert not times.is_measured(3)
    assert times.is_measured(4)
    for _ in range(DecodeTimes.RENEWED):
        times.observe(9, 0.2)
    assert times.is_measured(4)
    times.observe(9, 0.2)
    assert not times.is_measured(8)
    times.observe(4, 0.2)
    assert times.seconds(4) == pytest.approx(0.15), "a mean of one earlier step"


def test_drafts_are_labelled_for_the_revisions_with_most_and_summed_for_others() -> None:
    harness = Harness(policy=Policy(max_draft_tokens=4))
    revisions = {("t", f"d{i}"): Acceptance(0.9, num_drafted=i + 1, num_accepted=i) for i in range(25)}
    counters = harness.scheduler.state.counters
    counters.drafted_tokens, counters.accepted_tokens = sum(range(26)) + 7, sum(range(25)) + 3
    told = labelled_drafts(revisions, counters)
    assert len(told) == 21
    assert (told[0].revision, told[0].drafted, told[0].accepted) == ("d24", 25, 24)
    assert (told[-1].revision, told[-1].drafted) == (OTHERS, sum(range(6)) + 7)
