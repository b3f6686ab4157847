"""The bounds of bodies in the API's description: Litestar leaves out the bounds of elements, of maps and of unions.

msgspec refuses a body by the types of its struct, so the types define the bounds. `add_bounds` walks through a body's
schema and its type in parallel, and writes the lengths of the type into the schema.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from litestar.openapi.spec import OpenAPIType, Reference, Schema
from msgspec import inspect


def add_bounds(schema: Schema | Reference, body: type, registry: Any) -> None:
    """Write the lengths of `body` and of all its parts into its schema. `registry` holds Litestar's references."""
    _Walk(registry).visit(schema, inspect.type_info(body))


class _Walk:
    def __init__(self, registry: Any) -> None:
        self._registry = registry
        self._seen: set[type] = set()

    def visit(self, schema: Schema | Reference, type_: inspect.Type) -> None:
        while isinstance(type_, inspect.Metadata):
            type_ = type_.type
        arms = type_.types if isinstance(type_, inspect.UnionType) else (type_,)
        for part in self._parts(schema):
            for arm in arms:
                self._bound(part, arm.type if isinstance(arm, inspect.Metadata) else arm)

    def _parts(self, schema: Schema | Reference) -> Iterator[Schema]:
        found: Schema = self._registry.from_reference(schema).schema if isinstance(schema, Reference) else schema
        alternatives = found.one_of or found.any_of
        if not alternatives:
            yield found
        for one in alternatives or ():
            yield from self._parts(one)

    def _bound(self, schema: Schema, type_: inspect.Type) -> None:
        match type_:
            case inspect.StrType() if _is(schema, OpenAPIType.STRING) and not schema.enum and schema.const is None:
                schema.max_length, schema.min_length = type_.max_length, type_.min_length
            case inspect.CollectionType() if _is(schema, OpenAPIType.ARRAY):
                schema.max_items, schema.min_items = type_.max_length, type_.min_length
                if schema.items is not None:
                    self.visit(schema.items, type_.item_type)
            case inspect.DictType() if _is(schema, OpenAPIType.OBJECT) and not schema.properties:
                schema.max_properties, schema.min_properties = type_.max_length, type_.min_length
                if isinstance(schema.additional_properties, Schema | Reference):
                    self.visit(schema.additional_properties, type_.value_type)
            case inspect.StructType(cls=struct) if schema.title == struct.__name__ and struct not in self._seen:
                self._seen.add(struct)
                for field in type_.fields:
                    if (property_ := (schema.properties or {}).get(field.encode_name)) is not None:
                        self.visit(property_, field.type)


def _is(schema: Schema, kind: OpenAPIType) -> bool:
    return kind in (schema.type if isinstance(schema.type, list | tuple) else [schema.type])
