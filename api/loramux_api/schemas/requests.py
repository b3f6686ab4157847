"""A tenant's own requests on the wire: who was asked and how it ended, never what was said. Times in Unix seconds."""

from __future__ import annotations

from typing import Literal

import msgspec

from loramux.usage import AnsweredRequest
from loramux_api.schemas.tenancy import SECOND, seconds


class RequestObject(msgspec.Struct, kw_only=True):
    """A request to an adapter."""

    id: str
    object: Literal["request"] = "request"
    model: str
    """The revision that answered: `tenant/adapter@3`."""
    digest: str
    """Of that revision's files."""
    api_key_id: str
    status: str
    """open; settled: it is on the bill; interrupted: its server died, and it costs nothing."""
    prompt_tokens: int
    created_at: int
    settled_at: int | None


def request_object(request: AnsweredRequest) -> RequestObject:
    """The request, as callers see it."""
    return RequestObject(
        id=request.id,
        model=request.model,
        digest=request.adapter_digest,
        api_key_id=request.key_id,
        status=request.status,
        prompt_tokens=request.prompt_tokens,
        created_at=request.created_at // SECOND,
        settled_at=seconds(request.settled_at),
    )
