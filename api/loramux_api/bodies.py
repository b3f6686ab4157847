"""Request bodies: their bounds, clients that disconnect in the middle of one, and their strict decoding.

A decoder builds a whole list before it can count the elements, and holds the interpreter's lock during this time. So a
large body is scanned first: `check_shape` counts the body's strings, containers and separators without building
objects. The scan yields to other requests regularly, and stops at the first bound that is exceeded. A body within the
bounds is decoded in about 10 ms.

`decode_body` refuses a wrong type or a wrong range by the field's name. An unknown field is also refused, except in
bodies of inference (`InferenceBody`), because in these bodies clients send fields of other servers. `unknown_fields`
decides which unknown fields are ignored.
"""

from __future__ import annotations

import asyncio
import codecs
import re
from collections.abc import AsyncGenerator, Callable, Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import cache, partial
from http import HTTPStatus
from typing import Any, ClassVar, Literal, NoReturn, TypeVar, cast

import msgspec
from litestar import Request
from litestar.dto import AbstractDTO
from litestar.exceptions import InternalServerException
from litestar.types import Empty, Message, Scope
from litestar.utils.scope.state import ScopeState

from loramux.common.jobs import ANYONE, HeldUnits
from loramux.server.platform import Platform
from loramux.serving.errors import InvalidRequest, ServingError, Unavailable
from loramux_api.headers import note_ignored
from loramux_api.schema_bounds import add_bounds
from loramux_api.unknown_fields import LONGEST_NAME, MAX_UNKNOWN, ensure_ignorable, too_many

MIN_BODY_BYTES = 1 << 20
MAX_BODY_BYTES = 16 << 20
BYTES_PER_TOKEN = 64
"""The bytes that a body may have for every token of the model's context: several full prompts, escaped."""
SMALL_BODY_BYTES = 64 << 10
"""Maximum bytes of a body that is decoded without a scan, which takes less than a millisecond."""

BODY_SECONDS = 120.0
"""The time that a body of JSON may take to arrive."""

BodyKind = Literal["json", "document", "inference", "requests", "adapter", "file"]
BODY_BYTES: Mapping[BodyKind, Callable[[Platform], int]] = {
    "json": lambda _: SMALL_BODY_BYTES,
    "document": lambda _: 512 << 10,
    "inference": lambda platform: inference_body_bytes(platform.completions.context, platform.completions.image_bytes),
    "requests": lambda _: MAX_BODY_BYTES,
    "adapter": lambda platform: platform.settings.server.max_upload_bytes,
    "file": lambda platform: platform.settings.batches.max_body_bytes,
}
"""Maximum bytes of a body by the kind of its route. The request class of the route gives the kind; the default is
`json`.
"""
MAX_STRINGS = 100_000
MAX_CONTAINERS = 50_000
"""Maximum number of objects and lists in a body."""
MAX_VALUES = 1_000_000
"""Maximum number of commas outside of strings: enough for the token ids of several prompts."""
SLICE_BYTES = 32 << 10
"""Bytes that are scanned before other requests get their turn, in about 0.2 ms."""

AnyRequest = Request[Any, Any, Any]
T = TypeVar("T", bound="Body")

# Without possessive quantifiers, which Python before 3.11.5 matches wrongly (Debian 12 has 3.11.2). Each byte has one
# place in a match, so that a string without an end is given back byte by byte, once.
_string = re.compile(rb'"[^"\\]*(?:\\.[^"\\]*)*"', re.DOTALL)
_whole_strings = re.compile(rb'(?:[^"]*' + _string.pattern + rb')*[^"]*', re.DOTALL)
"""Matches up to the beginning of a string that has no end."""
_WINDOW = 64
"""Number of bytes before a quote in which backslashes are counted."""
_SHOWN = 1024
"""Number of characters of msgspec's message that are read at its beginning and at its end."""
_LONGEST_HARMLESS = 64
"""Bytes of the longest value of an unsupported field that may be harmless."""
_where = re.compile(r" - at `(?:key` in `)?\$\.?(?P<path>[^`]*)`$")
_unknown = re.compile(r"Object contains unknown field `(?P<name>.*)`$")
_missing = re.compile(r"Object missing required field `(?P<name>.*)`$")


class ClientDisconnected(Exception):
    """The client closed the connection before it was answered."""


class BodyTooLarge(ServingError):
    """The message gives the limit."""

    code = "request_too_large"
    status = HTTPStatus.REQUEST_ENTITY_TOO_LARGE


class BodyTimeout(ServingError):
    """The message gives the limit."""

    code = "request_timeout"
    status = HTTPStatus.REQUEST_TIMEOUT


class TooManyBodies(Unavailable):
    """Too many bytes of unfinished bodies are held at once."""

    code = "too_many_bodies"
    status = HTTPStatus.TOO_MANY_REQUESTS


class ApiRequest(AnyRequest):
    """A request whose body is bounded by the kind of its route, and whose client may disconnect before the end of the
    body.
    """

    body_kind: ClassVar[BodyKind] = "json"

    @property
    def max_bytes(self) -> int:
        """Maximum bytes of the body."""
        return BODY_BYTES[self.body_kind](self.app.state.platform)

    async def stream(self) -> AsyncGenerator[bytes, None]:
        """Yield the body's parts. Raises ClientDisconnected, or BodyTooLarge beyond the limit of the route's kind."""
        limit, length = self.max_bytes, 0
        if (self.content_length or 0) > limit:
            raise _too_large(limit)
        try:
            async for part in super().stream():
                length += len(part)
                if length > limit:
                    raise _too_large(limit)
                yield part
        except InternalServerException as error:
            if "disconnected" in error.detail:
                raise ClientDisconnected from None
            raise

    async def body(self) -> bytes:
        """Return the body, and hold its bytes of the tenant's memory until the answer begins (`release_body`).

        Raises BodyTooLarge, TooManyBodies, BodyTimeout, and InvalidRequest if the body has too many values.
        """
        if self._connection_state.body is not Empty:
            return self._connection_state.body
        assert HELD_BODY not in self.scope, "a body is read before it is dropped"
        # The bytes count in the tenant's share, because many connections may hold unfinished bodies.
        memory, parts = HeldUnits(self.app.state.platform.memory, self._tenant), list[bytes]()
        self.scope[HELD_BODY] = memory  # type: ignore[literal-required]
        try:
            async with asyncio.timeout(BODY_SECONDS):
                async for part in self.stream():
                    if not memory.try_add(len(part)):
                        raise TooManyBodies(
                            "Too many large bodies are on their way to this server at once. Please send fewer."
                        )
                    parts.append(part)
        except TimeoutError:
            raise BodyTimeout(f"The body did not arrive within {BODY_SECONDS:.0f} seconds.") from None
        data = b"".join(parts)
        if len(data) > SMALL_BODY_BYTES:
            await check_shape(data)
        self._connection_state.body = data  # not in `_body`, because a stream's request lives until its end
        return data

    @property
    def _tenant(self) -> str:
        caller = self.scope.get("auth")
        return ANYONE if caller is None else caller.tenant


class DocumentRequest(ApiRequest):
    """A request with a long list or a schema in its body."""

    body_kind = "document"


class InferenceRequest(ApiRequest):
    """A request for completions."""

    body_kind = "inference"


class RequestsRequest(ApiRequest):
    """A request with the requests of a batch in its body."""

    body_kind = "requests"


class AdapterRequest(ApiRequest):
    """A request whose body is an adapter's files, which are written to the disk."""

    body_kind = "adapter"


class LoadRequest(AdapterRequest):
    """A request whose body is a form with an adapter's files, or a JSON object that says where the files are."""

    @property
    def is_form(self) -> bool:
        """Return whether the body is a form."""
        return self.headers.get("content-type", "").lower().startswith("multipart/")

    @property
    def max_bytes(self) -> int:
        """Maximum bytes of the body."""
        return super().max_bytes if self.is_form else BODY_BYTES["document"](self.app.state.platform)


class FileRequest(ApiRequest):
    """A request whose body is a file of a batch, which is written to the disk."""

    body_kind = "file"


HELD_BODY = "loramux_held_body"
"""The key of a request's scope with the memory that its body holds."""
STORED_BODY = "loramux_stored_body"
"""The key of a request's scope that is there if the body is stored at the end of the answer."""


def hold_more(held: object, count: int) -> None:
    """Hold the memory of `count` more bytes, which were read from the database. Raises TooManyBodies."""
    assert isinstance(held, HeldUnits), "the body has been read"
    if not held.try_add(count):
        raise TooManyBodies("Your requests hold too many bytes of stored responses at once. Please send fewer.")


def hold_to_the_end(scope: Scope) -> None:
    """Hold the memory of a request's body until the end of its answer, because it is stored then."""
    scope[STORED_BODY] = True  # type: ignore[literal-required]


def release_body(scope: Scope) -> None:
    """Give back the memory of a request's body, because its answer begins or the request has ended."""
    held = scope.get(HELD_BODY)
    if isinstance(held, HeldUnits):
        held.release()


def drop_body(scope: Scope) -> None:
    """Forget the bytes of a request's body, which has been decoded. The decoded body is as large, so its memory is held
    until `release_body`.
    """
    ScopeState.from_scope(scope).body = Empty


async def release_answered_body(message: Message, scope: Scope) -> None:
    """Release the body, as a Litestar `before_send` hook: unless it is to be stored, nothing needs it when the answer
    begins.
    """
    if message["type"] == "http.response.start":
        drop_body(scope)
        if STORED_BODY not in scope:
            release_body(scope)


def inference_body_bytes(context: int, image_bytes: int = 0) -> int:
    """Return the maximum bytes of a request for completions, computed from the tokens of the largest context, and from
    the bytes of its images, which it holds as base64.
    """
    return min(max(MIN_BODY_BYTES, BYTES_PER_TOKEN * context), MAX_BODY_BYTES) + image_bytes * 4 // 3


async def check_shape(data: bytes) -> None:
    """Raise InvalidRequest for a body with more strings, containers or values than any request needs."""
    for _ in look_through(data):
        await asyncio.sleep(0)


def look_through(data: bytes) -> Iterator[None]:
    """Count the values of a body, and yield after each slice of the work. Raises InvalidRequest as `check_shape`
    does.

    The middle of a long string, such as an image as base64, is passed over at the speed of `memchr`.
    """
    strings = containers = values = position = 0
    opened = b""  # the beginning of the string in which the slice before has ended
    quote = -1  # the place of a quote, which is the first one after the slice
    while position < len(data):
        piece = opened + data[position : position + SLICE_BYTES]
        position += SLICE_BYTES
        end = _whole_strings.match(piece).end()  # type: ignore[union-attr]  # an empty match at least
        rest, count = _string.subn(b"", piece[:end])
        strings += count
        containers += rest.count(b"{") + rest.count(b"[")
        values += rest.count(b",")
        _bound(strings, MAX_STRINGS, "strings")
        _bound(containers, MAX_CONTAINERS, "objects and lists")
        _bound(values, MAX_VALUES, "values")
        opened = b""
        if end < len(piece):
            opened = _opened(_backslashes(piece))
            if quote < position and (quote := data.find(b'"', position)) < 0:
                return
            before = data[max(position, quote - _WINDOW) : quote]
            if (count := _backslashes(before)) < len(before):  # else the backslashes may begin before
                opened, position = _opened(count), quote
        yield


def _backslashes(text: bytes) -> int:
    """Return the number of backslashes at the end of a text."""
    return len(text) - len(text.rstrip(b"\\"))


def _opened(backslashes: int) -> bytes:
    """Return a string without an end that is like one with so many backslashes at the end of what is read."""
    return b'"\\' if backslashes % 2 else b'"'


def _bound(count: int, limit: int, kind: str) -> None:
    if count > limit:
        raise InvalidRequest(
            f"The body has more than {limit} {kind}; send a shorter one, or several requests.", code="request_too_large"
        )


def _too_large(limit: int) -> BodyTooLarge:
    return BodyTooLarge(f"The body is larger than the {limit} bytes that this endpoint takes.")


@dataclass(frozen=True, slots=True)
class Unsupported:
    """A field of OpenAI's API that this server does not support, and its values that have no effect."""

    reason: str
    harmless: Collection[Any] = field(default=(None,))


class Body(msgspec.Struct, kw_only=True):
    """A JSON object: its fields, and rules for other fields, which are ignored or refused."""

    ignored: ClassVar[frozenset[str]] = frozenset()
    """Fields of OpenAI's API that can be ignored: they do not change the answer's meaning."""
    unsupported: ClassVar[Mapping[str, Unsupported]] = {}
    """Fields of OpenAI's API that cannot be ignored: they would change the answer's meaning."""
    nested: ClassVar[Mapping[str, type[Body]]] = {}
    """Fields that are JSON objects with their own rules of this kind."""
    ignores_unknown: ClassVar[bool] = False
    """Ignore and report fields that the struct does not know. Otherwise they are refused."""

    def without_effect(self) -> Iterable[str]:
        """Return the parts of this body that are left out of the request, as the caller sees them in the report."""
        return ()


class InferenceBody(Body, kw_only=True):
    """A body of an inference endpoint."""

    ignores_unknown: ClassVar[bool] = True


class StrictJSON(AbstractDTO[Any]):
    """Makes Litestar decode every handler's `data` with `decode_body`. The application registers this plugin once."""

    def decode_bytes(self, value: bytes) -> Any:
        """Decode the body into its struct. Raises InvalidRequest."""
        field = self.asgi_connection.route_handler.parsed_data_field
        assert field is not None, "only a handler with `data` decodes a body"
        return decode_body(value, field.annotation, partial(note_ignored, self.asgi_connection.scope))

    def decode_builtins(self, value: Any) -> Any:
        """Refuse to decode: forms are not supported."""
        raise NotImplementedError

    @classmethod
    def create_openapi_schema(cls, *_: Any, **known: Any) -> Any:
        """Return the struct's own schema, with the bounds that the decoder checks."""
        creator, field = known["schema_creator"], known["field_definition"]
        schema = creator.for_field_definition(field)
        add_bounds(schema, field.annotation, creator.schema_registry)
        return schema

    @classmethod
    def create_for_field_definition(cls, *_: Any, **__: Any) -> None:
        """Do nothing: msgspec knows the struct."""

    @classmethod
    def generate_field_definitions(cls, *_: Any) -> Any:
        """Return nothing, because msgspec knows the fields."""
        raise NotImplementedError

    @classmethod
    def detect_nested_field(cls, *_: Any) -> bool:
        """Return nothing, because msgspec knows the fields."""
        return False


class UnknownField(InvalidRequest):
    """An object has a field that its struct does not know."""


def decode_body(data: bytes, body: type[T], note: Callable[[str], object] = lambda _: None) -> T:
    """Decode a request's body, in one pass. Raises InvalidRequest with the field's path.

    `note` takes the name of each part that is ignored. A body with such a field is decoded again without it.
    """
    ignored: list[str] = []
    try:
        decoded = _decoded(data, body)
    except UnknownField:
        if not body.ignores_unknown:
            raise
        ignored = list(_unknown_names(data, body))
        if len(ignored) > MAX_UNKNOWN:
            raise too_many(len(ignored)) from None
        decoded = _decoded(data, body, ignores_unknown=True)
    _check_unsupported(decoded)
    for name in (*ignored, *decoded.without_effect()):
        note(name)
    return decoded


def _decoded(data: bytes, body: type[T], *, ignores_unknown: bool = False) -> T:
    try:
        return _decoder(body, ignores_unknown).decode(data.removeprefix(codecs.BOM_UTF8))
    except msgspec.ValidationError as error:
        _refuse(str(error), body)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise InvalidRequest(f"The body is not valid JSON: {error}.", code="invalid_json") from None
    except RecursionError:
        raise InvalidRequest("The body is nested too deeply.", code="invalid_json") from None


@cache
def _decoder(body: type[T], ignores_unknown: bool) -> msgspec.json.Decoder[T]:
    # The hook accepts numbers beyond the range of floats, because bounds in schemas may have them. Fields with a
    # numeric type still refuse them.
    return msgspec.json.Decoder(_closed(body, ignores_unknown), float_hook=float)


def _closed(body: type[T], ignores_unknown: bool) -> type[T]:
    """Return a subclass that accepts the ignored and unsupported fields undecoded, and optionally refuses all
    others.
    """
    known = [(name, msgspec.Raw, msgspec.Raw()) for name in sorted({*body.ignored, *body.unsupported})]
    nested = [(name, _closed(inner, ignores_unknown) | None, None) for name, inner in body.nested.items()]
    closed = msgspec.defstruct(
        body.__name__, [*known, *nested], bases=(body,), forbid_unknown_fields=not ignores_unknown, kw_only=True
    )
    return cast(type[T], closed)


def _unknown_names(data: bytes | msgspec.Raw, body: type[Body], path: str = "") -> Iterator[str]:
    """Yield a body's unknown fields. Raises InvalidRequest for a field that must not be ignored."""
    known = known_fields(body)
    for name, value in msgspec.json.decode(
        bytes(data).removeprefix(codecs.BOM_UTF8), type=dict[str, msgspec.Raw]
    ).items():
        if name not in known:
            raw = bytes(value)
            ensure_ignorable(path, name, msgspec.json.decode(raw) if len(raw) <= _LONGEST_HARMLESS else raw, known)
            yield f"{path}{name[:LONGEST_NAME]}"
        elif name in body.nested and bytes(value).lstrip().startswith(b"{"):
            yield from _unknown_names(value, body.nested[name], f"{path}{name}.")


def known_fields(body: type[Body]) -> frozenset[str]:
    """Return the fields that are served, ignored or refused."""
    return frozenset({*(one.encode_name for one in msgspec.structs.fields(body)), *body.ignored, *body.unsupported})


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
    if len(message) > 2 * _SHOWN:  # msgspec's message repeats a name from the body
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
        raise UnknownField(sentence, field=param, code="unknown_parameter")
    value = f"'{path}'" if path else "the body"
    raise InvalidRequest(f"Invalid value for {value}: {sentence}.", field=path or None, code="invalid_value")


def _join(path: str, name: str) -> str:
    return f"{path}.{name}" if path else name
