"""Calls of tools in an answer's text, read as they come: a name first, then arguments as JSON, however written.

A scanner never takes back what it has given out, and does the same work for every character, however an answer is cut
into pieces. What a model writes without a grammar may be malformed: a scanner then gives out what it can make of it.
"""

from __future__ import annotations

import json
import secrets
import string
from collections.abc import Mapping
from enum import Enum
from typing import Any, Protocol

import msgspec

from loramux.constraints.tools import ToolStyle, ToolUse

_ALPHABET = string.ascii_letters + string.digits
_WORDS = {"True": "true", "False": "false", "None": "null"}


class CallDelta(msgspec.Struct, frozen=True, kw_only=True):
    """The news of one call of a tool."""

    index: int
    id: str | None = None
    """Set, with the name, on the call's first delta."""
    name: str | None = None
    arguments: str = ""


class CallScanner(Protocol):
    """Reads the calls of an answer, from the text that begins them on."""

    def push(self, text: str) -> tuple[CallDelta, ...]:
        """Return the news of the calls."""


def scanner_of(style: ToolStyle, use: ToolUse | None) -> CallScanner:
    """Return a scanner of calls in `style`; `use` has the tools, whose schemas say which values are texts."""
    match style.notation:
        case "json":
            return JsonCalls(style)
        case "bare":
            return BareCalls(style)
        case "python":
            return PythonCalls(style)
        case "xml":
            return XmlCalls(style, _texts(use))
        case "gemma":
            return GemmaCalls(style)


def new_id(style: ToolStyle) -> str:
    """Return a new call's id."""
    id = "".join(secrets.choice(_ALPHABET) for _ in range(style.id_characters))
    return id if style.id_characters < len("call_") + 9 else f"call_{id}"


def overlap(text: str, marker: str) -> int:
    """Return the length of the longest end of `text` that is a beginning of `marker`."""
    return next((n for n in range(min(len(text), len(marker) - 1), 0, -1) if marker.startswith(text[-n:])), 0)


class _At(Enum):
    BETWEEN = "between"
    """Outside of a call: blanks, separators and markers, which are skipped."""
    HEAD = "head"
    """Within a call's object, before its arguments or behind them."""
    ARGUMENTS = "arguments"


class JsonCalls:
    """Reads calls, each a JSON object with a name and then its arguments; or a bare name, and then the arguments."""

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
                calls.append(CallDelta(index=self._num_calls, id=new_id(self._style), name=name))
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


def _decoded(token: str) -> str:
    try:
        return msgspec.json.decode(token, type=str)
    except msgspec.DecodeError:
        return token.strip('"')


class ConvertingScanner:
    """The base of scanners that write arguments anew as JSON."""

    def __init__(self, style: ToolStyle) -> None:
        self._style = style
        self._num_calls = 0
        self._held = ""
        """Text that is not read yet."""
        self._in_call = False
        self._news: list[CallDelta] = []
        self._arguments = ""
        """Of the call under way: those that are not given out yet."""

    def push(self, text: str) -> tuple[CallDelta, ...]:
        """Return the news of the calls."""
        self._held += text
        while self._held and self._advance():
            pass
        self._give()
        news, self._news = self._news, []
        return tuple(news)

    def _advance(self) -> bool:
        """Read on; False where more text is needed."""
        raise NotImplementedError

    def _open(self, name: str) -> None:
        self._news.append(CallDelta(index=self._num_calls, id=new_id(self._style), name=name))
        self._num_calls += 1
        self._in_call = True

    def _close(self) -> None:
        self._give()
        self._in_call = False

    def _give(self) -> None:
        if self._arguments:
            self._news.append(CallDelta(index=self._num_calls - 1, arguments=self._arguments))
            self._arguments = ""


class BareCalls(ConvertingScanner):
    """`name[ARGS]{...}`, and the next behind `[TOOL_CALLS]`; a name may be followed by `[CALL_ID]` and an id."""

    def __init__(self, style: ToolStyle) -> None:
        super().__init__(style)
        self._depth = 0
        self._string = False
        self._is_escaped = False

    def _advance(self) -> bool:
        if not self._in_call:
            end = self._held.find(self._style.middle)
            if end < 0:
                return False
            name = self._held[:end].rpartition(self._style.begin)[2].partition("[CALL_ID]")[0].strip()
            self._held = self._held[end + len(self._style.middle) :]
            self._open(name)
            return True
        for place, character in enumerate(self._held):
            if self._ends(character):
                self._arguments += self._held[: place + 1].lstrip()
                self._held = self._held[place + 1 :]
                self._close()
                return True
        self._arguments += self._held if self._depth or self._arguments else self._held.lstrip()
        self._held = ""
        return False

    def _ends(self, character: str) -> bool:
        """Advance within the arguments; is the character their last?"""
        if self._string:
            self._string = self._is_escaped or character != '"'
            self._is_escaped = character == "\\" and not self._is_escaped
        elif character == '"':
            self._string = True
        elif character in "{[":
            self._depth += 1
        elif character in "}]":
            self._depth -= 1
            return self._depth <= 0
        return False


class PythonCalls(ConvertingScanner):
    """`name(key="value", ...), ...`: keyword arguments with literals of Python or of JSON."""

    def __init__(self, style: ToolStyle) -> None:
        super().__init__(style)
        self._word = ""
        self._quote = ""
        """The quote of the text under way."""
        self._is_escaped = False
        self._depth = 0

    def _advance(self) -> bool:
        character, self._held = self._held[0], self._held[1:]
        if not self._in_call:
            self._read_name(character)
        elif self._quote:
            self._read_text(character)
        else:
            self._read_value(character)
        return True

    def _read_name(self, character: str) -> None:
        if character == "(" and self._word:
            self._open(self._word)
            self._word, self._depth, self._arguments = "", 0, "{"
        else:
            self._word = self._word + character if character.isalnum() or character in "_.-" else ""

    def _read_text(self, character: str) -> None:
        if self._is_escaped:
            self._is_escaped = False
            escape = character if character in '"\\/bfnrtu' else ""
            self._arguments += f"\\{escape}" if escape else _escaped(character)
        elif character == "\\":
            self._is_escaped = True
        elif character == self._quote:
            self._quote = ""
            self._arguments += '"'
        else:
            self._arguments += _escaped(character)

    def _read_value(self, character: str) -> None:
        if character in "\"'":
            self._quote = character
            self._arguments += '"'
        elif character.isalnum() or character in "_.-+":
            self._word += character
        elif character == "=" and not self._depth:
            self._arguments += f"{json.dumps(self._word)}: "
            self._word = ""
        else:
            self._arguments += _written(self._word)
            self._word = ""
            self._read_sign(character)

    def _read_sign(self, character: str) -> None:
        if character == ")" and not self._depth:
            self._arguments += "}"
            self._close()
        elif character in "[{(":
            self._depth += 1
            self._arguments += "[" if character == "(" else character
        elif character in "]})":
            self._depth -= 1
            self._arguments += "]" if character == ")" else character
        elif character in ",:":
            self._arguments += f"{character} "


class GemmaCalls(ConvertingScanner):
    """`call:name{key:value, ...}`, with texts between two marks."""

    def __init__(self, style: ToolStyle) -> None:
        super().__init__(style)
        self._word = ""
        self._in_text = False
        self._depth = 0

    def _advance(self) -> bool:
        mark = self._style.mark
        if self._in_text:
            end = self._held.find(mark)
            length = end if end >= 0 else len(self._held) - overlap(self._held, mark)
            self._arguments += _escaped(self._held[:length])
            self._held = self._held[length:]
            if end >= 0:
                self._held, self._in_text = self._held[len(mark) :], False
                self._arguments += '"'
            return end >= 0
        if self._in_call and self._held.startswith(mark):
            self._held, self._in_text = self._held[len(mark) :], True
            self._arguments += '"'
            return True
        if self._in_call and mark.startswith(self._held):
            return False
        character, self._held = self._held[0], self._held[1:]
        if self._in_call:
            self._read(character)
        elif character == "{":
            self._open(self._word.rpartition("call:")[2].strip())
            self._word, self._depth, self._arguments = "", 0, "{"
        else:
            self._word += character
        return True

    def _read(self, character: str) -> None:
        if character == ":":
            self._arguments += f"{json.dumps(self._word.strip())}: "
            self._word = ""
            return
        if character not in ",{}[]":
            self._word += character
            return
        self._arguments += _written(self._word.strip())
        self._word = ""
        if character == ",":
            self._arguments += ", "
            return
        self._arguments += character
        self._depth += {"{": 1, "[": 1}.get(character, -1)
        if self._depth < 0:
            self._close()


class XmlCalls(ConvertingScanner):
    """`<function=name><parameter=key>value</parameter>...</function>`."""

    END = "</parameter>"

    def __init__(self, style: ToolStyle, texts: Mapping[str, frozenset[str]]) -> None:
        """`texts`: the arguments of each tool that are texts whatever they look like."""
        super().__init__(style)
        self._texts = texts
        self._name = ""
        self._key: str | None = None
        """The argument under way."""
        self._is_first = True

    def _advance(self) -> bool:
        if not self._in_call:
            return self._read_tag("<function=", self._begin)
        if self._key is not None:
            return self._read_content(self._key)
        parameter, end = self._held.find("<parameter="), self._held.find("</function>")
        if end >= 0 and (parameter < 0 or end < parameter):
            self._held = self._held[end + len("</function>") :]
            self._arguments += "}"
            self._close()
            return True
        return self._read_tag("<parameter=", self._begin_argument)

    def _read_tag(self, opening: str, begin: Any) -> bool:
        start = self._held.find(opening)
        end = self._held.find(">", start)
        if start < 0 or end < 0:
            return False
        name, self._held = self._held[start + len(opening) : end], self._held[end + 1 :]
        begin(name.strip())
        return True

    def _begin(self, name: str) -> None:
        self._name, self._is_first = name, True
        self._open(name)
        self._arguments = "{"

    def _begin_argument(self, name: str) -> None:
        self._key = name
        self._arguments += f"{'' if self._is_first else ', '}{json.dumps(name)}: "
        self._is_first = False

    def _read_content(self, key: str) -> bool:
        end = self._held.find(self.END)
        if end < 0:
            return False
        content, self._held = self._held[:end], self._held[end + len(self.END) :]
        content = content.removeprefix("\n").removesuffix("\n")
        self._arguments += _as_json(content, is_text=key in self._texts.get(self._name, ()))
        self._key = None
        return True


def _texts(use: ToolUse | None) -> dict[str, frozenset[str]]:
    """Return the arguments of each tool that are texts."""
    return {tool.name: frozenset(_text_names(tool.parameters)) for tool in (use.tools if use else ())}


def _text_names(schema: object) -> list[str]:
    properties = schema.get("properties") if isinstance(schema, dict) else None
    if not isinstance(properties, dict):
        return []
    return [name for name, one in properties.items() if isinstance(one, dict) and one.get("type") == "string"]


def _as_json(content: str, *, is_text: bool) -> str:
    if not is_text:
        try:
            msgspec.json.decode(content)
        except (msgspec.DecodeError, RecursionError):
            pass
        else:
            return content.strip()
    return json.dumps(content, ensure_ascii=False)


def _escaped(text: str) -> str:
    """Return a piece of a text as it stands within a JSON string."""
    return json.dumps(text, ensure_ascii=False)[1:-1]


def _written(word: str) -> str:
    """Return a bare word as JSON: a literal, a number, or a text."""
    if not word or word in ("true", "false", "null"):
        return word
    if word in _WORDS:
        return _WORDS[word]
    try:
        msgspec.json.decode(word)
    except msgspec.DecodeError:
        return json.dumps(word, ensure_ascii=False)
    return word
