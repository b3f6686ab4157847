"""loramux's own headers: deadline, idempotency key and preconditions; request id and rate limits."""

from __future__ import annotations

import hashlib
import re
import uuid
from typing import Annotated, Any, cast
from urllib.parse import quote

from litestar import Request
from litestar.connection import ASGIConnection
from litestar.params import HeaderParameter
from litestar.types import Message, Scope

from loramux.common.jobs import run_blocking, tenant_of_work
from loramux.data.entities import IdempotencyClaim
from loramux.money.limits.definitions import RateLimitStatus
from loramux.server.platform import Platform
from loramux.serving.errors import InvalidRequest

IDEMPOTENCY_KEY = "Idempotency-Key"
_sane_key = re.compile(r"[\x21-\x7e]{1,255}")
_STATE = "loramux.request_ids"
_IGNORED = "loramux.ignored"
IGNORED_FIELDS = b"x-loramux-ignored-fields"
MAX_IGNORED_LENGTH = 2048
"""Maximum number of bytes of the header."""
READABLE = (
    "x-request-id",
    "request-id",
    "openai-processing-ms",
    "retry-after",
    "x-loramux-ignored-fields",
    *(f"x-ratelimit-{of}-{kind}" for of in ("limit", "remaining", "reset") for kind in ("requests", "tokens")),
)
"""The headers of an answer that scripts of other origins may read."""
LOCAL_HOSTS = ("127.0.0.1", "localhost", "[::1]")
"""Names of this machine. Without TLS, a browser sends secure cookies only to these hosts."""
HSTS = (b"strict-transport-security", b"max-age=31536000")
SESSION_COOKIE = "loramux_session"
SIGN_IN_COOKIE = "loramux_sign_in"
"""Cookie with the secret of an unfinished sign-in at an issuer."""
FROM_CONSOLE = "loramux.from_console"
"""Key that is set in the scope of a request that was authenticated by the console's cookie."""
_DATA_ONLY = (
    (b"content-security-policy", b"default-src 'none'; frame-ancestors 'none'; sandbox"),
    (b"x-content-type-options", b"nosniff"),
    (b"cross-origin-resource-policy", b"same-origin"),
)
_sane_id = re.compile(rb"[A-Za-z0-9._:-]{1,128}")
HASHED_AT_ONCE = 256 << 10
"""Bytes of a body that are hashed on the event loop, in less than a millisecond."""
MAX_DEADLINE_MS = 3_600_000

Deadline = Annotated[
    int | None,
    HeaderParameter(
        name="x-loramux-deadline-ms",
        ge=1,
        le=MAX_DEADLINE_MS,
        description="Milliseconds to the first token. A request that would come later is refused at once, with 429, "
        "Retry-After and the expected wait; one that waits longer than this is refused then.",
    ),
]
"""Latest moment at which the first token is useful."""

MAX_ETAGS = 1024
IdempotencyKey = Annotated[
    str | None,
    HeaderParameter(
        name="Idempotency-Key",
        schema_extra={"max_length": 255},  # `claim_of` refuses a longer one in its own words
        description="1 to 255 visible ASCII characters, a UUID for instance. The same request again under the same key "
        "gets the same answer, billed once; 409 while it runs, 422 with another body. "
        "The answer is stored encrypted, for a day unless the operator says otherwise.",
    ),
]
"""Name under which a request can be sent again."""

IfMatch = Annotated[
    str | None,
    HeaderParameter(
        name="If-Match",
        max_length=MAX_ETAGS,
        description="The adapter's ETag as you read it: the change is made only if the adapter has not changed "
        "since, else the answer is 412.",
    ),
]
"""State that the adapter must still have."""

IfNoneMatch = Annotated[
    str | None,
    HeaderParameter(
        name="If-None-Match",
        max_length=MAX_ETAGS,
        description="The adapter's ETag as you have it: 304 if it is the same.",
    ),
]
"""State that the client has."""


async def claim_of(request: Request[Any, Any, Any], name: str | None) -> IdempotencyClaim | None:
    """Return the key with a digest of the request: method, path and body, byte by byte. Raises InvalidRequest."""
    if name is None:
        return None
    if not _sane_key.fullmatch(name):
        raise InvalidRequest(
            f"{IDEMPOTENCY_KEY} has 1 to 255 visible ASCII characters; a UUID is a good one.",
            field=IDEMPOTENCY_KEY,
            code="invalid_value",
        )
    platform = request.app.state.platform
    assert isinstance(platform, Platform)
    if not platform.settings.privacy.idempotency_seconds:
        raise InvalidRequest(
            f"This server stores no answers, so it takes no {IDEMPOTENCY_KEY}: send the request without it.",
            field=IDEMPOTENCY_KEY,
            code="idempotency_disabled",
        )
    asked = f"{request.method} {request.url.path}?{request.url.query}\n"
    digest, body = hashlib.sha256(asked.encode()), await request.body()
    if len(body) > HASHED_AT_ONCE:
        await run_blocking(tenant_of_work(), digest.update, body)
    else:
        digest.update(body)
    return IdempotencyClaim(name, digest.hexdigest())


def request_id(scope: Scope) -> str:
    """Return the client's own id if it is valid, otherwise a new id. The id stays the same for the whole request."""
    return _ids(scope)[-1]


def traceable_id(scope: Scope) -> str:
    """Return the server's own id of the request, followed by a slash and the client's id: for logs and the audit log.

    A client chooses its id freely, and may send the id of another request. The server's id is unique.
    """
    return "/".join(_ids(scope))


def _ids(scope: Scope) -> tuple[str, ...]:
    kept = cast(dict[str, Any], scope)
    if _STATE not in kept:
        sent = next((value for name, value in scope["headers"] if name.lower() == b"x-request-id"), b"")
        own = f"req_{uuid.uuid4().hex}"
        kept[_STATE] = (own, sent.decode()) if _sane_id.fullmatch(sent) else (own,)
    return cast(tuple[str, ...], kept[_STATE])


def is_local(connection: ASGIConnection[Any, Any, Any, Any]) -> bool:
    """Return whether a request was sent without TLS, to a name of this machine."""
    host = connection.headers.get("host", "")
    return connection.scope["scheme"] == "http" and (host.rpartition(":")[0] or host) in LOCAL_HOSTS


def cookie_name(name: str, connection: ASGIConnection[Any, Any, Any, Any]) -> str:
    """Return the name under which a cookie is sent.

    A browser accepts a name with the prefix `__Host-` only from this host and only over TLS, so that no other host of
    the same domain can set the cookie. Without TLS, on this machine, the name has no prefix.
    """
    return name if is_local(connection) else f"__Host-{name}"


async def send_transport_policy(message: Message, scope: Scope) -> None:
    """Make browsers that used TLS always use TLS for this host (RFC 6797): a `before_send` hook."""
    if message["type"] == "http.response.start" and scope["scheme"] == "https":
        message["headers"] = [*message["headers"], HSTS]


async def send_request_id(message: Message, scope: Scope) -> None:
    """Add the request id: a Litestar `before_send` hook, which also sees the responses of routes that do not exist."""
    if message["type"] == "http.response.start":
        message["headers"] = [*message["headers"], (b"x-request-id", request_id(scope).encode())]


def note_ignored(scope: Scope, name: str) -> None:
    """Remember a part of the request that is ignored; `send_ignored` and the log report it."""
    ignored_of(scope).append(name)


def ignored_of(scope: Scope) -> list[str]:
    """Return the parts of the request that are ignored."""
    found: list[str] = cast(dict[str, Any], scope).setdefault(_IGNORED, [])
    return found


async def send_ignored(message: Message, scope: Scope) -> None:
    """Add the names of the ignored parts of a request: a `before_send` hook."""
    if message["type"] == "http.response.start" and (names := ignored_of(scope)):
        written = ", ".join(quote(name, safe=" ()[].") for name in names)
        message["headers"] = [*message["headers"], (IGNORED_FIELDS, written[:MAX_IGNORED_LENGTH].encode())]


async def send_console_policy(message: Message, scope: Scope) -> None:
    """Keep other pages of this origin away from the console's session: a `before_send` hook.

    If a request has the session's cookie, its response gets headers that forbid a browser to show it as a page. The
    page with the API's description runs scripts from another origin. In a browser that is signed in, this page gets a
    separate origin, from which no cookie is sent.
    """
    if message["type"] != "http.response.start":
        return
    if FROM_CONSOLE in scope:
        message["headers"] = [*message["headers"], *_DATA_ONLY]
    elif scope["path"].lstrip("/").startswith("schema") and any(
        name.lower() == b"cookie" and SESSION_COOKIE.encode() in value for name, value in scope["headers"]
    ):
        message["headers"] = [*message["headers"], (b"content-security-policy", b"sandbox allow-scripts")]


def rate_headers(status: RateLimitStatus | None) -> dict[str, str]:
    """Return x-ratelimit-* headers in OpenAI's form: limit, remaining and reset of requests and tokens per minute."""
    headers: dict[str, str] = {}
    if status is None:
        return headers
    for kind, rate in (("requests", status.requests), ("tokens", status.tokens)):
        if rate is not None:
            headers[f"x-ratelimit-limit-{kind}"] = str(rate.limit)
            headers[f"x-ratelimit-remaining-{kind}"] = str(rate.remaining)
            headers[f"x-ratelimit-reset-{kind}"] = duration(rate.reset)
    return headers


def duration(microseconds: int) -> str:
    """Write a duration as `6m0s`, `1.5s` or `20ms`, rounded up to 1 ms."""
    milliseconds = -(-microseconds // 1000)
    if milliseconds < 1000:
        return f"{milliseconds}ms"
    minutes, left = divmod(milliseconds, 60_000)
    seconds = f"{left / 1000:.3f}".rstrip("0").rstrip(".")
    return f"{minutes}m{seconds}s" if minutes else f"{seconds}s"
