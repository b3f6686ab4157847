"""The limits by name, their subjects, and the token bucket that counts limits per minute.

A bucket refills evenly, in exact integers. A limit of L per minute adds L parts every microsecond. One request (or
token) costs PART parts; PART is the number of microseconds in a minute. No value is rounded, so the bucket is exact to
the token.
"""

from __future__ import annotations

from collections.abc import Sequence

import msgspec
from sqlalchemy.ext.asyncio import AsyncSession

from loramux.common.identity import Principal
from loramux.common.settings.serving import AdapterLimits
from loramux.common.units import MINUTE
from loramux.data.records.limits import LimitRepository
from loramux.data.records.requests import OpenedRequest, is_shadow, service_tier

PART = MINUTE
"""Number of parts of one request or token: the number of microseconds in a minute."""

MAX_INTEGER = 2**63 - 1
"""The largest value of a database column."""

BATCH_POOL = "batch:"
"""Prefix of the counters of batches."""
BATCH_LIMIT = "batch_"
"""Prefix of the limits of batches."""


class TokenBucket(msgspec.Struct, frozen=True):
    """`free` parts as of the microsecond `at`. If the clock goes back, nothing is refilled."""

    free: int
    at: int

    @classmethod
    def full(cls, limit: int, now: int) -> TokenBucket:
        """Return a bucket with a whole minute's worth."""
        return cls(limit * PART, now)

    def refilled(self, limit: int, now: int) -> TokenBucket:
        """Return the bucket as of `now`."""
        elapsed = max(0, now - self.at)
        return TokenBucket(min(limit * PART, self.free + elapsed * limit), self.at + elapsed)

    @property
    def whole(self) -> int:
        """The whole units that can be taken."""
        return max(0, self.free) // PART

    def minus(self, quantity: int) -> TokenBucket:
        """Return the bucket after taking `quantity`; the caller has checked that enough parts are available."""
        return TokenBucket(self.free - quantity * PART, self.at)

    def plus(self, quantity: int) -> TokenBucket:
        """Return the bucket after giving back `quantity`; `refilled` later reduces the bucket to the limit."""
        return TokenBucket(self.free + quantity * PART, self.at)

    def wait(self, quantity: int, limit: int) -> int | None:
        """Return the microseconds until `quantity` can be taken; None for never."""
        if quantity > limit:
            return None
        missing = quantity * PART - self.free
        return max(0, -(-missing // limit)) if limit else 0


class RateLimit(msgspec.Struct, frozen=True):
    """One limit per minute: its value, the remaining amount, and the microseconds until it is full again."""

    limit: int
    remaining: int
    reset: int


class RateLimitStatus(msgspec.Struct, frozen=True):
    """The tightest limits per minute that apply to a request, which the x-ratelimit headers show; None: no such limit
    applies.
    """

    requests: RateLimit | None = None
    tokens: RateLimit | None = None

    def tightest(self, other: RateLimitStatus) -> RateLimitStatus:
        """Return the limit with less left, separately for requests and tokens."""
        return RateLimitStatus(_tighter(self.requests, other.requests), _tighter(self.tokens, other.tokens))


def _tighter(one: RateLimit | None, other: RateLimit | None) -> RateLimit | None:
    if one is None or other is None:
        return one or other
    return min(one, other, key=lambda rate: rate.remaining)


class LimitDefinition(msgspec.Struct, frozen=True):
    """Meaning of one limit."""

    meaning: str
    max_value: int
    everywhere: bool
    """True: the limit may also be set on a project, a key or a member. False: only on a tier and a tenant."""


LIMITS = {
    "requests_per_minute": LimitDefinition("requests begun in a minute", MAX_INTEGER // PART, True),
    "tokens_per_minute": LimitDefinition("prompt and answer tokens in a minute", MAX_INTEGER // PART, True),
    "concurrent_requests": LimitDefinition("requests at the same time, over all servers", 10**9, True),
    "queued_requests": LimitDefinition("requests that wait for their first token, on one server", 10**9, False),
    "batch_requests_per_minute": LimitDefinition("lines of batches begun in a minute", MAX_INTEGER // PART, True),
    "batch_tokens_per_minute": LimitDefinition("their prompt and answer tokens in a minute", MAX_INTEGER // PART, True),
    "batch_concurrent_requests": LimitDefinition("lines of batches at the same time, over all servers", 10**9, True),
    "file_bytes": LimitDefinition("bytes of all files together, those that batches write too", 2**62, False),
    "adapters": LimitDefinition("adapters that exist", 10**9, False),
    "adapter_bytes": LimitDefinition("bytes of all adapters together", 2**62, False),
    "adapter_rank": LimitDefinition("the largest rank of an adapter", 10**6, False),
    "adapter_file_bytes": LimitDefinition("bytes of one adapter's weights", 2**62, False),
    "adapter_modules": LimitDefinition("modules that one adapter changes", 10**6, False),
}


def tier_subject(tier: str) -> str:
    """Return the subject of a tier's limits, which apply to tenants without such limits."""
    return f"tier:{tier}"


def subjects_of(request: OpenedRequest) -> dict[str, str]:
    """Return the subjects whose limits apply to the request, each with its name in messages.

    The key's subject is the head of its lineage, which a rotation keeps. The keys and members that made the key follow,
    so a key cannot escape its limits by making other keys. No limit applies to a shadow, because no caller requested
    it.
    """
    if is_shadow(request.tier):
        return {}
    return subjects_of_caller(request.tenant_id, request.project_id, request.lineage or (request.key_id,))


def subjects_of_caller(tenant: str, project: str | None, lineage: Sequence[str]) -> dict[str, str]:
    """Return the subjects whose limits apply to a caller. `lineage` is the caller's key, followed by the makers of the
    key.
    """
    of_project = {} if project is None else {str(project): "project"}
    key, *makers = lineage
    above = dict.fromkeys(makers, "key's maker")
    return {str(tenant): "organization"} | of_project | above | {key: "key"}


def pools_of(request: OpenedRequest) -> dict[str, str]:
    """Return the counters that the request takes from, each with the name of its subject in messages.

    Lines of batches have separate counters, so a batch never uses up the limits of interactive requests. Money has no
    separate counters: budgets are on the subjects themselves. A fine-tuning job takes from no counter, because its
    tokens are not those of a minute.
    """
    subjects = subjects_of(request)
    match service_tier(request.tier):
        case "batch":
            return {f"{BATCH_POOL}{subject}": word for subject, word in subjects.items()}
        case "training":
            return {}
        case _:
            return subjects


class AdapterQuota(msgspec.Struct, frozen=True):
    """A tenant's limits on the number and size of its adapters; None: no such limit is set."""

    adapters: int
    rank: int
    file_bytes: int
    """Maximum bytes of one adapter's weights."""
    modules: int | None
    """Maximum number of modules that one adapter changes."""
    total_bytes: int | None


async def tenant_limits(session: AsyncSession, principal: Principal) -> dict[str, int]:
    """Return the tenant's limits by name. A tenant's own limit replaces the limit of its tier."""
    tier = tier_subject(principal.tier)
    rows = await LimitRepository(session).limits({principal.tenant, tier})
    values = {row.name: row.value for row in rows if row.subject == tier}
    return values | {row.name: row.value for row in rows if row.subject == principal.tenant}


async def adapter_quota(session: AsyncSession, principal: Principal, server: AdapterLimits) -> AdapterQuota:
    """Return the tenant's own limits, or its tier's, but never more than the server accepts from any tenant."""
    values = await tenant_limits(session, principal)
    return AdapterQuota(
        adapters=min(values.get("adapters", server.max_adapters_per_tenant), server.max_adapters_per_tenant),
        rank=min(values.get("adapter_rank", server.max_rank), server.max_rank),
        file_bytes=min(values.get("adapter_file_bytes", server.max_bytes), server.max_bytes),
        modules=values.get("adapter_modules"),
        total_bytes=values.get("adapter_bytes"),
    )
