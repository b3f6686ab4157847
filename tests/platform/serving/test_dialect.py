"""Thoughts, texts and calls, read from answers in pieces of any size."""

from __future__ import annotations

import json

import pytest
from answer_pieces import cut, read
from hypothesis import given, settings
from hypothesis import strategies as st

from loramux.constraints.tools import STYLES, choose_style
from loramux.serving.parts import AnswerReader, Dialect, dialect_of

THOUGHT = ("<think>", "</think>")


def reader(style: str | None = None, *, in_thought: bool = False, thinks: bool = False) -> AnswerReader:
    dialect = Dialect(STYLES.get(style or ""), THOUGHT if thinks or in_thought else None)
    return AnswerReader(dialect, in_thought=in_thought, may_think=thinks, may_call=style is not None)


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(max_size=9),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=9), inner, max_size=3),
    max_leaves=6,
)
NAMES = st.text("abcXYZ019_-", min_size=1, max_size=20)
CALLS = st.lists(st.tuples(NAMES, st.dictionaries(st.text(max_size=9), JSON, max_size=3)), max_size=3)


@settings(max_examples=60, deadline=None)
@given(
    style=st.sampled_from(sorted(name for name, style in STYLES.items() if style.notation == "json")),
    calls=CALLS,
    text=st.sampled_from(["", "I look it up. ", "a <tool call [TOOL_ soon\n"]),
    indent=st.sampled_from([None, 2]),
    seed=st.integers(0, 99),
)
def test_calls_are_read_as_they_were_written(style, calls, text, indent, seed) -> None:
    """However an answer is cut into pieces, and whatever its arguments hold."""
    chosen = STYLES[style]
    text = text if chosen.begin else ""
    bodies = [json.dumps({"name": name, chosen.arguments: value}, indent=indent) for name, value in calls]
    written = chosen.begin + chosen.opening + chosen.separator.join(bodies) + chosen.closing if calls else ""
    _, content, found = read(reader(style), cut(text + written, seed))
    assert content == text
    assert [(name, json.loads(value)) for name, value in found.values()] == calls


def test_arguments_come_as_they_are_written() -> None:
    """Each piece goes out at once, and joined they are the arguments to the character."""
    made = reader("hermes")
    pieces = ['<tool_call>{"name": "f", "arg', 'uments": {"a"', ': "}]\\"{", "b":', " [1, 2] } }", "</tool_call>"]
    deltas = [made.push(piece).calls for piece in pieces]
    assert [[(c.index, c.name, c.arguments) for c in calls] for calls in deltas] == [
        [(0, "f", "")],
        [(0, None, '{"a"')],
        [(0, None, ': "}]\\"{", "b":')],
        [(0, None, " [1, 2] }")],
        [],
    ]


@pytest.mark.parametrize("seed", range(4))
def test_thought_is_split_off_with_the_blanks_around_it(seed: int) -> None:
    answer = "<think>\nOne < two.</thin\n</think>\n\nIt is two.</think>"
    assert read(reader(thinks=True), cut(answer, seed)) == ("One < two.</thin\n", "It is two.</think>", {})


@pytest.mark.parametrize("seed", range(4))
def test_thought_that_the_prompt_has_opened_needs_no_beginning(seed: int) -> None:
    answer = 'hm</think><tool_call>{"name": "f", "arguments": {}}</tool_call>'
    assert read(reader("hermes", in_thought=True), cut(answer, seed)) == ("hm", "", {0: ("f", "{}")})


def test_answer_without_a_thought_is_all_text() -> None:
    assert read(reader(thinks=True), ["<", "thin", "g> is hard <think>"]) == ("", "<thing> is hard <think>", {})


@pytest.mark.parametrize("seed", range(5))
def test_blanks_at_the_beginning_belong_to_a_text_and_not_to_calls_or_after_a_thought(seed: int) -> None:
    """A text is what its tokens say, as a client counts that joins them."""
    call = '<tool_call>{"name": "f", "arguments": {}}</tool_call>'
    assert read(reader("hermes"), cut(" \n 4096", seed))[1] == " \n 4096"
    assert read(reader("hermes", thinks=True), cut(" \n 4096", seed))[1] == " \n 4096"
    assert read(reader("hermes"), cut(f"\n\n{call}", seed))[1] == ""
    assert read(reader(thinks=True), cut("<think>\n so\n</think>\n\n 4096", seed))[1] == "4096"


def test_unfinished_parts_are_given_out_at_the_end() -> None:
    assert read(reader(thinks=True), ["<think>", "because </thi"]) == ("because </thi", "", {})
    assert read(reader("hermes"), ["so <tool_"]) == ("", "so <tool_", {})
    assert read(reader("hermes"), ['<tool_call>{"name": "f", "arguments": {"a": [1']) == (
        "",
        "",
        {0: ("f", '{"a": [1')},
    )


def test_llama3_calls_begin_the_answer_or_are_text() -> None:
    assert read(reader("llama3"), ['{"name": "f", "parameters": {}}'])[2] == {0: ("f", "{}")}
    assert read(reader("llama3"), ['a {"name": "f", "parameters": {}}'])[2] == {}


@pytest.mark.parametrize(
    ("template", "style"),
    [
        ("{% if tools %}<tool_call>", "hermes"),
        ("{% if tools %}[TOOL_CALLS]", "mistral"),
        ("{% if tools %}<|tool_call|>", "granite"),
        ("{% if tools %}<|tool_call|><|/tool_call|>", "phi4"),
        ('{% if tools %}{"name": function name, "parameters": ', "llama3"),
        ("{% for m in messages %}<tool_call>", None),
        ("{% if tools %}", None),
    ],
)
def test_style_is_that_of_the_template(template: str, style: str | None) -> None:
    assert choose_style(template) == (STYLES[style] if style else None)
    assert choose_style(template, "mistral") == STYLES["mistral"]
    assert choose_style(template, "none") is None


def test_dialect_knows_whether_a_prompt_has_opened_or_closed_a_thought() -> None:
    dialect = dialect_of("{{ '<think>' }} {{ '</think>' }}")
    assert dialect.thought == THOUGHT
    assert dialect.begins_in_thought("assistant\n<think>\n")
    assert not dialect.begins_in_thought("assistant\n")
    assert dialect.may_think("assistant\n")
    assert not dialect.may_think("assistant\n<think>\n\n</think>\n\n")
    assert dialect_of("{{ messages }}").thought is None
