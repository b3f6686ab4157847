"""Graders, which compare an answer with the expected answer and score it from 0 to 1. Graders are pure functions over
untrusted text.

Graders run on a thread, and each has a limit. A pattern has a time limit for each answer, and validation by a JSON
Schema has a work limit. Without the limit, references to references take exponential time and `uniqueItems` takes
quadratic time. An error of a branch that does not apply quotes its value. So `BoundedSchema` charges each application
of a keyword by the number of values that it may read. `BoundedSchema` raises `TooMuchWork` when the share of an answer
or the share of all answers is used up. Schemas may not refer to other documents, and may not have patterns, because
pattern matching has no bound.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Annotated, Any

import jsonschema
import msgspec
import regex
from jsonschema import validators
from msgspec import Meta
from referencing import Registry
from referencing.exceptions import Unresolvable

from loramux.common.errors import LoramuxError

PATTERN_SECONDS = 0.05
MAX_PATTERN = 1000
MAX_NAME = 512
Expected = str | float | int | None
Grade = Callable[[str, Expected], float]
MAX_SCHEMA_BYTES = 65_536
MAX_SCHEMA_PARTS = 2000
"""Maximum number of objects and lists of a schema. Checking the schema takes a quarter of a millisecond for each."""
MAX_WORK_PER_ANSWER = 200_000
"""Maximum units of work for one answer. A unit takes one to seven microseconds."""
MAX_WORK = 20_000_000
"""Maximum units of work for all answers that one schema validates."""
_NESTED = frozenset({"const", "dependentRequired", "enum"})
"""Keywords that read all nested values of their instance, not only its direct members."""
_QUOTED_PER_UNIT = 16
"""Values that an error quotes in the time of one unit of work."""

_number = regex.compile(r"[-+]?(?:\d+(?:,\d{3})*(?:\.\d+)?|\.\d+)(?:[eE][-+]?\d{1,3})?")


class InvalidGrader(LoramuxError):
    """The grader or the set is not valid; the message gives the reason."""


class Exact(msgspec.Struct, frozen=True, tag="exact", tag_field="type", forbid_unknown_fields=True):
    """The score is 1 if the answer equals the expected text, without surrounding spaces."""

    ignore_case: bool = False


class Contains(msgspec.Struct, frozen=True, tag="contains", tag_field="type", forbid_unknown_fields=True):
    """The score is 1 if the answer contains the expected text."""

    ignore_case: bool = False


class Pattern(msgspec.Struct, frozen=True, tag="regex", tag_field="type", forbid_unknown_fields=True):
    """The score is 1 if the pattern is found in the answer. Without a pattern, the expected text is the pattern."""

    pattern: Annotated[str, Meta(max_length=MAX_PATTERN)] | None = None


class Schema(msgspec.Struct, frozen=True, tag="json_schema", tag_field="type", forbid_unknown_fields=True):
    """The score is 1 if the answer is JSON that the schema allows."""

    schema: Annotated[dict[Annotated[str, Meta(max_length=MAX_NAME)], Any], Meta(max_length=MAX_SCHEMA_PARTS)]


class Number(msgspec.Struct, frozen=True, tag="number", tag_field="type", forbid_unknown_fields=True):
    """The score is 1 if the last number in the answer equals the expected number within a tolerance."""

    tolerance: Annotated[float, Meta(ge=0)] = 0.0
    relative: bool = False
    """True: the tolerance is a fraction of the expected number."""


class Label(msgspec.Struct, frozen=True, tag="label", tag_field="type", forbid_unknown_fields=True):
    """The score is 1 if the answer is the expected label, ignoring case. The result also has F1."""


class Judge(msgspec.Struct, frozen=True, tag="judge", tag_field="type", forbid_unknown_fields=True, kw_only=True):
    """The score from 0 to 1 that another model gives, called at an OpenAI-compatible URL (`judges`)."""

    url: Annotated[str, Meta(max_length=2048)]
    """The base URL, such as https://api.example.com/v1."""
    model: Annotated[str, Meta(min_length=1, max_length=200)]
    instructions: Annotated[str, Meta(min_length=1, max_length=8000)] | None = None
    """Instructions for grading; None: a right and complete answer scores 1."""


LocalGrader = Exact | Contains | Pattern | Schema | Number | Label
Grader = LocalGrader | Judge


def grade_with(grader: LocalGrader) -> Grade:
    """Return the grader's function. Raises InvalidGrader; the function also raises it, if a schema takes too long.

    Takes up to half a second: do not call it on the event loop.
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


class InvalidSchema(ValueError):
    """The schema is not valid; the message gives the reason."""


class TooMuchWork(Exception):
    """The validation of an answer takes more work than it may."""


class BoundedSchema:
    """A schema that validates answers' texts with a limit on the work."""

    def __init__(self, schema: Mapping[str, Any]) -> None:
        """Raises InvalidSchema. Takes up to half a second."""
        if len(json.dumps(schema)) > MAX_SCHEMA_BYTES:
            raise InvalidSchema(f"The schema has more than {MAX_SCHEMA_BYTES} bytes.")
        try:
            self._schema = _checked_schema(schema, [MAX_SCHEMA_PARTS])
            jsonschema.Draft202012Validator.check_schema(self._schema)
        except (jsonschema.SchemaError, RecursionError) as error:
            raise InvalidSchema(f"The schema is no JSON Schema: {str(error)[:200]}.") from None
        self._left, self._left_of_all = 0, MAX_WORK
        self._sizes: dict[int, int] = {}
        """Number of values in each container of schema and answer, by id; an answer's values only while it is
        validated.
        """
        counted = {name: self._counted(name, run) for name, run in _keywords()}
        self._validator = validators.extend(jsonschema.Draft202012Validator, counted)(self._schema, registry=Registry())

    def allows(self, text: str) -> bool:
        """Return whether `text` is JSON that the schema allows. Raises TooMuchWork."""
        self._left = min(MAX_WORK_PER_ANSWER, self._left_of_all)
        began_with = self._left
        try:
            return bool(self._validator.is_valid(json.loads(text)))
        except (ValueError, RecursionError, Unresolvable):
            return False
        finally:
            self._left_of_all -= began_with - max(0, self._left)
            self._sizes.clear()

    def _counted(self, name: str, run: Callable[..., Any]) -> Callable[..., Any]:
        nested = name in _NESTED

        def apply(validator: Any, value: Any, instance: Any, schema: Any) -> Any:
            members = self._size(value) if nested else len(value) if isinstance(value, dict | list) else 0
            whole = self._size(instance)
            looked_at = whole if name == "uniqueItems" else len(instance) if isinstance(instance, dict | list) else 0
            self._left -= 1 + members + looked_at + whole // _QUOTED_PER_UNIT
            if self._left < 0:
                raise TooMuchWork
            return run(validator, value, instance, schema)

        return apply

    def _size(self, value: Any) -> int:
        """Return the number of values in `value`. A long text counts as several values."""
        if isinstance(value, str):
            return 1 + len(value) // 64
        if not isinstance(value, dict | list):
            return 1
        if (known := self._sizes.get(id(value))) is None:
            children = value.values() if isinstance(value, dict) else value
            known = self._sizes[id(value)] = 1 + len(value) + sum(map(self._size, children))
        return known


def _keywords() -> Iterator[tuple[str, Callable[..., Any]]]:
    for name, run in jsonschema.Draft202012Validator.VALIDATORS.items():
        yield name, _unique_items if name == "uniqueItems" else run


def _unique_items(_: Any, unique: Any, instance: Any, __: Any) -> Iterator[jsonschema.ValidationError]:
    """Report in linear time an array that holds a value twice. The library compares objects pair by pair."""
    if unique and isinstance(instance, list) and len({_canonical(one) for one in instance}) < len(instance):
        yield jsonschema.ValidationError("an item is there twice")


def _canonical(value: Any) -> str:
    return json.dumps(_with_whole_numbers(value), sort_keys=True)


def _with_whole_numbers(value: Any) -> Any:
    """Return a value in which 1 replaces 1.0, because JSON Schema treats both as the same number."""
    if isinstance(value, dict):
        return {name: _with_whole_numbers(one) for name, one in value.items()}
    if isinstance(value, list):
        return [_with_whole_numbers(one) for one in value]
    return int(value) if isinstance(value, float) and value.is_integer() else value


def _checked_schema(part: Any, parts_left: list[int]) -> Any:
    """Return a copy without `$schema`, which would select another validator for a part of the schema.

    Raises InvalidSchema for patterns, and for references that leave the schema.
    """
    if not isinstance(part, dict | list):
        return part
    parts_left[0] -= 1
    if parts_left[0] < 0:
        raise InvalidSchema(f"The schema has more than {MAX_SCHEMA_PARTS} objects and lists.")
    if isinstance(part, list):
        return [_checked_schema(one, parts_left) for one in part]
    for name, kind in (("pattern", str), ("patternProperties", dict)):
        if isinstance(part.get(name), kind):
            raise InvalidSchema(f"'{name}' is not supported in a schema; use the grader regex.")
    for name in ("$ref", "$dynamicRef"):
        if isinstance(part.get(name), str) and not part[name].startswith("#"):
            raise InvalidSchema(f"'{name}' stays within the schema.")
    return {
        name: _checked_schema(one, parts_left)
        for name, one in part.items()
        if name != "$schema" or not isinstance(one, str)
    }
