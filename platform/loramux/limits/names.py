"""The limits by name, what they may be on, and the subjects that they are on."""

from __future__ import annotations

import msgspec

from loramux.limits.bucket import PART

BIGGEST = 2**63 - 1


class LimitKind(msgspec.Struct, frozen=True):
    """What one limit means."""

    meaning: str
    biggest: int
    everywhere: bool
    """Also on a project, a key or a member; else on a tier and a tenant only."""


LIMITS = {
    "requests_per_minute": LimitKind("requests begun in a minute", BIGGEST // PART, True),
    "tokens_per_minute": LimitKind("prompt and answer tokens in a minute", BIGGEST // PART, True),
    "concurrent_requests": LimitKind("requests at the same time, over all servers", 10**9, True),
    "queued_requests": LimitKind("requests that wait for their first token, on one server", 10**9, False),
    "adapters": LimitKind("adapters that exist", 10**9, False),
    "adapter_bytes": LimitKind("bytes of all adapters together", 2**62, False),
    "adapter_rank": LimitKind("the largest rank of an adapter", 10**6, False),
    "adapter_file_bytes": LimitKind("bytes of one adapter's weights", 2**62, False),
    "adapter_modules": LimitKind("modules that one adapter changes", 10**6, False),
}


def tier_subject(tier: str) -> str:
    """The subject of a tier's limits: those of its tenants that have none of their own."""
    return f"tier:{tier}"
