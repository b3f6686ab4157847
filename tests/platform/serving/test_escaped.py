"""Lark grammars of custom tools: what the grammar allows is what is allowed within a string of JSON."""

from __future__ import annotations

import json
import re

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from llguidance import LLMatcher, LLTokenizer

from loramux.constraints.escaped import escape_expression, escape_grammar

BYTES = LLTokenizer("byte")
PATCH = """
start: begin_patch hunk+ end_patch
begin_patch: "*** Begin Patch" LF
end_patch: "*** End Patch" LF?
hunk: add_hunk | update_hunk
add_hunk: "*** Add File: " filename LF add_line+
update_hunk: "*** Update File: " filename LF change?
filename: /(.+)/
add_line: "+" /(.*)/ LF -> line
change: (change_context | change_line)+
change_context: ("@@" | "@@ " /(.+)/) LF
change_line: ("+" | "-" | " ") /(.*)/ LF
%import common.LF
"""
"""The grammar of a coding agent's patches, shortened."""
EXPRESSIONS = (
    r"[a-z\"]+", r".*", r"[^\n]*", r"(a|\\|\")+x?", r"\d{2,3}", r"(?i:ab)c", r"[^\"\\]+", r"\s*\w+",
    r"[\x00-\x1f]{1,2}", r"a{0,2}b", r"[\\/]+", r"(ab?)*",
)  # fmt: skip


def allows(lark: str, text: str) -> bool:
    start, rules = escape_grammar(lark, "call_0_in")
    matcher = LLMatcher(BYTES, "\n".join(["%llguidance {}", f'start: "\\"" {start} "\\""', *rules]))
    assert not matcher.is_error(), matcher.get_error()
    written = list(json.dumps(text, ensure_ascii=False).encode())
    return bool(matcher.try_consume_tokens(written) == len(written) and matcher.is_accepting())


@pytest.mark.parametrize(
    ("text", "allowed"),
    [
        ('*** Begin Patch\n*** Add File: a "b".py\n+print("\\n")\n+\n*** End Patch\n', True),
        ("*** Begin Patch\n*** Update File: é\n@@ def\n-a\t\n+b\\\n*** End Patch", True),
        ("*** Begin Patch\n*** End Patch\n", False),
        ("*** Begin Patch\n*** Add File: \n+x\n*** End Patch\n", False),
        ("*** Begin Patch\n*** Add File: a\nx\n*** End Patch\n", False),
    ],
)
def test_patch_is_held_to_its_grammar(text: str, allowed: bool) -> None:
    assert allows(PATCH, text) is allowed


@settings(max_examples=150, deadline=None)
@given(st.sampled_from(EXPRESSIONS), st.text(st.sampled_from('ab"\\\n\t x/09ZÉ😀'), max_size=5))
def test_terminal_allows_what_its_expression_matches(expression: str, text: str) -> None:
    written = expression.replace("/", r"\/")
    assert allows(f"start: /{written}/", text) is bool(re.fullmatch(expression, text, re.ASCII))


@pytest.mark.parametrize(
    ("literal", "text", "allowed"),
    [(r'"a\"\\\n"', 'a"\\\n', True), ('"Ab"i', "aB", True), ('"Ab"', "ab", False), (r'"\u00e9"', "é", True)],
)
def test_literal_is_escaped_as_json_writes_it(literal: str, text: str, allowed: bool) -> None:
    assert allows(f"start: {literal}", text) is allowed


@pytest.mark.parametrize("name", ["LF", "WS", "INT", "CNAME", "ESCAPED_STRING", "NEWLINE"])
def test_common_terminals_can_be_imported(name: str) -> None:
    text = {"LF": "\n", "WS": " \t", "INT": "12", "CNAME": "a_1", "ESCAPED_STRING": '"a\\"b"', "NEWLINE": "\r\n"}[name]
    assert allows(f"%import common.{name}\nstart: {name}", text)


@pytest.mark.parametrize(
    ("lark", "why"),
    [
        ("%ignore / /\nstart: A\nA: /a/", "%ignore"),
        ("start: %json {}", "%json"),
        ("%import common.NOTHING\nstart: NOTHING", "NOTHING"),
        ("begin: /a/", "no rule 'start'"),
        (r"start: /a(?=b)/", "assert"),
        (r"start: /(a)\1/", "groupref"),
        (r"start: /a*?b/", "lazy"),
        (r"start: /^a/", "at"),
        ("start: /a(/", "cannot be read"),
    ],
)
def test_grammar_that_cannot_be_written_is_refused_by_what_it_uses(lark: str, why: str) -> None:
    with pytest.raises(ValueError, match=re.escape(why)):
        escape_grammar(lark, "p")


def test_empty_set_is_refused() -> None:
    with pytest.raises(ValueError, match="no character"):
        escape_expression(r"[^\x00-\U0010ffff]")
