"""JSON objects of a tenant's requests: model, state and usage, never prompts or answers. Times are Unix seconds."""

from __future__ import annotations

from typing import Literal

import msgspec

from loramux.common.units import SECOND
from loramux.data.entities import AnsweredRequest
from loramux_api.schemas.tenancy import seconds


class RequestObject(msgspec.Struct, kw_only=True):
    """A request to an adapter."""

    id: str
    object: Literal["request"] = "request"
    model: str
    """Revision that answered: `tenant/adapter@3`."""
    digest: str
    """Digest of the revision's files."""
    api_key_id: str
    status: str
    """Status of the request. `open`: not yet settled. `settled`: the request is on the bill. `interrupted`: its server
    died, and the request is free of charge.
    """
    prompt_tokens: int
    created_at: int
    settled_at: int | None


def request_object(request: AnsweredRequest) -> RequestObject:
    """Return the request as a JSON object."""
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
