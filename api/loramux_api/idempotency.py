"""The Idempotency-Key header."""

from __future__ import annotations

import hashlib
import re
from typing import Any

from litestar import Request

from loramux.gateway import InvalidRequest
from loramux.usage import Claim

HEADER = "Idempotency-Key"
_sane = re.compile(r"[\x21-\x7e]{1,255}")


async def claim_of(request: Request[Any, Any, Any], name: str | None) -> Claim | None:
    """The key with a digest of what came with it: method, path and body, byte by byte. Raises InvalidRequest."""
    if name is None:
        return None
    if not _sane.fullmatch(name):
        raise InvalidRequest(
            f"{HEADER} has 1 to 255 visible ASCII characters; a UUID is a good one.", param=HEADER, code="invalid_value"
        )
    asked = f"{request.method} {request.url.path}?{request.url.query}\n"
    digest = hashlib.sha256(asked.encode() + await request.body())
    return Claim(name, digest.hexdigest())
