"""How a model writes thoughts and calls of tools, and the reading of its answers as they come.

    answer = [thought] [text] [calls]

`AnswerReader` splits a text into these parts, character by character: a part is given out as soon as it is certain, and
never taken back. A call's grammar has its name before its arguments (`constraints.tools`), so that reading one needs no
second look at anything (`gateway.calls`).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import Enum
from functools import lru_cache
from types import MappingProxyType

import msgspec

from loramux.constraints.tools import ToolStyle, ToolUse, choose_style
from loramux.gateway.calls import CallDelta, overlap, scanner_of

_THOUGHTS = (
    ("<think>", "</think>"),
    ("[THINK]", "[/THINK]"),
    ("Here is my thought process:", "Here is my response:"),
)
"""Texts around a thought: Qwen3, DeepSeek-R1, SmolLM3 and others; Magistral; Granite."""

_VARIABLES = ("enable_thinking", "thinking", "reasoning_effort")


@dataclass(frozen=True, slots=True)
class Dialect:
    """The texts in which a model says more than the answer's own."""

    tools: ToolStyle | None = None
    thought: tuple[str, str] | None = None
    """The texts before and behind a thought; None: the model does not think."""
    variables: frozenset[str] = frozenset()
    """The template's variables that say how much it thinks."""

    @property
    def markers(self) -> tuple[str, ...]:
        """The texts that may be special tokens of the vocabulary."""
        return (*(self.tools.markers if self.tools else ()), *(self.thought or ()))

    def effort_fields(self, effort: str | None) -> dict[str, object]:
        """Return the template's variables for `effort`. Raises ValueError where it knows none."""
        if effort is None:
            return {}
        switches = [name for name in ("enable_thinking", "thinking") if name in self.variables]
        fields: dict[str, object] = {name: effort != "none" for name in switches}
        if "reasoning_effort" in self.variables:
            fields["reasoning_effort"] = effort
        if not fields and effort != "none":
            raise ValueError("the model's chat template knows no effort")
        return fields

    def begins_in_thought(self, prompt_tail: str) -> bool:
        """Does an answer to a prompt with this end begin within a thought?"""
        return self.thought is not None and prompt_tail.rstrip().endswith(self.thought[0])

    def may_think(self, prompt_tail: str) -> bool:
        """May an answer to a prompt with this end begin with a thought?"""
        return self.thought is not None and not prompt_tail.rstrip().endswith(self.thought[1])


@lru_cache(maxsize=1024)
def dialect_of(template: str, tool_parser: str | None = None) -> Dialect:
    """Return the dialect of a model with this chat template.

    `tool_parser` is the revision's choice, or else the base's, of how it writes calls; None: as the template does.
    """
    thought = next((pair for pair in _THOUGHTS if pair[1] in template), None)
    variables = frozenset(name for name in _VARIABLES if name in template)
    return Dialect(choose_style(template, tool_parser), thought, variables)


class AnswerParts(msgspec.Struct, frozen=True):
    """What became certain of an answer."""

    text: str = ""
    thought: str = ""
    calls: tuple[CallDelta, ...] = ()


class _Part(Enum):
    OPEN = "open"
    """Nothing but blanks so far: a thought may follow, a text or a call."""
    THOUGHT = "thought"
    TEXT = "text"
    CALLS = "calls"


class AnswerReader:
    """Splits one answer into its thought, its text and its calls."""

    def __init__(
        self,
        dialect: Dialect,
        *,
        in_thought: bool,
        may_think: bool,
        may_call: bool,
        use: ToolUse | None = None,
        special: Mapping[int, str] = MappingProxyType({}),
    ) -> None:
        self.special = special
        """The dialect's markers that are special tokens, which have no text otherwise."""
        self.part = _Part.THOUGHT if in_thought else _Part.OPEN
        self._dialect = dialect
        self._thought = dialect.thought if in_thought or may_think else None
        style = dialect.tools if may_call else None
        self._calls = scanner_of(style, use) if style else None
        self._begin, self._first = (style.begin, style.first) if style else ("", "")
        """The text before the calls, and the character that begins an answer of calls where there is none."""
        self._held = ""
        """Text that may be the beginning of a marker."""
        self._is_blank = True
        """The part has had no character but blanks."""
        self._blanks = ""
        """Blanks at the beginning of a text that may be calls alone: given out with the first other character."""
        self._is_behind_thought = in_thought
        """A thought came first: its own blanks, and those behind it, are not given out."""

    @property
    def is_thinking(self) -> bool:
        """Is the answer within its thought?"""
        return self.part is _Part.THOUGHT

    def push(self, text: str) -> AnswerParts:
        """Return what `text` makes certain."""
        self._held += text
        found: list[AnswerParts] = []
        while (parts := self._advance()) is not None:
            found.append(parts)
        return _joined(found)

    def flush(self) -> AnswerParts:
        """Return the rest at the end of the answer."""
        held, self._held = self._held, ""
        return AnswerParts() if self.part is _Part.CALLS else self._give(held)

    def _advance(self) -> AnswerParts | None:
        """Give out what is certain up to the next marker; None where more text is needed."""
        if not self._held:
            return None
        match self.part:
            case _Part.OPEN:
                return self._open()
            case _Part.THOUGHT:
                assert self._thought is not None, "a thought has an end"
                return self._until(self._thought[1], _Part.OPEN)
            case _Part.TEXT:
                return self._until(self._begin, _Part.CALLS)
            case _Part.CALLS:
                assert self._calls is not None, "the answer may call"
                held, self._held = self._held, ""
                return AnswerParts(calls=self._calls.push(held))

    def _open(self) -> AnswerParts | None:
        """Decide with which part the answer begins, or goes on behind a thought."""
        begun = self._held.lstrip()
        if self._thought is not None:
            begin = self._thought[0]
            if begun.startswith(begin):
                self._enter(_Part.THOUGHT, begun[len(begin) :])
                return AnswerParts()
            if begin.startswith(begun):
                return None
        if not begun:
            return None
        self._thought = None
        if self._calls is not None and not self._begin and begun.startswith(self._first):
            self._enter(_Part.CALLS, begun)
        else:
            self._enter(_Part.TEXT, self._held)
        return AnswerParts()

    def _until(self, marker: str, following: _Part) -> AnswerParts | None:
        """Give out the part's text up to `marker`, and never the beginning of one."""
        if not marker:
            held, self._held = self._held, ""
            return self._give(held)
        end = self._held.find(marker)
        if end >= 0:
            given = self._give(self._held[:end])
            self._is_behind_thought |= self.is_thinking
            self._thought = None
            self._enter(following, self._held[end + len(marker) :])
            return given
        certain = len(self._held) - overlap(self._held, marker)
        if not certain:
            return None
        given, self._held = self._give(self._held[:certain]), self._held[certain:]
        return given

    def _enter(self, part: _Part, rest: str) -> None:
        self.part, self._held, self._is_blank = part, rest, True

    def _give(self, text: str) -> AnswerParts:
        if self._is_blank and (self._dialect.thought or self._calls):
            begun = text.lstrip()
            if self.is_thinking or self._is_behind_thought:
                text = begun
            elif begun:
                text, self._blanks = self._blanks + text, ""
            else:
                text, self._blanks = "", self._blanks + text
        self._is_blank &= not text
        return AnswerParts(thought=text) if self.is_thinking else AnswerParts(text=text)


def _joined(found: list[AnswerParts]) -> AnswerParts:
    if len(found) == 1:
        return found[0]
    calls = tuple(call for parts in found for call in parts.calls)
    return AnswerParts("".join(p.text for p in found), "".join(p.thought for p in found), calls)
