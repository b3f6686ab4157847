"""JSON Schema validation of untrusted answers by untrusted schemas, with bounded work.

References that lead to references take exponential time, `uniqueItems` quadratic time, and every error of a branch
that does not apply quotes the value it is about. So each application of a keyword is charged by what it may look at,
and validation ends with `TooMuchWork` when an answer's share, or that of all answers, is used up. Schemas neither fetch
anything nor hold patterns, whose matching has no bound of its own.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import jsonschema
from jsonschema import validators
from referencing import Registry
from referencing.exceptions import Unresolvable

MAX_BYTES = 65_536
MAX_PARTS = 2000
"""Objects and lists of a schema: checking that it is one takes a quarter of a millisecond for each."""
MAX_WORK_PER_ANSWER = 200_000
"""Units of one to seven microseconds."""
MAX_WORK = 20_000_000
"""For all answers that one schema validates."""
_NESTED = frozenset({"const", "dependentRequired", "enum"})
"""Keywords that look at everything in their value, not only at its members."""
_QUOTED_PER_UNIT = 16
"""Values that an error quotes in the time of a unit."""


class InvalidSchema(ValueError):
    """The message says what is wrong with the schema."""


class TooMuchWork(Exception):
    """An answer takes longer to validate than it may."""


class BoundedSchema:
    """A schema that says of an answer's text whether it allows it."""

    def __init__(self, schema: Mapping[str, Any]) -> None:
        """Raises InvalidSchema. Takes up to half a second."""
        if len(json.dumps(schema)) > MAX_BYTES:
            raise InvalidSchema(f"The schema has more than {MAX_BYTES} bytes.")
        try:
            self._schema = _checked(schema, [MAX_PARTS])
            jsonschema.Draft202012Validator.check_schema(self._schema)
        except (jsonschema.SchemaError, RecursionError) as error:
            raise InvalidSchema(f"The schema is no JSON Schema: {str(error)[:200]}.") from None
        self._left, self._left_of_all = 0, MAX_WORK
        self._sizes: dict[int, int] = {}
        """Values in the schema's and the answer's containers, by id; those of an answer only while it is validated."""
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
        """Return the number of values in `value`, a long text counting as several."""
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
    """Say in linear time whether an array holds a value twice; the library compares objects pair by pair."""
    if unique and isinstance(instance, list) and len({_canonical(one) for one in instance}) < len(instance):
        yield jsonschema.ValidationError("an item is there twice")


def _canonical(value: Any) -> str:
    return json.dumps(_with_whole_numbers(value), sort_keys=True)


def _with_whole_numbers(value: Any) -> Any:
    """Return a value with 1 for 1.0: to JSON Schema both are the same number."""
    if isinstance(value, dict):
        return {name: _with_whole_numbers(one) for name, one in value.items()}
    if isinstance(value, list):
        return [_with_whole_numbers(one) for one in value]
    return int(value) if isinstance(value, float) and value.is_integer() else value


def _checked(part: Any, parts_left: list[int]) -> Any:
    """Return a copy without `$schema`, which would choose another validator for its part.

    Raises InvalidSchema for patterns, and for references out of the schema.
    """
    if not isinstance(part, dict | list):
        return part
    parts_left[0] -= 1
    if parts_left[0] < 0:
        raise InvalidSchema(f"The schema has more than {MAX_PARTS} objects and lists.")
    if isinstance(part, list):
        return [_checked(one, parts_left) for one in part]
    for name, kind in (("pattern", str), ("patternProperties", dict)):
        if isinstance(part.get(name), kind):
            raise InvalidSchema(f"'{name}' is not supported in a schema; use the grader regex.")
    for name in ("$ref", "$dynamicRef"):
        if isinstance(part.get(name), str) and not part[name].startswith("#"):
            raise InvalidSchema(f"'{name}' stays within the schema.")
    return {
        name: _checked(one, parts_left) for name, one in part.items() if name != "$schema" or not isinstance(one, str)
    }
