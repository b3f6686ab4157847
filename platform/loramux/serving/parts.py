"""Parts of an answer's text, and the texts with which a model marks them.

    answer = [thought] [text] [calls]

A `Dialect` is a model's notation of these parts. `AnswerReader` splits a text into the parts, character by character,
and gives a part out as soon as it is certain. One fact is known only at the end: if the prompt opened a thought that
the model never ends, this thought was the answer's text. A call's grammar puts its name before its arguments
(`constraints.tools`), so that a call is read in one pass (`serving.calls`).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import Enum
from functools import lru_cache
from types import MappingProxyType

import msgspec

from loramux.constraints.tools import ToolStyle, ToolUse, choose_style
from loramux.serving.calls import CallDelta, overlap, scanner_of

_THOUGHTS = (
    ("<think>", "</think>"),
    ("[THINK]", "[/THINK]"),
    ("Here is my thought process:", "Here is my response:"),
)
"""Texts around a thought: Qwen3, DeepSeek-R1, SmolLM3 and others; Magistral; Granite."""

MAX_HEAD = 1024
"""The largest number of characters, with blanks, within which a call must show the name of its tool."""

_VARIABLES = ("enable_thinking", "thinking", "reasoning_effort")


@dataclass(frozen=True, slots=True)
class Dialect:
    """Texts with which a model marks the parts of an answer that are not plain text."""

    tools: ToolStyle | None = None
    thought: tuple[str, str] | None = None
    """Texts before and after a thought; None if the model does not think."""
    variables: frozenset[str] = frozenset()
    """Variables of the template that set how much the model thinks."""

    @property
    def markers(self) -> tuple[str, ...]:
        """Texts that may be special tokens of the vocabulary."""
        return (*(self.tools.markers if self.tools else ()), *(self.thought or ()))

    def effort_fields(self, effort: str) -> dict[str, object]:
        """Return the template's variables for `effort`, which is a hint; empty without such a variable."""
        switches = [name for name in ("enable_thinking", "thinking") if name in self.variables]
        fields: dict[str, object] = {name: effort != "none" for name in switches}
        if "reasoning_effort" in self.variables:
            fields["reasoning_effort"] = effort
        return fields

    def begins_in_thought(self, prompt_tail: str) -> bool:
        """Return whether an answer to a prompt with this end begins within a thought."""
        return self.thought is not None and prompt_tail.rstrip().endswith(self.thought[0])

    def may_think(self, prompt_tail: str) -> bool:
        """Return whether an answer to a prompt with this end may begin with a thought."""
        return self.thought is not None and not prompt_tail.rstrip().endswith(self.thought[1])


@lru_cache(maxsize=1024)
def dialect_of(template: str, tool_parser: str | None = None) -> Dialect:
    """Return the dialect of a model with this chat template.

    `tool_parser` is the notation of calls that the revision or otherwise the base chose; None: the template's notation.
    """
    thought = next((pair for pair in _THOUGHTS if pair[1] in template), None)
    variables = frozenset(name for name in _VARIABLES if name in template)
    return Dialect(choose_style(template, tool_parser), thought, variables)


class AnswerParts(msgspec.Struct, frozen=True):
    """Parts of an answer that have become certain."""

    text: str = ""
    thought: str = ""
    calls: tuple[CallDelta, ...] = ()
    is_unended_thought: bool = False
    """True if the text repeats an earlier thought: see `AnswerReader.flush`."""


class _Part(Enum):
    OPEN = "open"
    """Only blanks so far: a thought, a text or a call may follow."""
    THOUGHT = "thought"
    TEXT = "text"
    CALLS = "calls"


class AnswerReader:
    """Splits one answer into its thought, its text and its calls.

    Offsets count characters of the model's whole output, including markers.
    """

    def __init__(
        self,
        dialect: Dialect,
        *,
        in_thought: bool,
        may_think: bool,
        may_call: bool,
        use: ToolUse | None = None,
        may_be_json: bool = False,
        special: Mapping[int, str] = MappingProxyType({}),
    ) -> None:
        """`may_be_json`: an answer without calls is JSON of a format."""
        self.special = special
        """Markers of the dialect that are special tokens, which otherwise have no text."""
        self.part = _Part.THOUGHT if in_thought else _Part.OPEN
        self.position = 0
        """Offset up to which the parts are certain."""
        self.thought_end: int | None = None
        """Offset of the first character after a thought and its marker."""
        self.text_begin: int | None = None
        """Offset of the text's first character, once one was given out."""
        self.text_end: int | None = None
        """Offset of the text's end, once calls have begun."""
        self._dialect = dialect
        self._thought = dialect.thought if in_thought or may_think else None
        style = dialect.tools if may_call else None
        self._use = use
        self._calls = scanner_of(style, use) if style else None
        self._begin, self._first = (style.begin, style.first) if style else ("", "")
        """The text before the calls, and, if there is none, the character that begins an answer of calls."""
        is_ambiguous = may_be_json and style is not None and not style.begin
        self._heads = style.heads(use) if is_ambiguous and style and use and not use.is_required else ()
        """The beginnings of calls, without blanks, if the answer may also be JSON that is no call."""
        self._held = ""
        """Text that may be the beginning of a marker."""
        self._leading: list[str] = []
        """Blanks before the held text, while no other character says which part they begin."""
        self._is_blank = True
        """True if the part has had only blanks so far."""
        self._blanks = ""
        """Blanks at the beginning of an answer that may consist only of calls. They are given out together with the
        first other character.
        """
        self._is_behind_thought = in_thought
        """True if a thought came first. Blanks at its beginning and after its end are not given out."""
        self._unended: list[str] | None = [] if in_thought else None
        """Pieces of a thought that the prompt has opened, while the thought has no end; otherwise None."""
        self._uncalled: list[str] | None = []
        """Text since the mark of a call, while no call has a name; otherwise None."""

    @property
    def is_thinking(self) -> bool:
        """True if the answer is within its thought."""
        return self.part is _Part.THOUGHT

    @property
    def is_undecided(self) -> bool:
        """True if the answer has had only blanks, which may come before a thought."""
        return self.part is _Part.OPEN and self.thought_end is None

    @property
    def is_calling(self) -> bool:
        """True if the answer is within its calls."""
        return self.part is _Part.CALLS

    def push(self, text: str) -> AnswerParts:
        """Return the parts that `text` makes certain."""
        if self.part is _Part.OPEN and not self._held and text.isspace():
            self._leading.append(text)
            return AnswerParts()
        self._hold(text)
        found: list[AnswerParts] = []
        while (parts := self._advance()) is not None:
            found.append(parts)
        return join_parts(found)

    def flush(self, *, is_stopped: bool = False) -> AnswerParts:
        """Return the rest at the end of the answer. `is_stopped`: the model itself ended the answer.

        If the prompt opened a thought, and the model ended its answer without ending the thought, the model does not
        think. The text then belongs to the answer and is read as its text.
        """
        if self.part is _Part.CALLS:
            return self._flush_calls(is_stopped=is_stopped)
        self._hold("")
        if is_stopped and self.is_thinking and self._unended is not None:
            return self._read_as_text("".join(self._unended) + self._take(len(self._held)))
        return self._give(self._take(len(self._held)))

    def _flush_calls(self, *, is_stopped: bool) -> AnswerParts:
        """Return text that begins like calls, if a finished answer has no call in it."""
        if not is_stopped or self._uncalled is None:
            return AnswerParts()
        written = "".join(self._uncalled)
        if self._unended is not None:
            return self._read_as_text("".join(self._unended) + written, may_call=False)
        self._enter(_Part.TEXT)
        return self._give(written)

    def _read_as_text(self, text: str, *, may_call: bool = True) -> AnswerParts:
        """Return the parts of an answer that has no thought."""
        reader = AnswerReader(
            self._dialect,
            in_thought=False,
            may_think=False,
            may_call=may_call and self._calls is not None,
            use=self._use,
            may_be_json=bool(self._heads),
        )
        reader._is_behind_thought = True
        parts = join_parts([reader.push(text), reader.flush(is_stopped=True)])
        self._enter(reader.part)
        self.thought_end = 0
        self.text_begin = self.position - len(text.lstrip())
        return msgspec.structs.replace(parts, is_unended_thought=True)

    def _hold(self, text: str) -> None:
        self._held = "".join([*self._leading, self._held, text])
        self._leading.clear()

    def _advance(self) -> AnswerParts | None:
        """Give out the certain text up to the next marker; return None if more text is needed."""
        if not self._held:
            return None
        match self.part:
            case _Part.OPEN:
                return self._open()
            case _Part.THOUGHT:
                assert self._thought is not None, "a thought has an end"
                return self._until({self._thought[1]: _Part.OPEN, self._begin: _Part.CALLS})
            case _Part.TEXT:
                return self._until({self._begin: _Part.CALLS})
            case _Part.CALLS:
                assert self._calls is not None, "the answer may call"
                written = self._take(len(self._held))
                calls = self._calls.push(written)
                if calls:
                    self._uncalled = self._unended = None
                elif self._uncalled is not None:
                    self._uncalled.append(written)
                return AnswerParts(calls=calls)

    def _open(self) -> AnswerParts | None:
        """Decide with which part the answer begins, or continues after a thought."""
        begun = self._held.lstrip()
        if not begun:
            self._leading, self._held = [self._held], ""
            return None
        if self._thought is not None:
            begin = self._thought[0]
            if begun.startswith(begin):
                self._take(len(self._held) - len(begun) + len(begin))
                self._enter(_Part.THOUGHT)
                return AnswerParts()
            if begin.startswith(begun):
                return None
        self._thought = None
        if self._calls is not None and not self._begin and begun.startswith(self._first):
            is_call = self._is_call(begun)
            if is_call is None:
                return None
            self._take(len(self._held) - len(begun))
            self._enter(_Part.CALLS if is_call else _Part.TEXT)
        else:
            self._enter(_Part.TEXT)
        return AnswerParts()

    def _is_call(self, begun: str) -> bool | None:
        """Return whether text begins a call of a known tool; None if more text is needed.

        An answer in a JSON format may begin with the same character as a call, even with the same key.
        """
        if not self._heads:
            return True
        parts = begun[:MAX_HEAD].split('"')
        written = '"'.join("".join(part.split()) if place % 2 == 0 else part for place, part in enumerate(parts))
        if any(written.startswith(head) for head in self._heads):
            return True
        may_follow = len(begun) < MAX_HEAD and any(head.startswith(written) for head in self._heads)
        return None if may_follow else False

    def _until(self, following: Mapping[str, _Part]) -> AnswerParts | None:
        """Give out the part's text up to the first marker, but never a text that may be the beginning of a marker.

        `following` has the part that each marker begins; an empty marker is ignored.
        """
        markers = [marker for marker in following if marker]
        ends = [(end, marker) for marker in markers if (end := self._held.find(marker)) >= 0]
        if ends:
            end, marker = min(ends)
            given = self._give(self._take(end))
            begun = self._take(len(marker))
            self._end(marker)
            self._enter(following[marker])
            if self.is_calling:
                self._uncalled = [begun]
            return given
        certain = len(self._held) - max((overlap(self._held, marker) for marker in markers), default=0)
        return self._give(self._take(certain)) if certain else None

    def _end(self, marker: str) -> None:
        """Note the end of a part at `marker`, which has been read."""
        if not self.is_thinking:
            self.text_end = self.position - len(marker)
            return
        is_call = marker == self._begin
        self.thought_end = self.position - (len(marker) if is_call else 0)
        self._is_behind_thought, self._thought = True, None
        if not is_call:
            self._unended = None

    def _take(self, length: int) -> str:
        """Remove text that is certain from the held text, and return it."""
        taken, self._held = self._held[:length], self._held[length:]
        self.position += len(taken)
        return taken

    def _enter(self, part: _Part) -> None:
        self.part, self._is_blank = part, True

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
        if not self.is_thinking:
            if text and self.text_begin is None:
                self.text_begin = self.position - len(text)
            return AnswerParts(text=text)
        if self._unended is not None:
            self._unended.append(text)
        return AnswerParts(thought=text)


def join_parts(found: list[AnswerParts]) -> AnswerParts:
    """Return consecutive parts as one."""
    if len(found) == 1:
        return found[0]
    return AnswerParts(
        text="".join(parts.text for parts in found),
        thought="".join(parts.thought for parts in found),
        calls=tuple(call for parts in found for call in parts.calls),
        is_unended_thought=any(parts.is_unended_thought for parts in found),
    )
