"""Suggestions for misspelt settings: the nearest key of the same table, or the table that the key belongs to."""

from __future__ import annotations

import re
from difflib import get_close_matches

import msgspec
from msgspec import inspect

_unknown = re.compile(r"unknown field `(?P<key>[^`]*)`(?: - at `\$\.?(?P<place>[^`]*)`)?")


def suggestion_for(refusal: str, settings: type[msgspec.Struct]) -> str:
    """Return a sentence with the setting that was probably meant; empty if no name is similar.

    `refusal` is msgspec's, such as "Object contains unknown field `prot` - at `$.server`".
    """
    found = _unknown.search(refusal)
    if found is None:
        return ""
    key, root = found["key"], inspect.type_info(settings)
    place = [part.partition("[")[0] for part in (found["place"] or "").split(".") if part]
    table: inspect.Type = root
    for part in place:
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
        for kind in field.type.types if isinstance(field.type, inspect.UnionType) else (field.type,):
            item = kind.item_type if isinstance(kind, inspect.VarTupleType) else kind
            if isinstance(item, inspect.StructType):
                found[field.encode_name] = item
    return found
