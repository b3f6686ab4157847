"""Constrained answers: what each row may choose, and that only constrained rows are concerned."""

from __future__ import annotations

import re
import threading
import time
from dataclasses import replace
from pathlib import Path

import llguidance
import msgspec
import numpy as np
import pytest
import torch
from adapter_zoo import load
from delayed_runner import LateRunner
from eager_drafts import draft_always
from preempting import preempting
from scheduler_harness import decoding
from tiny_base import byte_tokenizer, make_base

from loramux.common.settings.serving import ClassDeadlines
from loramux.constraints.grammars import compile_grammar
from loramux.engine.engine import Engine, build_engine
from loramux.engine.execution import constraints as compiling
from loramux.engine.execution.constraints import (
    MAX_COMPILED_OF_TENANT,
    Constraints,
    GrammarCompiler,
    TokenMasks,
    load_vocabulary,
)
from loramux.engine.execution.sampler import Sampler
from loramux.engine.messages import Constraint, Request, SamplingParams, TokenEvent
from loramux.engine.scheduling import state
from loramux.engine.scheduling.sequence import PENDING, Sequence

EOS, BOS, VOCAB = 256, 257, 260
THOUGHT = BOS
"""Stands for the token that ends a thought."""


def regex(pattern: str) -> str:
    return llguidance.LLMatcher.grammar_from_regex(pattern)


def request(
    name: str,
    pattern: str | None,
    *,
    after: int | None = None,
    opening: int | None = None,
    entry: int | None = None,
    eos_token_ids: tuple[int, ...] = (),
    **params,
) -> Request:
    constraint = None
    if pattern:
        constraint = Constraint(grammar=regex(pattern), field="f", after=after, opening=opening, entry=entry)
    return Request(
        id=name,
        tenant="t",
        prompt_token_ids=[1, 2],
        sampling=SamplingParams(**{"max_tokens": 24, "temperature": 0.0} | params),
        constraint=constraint,
        eos_token_ids=eos_token_ids,
    )


def sequence(constraints: Constraints, pattern: str | None, output: str = "", **params) -> Sequence:
    asked = request(f"r{np.random.default_rng().integers(1 << 60)}", pattern, **params)
    if pattern is not None:
        assert constraints.begin(asked, constraints.compile(asked).result()) is None
    made = Sequence(asked, 0.0)
    made.token_ids += output.encode()
    return made


def allowed(masks: TokenMasks, number: int = 0) -> list[int]:
    bits = np.unpackbits(masks.words[number].view(np.uint8), bitorder="little")
    return np.flatnonzero(bits[:VOCAB]).tolist()


@pytest.fixture(scope="module")
def tokenizer() -> llguidance.LLTokenizer:
    from llguidance.hf import from_tokenizer

    return from_tokenizer(byte_tokenizer(), n_vocab=VOCAB, eos_token=[EOS])


@pytest.fixture
def constraints(tokenizer: llguidance.LLTokenizer):
    made = Constraints(tokenizer, (EOS,))
    yield made
    made.close()


def test_masks_name_the_rows_of_constrained_sequences_only(constraints: Constraints) -> None:
    rows = [sequence(constraints, None), sequence(constraints, "ab|cd"), sequence(constraints, "ab|cd", "c")]
    masks = constraints.masks(rows)
    assert masks.rows.tolist() == [1, 2]
    assert [allowed(masks, n) for n in range(2)] == [[97, 99], [100]]
    assert constraints.masks([rows[0]]) is None


def test_masks_after_the_whole_grammar_allow_the_end_only(constraints: Constraints) -> None:
    assert allowed(constraints.masks([sequence(constraints, "ab?", "a")])) == [98, EOS]
    assert allowed(constraints.masks([sequence(constraints, "ab?", "ab")])) == [EOS]


def test_masks_of_an_answer_that_ended_with_a_fault_read_no_token_that_never_came(constraints: Constraints) -> None:
    """On a GPU one more row of it is launched; the other row stays constrained."""
    ended, beside = sequence(constraints, "ab|cd"), sequence(constraints, "ab|cd", "c")
    ended.token_ids.append(PENDING)
    assert allowed(constraints.masks([ended, beside]), 1) == [100]


@pytest.mark.parametrize("added", [VOCAB, 300, 1 << 20])
def test_masks_after_a_draft_that_is_no_token_of_the_grammars_leave_the_answer_as_it_was(
    constraints: Constraints, added: int
) -> None:
    """A prompt with tokens that an adapter has added is copied into drafts; the grammar knows the base's tokens alone.
    Also where a thought ends among the drafts."""
    plain, thinks = sequence(constraints, "abcd", "a"), sequence(constraints, "abcd", after=THOUGHT)
    for _ in range(2):
        masks = constraints.masks([plain, thinks], {plain: [98, added, 99], thinks: [added, THOUGHT, 97, added]})
        assert not masks.faults
        assert masks.rows.tolist() == list(range(9))
        assert [allowed(masks, n) for n in (0, 1, 6, 7)] == [[98], [99], [97], [98]]
    plain.token_ids.append(98)
    assert allowed(constraints.masks([plain])) == [99]


def test_masks_allow_the_ends_of_a_revision_in_place_of_the_bases(constraints: Constraints) -> None:
    s = sequence(constraints, "ab?", "a", eos_token_ids=(258, 259))
    assert allowed(constraints.masks([s])) == [98, 258, 259]
    assert allowed(constraints.masks([sequence(constraints, "ab?", "a", eos_token_ids=(258,), min_tokens=2)])) == [98]


def test_masks_let_an_answer_begin_with_a_thought_or_with_the_grammar(constraints: Constraints) -> None:
    opened, direct = (sequence(constraints, "ab", after=THOUGHT, opening=258) for _ in range(2))
    assert allowed(constraints.masks([opened])) == allowed(constraints.masks([direct])) == [97, 258]
    masks = constraints.masks([opened], {opened: [258, 7, THOUGHT, 97]})
    assert [allowed(masks, n) for n in (0, 3, 4)] == [[97, 258], [97], [98]]
    assert [len(allowed(masks, n)) for n in (1, 2)] == [VOCAB] * 2
    assert [allowed(constraints.masks([direct], {direct: [97]}), n) for n in range(2)] == [[97, 258], [98]]
    opened.token_ids += [258, 5]
    direct.token_ids += [97]
    assert allowed(constraints.masks([opened])) == list(range(VOCAB))
    assert allowed(constraints.masks([direct])) == [98]
    opened.token_ids += [THOUGHT]
    assert allowed(constraints.masks([opened])) == [97]


def test_masks_give_a_row_to_every_drafted_token(constraints: Constraints) -> None:
    """Row i holds the tokens that may follow the sequence and the first i drafted tokens; the state does not change."""
    drafted, plain = sequence(constraints, "ab|cd"), sequence(constraints, "x")
    masks = constraints.masks([drafted, sequence(constraints, None), plain], {drafted: [97, 98, EOS]})
    assert masks.rows.tolist() == [0, 1, 2, 3, 5]
    assert [allowed(masks, n) for n in (0, 1, 2, 4)] == [[97, 99], [98], [EOS], [120]]
    drafted.token_ids += [99]
    assert allowed(constraints.masks([drafted])) == [100]


def test_masks_leave_a_thought_free_and_let_the_answer_end_in_it(constraints: Constraints) -> None:
    s = sequence(constraints, "ab", "thinking", after=THOUGHT)
    assert allowed(constraints.masks([s])) == list(range(VOCAB))
    masks = constraints.masks([s], {s: [100, THOUGHT, 97]})
    assert [len(allowed(masks, n)) for n in range(2)] == [VOCAB] * 2
    assert [allowed(masks, n) for n in (2, 3)] == [[97], [98]]
    s.token_ids += [THOUGHT, 97]
    assert allowed(constraints.masks([s])) == [98]


def test_masks_in_a_thought_have_a_revisions_ends_in_place_of_the_bases_and_none_before_min_tokens(
    constraints: Constraints,
) -> None:
    s = sequence(constraints, "ab", "x", after=THOUGHT, eos_token_ids=(258,))
    assert allowed(constraints.masks([s])) == [t for t in range(VOCAB) if t != EOS]
    s = sequence(constraints, "ab", "x", after=THOUGHT, min_tokens=3)
    assert allowed(constraints.masks([s])) == [t for t in range(VOCAB) if t != EOS]


def test_entry_of_the_grammar_ends_a_thought_and_is_read_by_the_grammar(constraints: Constraints) -> None:
    """So a call that begins within a thought has the form of a call, drafted or not."""
    s = sequence(constraints, "kab", "thin", after=THOUGHT, entry=ord("k"))
    masks = constraints.masks([s], {s: [100, ord("k"), 97]})
    assert [len(allowed(masks, n)) for n in range(2)] == [VOCAB] * 2
    assert [allowed(masks, n) for n in (2, 3)] == [[97], [98]]
    s.token_ids += [ord("k")]
    assert allowed(constraints.masks([s])) == [97]
    s.token_ids += [97, THOUGHT]
    assert constraints.masks([s]).faults


def test_masks_of_a_state_built_from_tokens_equal_those_of_one_that_followed_them(constraints: Constraints) -> None:
    """So an answer that goes on elsewhere, or that was preempted, is constrained as if it had not moved."""
    followed = sequence(constraints, "(ab|cd){1,9}")
    for byte in b"abcdab":
        constraints.masks([followed])
        followed.token_ids.append(byte)
    rebuilt = sequence(constraints, "(ab|cd){1,9}", "abcdab")
    assert allowed(constraints.masks([followed])) == allowed(constraints.masks([rebuilt])) == [97, 99, EOS]


def test_masks_forbid_an_end_before_min_tokens_unless_nothing_else_is_left(constraints: Constraints) -> None:
    assert allowed(constraints.masks([sequence(constraints, "ab?", "a", min_tokens=4)])) == [98]
    assert allowed(constraints.masks([sequence(constraints, "ab?", "ab", min_tokens=4)])) == [EOS]


def test_compile_of_an_invalid_grammar_names_the_field(constraints: Constraints) -> None:
    asked = request("bad", "ab")
    broken = replace_constraint(asked, '{"grammars":[{"lark_grammar":"start: nothing"}]}')
    fault = constraints.begin(broken, constraints.compile(broken).result())
    assert (fault.code, fault.field) == ("invalid_constraint", "f")
    assert "nothing" in fault.message


def replace_constraint(asked: Request, grammar: str) -> Request:
    return msgspec.structs.replace(asked, constraint=Constraint(grammar=grammar, field="f"))


def test_compiler_keeps_a_bounded_number_of_grammars_of_a_tenant(tokenizer: llguidance.LLTokenizer) -> None:
    compiler = GrammarCompiler(tokenizer)
    first = compiler.compile("t", regex("a0"))
    assert compiler.compile("t", regex("a0")) is first
    assert compiler.compile("other", regex("a0")) is not first
    for i in range(1, MAX_COMPILED_OF_TENANT + 1):
        compiler.compile("t", regex(f"a{i}")).result(10)
    assert compiler.compile("t", regex("a0")) is not first
    compiler.close()


def test_sampler_of_a_constrained_row_takes_the_best_allowed_token(constraints: Constraints) -> None:
    """Log probabilities are those of the allowed tokens, and there are fewer alternatives than requested if fewer are
    allowed."""
    rows = [sequence(constraints, "a|b", logprobs=4), sequence(constraints, None, logprobs=2)]
    logits = torch.zeros(2, VOCAB)
    logits[:, 98], logits[:, 5] = 1.0, 9.0
    constrained, free = Sampler((EOS,)).sample(logits, decoding(rows), constraints.masks(rows))
    assert (constrained.token_id, free.token_id) == (98, 5)
    assert {top.token_id for top in constrained.top_logprobs} == {97, 98}
    assert sum(np.exp(top.logprob) for top in constrained.top_logprobs) == pytest.approx(1.0)
    assert free.top_logprobs[0].token_id == 5


@pytest.mark.parametrize("temperature", [0.0, 1.5])
def test_sampler_of_a_constrained_row_follows_the_grammar_to_its_end(constraints: Constraints, temperature) -> None:
    s, sampler = sequence(constraints, "[0-9]{3}-[a-f]{2}", temperature=temperature, ignore_eos=True), Sampler((EOS,))
    torch.manual_seed(0)
    event = TokenEvent(request_id="")
    while event.finish_reason is None:
        (event,) = sampler.sample(torch.randn(1, VOCAB), decoding([s]), constraints.masks([s]))
        s.token_ids.append(event.token_id)
    assert re.fullmatch(r"[0-9]{3}-[a-f]{2}", bytes(s.token_ids[2:-1]).decode())
    assert event.finish_reason == "stop"


# in an engine


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_base(tmp_path_factory.mktemp("base"))


def engine_of(base: Path, *, late: bool, **settings) -> Engine:
    loaded, chosen = load(base, **settings)
    if late:
        loaded = replace(loaded, runner=LateRunner(loaded.runner))
    return build_engine(loaded, chosen, wake=lambda: None)


def run(engine: Engine, asked: list[Request], on_step=lambda number: None) -> dict[str, list[TokenEvent]]:
    events: dict[str, list[TokenEvent]] = {one.id: [] for one in asked}
    for one in asked:
        engine.submit(one)
    number = 0
    while not engine.is_idle:
        on_step(number := number + 1)
        report = engine.step()
        for event in report.events if report else []:
            events[event.request_id].append(event)
    return events


def text(events: list[TokenEvent]) -> str:
    return bytes(e.token_id for e in events if e.token_id is not None and e.token_id < EOS).decode(errors="replace")


PATTERNS = ["[0-9]{4}", "(yes|no), (yes|no)", "x{2,7}y", "[a-c]{12}"]


@pytest.mark.parametrize("late", [False, True], ids=["in turn", "one step ahead"])
def test_engine_constrains_half_of_a_batch_and_leaves_the_other_half_alone(base: Path, late: bool) -> None:
    params = {"temperature": 0.8, "ignore_eos": True}
    free = [request(f"free{i}", None, seed=i, **params) for i in range(4)]
    bound = [request(f"bound{i}", pattern, seed=i, **params) for i, pattern in enumerate(PATTERNS)]
    alone = run(engine_of(base, late=late), free)
    mixed = run(engine_of(base, late=late), [one for pair in zip(free, bound, strict=True) for one in pair])
    for one in free:
        assert [e.token_id for e in mixed[one.id]] == [e.token_id for e in alone[one.id]]
    for one, pattern in zip(bound, PATTERNS, strict=True):
        assert re.fullmatch(pattern, text(mixed[one.id]))
        assert mixed[one.id][-1].finish_reason == "stop"


@pytest.mark.parametrize("late", [False, True], ids=["in turn", "one step ahead"])
def test_engine_preempted_constrained_answers_are_the_same(base: Path, late: bool) -> None:
    asked = [request(f"r{i}", pattern, seed=i, temperature=1.0) for i, pattern in enumerate(PATTERNS)]
    undisturbed = run(engine_of(base, late=late), asked)
    engine = engine_of(base, late=late, swap_bytes=0)

    def preempt(number: int) -> None:
        if number % 3 == 2 and engine.scheduler.running:
            engine.scheduler.state.preempt(engine.scheduler.running[-1])

    disturbed = run(engine, asked, preempt)
    assert engine.stats().preemptions > 1
    assert {name: text(events) for name, events in disturbed.items()} == {
        name: text(events) for name, events in undisturbed.items()
    }


@pytest.mark.parametrize("told", [1, 3])
def test_engine_continues_a_constrained_answer_that_another_has_begun(base: Path, told: int) -> None:
    """From the tokens that were told, as after an engine's death; the prompt is no part of the answer."""
    whole = request("r", "(ab|cd){4}", seed=3, temperature=1.0)
    tokens = [event.token_id for event in run(engine_of(base, late=False), [whole])["r"]]
    rest = msgspec.structs.replace(whole, output_token_ids=tokens[:told])
    assert [event.token_id for event in run(engine_of(base, late=True), [rest])["r"]] == tokens[told:]


def test_engine_that_speculates_gives_the_same_constrained_answers(base: Path) -> None:
    patterns = ["(ab){12}", "(abc|abd){6}", "[a-c]{12}", None]
    asked = [request(f"r{i}", pattern, seed=i, temperature=0.7, max_tokens=30) for i, pattern in enumerate(patterns)]
    speculated = run(engine_of(base, late=False, speculation="ngram"), asked)
    one_by_one = run(engine_of(base, late=False), asked)
    assert {name: text(events) for name, events in speculated.items()} == {
        name: text(events) for name, events in one_by_one.items()
    }


@pytest.mark.parametrize("ranks", [1, 2])
def test_engine_constrained_answers_with_drafts_are_the_same(base: Path, ranks: int) -> None:
    """Right and wrong drafts, allowed by the grammar and not, of constrained and other rows side by side."""
    asked = [request(f"r{i}", pattern, seed=i, temperature=1.0) for i, pattern in enumerate([*PATTERNS, None])]
    alone = run(engine_of(base, late=False), asked)
    engine = preempting(engine_of(base, late=False, tensor_parallel_size=ranks))
    draft_always(engine.scheduler, lambda own: [event.token_id for event in alone[own.id]])
    drafted = run(engine, asked)
    for one in asked:
        assert [event.token_id for event in drafted[one.id]] == [event.token_id for event in alone[one.id]]
        assert drafted[one.id][-1].finish_reason == alone[one.id][-1].finish_reason
    assert engine.stats().accepted_tokens > 5
    assert engine.stats().preemptions > 0
    engine.close()


def test_engine_cut_by_max_tokens_reports_length(base: Path) -> None:
    events = run(engine_of(base, late=False), [request("r", "[0-9]{9}", max_tokens=4)])["r"]
    assert re.fullmatch("[0-9]{4}", text(events))
    assert events[-1].finish_reason == "length"


def test_engine_refuses_a_broken_grammar_and_serves_its_neighbour(base: Path) -> None:
    broken = replace_constraint(request("bad", "a"), '{"grammars":[{"lark_grammar":"start: nothing"}]}')
    events = run(engine_of(base, late=False), [broken, request("good", "ab")])
    assert events["bad"][-1].fault.code == "invalid_constraint"
    assert text(events["good"]) == "ab"


def test_engine_cancels_a_request_whose_grammar_is_being_compiled(base: Path) -> None:
    engine = engine_of(base, late=False)
    engine.submit(request("r", "ab"))
    engine.cancel("r")
    (event,) = engine.step().events
    assert (event.finish_reason, event.count.tokens.total) == ("cancelled", 0)
    assert engine.is_idle


@pytest.mark.parametrize("of_class", [False, True])
def test_deadline_ends_a_request_whose_grammar_is_being_compiled_without_a_command_or_a_wake_up(
    base: Path, monkeypatch: pytest.MonkeyPatch, of_class: bool
) -> None:
    """Unless a choice of its group has begun: then the deadline ends none."""
    go_on, woken = threading.Event(), threading.Semaphore(0)
    monkeypatch.setattr(compiling, "compile_grammar", lambda *of: (go_on.wait(60), compile_grammar(*of))[1])
    loaded, settings = load(base)
    deadlines = ClassDeadlines(standard=200) if of_class else ClassDeadlines()
    scheduler = msgspec.structs.replace(settings.scheduler, deadlines_ms=deadlines)
    settings = msgspec.structs.replace(settings, scheduler=scheduler)
    engine = build_engine(loaded, settings, wake=woken.release)
    late = msgspec.structs.replace(request("late", "ab"), deadline_ms=None if of_class else 200)
    begun = msgspec.structs.replace(request("begun", "ab"), group_started=True, deadline_ms=200)
    events: list[TokenEvent] = []
    try:
        engine.submit(late)
        engine.submit(begun)
        while not events:
            assert engine.wait_seconds < 1
            woken.acquire(timeout=engine.wait_seconds)
            report = engine.step()
            events += report.events if report else []
        assert [(event.request_id, event.fault.code) for event in events] == [("late", "deadline_exceeded")]
        assert engine.stats().missed_deadlines == 1
        go_on.set()
        while not engine.is_idle:
            report = engine.step()
            events += report.events if report else []
        assert text([event for event in events if event.request_id == "begun"]) == "ab"
    finally:
        go_on.set()
        engine.close()


def test_choice_whose_grammar_compiles_until_its_group_is_forgotten_is_not_refused(
    base: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another choice of the group had begun when the deadline passed, so that the deadline ends none."""
    go_on = threading.Event()
    monkeypatch.setattr(compiling, "compile_grammar", lambda *of: (go_on.wait(60), compile_grammar(*of))[1])
    monkeypatch.setattr(state, "MAX_ENDED_GROUPS", 0)
    engine = engine_of(base, late=False)
    first = request("first", None, ignore_eos=True)
    events: list[TokenEvent] = []
    try:
        engine.submit(msgspec.structs.replace(first, group_id="g"))
        engine.step()
        engine.submit(msgspec.structs.replace(request("second", "ab"), group_id="g", deadline_ms=1))
        time.sleep(0.01)
        engine.step()
        engine.cancel("first")
        engine.step()
        assert "second" in engine._compiling
        go_on.set()
        while not engine.is_idle:
            report = engine.step()
            events += report.events if report else []
        assert text([event for event in events if event.request_id == "second"]) == "ab"
    finally:
        go_on.set()
        engine.close()


def test_load_tokenizer_without_files_is_none(tmp_path: Path) -> None:
    assert load_vocabulary(tmp_path, VOCAB, (EOS,)) is None
