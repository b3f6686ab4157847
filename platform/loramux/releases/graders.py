"""Graders: a score of 0 to 1 for an answer, from what was expected. Pure functions over untrusted text, on a thread.

A pattern has a time limit for each answer, and a schema's work is bounded (`bounded_schema`), so that no grader
runs for long.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import Annotated, Any

import msgspec
import regex
from msgspec import Meta

from loramux.errors import LoramuxError
from loramux.releases.bounded_schema import BoundedSchema, InvalidSchema, TooMuchWork

PATTERN_SECONDS = 0.05
MAX_PATTERN = 1000
_number = regex.compile(r"[-+]?(?:\d+(?:,\d{3})*(?:\.\d+)?|\.\d+)(?:[eE][-+]?\d{1,3})?")

Expected = str | float | int | None
Grade = Callable[[str, Expected], float]


class InvalidGrader(LoramuxError):
    """The message says what is wrong with the grader or the set."""


class Exact(msgspec.Struct, frozen=True, tag="exact", tag_field="type", forbid_unknown_fields=True):
    """1 where the answer is the expected text; spaces around both do not count."""

    ignore_case: bool = False


class Contains(msgspec.Struct, frozen=True, tag="contains", tag_field="type", forbid_unknown_fields=True):
    """1 where the answer contains the expected text."""

    ignore_case: bool = False


class Pattern(msgspec.Struct, frozen=True, tag="regex", tag_field="type", forbid_unknown_fields=True):
    """1 where the pattern is found in the answer; without one, the expected text is the pattern."""

    pattern: Annotated[str, Meta(max_length=MAX_PATTERN)] | None = None


class Schema(msgspec.Struct, frozen=True, tag="json_schema", tag_field="type", forbid_unknown_fields=True):
    """1 where the answer is JSON that the schema allows."""

    schema: dict[str, Any]


class Number(msgspec.Struct, frozen=True, tag="number", tag_field="type", forbid_unknown_fields=True):
    """1 where the last number in the answer is the expected one, within a tolerance."""

    tolerance: Annotated[float, Meta(ge=0)] = 0.0
    relative: bool = False
    """The tolerance is a part of the expected number."""


class Label(msgspec.Struct, frozen=True, tag="label", tag_field="type", forbid_unknown_fields=True):
    """1 where the answer is the expected label, whatever its case; the result has F1 too."""


class Judge(msgspec.Struct, frozen=True, tag="judge", tag_field="type", forbid_unknown_fields=True, kw_only=True):
    """The score of another model, from 0 to 1, asked at an OpenAI-shaped URL (`judges`)."""

    url: Annotated[str, Meta(max_length=2048)]
    """Such as https://api.example.com/v1."""
    model: Annotated[str, Meta(min_length=1, max_length=200)]
    instructions: Annotated[str, Meta(min_length=1, max_length=8000)] | None = None
    """How to grade; None: right and complete is 1."""


LocalGrader = Exact | Contains | Pattern | Schema | Number | Label
Grader = LocalGrader | Judge


def grade_with(grader: LocalGrader) -> Grade:
    """Return the grader's function. Raises InvalidGrader, as the function does where a schema takes too long.

    Takes up to half a second: not for the event loop.
    """
    match grader:
        case Exact(ignore_case):
            return lambda answer, expected: float(_folded(answer, ignore_case) == _folded(_text(expected), ignore_case))
        case Contains(ignore_case):
            return lambda answer, expected: float(_folded(_text(expected), ignore_case) in _folded(answer, ignore_case))
        case Pattern(pattern):
            return _pattern_grade(pattern)
        case Schema(schema):
            return _schema_grade(schema)
        case Number(tolerance, relative):
            return lambda answer, expected: _number_grade(answer, expected, tolerance, relative)
        case Label():
            return lambda answer, expected: float(label_of(answer) == label_of(_text(expected)))


def label_of(text: str) -> str:
    """Return a text as a label."""
    return text.strip().strip(".\"'`").casefold()


def f1(pairs: Sequence[tuple[str, str]]) -> dict[str, float]:
    """Return `macro` and `micro` F1 of (answered, expected) labels; macro over the expected labels."""
    hit = Counter(expected for answered, expected in pairs if answered == expected)
    answered, expected = Counter(one for one, _ in pairs), Counter(one for _, one in pairs)
    each = [2 * hit[label] / (answered[label] + expected[label]) for label in expected]
    return {"macro": sum(each) / len(each) if each else 0.0, "micro": hit.total() / len(pairs) if pairs else 0.0}


def _text(expected: Expected) -> str:
    return "" if expected is None else str(expected)


def _folded(text: str, ignore_case: bool) -> str:
    return text.strip().casefold() if ignore_case else text.strip()


def _pattern_grade(pattern: str | None) -> Grade:
    compiled = None if pattern is None else _compiled(pattern)

    def grade(answer: str, expected: Expected) -> float:
        try:
            wanted = compiled or _compiled(_text(expected))
            return float(wanted.search(answer, timeout=PATTERN_SECONDS) is not None)
        except (TimeoutError, InvalidGrader):
            return 0.0

    return grade


def _compiled(pattern: str) -> Any:
    try:
        return regex.compile(pattern[:MAX_PATTERN])
    except regex.error as error:
        raise InvalidGrader(f"The pattern cannot be compiled: {error}.", "grader.pattern") from None


def _schema_grade(schema: Mapping[str, Any]) -> Grade:
    try:
        bounded = BoundedSchema(schema)
    except InvalidSchema as error:
        raise InvalidGrader(str(error), "grader.schema") from None

    def grade(answer: str, _: Expected) -> float:
        try:
            return float(bounded.allows(answer))
        except TooMuchWork:
            raise InvalidGrader(
                "The schema takes too long to validate the answers; give it fewer references and alternatives.",
                "grader.schema",
            ) from None

    return grade


def _number_grade(answer: str, expected: Expected, tolerance: float, relative: bool) -> float:
    found = _number.findall(answer, timeout=PATTERN_SECONDS)
    try:
        wanted = float(_text(expected).replace(",", ""))
        given = float(found[-1].replace(",", ""))
    except (ValueError, IndexError):
        return 0.0
    return float(abs(given - wanted) <= tolerance * (abs(wanted) if relative else 1.0))
