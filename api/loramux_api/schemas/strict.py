"""JSON bodies to structs, strictly: what has a wrong type or range, or is unknown, is named and never guessed."""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from typing import Any, ClassVar, NoReturn, TypeVar

import msgspec
from litestar.dto import AbstractDTO

from loramux.gateway import InvalidRequest

T = TypeVar("T", bound="Body")
_where = re.compile(r" - at `(?:key` in `)?\$\.?(?P<path>[^`]*)`$")
_unknown = re.compile(r"Object contains unknown field `(?P<name>.*)`$")
_missing = re.compile(r"Object missing required field `(?P<name>.*)`$")


@dataclass(frozen=True, slots=True)
class Unsupported:
    """A field of OpenAI's API that this server does not serve, and the values of it that ask for nothing."""

    reason: str
    harmless: Collection[Any] = field(default=(None,))


class Body(msgspec.Struct, kw_only=True):
    """A JSON object: its fields, and what is known of other fields."""

    ignored: ClassVar[frozenset[str]] = frozenset()
    """Fields of OpenAI's API without which the answer means the same."""
    unsupported: ClassVar[Mapping[str, Unsupported]] = {}
    """Fields of OpenAI's API without which it would mean something else."""
    nested: ClassVar[Mapping[str, type[Body]]] = {}
    """Fields that are such objects themselves."""


class StrictJSON(AbstractDTO[T]):
    """Has Litestar decode a handler's `data` with `decode_body`."""

    def decode_bytes(self, value: bytes) -> Any:
        """The body as its struct. Raises InvalidRequest."""
        return decode_body(value, self.model_type)

    def decode_builtins(self, value: Any) -> Any:
        """Not for forms."""
        raise NotImplementedError

    @classmethod
    def create_openapi_schema(cls, *_: Any, **known: Any) -> Any:
        """The struct's own schema."""
        return known["schema_creator"].for_field_definition(known["field_definition"])

    @classmethod
    def create_for_field_definition(cls, *_: Any, **__: Any) -> None:
        """Nothing to prepare: msgspec knows the struct."""

    @classmethod
    def generate_field_definitions(cls, *_: Any) -> Any:
        """Not used: fields are msgspec's."""
        raise NotImplementedError

    @classmethod
    def detect_nested_field(cls, *_: Any) -> bool:
        """Not used: fields are msgspec's."""
        return False


def decode_body(data: bytes, body: type[T]) -> T:
    """Decode a request's body. Raises InvalidRequest with the field's path as `param`."""
    try:
        fields = msgspec.json.decode(data, type=dict[str, msgspec.Raw])
        _check_names(fields, body)
        return msgspec.json.decode(data, type=body)
    except msgspec.ValidationError as error:
        _refuse(str(error))
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise InvalidRequest(f"The body is not valid JSON: {error}.", code="invalid_json") from None


def _check_names(fields: Mapping[str, msgspec.Raw], body: type[Body], path: str = "") -> None:
    for name in fields.keys() - body.__struct_encode_fields__ - body.ignored:
        param = f"{path}{name[:80]}"
        if name not in body.unsupported:
            raise InvalidRequest(
                f"Unrecognized request argument supplied: {param}", param=param, code="unknown_parameter"
            )
        if msgspec.json.decode(fields[name]) not in body.unsupported[name].harmless:
            raise InvalidRequest(
                f"'{param}' is not supported: {body.unsupported[name].reason}",
                param=param,
                code="unsupported_parameter",
            )
    for name, inner in body.nested.items():
        if bytes(fields.get(name, b"")).startswith(b"{"):
            _check_names(msgspec.json.decode(fields[name], type=dict[str, msgspec.Raw]), inner, f"{path}{name}.")


def _refuse(told: str) -> NoReturn:
    """Turn msgspec's sentence into ours: it ends in the JSON path of the offending value."""
    located = _where.search(told)
    path = located["path"].replace("[...]", "") if located else ""
    sentence = told[: located.start()] if located else told
    if missing := _missing.match(sentence):
        param = _join(path, missing["name"])
        raise InvalidRequest(f"Missing required parameter: '{param}'.", param=param, code="missing_required_parameter")
    if unknown := _unknown.match(sentence):
        param = _join(path, unknown["name"][:80])
        raise InvalidRequest(f"Unknown parameter: '{param}'.", param=param, code="unknown_parameter")
    value = f"'{path}'" if path else "the body"
    raise InvalidRequest(f"Invalid value for {value}: {sentence}.", param=path or None, code="invalid_value")


def _join(path: str, name: str) -> str:
    return f"{path}.{name}" if path else name
