"""Tags that callers put on requests to find them on the bill: bounded as OpenAI bounds `metadata`."""

from __future__ import annotations

from collections.abc import Mapping

import msgspec

from loramux.gateway.errors import InvalidRequest

MAX_TAGS = 16
MAX_KEY = 64
MAX_VALUE = 512

_encode = msgspec.json.Encoder(order="sorted").encode


def canonical_tags(tags: Mapping[str, str] | None) -> str:
    """The tags as a JSON object with sorted keys; empty where there are none. Raises InvalidRequest."""
    if not tags:
        return ""
    if len(tags) > MAX_TAGS:
        raise _refused(f"a request has at most {MAX_TAGS} and this one has {len(tags)}; send fewer.")
    for key, value in tags.items():
        if not (1 <= len(key) <= MAX_KEY and key.isprintable()):
            raise _refused(f"a name has 1 to {MAX_KEY} printable characters; got {key[:MAX_KEY]!r}.")
        if not (len(value) <= MAX_VALUE and value.isprintable()):
            raise _refused(f"the value of {key!r} has at most {MAX_VALUE} characters, all printable.")
    return _encode(dict(tags)).decode()


def _refused(why: str) -> InvalidRequest:
    return InvalidRequest(f"Invalid value for 'metadata': {why}", param="metadata", code="invalid_value")
