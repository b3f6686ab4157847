"""The work of reading an answer is linear in its length, in every notation, whatever the model writes."""

from __future__ import annotations

import tracemalloc
from collections.abc import Iterator

import pytest

from loramux.constraints.tools import STYLES, Tool, ToolUse
from loramux.serving.calls import ConvertingScanner
from loramux.serving.parts import AnswerReader, Dialect

LENGTH = 8_000
MAX_BYTES = 2_200
"""Bytes that one step of a reader may take on average. A step that copies what came before takes LENGTH / 2."""

PROPERTIES = {"s": {"type": "string"}, "u": {"type": ["string", "null"]}, "a b": {}, "o": {"type": "object"}}
USE = ToolUse(tools=(Tool(name="f", parameters={"type": "object", "properties": PROPERTIES}),))
X, BLANKS, LIST = "x" * LENGTH, "\n" * LENGTH, "1," * (LENGTH // 2)
MARK = STYLES["gemma4"].mark

ANSWERS = [
    ("hermes", BLANKS),
    ("hermes", f"<think>{BLANKS}</think>{BLANKS}"),
    ("hermes", f"<tool_call>{X}"),
    ("hermes", f'<tool_call>{{"{X}'),
    ("hermes", f'<tool_call>{{"name": "f", "arguments": {{"s": "{X}", "o": [{LIST}'),
    ("llama3", f'{{"name": "f", "parameters": {{"s": "{X}"}}}}; {BLANKS}'),
    ("mistral_args", f"[TOOL_CALLS]{X}"),
    ("mistral_args", f'[TOOL_CALLS]f[ARGS]{BLANKS}{{"s": "{X}"}}'),
    ("pythonic", f"[{X}("),
    ("pythonic", f"[f({X}=1, s={X}, s='{X}', s=\"{X}\\n\", s=[{LIST}1], s={BLANKS}1"),
    ("qwen3_coder", f"<tool_call>{X}"),
    ("qwen3_coder", f"<tool_call><function={X}"),
    ("qwen3_coder", f"<tool_call><function=f>{X}"),
    ("qwen3_coder", f"<tool_call><function=f><parameter={X}"),
    ("qwen3_coder", f"<tool_call><function=f><parameter=s>\n{X}{BLANKS}</parameter>{X}"),
    ("qwen3_coder", f"<tool_call><function=f><parameter=u>\n{X}{BLANKS}</parameter>{X}"),
    ("qwen3_coder", "<tool_call><function=f>" + "<parameter=s>\na\n</parameter>" * (LENGTH // 20)),
    ("gemma4", f"<|tool_call>call:{X}"),
    ("gemma4", f"<|tool_call>call:f{{{BLANKS}{X}:1,s:{X},s:[{LIST}1],s:{MARK}{X}{MARK},o:{{{'a:1,' * (LENGTH // 4)}"),
    ("gemma4", f"<|tool_call>call:f{{s:{MARK}a{MARK}{BLANKS}"),
    ("gemma4", f"<|tool_call>call:f{{s:{MARK}{f'{MARK}      ' * (LENGTH // 10)}"),
]


def steps(monkeypatch: pytest.MonkeyPatch, style: str, pieces: list[str]) -> Iterator[int]:
    """Yield the memory that each step took at its peak: a piece, or the next part that a scanner reads in one piece."""
    found: list[int] = []
    advance = {scanner: scanner._advance for scanner in ConvertingScanner.__subclasses__()}

    def measured(scanner: ConvertingScanner) -> bool:
        before = tracemalloc.get_traced_memory()[0]
        tracemalloc.reset_peak()
        is_read = advance[type(scanner)](scanner)
        found.append(tracemalloc.get_traced_memory()[1] - before)
        return is_read

    if len(pieces) == 1:
        for scanner in advance:
            monkeypatch.setattr(scanner, "_advance", measured)
    dialect = Dialect(STYLES[style], ("<think>", "</think>"))
    reader = AnswerReader(dialect, in_thought=False, may_think=True, may_call=True, use=USE)
    tracemalloc.start()
    try:
        for piece in pieces:
            before = tracemalloc.get_traced_memory()[0]
            tracemalloc.reset_peak()
            reader.push(piece)
            yield tracemalloc.get_traced_memory()[1] - before
    finally:
        tracemalloc.stop()
    yield from found


@pytest.mark.parametrize("number", range(len(ANSWERS)))
def test_answer_is_read_token_by_token_in_linear_work(monkeypatch: pytest.MonkeyPatch, number: int) -> None:
    style, text = ANSWERS[number]
    pieces = [text[place : place + 3] for place in range(0, len(text), 3)]
    assert sum(steps(monkeypatch, style, pieces)) / len(pieces) < MAX_BYTES


@pytest.mark.parametrize("number", range(len(ANSWERS)))
def test_answer_is_read_in_one_piece_in_linear_work(monkeypatch: pytest.MonkeyPatch, number: int) -> None:
    style, text = ANSWERS[number]
    assert sum(steps(monkeypatch, style, [text])) / len(text) < MAX_BYTES
