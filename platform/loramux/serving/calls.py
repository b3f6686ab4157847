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
        self._string: list[str] | None = None
        """Characters of the unfinished string, as JSON; None outside of a string."""
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
            self._string = []
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
            self._string = []
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
                self._last = _decoded(f'"{"".join(self._string)}"')
            self._string = None
            return True
        self._is_escaped = character == "\\" and not self._is_escaped
        if self._at is _At.HEAD:
            self._string.append(character)
        return False


class ConvertingScanner:
    """Base of the scanners that convert arguments to JSON.

    A scanner reads the held text from `_place` on. If it needs a certain text before it can read further, it awaits
    that text: until it comes, new pieces are only searched, so that no character is read twice.
    """

    def __init__(self, style: ToolStyle) -> None:
        self._style = style
        self._num_calls = 0
        self._held = ""
        self._place = 0
        """Offset in the held text up to which it has been read."""
        self._pieces: list[str] = []
        """Pieces after the held text, which are joined to it when the awaited text has come."""
        self._awaited: re.Pattern[str] | None = None
        self._awaited_length = 0
        self._tail = ""
        """Last characters before the next piece, in which the awaited text may begin."""
        self._in_call = False
        self._news: list[CallDelta] = []
        self._arguments: list[str] = []
        """Arguments of the current call that have not been given out yet."""

    def push(self, text: str) -> tuple[CallDelta, ...]:
        """Return the new parts of the calls."""
        self._pieces.append(text)
        if self._awaited is not None and self._awaited.search(self._tail + text) is None:
            self._tail = _last(self._tail + text, self._awaited_length - 1)
            return ()
        self._held, self._place = "".join([self._held[self._place :], *self._pieces]), 0
        self._pieces, self._awaited = [], None
        while self._place < len(self._held) and self._advance():
            pass
        self._give()
        news, self._news = self._news, []
        return join_calls(news)

    def _advance(self) -> bool:
        """Read further; return False if more text is needed."""
        raise NotImplementedError

    def _await(self, awaited: re.Pattern[str], length: int = 1) -> bool:
        """Wait for a text that `awaited` matches, of at most `length` characters; return False."""
        self._awaited, self._awaited_length, self._tail = awaited, length, _last(self._held, length - 1)
        return False

    def _open(self, name: str) -> None:
        self._news.append(CallDelta(index=self._num_calls, id=new_id(self._style), name=name))
        self._num_calls += 1
        self._in_call = True

    def _close(self) -> None:
        self._give()
        self._in_call = False

    def _give(self) -> None:
        if arguments := "".join(self._arguments):
            self._news.append(CallDelta(index=self._num_calls - 1, arguments=arguments))
        self._arguments = []

    def _read_until(self, mark: str) -> tuple[str, bool]:
        """Read the certain part of a text up to `mark`, and the mark if it is there; return the part, and whether it
        is.
        """
        begin, end = self._place, self._held.find(mark, self._place)
        if end >= 0:
            self._place = end + len(mark)
            return self._held[begin:end], True
        self._place = len(self._held) - overlap(self._held[max(begin, len(self._held) - len(mark)) :], mark)
        return self._held[begin : self._place], False


class BareCalls(ConvertingScanner):
    """Reads `name[ARGS]{...}` and further calls, each after `[TOOL_CALLS]`. `[CALL_ID]` and an id may follow a name."""

    def __init__(self, style: ToolStyle) -> None:
        super().__init__(style)
        self._middle = _any_of(style.middle)
        self._depth = 0
        self._string = False
        self._is_escaped = False

    def _advance(self) -> bool:
        begin = self._place
        if not self._in_call:
            found = self._middle.search(self._held, begin)
            if found is None:
                return self._await(self._middle, len(self._style.middle))
            self._place = found.end()
            written = self._held[begin : found.start()]
            self._open(written.rpartition(self._style.begin)[2].partition("[CALL_ID]")[0].strip())
            return True
        is_begun = self._depth > 0 or bool(self._arguments)
        is_over = False
        while self._place < len(self._held) and not is_over:
            is_over = self._ends(self._held[self._place])
            self._place += 1
        written = self._held[begin : self._place]
        if written := written if is_begun else written.lstrip():
            self._arguments.append(written)
        if is_over:
            self._close()
        return is_over

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
        ends = rf"{re.escape(notation.sign)},()\[\]{{}}"
        self._end_of_key = re.compile(f"[{ends}]")
        self._plain = re.compile(rf"[^,:()\[\]{{}}\"'{style.mark[:1]}]+")
        """Characters of a bare word."""
        self._key = re.compile(rf"([^\s\"'{ends}][^{ends}]*)(.?)")
        self._names = {tool.name: _known_names(tool.parameters) for tool in (use.tools if use else ())}
        self._known: list[str] = []
        """Names of the current tool's arguments that are not plain keys, the longest first."""
        self._word: list[str] = []
        """Pieces of the current bare word, which has no blanks before it."""
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
            self._read_run(_BLANKS)
        read = self._read_mark()
        if read is None and self._is_key:
            read = self._read_key()
        if read is None:
            self._read_value()
        return read is not False

    def _read_run(self, characters: re.Pattern[str]) -> str:
        """Read the characters that follow and match an expression."""
        begin, found = self._place, characters.match(self._held, self._place)
        self._place = found.end() if found else begin
        return self._held[begin : self._place]

    def _read_mark(self) -> bool | None:
        """Read the mark that begins a text. Return False if more text is needed, None if other text comes."""
        mark = self._style.mark
        following = self._held[self._place : self._place + max(len(mark), 1)]
        if following and not (mark and mark.startswith(following)):
            return None
        if len(following) < max(len(mark), 1):
            return False
        self._place += len(mark)
        self._begin_text(mark)
        return True

    def _read_name(self) -> bool:
        if run := self._read_run(_NAME):
            self._word.append(run)
            return True
        character = self._held[self._place]
        self._place += 1
        name, self._word = "".join(self._word), []
        if character == self._notation.opening and name:
            self._open(name)
            self._known = self._names.get(name, [])
            self._arguments, self._open_signs, self._is_key = ["{"], [self._notation.closing], True
        return True

    def _read_key(self) -> bool | None:
        """Read a name and its sign. Return False if more text is needed, None if other text comes."""
        is_name = len(self._open_signs) == 1 or self._notation.nested_names
        length = len(self._held) - self._place
        for name in self._known if is_name else ():
            written = name + self._notation.sign
            if self._held.startswith(written, self._place):
                return self._take_key(name, len(written))
            if length < len(written) and written.startswith(self._held[self._place :]):
                return False
        match = self._key.match(self._held, self._place) if is_name else None
        if match is None or (match[2] and match[2] != self._notation.sign):
            return None
        return self._take_key(match[1].strip(), len(match[0])) if match[2] else self._await(self._end_of_key)

    def _take_key(self, name: str, length: int) -> bool:
        self._arguments.append(f"{json.dumps(name)}: ")
        self._place += length
        self._is_key = False
        return True

    def _read_value(self) -> None:
        if run := self._read_run(self._plain):
            self._add_word(run)
            return
        character = self._held[self._place]
        self._place += 1
        if character in self._notation.quotes and not self._word:
            self._begin_text(character)
        elif character == ":" and self._is_named:
            self._arguments.append(": ")
            self._is_named = False
        elif character in ",[]{}()":
            self._arguments.append(self._written("".join(self._word).strip()))
            self._word = []
            self._read_sign(character)
        else:
            self._add_word(character)

    def _add_word(self, text: str) -> None:
        if text := text if self._word else text.lstrip():
            self._word.append(text)

    def _read_sign(self, character: str) -> None:
        if character in "[{(":
            self._arguments.append("{" if character == "{" else "[")
            self._open_signs.append("}" if character == "{" else "]")
            self._is_key = character == "{"
        elif character == ",":
            self._arguments.append(", ")
            self._is_key = len(self._open_signs) == 1 or self._open_signs[-1] == "}"
        elif len(self._open_signs) > 1:
            self._arguments.append(self._open_signs.pop())
            self._is_key = False
        elif character == self._notation.closing:
            self._arguments.append("}")
            self._close()

    def _begin_text(self, end: str) -> None:
        self._quote, self._word = end, []
        self._is_named, self._is_key = self._is_key, False
        self._arguments.append('"')

    def _end_text(self) -> None:
        self._quote = ""
        self._arguments.append('"')

    def _read_marked(self) -> bool:
        """Read on in a text without escapes. The mark ends the text only if a comma, a colon or a closing bracket
        follows.
        """
        text, is_marked = self._read_until(self._quote)
        self._arguments.append(_escaped(text))
        if not is_marked:
            return False
        following = _NOT_BLANK.search(self._held, self._place)
        if following is None:
            self._place -= len(self._quote)
            return self._await(_NOT_BLANK)
        if following[0] in ",:]}":
            self._end_text()
        else:
            self._arguments.append(_escaped(self._quote))
        return True

    def _read_quoted(self) -> bool:
        """Read on in a text with escapes."""
        if not self._is_escaped and (run := self._read_run(_QUOTED[self._quote])):
            self._arguments.append(_escaped(run))
            return True
        character = self._held[self._place]
        self._place += 1
        if self._is_escaped:
            self._is_escaped = False
            escape = character if character in '"\\/bfnrtu' else ""
            self._arguments.append(f"\\{escape}" if escape else _escaped(character))
        elif character == "\\":
            self._is_escaped = True
        else:
            self._end_text()
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
        if self._kinds is not None:
            return self._read_content(self._kinds)
        if not self._in_call:
            return self._read_tag(_FUNCTION, _END_OF_NAME, 1, self._begin)
        return self._read_tag(_PARAMETER, _END_OF_KEY, len(XmlWriter.AFTER_NAME), self._begin_argument)

    def _read_tag(
        self, opening: re.Pattern[str], closing: re.Pattern[str], length: int, begin: Callable[[str], None]
    ) -> bool:
        """Read the next tag and its name, or the end of a function. `length` is that of the tag's end."""
        found = opening.search(self._held, self._place)
        if found is None:
            return self._await(opening, len(XmlWriter.BEGIN))
        self._place = found.start()
        if found[0] == END_OF_FUNCTION:
            self._place = found.end()
            self._arguments.append("}")
            self._close()
            return True
        end = closing.search(self._held, found.end())
        if end is None:
            return self._await(closing, length)
        self._place = end.end()
        begin(self._held[found.end() : end.start()])
        return True

    def _begin(self, name: str) -> None:
        self._name, self._is_first = name.strip(), True
        self._open(self._name)
        self._arguments = ["{"]

    def _begin_argument(self, name: str) -> None:
        known = self._name in self._schemas
        self._kinds = argument_kinds(self._schemas[self._name], name) if known else KINDS
        self._arguments.append(f"{'' if self._is_first else ', '}{json.dumps(name)}: ")
        self._is_first = False

    def _read_content(self, kinds: frozenset[str]) -> bool:
        if kinds != {"string"}:
            return self._read_value(kinds)
        text, is_ended = self._read_until(XmlWriter.END)
        self._arguments.append(("" if self._is_begun else '"') + _escaped(text) + ('"' if is_ended else ""))
        self._is_begun = not is_ended
        self._kinds = None if is_ended else kinds
        return is_ended

    def _read_value(self, kinds: frozenset[str]) -> bool:
        """Read a value whose end says whether it is a text or JSON."""
        end = self._held.find(XmlWriter.END, self._place)
        if end < 0:
            return self._await(_END_OF_VALUE, len(XmlWriter.END))
        content = self._held[self._place : end]
        is_json = _json_kind(content) in kinds
        self._arguments.append(content.strip(" \t\r\n") if is_json else json.dumps(content, ensure_ascii=False))
        self._place, self._kinds = end + len(XmlWriter.END), None
        return True


def _last(text: str, length: int) -> str:
    return text[max(len(text) - length, 0) :]


def _any_of(*texts: str) -> re.Pattern[str]:
    return re.compile("|".join(map(re.escape, texts)))


_BLANKS, _NOT_BLANK = re.compile(r"\s+"), re.compile(r"\S")
_NAME = re.compile(r"[\w.-]+")
_QUOTED = {quote: re.compile(rf"[^\\{quote}]+") for quote in ('"', "'")}
_FUNCTION, _END_OF_NAME = _any_of(FUNCTION), _any_of(">")
_PARAMETER, _END_OF_KEY = _any_of(XmlWriter.BEGIN, END_OF_FUNCTION), _any_of(XmlWriter.AFTER_NAME)
_END_OF_VALUE = _any_of(XmlWriter.END)


def _known_names(schema: object) -> list[str]:
    """Return the names of a tool's arguments that are not plain keys, the longest first."""
    return sorted(set(special_names(schema)), key=len, reverse=True)


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
