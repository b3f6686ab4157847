"""How a model writes thoughts and calls of tools, and the reading of its answers as they come.

    answer = [thought] [text] [calls]

`AnswerReader` splits a text into these parts, character by character: a part is given out as soon as it is certain, and
never taken back. A call's grammar has its name before its arguments (`constraints.tools`), so that reading one is a
scan of nested JSON and needs no second look at anything.
"""

from __future__ import annotations

import secrets
import string
from collections.abc import Mapping
from dataclasses import dataclass
from enum import Enum
from functools import lru_cache
from types import MappingProxyType

import msgspec

from loramux.constraints.tools import ToolStyle, choose_style

TAIL_CHARACTERS = 64
"""The end of a prompt that says whether the answer begins within a thought."""

_THOUGHTS = (
    ("<think>", "</think>"),
    ("[THINK]", "[/THINK]"),
    ("Here is my thought process:", "Here is my response:"),
)
"""Texts around a thought: Qwen3, DeepSeek-R1, SmolLM3 and others; Magistral; Granite."""

_VARIABLES = ("enable_thinking", "thinking", "reasoning_effort")

_ALPHABET = string.ascii_letters + string.digits


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


class CallDelta(msgspec.Struct, frozen=True, kw_only=True):
    """The news of one call of a tool."""

    index: int
    id: str | None = None
    """Set, with the name, on the call's first delta."""
    name: str | None = None
    arguments: str = ""


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
        special: Mapping[int, str] = MappingProxyType({}),
    ) -> None:
        self.special = special
        """The dialect's markers that are special tokens, which have no text otherwise."""
        self.part = _Part.THOUGHT if in_thought else _Part.OPEN
        self._dialect = dialect
        self._thought = dialect.thought if in_thought or may_think else None
        self._calls = CallScanner(dialect.tools) if may_call and dialect.tools else None
        self._held = ""
        """Text that may be the beginning of a marker."""
        self._is_blank = True
        """The part has had no character but blanks; those at its beginning are not given out."""

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
                begin = self._calls.begin if self._calls else ""
                return self._until(begin, _Part.CALLS)
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
        if self._calls is not None and not self._calls.begin and begun.startswith("{"):
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
            self._thought = None
            self._enter(following, self._held[end + len(marker) :])
            return given
        certain = len(self._held) - _overlap(self._held, marker)
        if not certain:
            return None
        given, self._held = self._give(self._held[:certain]), self._held[certain:]
        return given

    def _enter(self, part: _Part, rest: str) -> None:
        self.part, self._held, self._is_blank = part, rest, True

    def _give(self, text: str) -> AnswerParts:
        if self._is_blank and (self._dialect.thought or self._calls):
            text = text.lstrip()
        self._is_blank &= not text
        return AnswerParts(thought=text) if self.is_thinking else AnswerParts(text=text)


def _overlap(text: str, marker: str) -> int:
    """Return the length of the longest end of `text` that is a beginning of `marker`."""
    return next((n for n in range(min(len(text), len(marker) - 1), 0, -1) if marker.startswith(text[-n:])), 0)


def _joined(found: list[AnswerParts]) -> AnswerParts:
    if len(found) == 1:
        return found[0]
    calls = tuple(call for parts in found for call in parts.calls)
    return AnswerParts("".join(p.text for p in found), "".join(p.thought for p in found), calls)


class _At(Enum):
    BETWEEN = "between"
    """Outside of a call: blanks, separators and markers, which are skipped."""
    HEAD = "head"
    """Within a call's object, before its arguments or behind them."""
    ARGUMENTS = "arguments"


class CallScanner:
    """Reads calls, each a JSON object with a name and then its arguments."""

    def __init__(self, style: ToolStyle) -> None:
        self.begin = style.begin
        """The text before the first call."""
        self._style = style
        self._at = _At.BETWEEN
        self._num_calls = 0
        self._depth = 0
        """Open objects and lists of the arguments."""
        self._string: str | None = None
        """The string under way, as JSON; None outside of one."""
        self._is_escaped = False
        self._last = ""
        """The last string of the head: a key, until its value has come."""
        self._key = ""

    def push(self, text: str) -> tuple[CallDelta, ...]:
        """Return the news of the calls."""
        calls: list[CallDelta] = []
        arguments = ""
        for character in text:
            if self._at is _At.ARGUMENTS:
                if self._belongs(character):
                    arguments += character
                if arguments and self._at is not _At.ARGUMENTS:
                    calls.append(CallDelta(index=self._num_calls - 1, arguments=arguments))
                    arguments = ""
            elif (name := self._read(character)) is not None:
                calls.append(CallDelta(index=self._num_calls, id=self._new_id(), name=name))
                self._num_calls += 1
        if arguments:
            calls.append(CallDelta(index=self._num_calls - 1, arguments=arguments))
        return tuple(calls)

    def _belongs(self, character: str) -> bool:
        """Advance within the arguments; is the character part of them?"""
        if self._string is not None:
            self._read_string(character)
        elif character == '"':
            self._string = ""
        elif character in "{[":
            self._depth += 1
        elif character in "}]":
            if not self._depth:
                self._at = _At.BETWEEN
                return False
            self._depth -= 1
            if not self._depth:
                self._at = _At.HEAD
        elif not self._depth and character.isspace():
            return False
        return True

    def _read(self, character: str) -> str | None:
        """Advance outside of arguments; return a call's name where it is complete."""
        if self._at is _At.BETWEEN:
            if character == "{":
                self._at, self._key = _At.HEAD, ""
        elif self._string is not None:
            if self._read_string(character) and self._key == "name":
                self._key = ""
                return self._last
        elif character == '"':
            self._string = ""
        elif character == ":":
            self._key = self._last
            if self._key == self._style.arguments:
                self._at = _At.ARGUMENTS
        elif character == "}":
            self._at = _At.BETWEEN
        return None

    def _read_string(self, character: str) -> bool:
        """Advance within a string; has it ended?"""
        assert self._string is not None, "a string is under way"
        if character == '"' and not self._is_escaped:
            if self._at is _At.HEAD:
                self._last = _decoded(f'"{self._string}"')
            self._string = None
            return True
        self._is_escaped = character == "\\" and not self._is_escaped
        if self._at is _At.HEAD:
            self._string += character
        return False

    def _new_id(self) -> str:
        id = "".join(secrets.choice(_ALPHABET) for _ in range(self._style.id_characters))
        return id if self._style.id_characters < len("call_") + 9 else f"call_{id}"


def _decoded(token: str) -> str:
    try:
        return msgspec.json.decode(token, type=str)
    except msgspec.DecodeError:
        return token.strip('"')
