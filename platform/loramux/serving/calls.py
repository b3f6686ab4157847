"""Read calls of tools from an answer's text as it arrives: a name first, then the arguments as JSON, in any notation.

A scanner never takes back parts that it has given out, and does the same work for every character, independently of the
division of the answer into pieces. It reads a notation by the description from which its grammar is made
(`constraints.notations`). A model that follows no grammar may write malformed calls. A scanner then gives out the parts
that it can read.
"""

from __future__ import annotations

import json
import re
import secrets
import string
from collections.abc import Callable, Iterable
from enum import Enum
from typing import Protocol

import msgspec

from loramux.constraints.notations import (
    END_OF_FUNCTION,
    FUNCTION,
    GEMMA,
    PYTHON,
    LiteralNotation,
    XmlWriter,
    argument_kinds,
    special_names,
)
from loramux.constraints.schemas import KINDS, kind_of
from loramux.constraints.tools import ToolStyle, ToolUse

_ALPHABET = string.ascii_letters + string.digits


class CallDelta(msgspec.Struct, frozen=True, kw_only=True):
    """New parts of one call of a tool."""

    index: int
    id: str | None = None
    """Id of the call; set, with the name, on the call's first delta."""
    name: str | None = None
    arguments: str = ""


def join_calls(news: Iterable[CallDelta]) -> tuple[CallDelta, ...]:
    """Join the deltas of each call into one, in the order of the calls: clients add up the entries of a chunk by
    index.
    """
    calls: dict[int, CallDelta] = {}
    arguments: dict[int, list[str]] = {}
    for delta in news:
        calls.setdefault(delta.index, delta)
        arguments.setdefault(delta.index, []).append(delta.arguments)
    return tuple(msgspec.structs.replace(calls[index], arguments="".join(arguments[index])) for index in sorted(calls))


class CallScanner(Protocol):
    """Reads the calls of an answer, starting at the text that begins them."""

    def push(self, text: str) -> tuple[CallDelta, ...]:
        """Return the new parts of the calls."""


def scanner_of(style: ToolStyle, use: ToolUse | None) -> CallScanner:
    """Return a scanner of calls in `style`. `use` has the tools; their schemas show which values are texts."""
    match style.notation:
        case "json":
            return JsonCalls(style)
        case "bare":
            return BareCalls(style)
        case "python":
            return LiteralCalls(style, PYTHON, use)
        case "xml":
            return XmlCalls(style, use)
        case "gemma":
            return LiteralCalls(style, GEMMA, use)


def new_id(style: ToolStyle) -> str:
    """Return the id of a new call."""
    id = "".join(secrets.choice(_ALPHABET) for _ in range(style.id_characters))
    return id if style.id_characters < len("call_") + 9 else f"call_{id}"


def overlap(text: str, marker: str) -> int:
    """Return the length of the longest suffix of `text` that is a prefix of `marker`."""
    return next((n for n in range(min(len(text), len(marker) - 1), 0, -1) if marker.startswith(text[-n:])), 0)


class _At(Enum):
    BETWEEN = "between"
    """Outside of a call: blanks, separators and markers, which are skipped."""
    HEAD = "head"
    """Within a call's object, before its arguments or after them."""
    ARGUMENTS = "arguments"


class JsonCalls:
    """Reads calls that are each a JSON object with a name and then arguments, or a bare name and then the arguments."""

    def __init__(self, style: ToolStyle) -> None:
        self.begin = style.begin
        """The text before the first call."""
        self._style = style
        self._at = _At.BETWEEN
        self._num_calls = 0
        self._depth = 0
        """Number of open objects and lists in the arguments."""
        self._string: str | None = None
        """The unfinished string, as JSON; None outside of a string."""
        self._is_escaped = False
        self._last = ""
        """Last string outside of the arguments: it is a key until its value has arrived."""
        self._key = ""

    def push(self, text: str) -> tuple[CallDelta, ...]:
        """Return the new parts of the calls."""
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
        return join_calls(calls)

    def _belongs(self, character: str) -> bool:
        """Advance within the arguments, and return whether the character belongs to them."""
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
        """Advance outside of arguments; return a call's name when it is complete."""
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
        """Advance within a string, and return whether it has ended."""
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


class ConvertingScanner:
    """Base of the scanners that convert arguments to JSON."""

    def __init__(self, style: ToolStyle) -> None:
        self._style = style
        self._num_calls = 0
        self._held = ""
        """Text that has not been read yet."""
        self._in_call = False
        self._news: list[CallDelta] = []
        self._arguments = ""
        """Arguments of the current call that have not been given out yet."""

    def push(self, text: str) -> tuple[CallDelta, ...]:
        """Return the new parts of the calls."""
        self._held += text
        while self._held and self._advance():
            pass
        self._give()
        news, self._news = self._news, []
        return join_calls(news)

    def _advance(self) -> bool:
        """Read further; return False if more text is needed."""
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
    """Reads `name[ARGS]{...}` and further calls, each after `[TOOL_CALLS]`. `[CALL_ID]` and an id may follow a name."""

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
        """Advance within the arguments, and return whether the character is their last."""
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


class LiteralCalls(ConvertingScanner):
    """Reads `name(key="value", ...)` and `call:name{key:value, ...}`: names, each with a literal."""

    def __init__(self, style: ToolStyle, notation: LiteralNotation, use: ToolUse | None) -> None:
        super().__init__(style)
        self._notation = notation
        self._names = {tool.name: _known_names(tool.parameters) for tool in (use.tools if use else ())}
        self._known: list[str] = []
        """Names of the current tool's arguments that are not plain keys, the longest first."""
        self._word = ""
        self._quote = ""
        """The text that will end the current text."""
        self._is_escaped = False
        self._open_signs: list[str] = []
        """Signs that end the call and its open values."""
        self._is_key = False
        """True if a name, or the end of an object, comes next."""
        self._is_named = False
        """True if the current or last text is a name, which its sign follows."""

    def _advance(self) -> bool:
        if not self._in_call:
            return self._read_name()
        if self._quote:
            return self._read_marked() if self._quote == self._style.mark else self._read_quoted()
        if self._is_key:
            self._held = self._held.lstrip()
        read = self._read_mark()
        if read is None and self._is_key:
            read = self._read_key()
        if read is None:
            self._read_value()
        return read is not False

    def _read_mark(self) -> bool | None:
        """Read the mark that begins a text. Return False if more text is needed, None if other text comes."""
        mark = self._style.mark
        if self._held and not (mark and mark.startswith(self._held[: len(mark)])):
            return None
        if len(self._held) < max(len(mark), 1):
            return False
        self._begin_text(mark)
        return True

    def _read_name(self) -> bool:
        character, self._held = self._held[0], self._held[1:]
        if character == self._notation.opening and self._word:
            name, self._word = self._word, ""
            self._open(name)
            self._known = self._names.get(name, [])
            self._arguments, self._open_signs, self._is_key = "{", [self._notation.closing], True
        elif character.isalnum() or character in "_.-":
            self._word += character
        else:
            self._word = ""
        return True

    def _read_key(self) -> bool | None:
        """Read a name and its sign. Return False if more text is needed, None if other text comes."""
        is_name = len(self._open_signs) == 1 or self._notation.nested_names
        sign = self._notation.sign if is_name else ":"
        for name in self._known if is_name else ():
            if self._held.startswith(name + sign):
                return self._take_key(name, name + sign)
            if (name + sign).startswith(self._held):
                return False
        match = re.match(rf"([^\s\"'{re.escape(sign)},()\[\]{{}}][^{re.escape(sign)},()\[\]{{}}]*)(.?)", self._held)
        if not is_name or match is None or (match[2] and match[2] != sign):
            return None
        return self._take_key(match[1].strip(), match[0]) if match[2] else False  # the name may continue

    def _take_key(self, name: str, text: str) -> bool:
        self._arguments += f"{json.dumps(name)}: "
        self._held = self._held[len(text) :]
        self._is_key = False
        return True

    def _read_value(self) -> None:
        character, self._held = self._held[0], self._held[1:]
        if character in self._notation.quotes and not self._word.strip():
            self._begin_text(character, length=0)
        elif character == ":" and self._is_named:
            self._arguments += ": "
            self._is_named = False
        elif character in ",[]{}()":
            self._arguments += self._written(self._word.strip())
            self._word = ""
            self._read_sign(character)
        else:
            self._word += character

    def _read_sign(self, character: str) -> None:
        if character in "[{(":
            self._arguments += "{" if character == "{" else "["
            self._open_signs.append("}" if character == "{" else "]")
            self._is_key = character == "{"
        elif character == ",":
            self._arguments += ", "
            self._is_key = len(self._open_signs) == 1 or self._open_signs[-1] == "}"
        elif len(self._open_signs) > 1:
            self._arguments += self._open_signs.pop()
            self._is_key = False
        elif character == self._notation.closing:
            self._arguments += "}"
            self._close()

    def _begin_text(self, end: str, length: int | None = None) -> None:
        self._held = self._held[len(end) if length is None else length :]
        self._quote, self._word = end, ""
        self._is_named, self._is_key = self._is_key, False
        self._arguments += '"'

    def _end_text(self) -> None:
        self._quote = ""
        self._arguments += '"'

    def _read_marked(self) -> bool:
        """Read on in a text without escapes. The mark ends the text only if a comma, a colon or a closing bracket
        follows.
        """
        text, self._held, is_marked = _until(self._held, self._quote)
        self._arguments += _escaped(text)
        if not is_marked:
            return False
        if not (following := self._held.lstrip()):
            self._held = self._quote + self._held
            return False
        if following[0] in ",:]}":
            self._end_text()
        else:
            self._arguments += _escaped(self._quote)
        return True

    def _read_quoted(self) -> bool:
        """Read a text with escapes."""
        character, self._held = self._held[0], self._held[1:]
        if self._is_escaped:
            self._is_escaped = False
            escape = character if character in '"\\/bfnrtu' else ""
            self._arguments += f"\\{escape}" if escape else _escaped(character)
        elif character == "\\":
            self._is_escaped = True
        elif character == self._quote:
            self._end_text()
        else:
            self._arguments += _escaped(character)
        return True

    def _written(self, word: str) -> str:
        """Return a bare word as JSON: a literal, a number, or a text."""
        if not word:
            return ""
        if word in self._notation.words:
            return json.dumps(self._notation.words[word])
        return word if _json_kind(word) is not None else json.dumps(word, ensure_ascii=False)


class XmlCalls(ConvertingScanner):
    """Reads `<function=name><parameter=key>value</parameter>...</function>`."""

    def __init__(self, style: ToolStyle, use: ToolUse | None) -> None:
        super().__init__(style)
        self._schemas = {tool.name: tool.parameters for tool in (use.tools if use else ())}
        self._name = ""
        self._kinds: frozenset[str] | None = None
        """JSON types that the current argument may have; None between arguments."""
        self._is_begun = False
        """True if a part of the argument's text has been given out."""
        self._is_first = True

    def _advance(self) -> bool:
        if not self._in_call:
            return self._read_tag(FUNCTION, ">", self._begin)
        if self._kinds is not None:
            return self._read_content(self._kinds)
        parameter, end = self._held.find(XmlWriter.BEGIN), self._held.find(END_OF_FUNCTION)
        if end >= 0 and (parameter < 0 or end < parameter):
            self._held = self._held[end + len(END_OF_FUNCTION) :]
            self._arguments += "}"
            self._close()
            return True
        return self._read_tag(XmlWriter.BEGIN, XmlWriter.AFTER_NAME, self._begin_argument)

    def _read_tag(self, opening: str, closing: str, begin: Callable[[str], None]) -> bool:
        start = self._held.find(opening)
        end = self._held.find(closing, start)
        if start < 0 or end < 0:
            return False
        name, self._held = self._held[start + len(opening) : end], self._held[end + len(closing) :]
        begin(name)
        return True

    def _begin(self, name: str) -> None:
        self._name, self._is_first = name.strip(), True
        self._open(self._name)
        self._arguments = "{"

    def _begin_argument(self, name: str) -> None:
        known = self._name in self._schemas
        self._kinds = argument_kinds(self._schemas[self._name], name) if known else KINDS
        self._arguments += f"{'' if self._is_first else ', '}{json.dumps(name)}: "
        self._is_first = False

    def _read_content(self, kinds: frozenset[str]) -> bool:
        if kinds != {"string"}:
            content, end, rest = self._held.partition(XmlWriter.END)
            if end:
                is_json = _json_kind(content) in kinds
                self._arguments += content.strip(" \t\r\n") if is_json else json.dumps(content, ensure_ascii=False)
                self._held, self._kinds = rest, None
            return bool(end)
        text, self._held, is_ended = _until(self._held, XmlWriter.END)
        self._arguments += ("" if self._is_begun else '"') + _escaped(text) + ('"' if is_ended else "")
        self._is_begun = not is_ended
        self._kinds = None if is_ended else kinds
        return is_ended


def _known_names(schema: object) -> list[str]:
    """Return the names of a tool's arguments that are not plain keys, the longest first."""
    return sorted(set(special_names(schema)), key=len, reverse=True)


def _until(text: str, mark: str) -> tuple[str, str, bool]:
    """Return the certain part of a text up to `mark`, the rest after it, and whether the mark was found."""
    end = text.find(mark)
    if end >= 0:
        return text[:end], text[end + len(mark) :], True
    length = len(text) - overlap(text, mark)
    return text[:length], text[length:], False


def _json_kind(text: str) -> str | None:
    """Return the type of the JSON value that a text is; None if it is not JSON."""
    try:
        return kind_of(msgspec.json.decode(text))
    except (msgspec.DecodeError, RecursionError):
        return None


def _escaped(text: str) -> str:
    """Return a piece of a text, escaped for the inside of a JSON string."""
    return json.dumps(text, ensure_ascii=False)[1:-1]


def _decoded(token: str) -> str:
    try:
        return msgspec.json.decode(token, type=str)
    except msgspec.DecodeError:
        return token.strip('"')
