"""The x-request-id of every response, by which a client and a log speak of the same request."""

from __future__ import annotations

import re
import uuid
from typing import Any, cast

from litestar.types import Message, Scope

_KEY = "loramux.request_id"
_sane = re.compile(rb"[A-Za-z0-9._:-]{1,128}")


def request_id(scope: Scope) -> str:
    """The client's own id where it sent a sane one, else one made here; the same for the whole request."""
    kept = cast(dict[str, Any], scope)
    if _KEY not in kept:
        sent = next((value for name, value in scope["headers"] if name.lower() == b"x-request-id"), b"")
        kept[_KEY] = sent.decode() if _sane.fullmatch(sent) else f"req_{uuid.uuid4().hex}"
    return cast(str, kept[_KEY])


async def send_request_id(message: Message, scope: Scope) -> None:
    """A Litestar `before_send` hook: it also sees the responses of routes that do not exist."""
    if message["type"] == "http.response.start":
        message["headers"] = [*message["headers"], (b"x-request-id", request_id(scope).encode())]
