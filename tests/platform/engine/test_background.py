"""Prompts of class batch give way to the classes above it, and nothing stands still for that."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scheduler_harness import Harness

from loramux.engine.messages import ServiceClass
from loramux.engine.scheduling.policy import Policy
from loramux.engine.scheduling.sequence import StepBuilder

BATCH, STANDARD, INTERACTIVE = ServiceClass.BATCH, ServiceClass.STANDARD, ServiceClass.INTERACTIVE


def with_room(lead: float = 8192.0, tokens: int = 8, **rest: int) -> Harness:
    """Room for everything: a step has 32 tokens, of which batch's prompts get `tokens` if there are other rows."""
    policy = Policy(background_prefill_tokens=tokens, max_service_lead=lead)
    return Harness(**{"num_pages": 400, "max_num_seqs": 16, "max_tokens": 32} | rest, policy=policy)


def lengths(harness: Harness) -> dict[str, int]:
    """Tokens of each request in the next step, which is run."""
    before = {s.id: s.num_computed for s in harness.scheduler.running}
    harness.step()
    return {s.id: s.num_computed - before.get(s.id, 0) for s in harness.scheduler.running}


def test_prompt_of_class_batch_with_a_decoding_row_has_few_tokens_of_the_step() -> None:
    harness = with_room()
    harness.submit("chat", prompt=4, output=50, service_class=INTERACTIVE, tenant="u")
    harness.step()
    harness.submit("line", prompt=100, output=1, service_class=BATCH)
    assert [lengths(harness)["line"] for _ in range(3)] == [8, 8, 8]
    harness.scheduler.cancel("chat")
    assert lengths(harness) == {"line": 8}, "the next question of a conversation would meet a long step"
    harness.time += harness.scheduler.state.policy.quiet_seconds
    assert lengths(harness) == {"line": 32}, "alone it has the whole step again"


def test_batch_prompts_lengthen_a_step_by_a_share_of_its_fixed_time() -> None:
    """A step takes 8 ms and 0.1 a token: a quarter of 8 ms is 20 tokens, with any other rows."""
    harness = with_room(tokens=128, max_tokens=512, num_pages=2000, pace=(0.008, 0.0001))
    harness.submit("chat", prompt=300, output=600, service_class=INTERACTIVE, tenant="u")
    for number in range(40):
        harness.submit(f"early {number}", prompt=100 + number, output=2, service_class=INTERACTIVE, tenant="u")
        harness.step()
    harness.submit("line", prompt=400, output=1, service_class=BATCH)
    assert [lengths(harness)["line"] for _ in range(2)] == [20, 20]


def test_batch_prompts_move_where_tokens_take_all_of_a_step() -> None:
    harness = with_room(tokens=128, max_tokens=512, num_pages=2000, pace=(0.0, 0.001))
    harness.submit("chat", prompt=300, output=600, service_class=INTERACTIVE, tenant="u")
    for _ in range(10):
        harness.step()
    harness.submit("line", prompt=400, output=1, service_class=BATCH)
    assert lengths(harness)["line"] == 16


def test_lone_batch_has_every_token_of_the_step() -> None:
    harness = with_room()
    for number in range(3):
        harness.submit(f"line {number}", prompt=100, output=1, service_class=BATCH)
    assert sum(lengths(harness).values()) == 32


@pytest.mark.parametrize("service_class", [STANDARD, INTERACTIVE])
def test_waiting_request_of_a_higher_class_is_prefilled_before_a_running_batch_prompt(
    service_class: ServiceClass,
) -> None:
    harness = with_room()
    harness.submit("line", prompt=100, output=1, service_class=BATCH)
    harness.step()
    harness.submit("chat", prompt=30, output=1, service_class=service_class, tenant="u")
    assert lengths(harness)["line"] == 2, "the rest of the step"
    assert harness.finished == {"chat": "length"}


def test_standard_prompts_with_interactive_rows_have_the_whole_step() -> None:
    """A first token is waited for in both classes."""
    harness = with_room()
    harness.submit("first", prompt=4, output=50, service_class=INTERACTIVE, tenant="u")
    harness.step()
    harness.submit("second", prompt=100, output=1, service_class=STANDARD)
    assert lengths(harness) == {"first": 1, "second": 31}


def test_line_that_must_wait_for_the_next_step_keeps_no_other_class_out() -> None:
    harness = with_room()
    harness.submit("chat", prompt=4, output=50, service_class=INTERACTIVE, tenant="u")
    for number in range(6):
        harness.submit(f"line {number}", prompt=20, output=1, service_class=BATCH, tenant=f"t{number}")
    for number in range(2):
        harness.submit(f"other {number}", prompt=8, output=50, service_class=STANDARD, tenant="v")
    found = lengths(harness)
    assert (found["chat"], found["other 0"], found["other 1"]) == (4, 8, 8), "lines come before the second"
    assert sum(length for name, length in found.items() if name.startswith("line")) == 8


def test_lines_take_the_tokens_of_a_step_one_after_the_other_and_not_all_at_once() -> None:
    harness = with_room()
    harness.submit("chat", prompt=4, output=50, service_class=INTERACTIVE, tenant="u")
    harness.step()
    for number in range(4):
        harness.submit(f"line {number}", prompt=16, output=20, service_class=BATCH)
    lengths(harness)
    assert {s.id for s in harness.scheduler.running} == {"chat", "line 0"}
    assert lengths(harness)["line 0"] == 8, "those that wait do not take its tokens"


def test_flood_of_chats_holds_a_batch_prompt_up_by_half_the_service_lead_and_no_longer() -> None:
    """Chats fill every step: batch is let back to the share that its weight gives it."""
    harness = with_room(lead=64.0, max_num_seqs=64)
    harness.submit("line", prompt=64, output=1, service_class=BATCH)
    steps = 0
    while "line" not in harness.finished:
        for number in range(2):
            harness.submit(f"chat {steps}.{number}", prompt=32, output=1, service_class=INTERACTIVE, tenant="u")
        harness.step()
        steps += 1
        assert steps < 60, "32 tokens over weight 8 are 4 units a step: 32 units are 8 steps, and then 8 tokens a step"
    assert steps > 4, "they came first"


def test_share_of_batch_is_one_of_the_prompt_tokens_that_decoding_rows_leave() -> None:
    harness = with_room(lead=8.0, tokens=1, num_pages=2000, max_num_seqs=64, max_tokens=512, max_mixed=32)
    harness.submit("row", prompt=4, output=500, service_class=INTERACTIVE, tenant="u")
    harness.step()
    harness.submit("line", prompt=400, output=1, service_class=BATCH)
    found = []
    for number in range(20):
        harness.submit(f"chat {number}", prompt=64, output=1, service_class=INTERACTIVE, tenant="u")
        found.append(lengths(harness)["line"])
    assert max(found) == 4, "an eighth of 32, not of 512"


def test_share_of_batch_counts_attention_to_a_long_context() -> None:
    """A token of the line counts as 9 or 10 of the 64 next to answers: batch's 16 are one token, not six."""
    harness = with_room(tokens=16, num_pages=2000, max_num_seqs=64, max_tokens=400, max_mixed=64, token_context=50.0)
    harness.submit("line", prompt=900, output=1, service_class=BATCH)
    harness.step()
    harness.submit("row", prompt=4, output=500, service_class=INTERACTIVE, tenant="u")
    harness.step()
    row = harness.scheduler.running[-1]
    harness.scheduler.queue.charge(row.flow, 8 * 6000.0)  # so that batch has its share and does not come last
    harness.submit("chat", prompt=300, output=1, service_class=INTERACTIVE, tenant="v")
    assert lengths(harness) == {"line": 1, "row": 1, "chat": 38}
    assert lengths(harness) == {"line": 1, "row": 1, "chat": 26}


def test_tokens_kept_for_running_lines_count_attention_to_their_contexts() -> None:
    """The last three tokens of the line count as 28: the background's 16 are all kept."""
    harness = with_room()
    harness.submit("line", prompt=403, output=1, service_class=BATCH)
    (line,) = harness.scheduler.state.sequences.values()
    line.num_computed = 400
    builder = StepBuilder(64, 8, token_context=50.0, background=line.flow.group, background_left=16)
    builder.keep_for([line])
    assert builder.is_background_full(line)
    builder.release_kept()
    assert builder.background_left == 16


def test_batch_prompts_have_the_whole_step_while_those_above_cannot_join() -> None:
    """The pool is promised to lines, and the chat is too large for it: nothing is gained if they go slowly."""
    harness = with_room(num_pages=14, max_tokens=16)
    harness.submit("line", prompt=40, output=8, service_class=BATCH)
    harness.step()
    harness.submit("chat", prompt=40, output=8, service_class=INTERACTIVE, tenant="u")
    harness.scheduler.running[0].units_at_start = 1000  # it has made no progress, so that it is not preempted
    harness.step()
    harness.scheduler.running[0].units_at_start = 1000
    assert lengths(harness)["line"] == 16


@settings(max_examples=150, deadline=None)
@given(
    requests=st.lists(
        st.tuples(
            st.integers(1, 40),
            st.integers(1, 20),
            st.sampled_from([None, None, "a", "b", "huge"]),
            st.sampled_from(list(ServiceClass)),
            st.sampled_from("tuv"),
            st.integers(0, 4),
        ),
        min_size=1,
        max_size=30,
    ),
    tokens=st.integers(1, 6),
    lead=st.sampled_from([0.0, 8.0, 100.0, 8192.0]),
    pages=st.integers(15, 40),
    rows=st.integers(1, 5),
    guaranteed=st.sampled_from([0.0, 0.3]),
    most=st.sampled_from([0.7, 1.0]),
    cached=st.booleans(),
)
def test_no_step_is_empty_while_something_could_run(
    requests, tokens, lead, pages, rows, guaranteed, most, cached
) -> None:
    """Every request ends, in no more steps than it takes to compute one token at a time, preemptions included."""
    policy = Policy(
        background_prefill_tokens=tokens,
        max_service_lead=lead,
        tenant_guaranteed_pages=guaranteed,
        tenant_max_pages=most,
        prefix_cache=cached,
    )
    harness = Harness(num_pages=pages, max_num_seqs=rows, max_tokens=8, policy=policy)
    empty = 0
    for number, (prompt, output, adapter, service_class, tenant, steps) in enumerate(requests):
        harness.submit(f"r{number}", prompt, output, adapter, service_class, tenant)
        for _ in range(steps):
            harness.store.finish_all()
            harness.step()
    for _ in range(6000):
        if harness.scheduler.is_idle:
            break
        harness.store.finish_all()
        runs = bool(harness.step())
        empty = 0 if runs else empty + 1
        assert empty <= 3, "loads have ended, so that something can run: a load takes two plans"
    assert len(harness.finished) == len(requests)
    for number, (_, output, *_rest) in enumerate(requests):
        assert harness.finished[f"r{number}"] == "error" or harness.generated[f"r{number}"] == output
