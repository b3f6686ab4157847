"""Thoughts, stop strings and ends of answers, cut into tokens anywhere."""

from __future__ import annotations

import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from loramux.constraints.tools import STYLES
from loramux.engine.messages import TokenEvent
from loramux.serving.messages import Delta, Token
from loramux.serving.output import OutputProcessor
from loramux.serving.parts import AnswerReader, Dialect
from loramux.serving.tokenizer import StopAutomaton

EOS = -1
THOUGHT = ("<think>", "</think>")
CALL = '<tool_call>{"name": "f", "arguments": {"v": "a;b"}}</tool_call>'


class Pieces:
    """A vocabulary of the pieces of one answer."""

    def __init__(self, pieces: list[str]) -> None:
        self.pieces = pieces

    def decode(self, ids: list[int]) -> str:
        return "".join(self.pieces[one] for one in ids)

    def token(self, token_id: int) -> Token:
        text = "<eos>" if token_id == EOS else self.pieces[token_id]
        return Token(text, text.encode(), token_id)


class Answer:
    """Return a processor's result for an answer that comes in `pieces`, and then ends by `finish`."""

    def __init__(
        self,
        pieces: list[str],
        *,
        finish: str = "stop",
        stop: tuple[str, ...] = (),
        style: str | None = "hermes",
        in_thought: bool = True,
        thinks: bool = True,
        min_tokens: int = 0,
        with_logprobs: bool = True,
    ) -> None:
        dialect = Dialect(STYLES.get(style or ""), THOUGHT if thinks else None)
        reader = AnswerReader(dialect, in_thought=in_thought, may_think=thinks, may_call=style is not None)
        vocabulary = Pieces(pieces)
        self.output = OutputProcessor(0, vocabulary, [], StopAutomaton(stop), min_tokens, reader)  # type: ignore[arg-type]
        ids = [*range(len(pieces)), *([EOS] if finish == "stop" else [])]
        self.deltas: list[Delta] = []
        for number, token_id in enumerate(ids, start=1):
            event = TokenEvent(
                request_id="r",
                token_id=token_id,
                logprob=-float(number) if with_logprobs else None,
                finish_reason=finish if number == len(ids) else None,
            )
            self.deltas.append(self.output.push(event))
            if self.output.finish_reason is not None:
                break

    @property
    def text(self) -> str:
        return "".join(delta.text for delta in self.deltas)

    @property
    def thought(self) -> str:
        """The thought of the whole answer."""
        is_text = any(delta.is_unended_thought for delta in self.deltas)
        return "" if is_text else "".join(delta.thought for delta in self.deltas)

    @property
    def calls(self) -> str:
        return "".join((call.name or "") + call.arguments for delta in self.deltas for call in delta.calls)

    @property
    def thought_tokens(self) -> int:
        return sum(delta.thought_tokens for delta in self.deltas)

    @property
    def stop_string(self) -> str | None:
        return self.deltas[-1].stop_string


def cuts(text: str) -> list[list[str]]:
    """The text in single characters, whole, in two pieces at each place, and in pieces at random."""
    ways = [list(text), [text], *([text[:i], text[i:]] for i in range(1, len(text)))]
    for seed in range(8):
        rng, rest, pieces = random.Random(seed), text, []
        while rest:
            length = rng.choice([1, 2, 3, 9])
            pieces.append(rest[:length])
            rest = rest[length:]
        ways.append(pieces)
    return ways


@pytest.mark.parametrize(
    ("written", "stop", "thought", "text", "stopped_by"),
    [
        ("a Question: b</think>42", ("Question:",), "a Question: b", "42", None),
        ("a Question: b</think>42 Question: c", ("Question:",), "a Question: b", "42 ", "Question:"),
        ("x</think>y", ("<",), "x", "y", None),
        ("x</think>y", ("think>",), "x", "y", None),
        ("x</think>y", ("</think>y", "x</t"), "x", "y", None),
        ("x</think>\n\ny\n\nz", ("\n\n",), "x", "y", "\n\n"),
        ("x</think>y;", (";z", "y;;"), "x", "y;", None),
    ],
)
def test_stop_strings_match_in_the_text_only(written, stop, thought, text, stopped_by) -> None:
    for pieces in cuts(written):
        answer = Answer(pieces, stop=stop)
        assert (answer.thought, answer.text, answer.stop_string) == (thought, text, stopped_by), pieces
        assert answer.output.finish_reason == "stop"


def test_stop_strings_never_match_in_a_call_or_across_its_mark() -> None:
    for pieces in cuts("t</think>so;" + CALL):
        answer = Answer(pieces, stop=("a;b", '"name"', "<tool", ";<", "call>"))
        assert (answer.thought, answer.text, answer.calls) == ("t", "so;", 'f{"v": "a;b"}'), pieces
        assert answer.stop_string is None


def test_stop_string_before_a_call_ends_the_answer_without_the_call() -> None:
    for pieces in cuts("t</think>so END " + CALL):
        answer = Answer(pieces, stop=("END",))
        assert (answer.text, answer.calls, answer.stop_string) == ("so ", "", "END"), pieces


def test_text_that_may_begin_a_stop_string_is_given_out_before_a_call() -> None:
    for pieces in cuts(f"t</think>y;{CALL}"):
        answer = Answer(pieces, stop=(";z",))
        [first, *_] = [number for number, delta in enumerate(answer.deltas) if delta.calls]
        assert "".join(delta.text for delta in answer.deltas[: first + 1]) == "y;", pieces


def test_answer_that_stops_within_a_thought_that_the_prompt_opened_is_the_text() -> None:
    for pieces in cuts("\n42 </thi"):
        answer = Answer(pieces)
        assert (answer.thought, answer.text, answer.thought_tokens) == ("", "42 </thi", 0), pieces
        assert answer.deltas[-1].is_unended_thought
    assert Answer([]).text == ""


def test_text_that_was_taken_for_a_thought_ends_at_its_first_stop_string() -> None:
    for pieces in cuts("42\nQuestion: b"):
        answer = Answer(pieces, stop=("Question:",))
        assert (answer.text, answer.stop_string) == ("42\n", "Question:"), pieces


def test_text_that_was_taken_for_a_thought_may_be_a_call_without_a_mark() -> None:
    """Llama 3 writes calls without a mark, which no thought can be told from before its end."""
    for pieces in cuts('{"name": "f", "parameters": {"v": 1}}'):
        answer = Answer(pieces, style="llama3")
        assert (answer.thought, answer.text, answer.calls) == ("", "", 'f{"v": 1}'), pieces


@pytest.mark.parametrize("in_thought", [True, False])
def test_thought_that_its_length_cuts_stays_a_thought(in_thought: bool) -> None:
    for pieces in cuts(("" if in_thought else "<think>") + "because"):
        answer = Answer(pieces, finish="length", in_thought=in_thought)
        assert (answer.thought, answer.text, answer.thought_tokens) == ("because", "", len(pieces)), pieces


def test_thought_that_the_model_has_opened_itself_stays_a_thought() -> None:
    for pieces in cuts("<think>because"):
        answer = Answer(pieces, in_thought=False)
        assert (answer.thought, answer.text) == ("because", ""), pieces


@pytest.mark.parametrize("in_thought", [True, False])
def test_call_within_a_thought_is_a_call_and_ends_the_thought(in_thought: bool) -> None:
    opening = "" if in_thought else "<think>"
    for pieces in cuts(f"{opening}hm {CALL}"):
        answer = Answer(pieces, in_thought=in_thought)
        assert (answer.thought, answer.text, answer.calls) == ("hm ", "", 'f{"v": "a;b"}'), pieces
        offsets = [sum(map(len, pieces[:i])) for i in range(len(pieces))]
        assert answer.thought_tokens == sum(offset < len(opening) + 3 for offset in offsets), pieces


def test_marks_of_calls_are_part_of_a_thought_where_no_tools_are_offered() -> None:
    for pieces in cuts(f"hm {CALL}</think>x"):
        answer = Answer(pieces, style=None)
        assert (answer.thought, answer.text) == (f"hm {CALL}", "x"), pieces


@pytest.mark.parametrize("opening", ["", "so </think>"])
def test_text_with_the_mark_of_a_call_and_no_call_is_a_text(opening: str) -> None:
    for pieces in cuts(f"{opening}write <tool_call> around it"):
        answer = Answer(pieces)
        assert (answer.text, answer.calls) == ("write <tool_call> around it", ""), pieces


def test_call_that_its_length_cuts_before_its_name_is_not_shown() -> None:
    for pieces in cuts('</think>so <tool_call>{"na'):
        answer = Answer(pieces, finish="length")
        assert (answer.text, answer.calls) == ("so ", ""), pieces


@settings(max_examples=200, deadline=None)
@given(
    thought=st.text("ab <>/think;", max_size=12).filter(lambda one: "</think>" not in one),
    text=st.text("ab <>/think;", max_size=12),
    stops=st.lists(st.text("ab<;", min_size=1, max_size=3), max_size=2),
    seed=st.integers(0, 99),
)
def test_tokens_of_a_thought_are_counted_by_their_offsets(thought, text, stops, seed) -> None:
    """Split the text anywhere: text may be held back because of a stop string or a marker."""
    written = f"{thought}</think>{text}"
    if written.index("</think>") != len(thought):
        return
    rng, rest, pieces = random.Random(seed), written, []
    while rest:
        length = rng.choice([1, 1, 2, 5, 12])
        pieces.append(rest[:length])
        rest = rest[length:]
    answer = Answer(pieces, stop=tuple(stops), style=None)
    offsets = [sum(map(len, pieces[:i])) for i in range(len(pieces))]
    assert answer.thought_tokens == sum(offset < len(thought) + len("</think>") for offset in offsets)


@settings(max_examples=200, deadline=None)
@given(
    text=st.text("ab; <tool_cal>", min_size=1, max_size=20),
    stops=st.lists(st.text("ab; ", min_size=1, max_size=3), max_size=2),
    finish=st.sampled_from(["stop", "length"]),
    in_thought=st.booleans(),
    seed=st.integers(0, 99),
)
def test_every_token_id_comes_with_its_logprob(text, stops, finish, in_thought, seed) -> None:
    rng, rest, pieces = random.Random(seed), text, []
    while rest:
        length = rng.choice([1, 1, 2, 5])
        pieces.append(rest[:length])
        rest = rest[length:]
    answer = Answer(pieces, stop=tuple(stops), finish=finish, in_thought=in_thought)
    given_out = []
    for delta in answer.deltas:
        logprobs = delta.logprobs + delta.unshown_logprobs
        assert [one.token.id for one in logprobs] == list(delta.token_ids)
        given_out += logprobs
    assert [one.logprob for one in given_out] == [-float(n) for n in range(1, answer.output.num_tokens + 1)]
    ids = [one for delta in Answer(pieces, finish=finish, with_logprobs=False).deltas for one in delta.token_ids]
    assert ids == [*range(len(pieces)), *([EOS] if finish == "stop" else [])]


def test_logprobs_say_which_tokens_are_of_the_text() -> None:
    written = ["so", "</think>", "\n\n", "a", "b ", *CALL]
    answer = Answer(written, in_thought=True)
    logprobs = [one for delta in answer.deltas for one in delta.logprobs]
    assert [one.token.text for one in logprobs if one.is_text] == ["a", "b "]
    assert len(logprobs) == len(written)
    assert [one.token.text for one in answer.deltas[-1].unshown_logprobs] == ["<eos>"]


def test_stop_strings_wait_for_min_tokens_in_the_text_too() -> None:
    answer = Answer(["t", "</think>", "x", "y", "x", "z"], stop=("x",), min_tokens=4)
    assert (answer.text, answer.stop_string) == ("xy", "x")


@pytest.mark.parametrize("style", ["hermes", "pythonic"])
def test_delta_has_one_entry_for_each_call(style: str) -> None:
    """Clients put a call together by its index, and take one entry of a chunk for each."""
    written = {"hermes": CALL + CALL, "pythonic": '[f(v="a;b"), f(v="a;b")]'}[style]
    for pieces in cuts(written):
        answer = Answer(pieces, style=style, thinks=False, in_thought=False)
        for delta in answer.deltas:
            indexes = [call.index for call in delta.calls]
            assert len(indexes) == len(set(indexes)), pieces
        assert answer.calls == 'f{"v": "a;b"}' * 2, pieces
