r"""Rewrite a Lark grammar so that it matches its texts in the form in which they are escaped within a JSON string.

A custom tool has an input with its own grammar, and a model writes that input as a string of a call's arguments. So

    start: "a\n" WORD            becomes        p_start: "a" "\\n" p_WORD
    WORD: /[a-z"]+/                             p_WORD: ((/[a-z]/ | "\\\""))+

Every terminal becomes a rule of single characters. The reason is that the escapes `\n` and `\"` begin with the same
character, and the lexer of llguidance takes the longest text without backtracking. Names get a prefix, because the
rules become part of another grammar. Each character has only one spelling, that of `json.dumps` without ASCII escapes.
Python's own parser reads the expressions; an expression that this module cannot rewrite is refused.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable
from re import _constants as codes  # type: ignore[attr-defined]  # the parser's own constants
from re import _parser as expressions  # type: ignore[attr-defined]
from typing import Any

MOST = 0x10FFFF
_SPECIAL = ('"', "\\", *map(chr, range(32)))
"""Characters that JSON escapes in a string."""
COMMON = {
    "LF": r"\n",
    "CR": r"\r",
    "NEWLINE": r"(\r?\n)+",
    "WS": r"[ \t\f\r\n]+",
    "WS_INLINE": r"[ \t]+",
    "DIGIT": "[0-9]",
    "HEXDIGIT": "[0-9a-fA-F]",
    "INT": "[0-9]+",
    "SIGNED_INT": "[+-]?[0-9]+",
    "LETTER": "[a-zA-Z]",
    "WORD": "[a-zA-Z]+",
    "CNAME": "[_a-zA-Z][_a-zA-Z0-9]*",
    "ESCAPED_STRING": r'"([^"\\]|\\.)*"',
}
"""Terminals of Lark's `common`, which a grammar may import."""
_token = re.compile(
    r"""(?P<import>%import\s+common\.[A-Z_]+)
      | (?P<comment>//[^\n]*|\#[^\n]*)
      | (?P<text>"(?:[^"\\\n]|\\.)*"i?)
      | (?P<regex>/(?![*+?/])(?:[^/\\\n\[]|\\.|\[(?:[^\]\\\n]|\\.)*\])+/[imslux]*)
      | (?P<directive>%[a-z_]+)
      | (?P<name>[_a-zA-Z][_a-zA-Z0-9]*)
      | (?P<other>\s+|[^\s])""",
    re.VERBOSE,
)
_CATEGORIES = {
    codes.CATEGORY_DIGIT: [(48, 57)],
    codes.CATEGORY_WORD: [(48, 57), (65, 90), (95, 95), (97, 122)],
    codes.CATEGORY_SPACE: [(9, 13), (32, 32)],
}
_NOT = {
    codes.CATEGORY_NOT_DIGIT: codes.CATEGORY_DIGIT,
    codes.CATEGORY_NOT_WORD: codes.CATEGORY_WORD,
    codes.CATEGORY_NOT_SPACE: codes.CATEGORY_SPACE,
}
Ranges = list[tuple[int, int]]


def escape_grammar(lark: str, prefix: str) -> tuple[str, list[str]]:
    """Return the name of the start rule, and the rules. Raises ValueError with what cannot be written."""
    written: list[str] = []
    for found in _token.finditer(lark):
        kind, text = found.lastgroup, found[0]
        match kind:
            case "comment":
                continue
            case "import":
                name = text.rpartition(".")[2]
                if name not in COMMON:
                    raise ValueError(f"the grammar imports {name}; write it as a terminal")
                written.append(f"{_prefixed(name, prefix)}: {escape_expression(COMMON[name])}")
            case "text":
                written.append(_escaped_text(text))
            case "regex":
                body, _, flags = text[1:].rpartition("/")
                written.append(f"({escape_expression(body.replace(chr(92) + '/', '/'), flags)})")
            case "directive":
                raise ValueError(f"the grammar uses {text}, which cannot be part of a call; write rules and terminals")
            case "name":
                written.append(_prefixed(text, prefix))
            case _:
                written.append(text)
    rules = "".join(written)
    if not re.search(rf"^\s*{re.escape(_prefixed('start', prefix))}\b", rules, re.MULTILINE):
        raise ValueError("the grammar has no rule 'start'")
    return _prefixed("start", prefix), [rules]


def _prefixed(name: str, prefix: str) -> str:
    """Return a name of the other grammar. Terminals become rules, whose names have no capital letters."""
    return f"{prefix}_{'t_' if name.isupper() else ''}{name.lower()}"


def _escaped_text(literal: str) -> str:
    text = str(json.loads(literal.removesuffix("i")))
    return f"({escape_expression(re.escape(text), 'i' if literal.endswith('i') else '')})"


def _escaped(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)[1:-1]


def escape_expression(pattern: str, flags: str = "") -> str:
    """Return the expression of the escaped texts. Raises ValueError if the expression cannot be written."""
    if set(flags) - set("isu"):
        raise ValueError(f"the flags '{flags}' of an expression cannot be used in a grammar of a call")
    given = (re.IGNORECASE if "i" in flags else 0) | (re.DOTALL if "s" in flags else 0)
    try:
        parsed = expressions.parse(pattern, given | re.ASCII)
    except (re.error, OverflowError, RecursionError) as error:
        raise ValueError(f"the expression /{pattern[:80]}/ cannot be read: {error}") from None
    return _sequence(parsed, parsed.state.flags)


def _sequence(items: Iterable[tuple[Any, Any]], flags: int) -> str:
    return " ".join(_WRITERS.get(code, _refuse)(value, flags, code) for code, value in items) or '""'


def _refuse(_value: Any, _flags: int, code: Any) -> str:
    raise ValueError(f"an expression with {str(code).lower()} cannot be part of a call's grammar")


def _literal(value: int, flags: int, _code: Any) -> str:
    return _set([(value, value)], flags)


def _not_literal(value: int, flags: int, _code: Any) -> str:
    return _set(_without(_cased([(value, value)], flags)), 0)


def _any(_value: Any, flags: int, _code: Any) -> str:
    return _set([(0, MOST)] if flags & re.DOTALL else [(0, 9), (11, MOST)], 0)


def _in(value: list[tuple[Any, Any]], flags: int, _code: Any) -> str:
    ranges: Ranges = []
    is_negated = False
    for code, one in value:
        if code is codes.NEGATE:
            is_negated = True
        elif code is codes.LITERAL:
            ranges.append((one, one))
        elif code is codes.RANGE:
            ranges.append(one)
        elif one in _NOT:
            ranges += _without(_CATEGORIES[_NOT[one]])
        else:
            ranges += _CATEGORIES[one]
    ranges = _cased(ranges, flags)
    return _set(_without(ranges) if is_negated else ranges, 0)


def _branch(value: Any, flags: int, _code: Any) -> str:
    return f"({' | '.join(_sequence(one, flags) for one in value[1])})"


def _group(value: Any, flags: int, _code: Any) -> str:
    _, added, removed, items = value
    return f"({_sequence(items, (flags | added) & ~removed)})"


def _repeat(value: Any, flags: int, code: Any) -> str:
    low, high, items = value
    if code is codes.MIN_REPEAT:
        raise ValueError("a lazy repetition cannot be part of a call's grammar")
    most = None if high is codes.MAXREPEAT else int(high)
    times = {(0, None): "*", (1, None): "+", (0, 1): "?"}.get((low, most), f"{{{low},{'' if most is None else most}}}")
    return f"({_sequence(items, flags)}){times}"


_WRITERS: dict[Any, Callable[[Any, int, Any], str]] = {
    codes.LITERAL: _literal,
    codes.NOT_LITERAL: _not_literal,
    codes.ANY: _any,
    codes.IN: _in,
    codes.BRANCH: _branch,
    codes.SUBPATTERN: _group,
    codes.MAX_REPEAT: _repeat,
    codes.MIN_REPEAT: _repeat,
}


def _cased(ranges: Ranges, flags: int) -> Ranges:
    """Return the ranges with both cases of ASCII letters, if the expression ignores case."""
    if not flags & re.IGNORECASE:
        return ranges
    both = list(ranges)
    for low, high in ranges:
        for first, last, shift in ((65, 90, 32), (97, 122, -32)):
            if max(low, first) <= min(high, last):
                both.append((max(low, first) + shift, min(high, last) + shift))
    return both


def _without(ranges: Ranges) -> Ranges:
    """Return all other characters."""
    left, position = [], 0
    for low, high in sorted(ranges):
        if low > position:
            left.append((position, low - 1))
        position = max(position, high + 1)
    return [*left, *([(position, MOST)] if position <= MOST else [])]


def _set(ranges: Ranges, flags: int) -> str:
    """Write one character of the ranges, escaped as in JSON."""
    ranges = _cased(ranges, flags)
    parts = [
        json.dumps(_escaped(c), ensure_ascii=False)
        for c in _SPECIAL
        if any(low <= ord(c) <= high for low, high in ranges)
    ]
    plain = _without([*_without(ranges), (0, 31), (34, 34), (92, 92)])
    if plain:
        parts.insert(0, f"/[{''.join(f'{_point(low)}-{_point(high)}' for low, high in plain)}]/")
    if not parts:
        raise ValueError("an expression matches no character")
    return parts[0] if len(parts) == 1 else f"({' | '.join(parts)})"


def _point(code: int) -> str:
    return f"\\x{{{code:X}}}"
