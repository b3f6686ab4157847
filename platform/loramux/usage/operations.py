"""What the writer is asked to do, and what comes of it."""

from __future__ import annotations

import msgspec

from loramux.limits import Standing
from loramux.records import ProjectId, TenantId
from loramux.records.counts import Counted
from loramux.records.ledger import LedgerEntry
from loramux.usage.claims import Answered, Claim


class OpenedRequest(msgspec.Struct, frozen=True, kw_only=True):
    """A request about to be queued; prompt_tokens and max_tokens are the most it can come to cost."""

    id: str
    tenant: TenantId
    key_id: str
    """Or the member who asks in person."""
    project_id: ProjectId | None = None
    model: str
    """As resolved: `tenant/adapter@3`, or the base model's name."""
    adapter_digest: str | None
    base_model: str = ""
    tier: str = ""
    tags: str = ""
    """As `loramux.gateway.tags` writes them."""
    prompt_tokens: int
    max_tokens: int
    waiting: int = 0
    """How many requests of the tenant wait on this server already."""
    claim: Claim | None = None
    """The idempotency key that it came with."""


class Settlement(msgspec.Struct, frozen=True, kw_only=True):
    """How a request ended, in whole tokens; cached_tokens are part of input_tokens, waived or not."""

    request_id: str
    input_tokens: int = 0
    cached_tokens: int = 0
    output_tokens: int = 0
    """Every token generated up to and including the one that ended it, also those the client never saw."""
    waived_input_tokens: int = 0
    waived_cached_tokens: int = 0
    waived_output_tokens: int = 0
    adapter_load: int = 0
    """How often weights were read into the pool for it."""
    finish_reason: str | None
    status: str
    """`completed`, `cancelled` or `failed`."""
    answer: bytes | None = None
    """What to tell whoever sends the request again; None frees its idempotency key."""
    counted: Counted | None = None
    """What the engine counted for it by itself; None when it died, and then the quantities are 0."""


Operation = OpenedRequest | Settlement
Outcome = LedgerEntry | Standing | Answered
"""A settlement's entry; for a request its standing, or the answer that it had already."""


def unused(request_id: str, status: str) -> Settlement:
    """The end of a request that is recorded and costs nothing."""
    return Settlement(request_id=request_id, finish_reason=None, status=status)
