"""Strict decoding of JSON bodies: an unknown field, a wrong type or a wrong range is refused by its name."""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from functools import cache
from typing import Any, ClassVar, NoReturn, TypeVar, cast

import msgspec
from litestar.dto import AbstractDTO

from loramux.gateway import InvalidRequest

T = TypeVar("T", bound="Body")
_SHOWN = 1024
"""Characters of msgspec's message that are read, from both ends."""
_LONGEST_HARMLESS = 64
"""Bytes of an unsupported field's value beyond which it cannot be a harmless one."""
_where = re.compile(r" - at `(?:key` in `)?\$\.?(?P<path>[^`]*)`$")
_unknown = re.compile(r"Object contains unknown field `(?P<name>.*)`$")
_missing = re.compile(r"Object missing required field `(?P<name>.*)`$")


@dataclass(frozen=True, slots=True)
class Unsupported:
    """A field of OpenAI's API that this server does not support, and its values that have no effect."""

    reason: str
    harmless: Collection[Any] = field(default=(None,))


class Body(msgspec.Struct, kw_only=True):
    """A JSON object: its fields, and the other fields that are ignored or refused by name."""

    ignored: ClassVar[frozenset[str]] = frozenset()
    """Fields of OpenAI's API that can be ignored: they do not change the answer's meaning."""
    unsupported: ClassVar[Mapping[str, Unsupported]] = {}
    """Fields of OpenAI's API that cannot be ignored: they would change the answer's meaning."""
    nested: ClassVar[Mapping[str, type[Body]]] = {}
    """Fields that are JSON objects with such rules themselves."""


class StrictJSON(AbstractDTO[Any]):
    """Has Litestar decode every handler's `data` with `decode_body`: the application names it once."""

    def decode_bytes(self, value: bytes) -> Any:
        """Decode the body into its struct. Raises InvalidRequest."""
        field = self.asgi_connection.route_handler.parsed_data_field
        assert field is not None, "only a handler with `data` decodes a body"
        return decode_body(value, field.annotation)

    def decode_builtins(self, value: Any) -> Any:
        """Refuse to decode: forms are not supported."""
        raise NotImplementedError

    @classmethod
    def create_openapi_schema(cls, *_: Any, **known: Any) -> Any:
        """Return the struct's own schema."""
        return known["schema_creator"].for_field_definition(known["field_definition"])

    @classmethod
    def create_for_field_definition(cls, *_: Any, **__: Any) -> None:
        """Do nothing: msgspec knows the struct."""

    @classmethod
    def generate_field_definitions(cls, *_: Any) -> Any:
        """Not used: fields are msgspec's."""
        raise NotImplementedError

    @classmethod
    def detect_nested_field(cls, *_: Any) -> bool:
        """Not used: fields are msgspec's."""
        return False


def decode_body(data: bytes, body: type[T]) -> T:
    """Decode a request's body, in one pass. Raises InvalidRequest with the field's path."""
    try:
        decoded: T = _decoder(body).decode(data)
    except msgspec.ValidationError as error:
        _refuse(str(error), body)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise InvalidRequest(f"The body is not valid JSON: {error}.", code="invalid_json") from None
    except RecursionError:
        raise InvalidRequest("The body is nested too deeply.", code="invalid_json") from None
    _check_unsupported(decoded)
    return decoded


@cache
def _decoder(body: type[T]) -> msgspec.json.Decoder[T]:
    return msgspec.json.Decoder(_closed(body))


def _closed(body: type[T]) -> type[T]:
    """Return a subclass that takes the ignored and unsupported fields undecoded, and refuses all others."""
    known = [(name, msgspec.Raw, msgspec.Raw()) for name in sorted({*body.ignored, *body.unsupported})]
    nested = [(name, _closed(inner) | None, None) for name, inner in body.nested.items()]
    closed = msgspec.defstruct(
        body.__name__, [*known, *nested], bases=(body,), forbid_unknown_fields=True, kw_only=True
    )
    return cast(type[T], closed)


def _check_unsupported(body: Body, path: str = "") -> None:
    for name, unsupported in body.unsupported.items():
        given = bytes(getattr(body, name, b""))
        if given and (len(given) > _LONGEST_HARMLESS or msgspec.json.decode(given) not in unsupported.harmless):
            raise InvalidRequest(
                f"'{path}{name}' is not supported: {unsupported.reason}",
                field=f"{path}{name}",
                code="unsupported_parameter",
            )
    for name in body.nested:
        if (inner := getattr(body, name)) is not None:
            _check_unsupported(inner, f"{path}{name}.")


def _refuse(message: str, body: type[Body]) -> NoReturn:
    """Translate msgspec's message, which ends in the JSON path of the invalid value."""
    if len(message) > 2 * _SHOWN:  # it repeats a name of the body's
        message = message[:_SHOWN] + message[-_SHOWN:]
    located = _where.search(message)
    path = located["path"].replace("[...]", "") if located else ""
    sentence = message[: located.start()] if located else message
    if missing := _missing.match(sentence):
        param = _join(path, missing["name"])
        raise InvalidRequest(f"Missing required parameter: '{param}'.", field=param, code="missing_required_parameter")
    if unknown := _unknown.match(sentence):
        param = _join(path, unknown["name"][:80])
        closed = not path or path in body.nested
        sentence = f"Unrecognized request argument supplied: {param}" if closed else f"Unknown parameter: '{param}'."
        raise InvalidRequest(sentence, field=param, code="unknown_parameter")
    value = f"'{path}'" if path else "the body"
    raise InvalidRequest(f"Invalid value for {value}: {sentence}.", field=path or None, code="invalid_value")


def _join(path: str, name: str) -> str:
    return f"{path}.{name}" if path else name
