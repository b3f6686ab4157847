"""HTTP as clients use it, between the ASGI server and the application.

    framing      a request whose length or host could be read in two ways is refused
    HEAD         is answered like GET, without the body
    gzip         a body is decoded as it comes, so that every bound counts decoded bytes; other encodings are refused
    timing       `openai-processing-ms`, which clients log
    reading      a client that takes nothing of a download or of a stream is disconnected
    closing      an answer before the end of a long body says that the connection closes: servers do not read the rest

granian forwards no Content-Length together with a Transfer-Encoding: it reads the chunks and closes the connection (RFC
9112, 6.1). Other servers forward both.
"""

from __future__ import annotations

import asyncio
import logging
import math
import time
import zlib
from collections import Counter
from collections.abc import Awaitable
from http import HTTPStatus
from types import TracebackType
from typing import Any, cast

import msgspec
from litestar.types import ASGIApp, HTTPScope, Message, Receive, Scope, Send

from loramux.serving.errors import InvalidRequest, ServingError
from loramux_api.headers import request_id

PIECE = 64 << 10
"""Maximum number of decoded bytes of one message."""
GZIP = zlib.MAX_WBITS | 16
READ_ANYWAY = 8 << 10
"""Maximum bytes of an unread body with which the connection stays open: so few bytes have arrived together with the
head.
"""
READER_SECONDS = 60.0
"""Seconds in which a client must take the next part of a download or of a stream."""
_TIMED = "/v1/"
_BODY_SENDER = "loramux.body_sender"

logger = logging.getLogger(__name__)


class UnsupportedEncoding(ServingError):
    """The body has an encoding that this server does not read."""

    code = "unsupported_content_encoding"
    status = HTTPStatus.UNSUPPORTED_MEDIA_TYPE


async def serve(app: ASGIApp, scope: HTTPScope, receive: Receive, send: Send) -> None:
    """Let `app` answer a request."""
    if "method" not in scope:  # a WebSocket: the application has none, and refuses it
        await app(scope, receive, send)
        return
    began = time.monotonic()
    is_head = scope["method"] == "HEAD"
    is_read = not _has_long_body(scope)

    async def receive_noted() -> Any:
        nonlocal is_read
        message = await receive()
        is_read = is_read or not message.get("more_body", False)
        return message

    async def send_shaped(message: Message) -> None:
        if message["type"] == "http.response.start" and scope["path"].startswith(_TIMED):
            spent = str(round(1000 * (time.monotonic() - began))).encode()
            message["headers"] = [*message["headers"], (b"openai-processing-ms", spent)]
        if message["type"] == "http.response.start" and not is_read:
            others = [one for one in message["headers"] if one[0].lower() != b"connection"]
            message["headers"] = [*others, (b"connection", b"close")]
        if is_head and message["type"] == "http.response.body":
            message = cast(Message, {**message, "body": b""})
        await send(message)

    headers = Counter(name.lower() for name, _ in scope["headers"])
    if (fault := _framing_fault(scope, headers)) is not None:
        await _refuse(scope, send, fault)
        return
    if is_head:
        scope = cast(HTTPScope, {**scope, "method": "GET"})
    else:
        cast(Any, scope)["extensions"] = {**(scope.get("extensions") or {}), _BODY_SENDER: send}
    if b"content-encoding" in headers:
        scope, receive_body = _decoded(scope, receive_noted)
    else:
        receive_body = receive_noted
    await app(scope, receive_body, send_shaped)


def body_sender(scope: Scope, send: Send) -> Send:
    """Return the ASGI server's own `send`, with which the middle parts of a body go out unchanged.

    A stream has a part per token, and every layer below `send` is a coroutine per part. Returns `send` if a layer
    changes the parts.
    """
    return cast(Send, (scope.get("extensions") or {}).get(_BODY_SENDER, send))


class ReaderLimit:
    """Ends a block that sends a body, if the client takes nothing of a part for READER_SECONDS.

    Else what waits for the client would stay in memory for as long as it keeps the connection. A stream has a part for
    each token, so all parts of a body have one timer, which looks at the part that is being sent.
    """

    def __init__(self, scope: Scope) -> None:
        self._scope = scope
        self._clock = asyncio.get_running_loop().time
        self._since = math.inf
        """Time since which a part is being sent; inf if none is."""
        self._limit = asyncio.timeout(None)
        self._timer: asyncio.TimerHandle

    async def take(self, sending: Awaitable[None]) -> None:
        """Wait until the client has taken a part."""
        self._since = self._clock()
        await sending
        self._since = math.inf

    async def __aenter__(self) -> ReaderLimit:
        """Begin to look at the parts."""
        await self._limit.__aenter__()
        self._look()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> bool:
        """End the body without its end, by which the client sees that it is cut."""
        self._timer.cancel()
        try:
            await self._limit.__aexit__(kind, error, trace)
        except TimeoutError:
            logger.info("request %s: its client took nothing for %g s", request_id(self._scope), READER_SECONDS)
            return True
        return False

    def _look(self) -> None:
        if self._clock() - self._since >= READER_SECONDS:
            self._limit.reschedule(self._clock())
        else:
            self._timer = asyncio.get_running_loop().call_later(READER_SECONDS / 4, self._look)


def _has_long_body(scope: HTTPScope) -> bool:
    """Return whether a request of HTTP/1.1 has a body that may still be arriving when the request is refused."""
    if not scope["http_version"].startswith("1"):
        return False
    headers = {name.lower(): value for name, value in scope["headers"]}
    length = headers.get(b"content-length", b"0")
    return b"transfer-encoding" in headers or not length.isdigit() or int(length) > READ_ANYWAY


def _framing_fault(scope: HTTPScope, headers: Counter[bytes]) -> str | None:
    """Return the fault in the framing of an HTTP/1.1 request, if there is one."""
    if scope["http_version"] != "1.1":
        return None
    if headers[b"content-length"] and headers[b"transfer-encoding"]:
        return "A request has a Content-Length or a Transfer-Encoding, not both."
    hosts = [value for name, value in scope["headers"] if name.lower() == b"host"]
    if len(hosts) != 1 or not hosts[0].strip():
        return f"A request has one Host header, and this one has {len([one for one in hosts if one.strip()])}."
    return None


async def _refuse(scope: HTTPScope, send: Send, message: str) -> None:
    error = {"message": message, "type": "invalid_request_error", "param": None, "code": "invalid_http_request"}
    body = msgspec.json.encode({"error": error})
    headers = [
        (b"content-type", b"application/json"),
        (b"content-length", str(len(body)).encode()),
        (b"connection", b"close"),
        (b"x-request-id", request_id(scope).encode()),
    ]
    await send({"type": "http.response.start", "status": HTTPStatus.BAD_REQUEST, "headers": headers})
    await send({"type": "http.response.body", "body": body, "more_body": False})


def _decoded(scope: HTTPScope, receive: Receive) -> tuple[HTTPScope, Receive]:
    """Return the request as if its body had been sent without an encoding."""
    encodings = [
        one.strip().lower()
        for name, value in scope["headers"]
        if name.lower() == b"content-encoding"
        for one in value.decode("latin-1").split(",")
    ]
    encodings = [one for one in encodings if one not in ("", "identity")]
    left = [one for one in scope["headers"] if one[0].lower() not in (b"content-encoding", b"content-length")]
    if not encodings:
        return scope, receive
    if encodings in (["gzip"], ["x-gzip"]):
        return cast(HTTPScope, {**scope, "headers": left}), GzipBody(receive)
    shown = ", ".join(encodings)[:80]

    async def refuse() -> Any:
        raise UnsupportedEncoding(
            f"The body has the Content-Encoding '{shown}'; this server reads gzip, and bodies without an encoding.",
            "Content-Encoding",
        )

    return scope, refuse


class GzipBody:
    """Receives a body and decodes it piece by piece. This receiver never holds more than one decoded piece, even if the
    decoded body is large.
    """

    def __init__(self, receive: Receive) -> None:
        self._receive = receive
        self._decoder = zlib.decompressobj(GZIP)
        self._pending = b""
        self._has_more_output = False
        self._is_whole = False
        """True if all encoded bytes have come."""
        self._is_done = False

    async def __call__(self) -> Any:
        """Return the next message. Raises InvalidRequest if the body is not gzip."""
        if self._is_done:
            return await self._receive()
        while True:
            if self._pending or self._has_more_output:
                if piece := self._decode():
                    await asyncio.sleep(0)
                    return {"type": "http.request", "body": piece, "more_body": True}
            elif self._is_whole:
                if not self._decoder.eof:
                    raise _not_gzip("it ends too early")
                self._is_done = True
                return {"type": "http.request", "body": b"", "more_body": False}
            else:
                message = await self._receive()
                if message["type"] != "http.request":
                    return message
                self._pending = message.get("body", b"")
                self._is_whole = not message.get("more_body", False)

    def _decode(self) -> bytes:
        if self._decoder.eof:
            raise _not_gzip("bytes follow its end")
        try:
            piece = self._decoder.decompress(self._pending, PIECE)
        except zlib.error:
            raise _not_gzip("it cannot be decoded") from None
        if self._decoder.unused_data:
            raise _not_gzip("bytes follow its end")
        self._pending = self._decoder.unconsumed_tail
        self._has_more_output = len(piece) == PIECE and not self._decoder.eof
        return piece


def _not_gzip(why: str) -> InvalidRequest:
    return InvalidRequest(
        f"The body has the Content-Encoding gzip, and is no whole gzip stream: {why}.",
        "Content-Encoding",
        code="invalid_encoding",
    )
