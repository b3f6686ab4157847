"""Sentences about mistakes in a settings file: the setting, the values that it takes, and the value that was found."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from difflib import get_close_matches
from typing import Any

import msgspec
from msgspec import inspect

UNITS = {"_bytes": "bytes", "_seconds": "seconds", "_s": "seconds", "_ms": "milliseconds", "_days": "days"}
"""End of a setting's name -> the unit of its number."""

_unknown = re.compile(r"unknown field `(?P<key>[^`]*)`(?: - at `\$\.?(?P<place>[^`]*)`)?")
_missing = re.compile(r"missing required field `(?P<key>[^`]*)`(?: - at `\$\.?(?P<place>[^`]*)`)?")
_wrong = re.compile(r"(?:Expected |Invalid enum value ).*? - at `\$\.(?P<place>[^`]*)`", re.DOTALL)
_credentials = re.compile(r"//[^/\s]*@")
_step = re.compile(r"([^.\[\]]+)|\[(\d+|\.\.\.)\]")


def describe_mistake(refusal: str, data: dict[str, Any], settings: type[msgspec.Struct]) -> str:
    """Return a sentence about a mistake that msgspec refused, such as "Expected `int`, got `str` - at `$.server.port`".

    `data` is what was read from the file. A refusal in the words of a settings class is returned with its place.
    """
    if found := _unknown.search(refusal):
        place = f"{_table_name(found['place'])} has" if found["place"] else "there is"
        suggestion = _suggestion_for(found["key"], found["place"] or "", settings)
        return f"{place} no setting `{found['key']}`" + (f"; {suggestion}" if suggestion else "")
    if found := _missing.search(refusal):
        table = _table_name(found["place"]) if found["place"] else "the file"
        return f"{table} needs `{found['key']}`, which has no default"
    found = _wrong.fullmatch(refusal)
    if found is None:
        return refusal
    steps = [name or index for name, index in _step.findall(found["place"])]
    kind, value = _at(inspect.type_info(settings), data, steps)
    if kind is None:
        return refusal
    return f"{found['place']} must be {_wanted(kind, steps)}, not {_shown(value)}{_way_out(kind, value, steps)}"


def _table_name(place: str) -> str:
    """Return a table as its header names it; an item of a list, such as `sinks[0]`, has no header."""
    return place if "[" in place else f"[{place}]"


def _at(kind: inspect.Type | None, value: Any, steps: list[str]) -> tuple[inspect.Type | None, Any]:
    """Return the type and the value at a place in the settings; None as the type if the place has no single type."""
    for step in steps:
        alternatives = [one for one in _alternatives(kind) if not isinstance(one, inspect.NoneType)]
        kind = alternatives[0] if len(alternatives) == 1 else None
        if isinstance(kind, inspect.StructType):
            kind = next((field.type for field in kind.fields if field.encode_name == step), None)
        elif isinstance(kind, inspect.VarTupleType | inspect.ListType):
            kind = kind.item_type
        elif isinstance(kind, inspect.DictType):
            kind = kind.value_type
        else:
            return None, None
        if isinstance(value, dict) and step in value:
            value = value[step]
        elif isinstance(value, list) and step.isdigit():
            value = value[int(step)]
        else:
            return None, None
    return kind, value


def _alternatives(kind: inspect.Type | None) -> Iterator[inspect.Type]:
    if isinstance(kind, inspect.Metadata):
        yield from _alternatives(kind.type)
    elif isinstance(kind, inspect.UnionType):
        for one in kind.types:
            yield from _alternatives(one)
    elif kind is not None:
        yield kind


def _wanted(kind: inspect.Type, steps: list[str]) -> str:
    """Return what a setting takes in words, such as `a whole number from 1 to 65535`. null is not written in TOML."""
    kinds = [one for one in _alternatives(kind) if not isinstance(one, inspect.NoneType)]
    return " or ".join(_words(one, steps) for one in kinds)


def _words(kind: inspect.Type, steps: list[str]) -> str:  # noqa: PLR0911  one return for each type
    match kind:
        case inspect.LiteralType(values):
            return "one of " + ", ".join(_shown(value) for value in values)
        case inspect.BoolType():
            return "true or false"
        case inspect.IntType() | inspect.FloatType():
            units = [unit for step in reversed(steps) for end, unit in UNITS.items() if step.endswith(end)]
            unit = f" of {units[0]}" if units else ""
            whole = "a whole number" if isinstance(kind, inspect.IntType) else "a number"
            return whole + unit + _range(kind)
        case inspect.StrType(min_length=least, max_length=most, pattern=pattern):
            length = f" of at most {most} characters" if most is not None else ""
            length = f" of {least} to {most} characters" if least and most is not None else length
            return "text in quotes" + length + (f" that matches {pattern}" if pattern else "")
        case inspect.VarTupleType(item_type=item) | inspect.ListType(item_type=item):
            if isinstance(item, inspect.StructType):
                return f"a list of tables, each below a line [[{'.'.join(steps)}]]"
            return f"a list in brackets, each item {_wanted(item, [])}"
        case inspect.StructType() | inspect.DictType():
            return "a table"
    return "of another type"


def _range(kind: inspect.IntType | inspect.FloatType) -> str:
    least = kind.ge if kind.ge is not None else kind.gt
    most = kind.le if kind.le is not None else kind.lt
    above, below = kind.ge is None and least is not None, kind.le is None and most is not None
    if least is not None and most is not None and not above and not below:
        return f" from {least} to {most}"
    parts = [f"above {least}" if above else f"of at least {least}"] if least is not None else []
    if most is not None:
        parts.append(f"below {most}" if below else f"of at most {most}")
    return f" {' and '.join(parts)}" if parts else ""


def _shown(value: Any) -> str:
    """Return a value as TOML writes it, without an address's user and password, cut to 100 characters."""
    if isinstance(value, dict):
        return "a table"
    if isinstance(value, list):
        return "a list"
    text = json.dumps(value, ensure_ascii=False) if isinstance(value, str | int | float) else str(value)
    text = _credentials.sub("//...@", text)
    return text if len(text) <= 100 else f"{text[:100]}..."


def _way_out(kind: inspect.Type, value: Any, steps: list[str]) -> str:
    """Return what to write instead, if that is clear from the value."""
    kinds = list(_alternatives(kind))
    if not isinstance(value, str):
        is_text = any(isinstance(one, inspect.StrType) for one in kinds)
        return f'; write "{_shown(value)}"' if is_text and isinstance(value, int | float) else ""
    values = [str(one) for kind in kinds if isinstance(kind, inspect.LiteralType) for one in kind.values]
    way_out = ""
    if any(isinstance(one, inspect.IntType | inspect.FloatType) for one in kinds):
        is_number = re.fullmatch(r"[+-]?[0-9_.]+", value)
        way_out = f"write {value} without quotes" if is_number else "write the number alone, without quotes and unit"
    elif any(isinstance(one, inspect.BoolType) for one in kinds):
        way_out = "write it without quotes"
    elif near := get_close_matches(value, values, n=1, cutoff=0.6):
        way_out = f"did you mean {_shown(near[0])}?"
    elif any(isinstance(one, inspect.VarTupleType | inspect.ListType) for one in kinds):
        way_out = f"write [{_shown(value)}]"
    elif any(isinstance(one, inspect.StructType) for one in kinds) and len(steps) == 1:
        way_out = f"write its settings below a line [{steps[0]}]"
    return way_out and f"; {way_out}"


def _suggestion_for(key: str, place: str, settings: type[msgspec.Struct]) -> str:
    """Return a sentence with the setting that was probably meant, the nearest key of the same table, or with the table
    that the key belongs to; empty if no name is similar.
    """
    root = inspect.type_info(settings)
    table: inspect.Type = root
    for part in [part.partition("[")[0] for part in place.split(".") if part]:
        table = _tables_of(table).get(part, table)
    names = [field.encode_name for field in _fields(table)]
    if near := get_close_matches(key, names, n=1, cutoff=0.6):
        return f"did you mean `{near[0]}`?"
    homes = [name for name, one in _tables_of(root).items() if key in [field.encode_name for field in _fields(one)]]
    return f"`{key}` belongs to {' or '.join(f'[{name}]' for name in homes)}" if homes else ""


def _fields(table: inspect.Type) -> tuple[inspect.Field, ...]:
    return table.fields if isinstance(table, inspect.StructType) else ()


def _tables_of(table: inspect.Type) -> dict[str, inspect.Type]:
    """Return the tables in a table, by name: its structs, and the items of its lists of structs."""
    found: dict[str, inspect.Type] = {}
    for field in _fields(table):
        for kind in _alternatives(field.type):
            item = kind.item_type if isinstance(kind, inspect.VarTupleType) else kind
            if isinstance(item, inspect.StructType):
                found[field.encode_name] = item
    return found
