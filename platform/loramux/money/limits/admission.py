"""Admission by limits: it decides which requests of a batch may begin, under the locks of one transaction.

Admission and the insertion of the row in state `open` are one transaction; settlement and release are another. A crash
between the two leaves an open row and its holds. The sweep that settles the row also releases the holds.

The functions over `SubjectLimits` and `SubjectCounter` are plain arithmetic; `AdmissionBatch` locks and reads the rows
that a batch of requests touches, applies these functions in memory, and writes the outcome once.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Mapping, Sequence
from itertools import chain
from typing import Any

import msgspec
from sqlalchemy.ext.asyncio import AsyncSession

from loramux.common.identity import Principal
from loramux.common.units import SECOND, TokenCounts
from loramux.data.records.limits import CounterRepository, LimitRepository
from loramux.data.records.requests import OpenedRequest, tenant_tier
from loramux.money.limits.budgets import BudgetBatch, ChargedUsage, Prices
from loramux.money.limits.definitions import (
    BATCH_LIMIT,
    BATCH_POOL,
    MAX_INTEGER,
    RateLimit,
    RateLimitStatus,
    TokenBucket,
    pools_of,
    subjects_of_caller,
    tier_subject,
)
from loramux.money.limits.errors import LimitReached, QueueFull, RateReached, RequestTooLarge, TooManyRunning

RETRY = SECOND
"""Microseconds after which a caller may retry if too many requests run. The end of a running request is not known, so
this is a guess."""


COUNTED_LIMITS = ("requests_per_minute", "tokens_per_minute", "concurrent_requests", "queued_requests")


class SubjectLimits(msgspec.Struct, frozen=True, kw_only=True):
    """One subject's limits on requests and tokens; None: no limit."""

    requests_per_minute: int | None = None
    tokens_per_minute: int | None = None
    concurrent_requests: int | None = None
    queued_requests: int | None = None
    prefix: str = ""
    """Prefix of the limits' names in messages."""

    @classmethod
    def of_pool(cls, pool: str, values: Mapping[str, int]) -> SubjectLimits | None:
        """Return the limits of a pool (`pools_of`) from its subject's limits by name; None without limits."""
        prefix = BATCH_LIMIT if pool.startswith(BATCH_POOL) else ""
        found = {name: values[prefix + name] for name in COUNTED_LIMITS if prefix + name in values}
        return cls(**found, prefix=prefix) if found else None


class SubjectCounter(msgspec.Struct, frozen=True):
    """One subject's remaining requests and tokens of the minute, and its number of running requests."""

    requests: TokenBucket
    tokens: TokenBucket
    running: int

    def refilled(self, limits: SubjectLimits, now: int) -> SubjectCounter:
        """Return the counter as of `now`."""
        return SubjectCounter(
            _refilled(self.requests, limits.requests_per_minute, now),
            _refilled(self.tokens, limits.tokens_per_minute, now),
            self.running,
        )

    def with_request(self, limits: SubjectLimits, tokens: int) -> SubjectCounter:
        """Return the refilled counter with one more request of `tokens` tokens, which `ensure_admits` has checked."""
        return SubjectCounter(
            self.requests if limits.requests_per_minute is None else self.requests.minus(1),
            self.tokens if limits.tokens_per_minute is None else self.tokens.minus(tokens),
            self.running + 1,
        )

    def without_request(self, unused: int) -> SubjectCounter:
        """Return the counter with one request less, and with the reserved but unused tokens given back."""
        tokens = self.tokens.plus(unused)
        return SubjectCounter(
            self.requests, TokenBucket(min(tokens.free, MAX_INTEGER), tokens.at), max(0, self.running - 1)
        )

    def status(self, limits: SubjectLimits) -> RateLimitStatus:
        """Return the rest of the minute's limits of the refilled counter."""
        return RateLimitStatus(
            _rate_limit(self.requests, limits.requests_per_minute), _rate_limit(self.tokens, limits.tokens_per_minute)
        )


def ensure_admits(owner: str, limits: SubjectLimits, counter: SubjectCounter, request: OpenedRequest) -> None:
    """Raise unless the request fits now. `counter` is refilled; `owner` is the subject's word in messages.

    Raises RequestTooLarge, RateReached, TooManyRunning or QueueFull.
    """
    limit, tokens = limits.tokens_per_minute, request.max_total
    if limit is not None and tokens > limit:
        raise RequestTooLarge(
            f"This request may use {tokens} tokens (prompt and max_tokens), and your {owner} has {limit} a minute "
            f"({limits.prefix}tokens_per_minute): it would never fit. Lower max_tokens, shorten the prompt, or ask for "
            "a higher limit.",
            "max_tokens",
        )
    ensure_rate(owner, "requests", counter.requests, limits.requests_per_minute, 1)
    ensure_rate(owner, "tokens", counter.tokens, limit, tokens)
    most = limits.concurrent_requests
    if most is not None and counter.running >= most:
        raise TooManyRunning(
            f"Your {owner} runs {counter.running} requests at the same time, and may run {most} "
            f"({limits.prefix}concurrent_requests). Please wait until one has ended.",
            wait=RETRY,
        )
    longest = limits.queued_requests
    if longest is not None and request.waiting >= longest:
        raise QueueFull(
            f"Your {owner} has {request.waiting} requests that wait for their first token, and may have {longest} "
            "(queued_requests). Please send fewer at a time.",
            wait=RETRY,
        )


def ensure_rate(owner: str, kind: str, bucket: TokenBucket, limit: int | None, quantity: int) -> None:
    """Raise RateReached unless the refilled bucket has the requested number of requests or tokens."""
    if limit is None or bucket.whole >= quantity:
        return
    wait = bucket.wait(quantity, limit)
    when = "" if wait is None else f" Please try again in {wait / SECOND:.3f}s."
    raise RateReached(
        f"Rate limit reached for your {owner} on {kind} per minute: limit {limit}, left {bucket.whole}, "
        f"this request {quantity}.{when}",
        kind,
        wait=wait,
    )


async def check_request_rate(session: AsyncSession, principal: Principal, now: int) -> None:
    """Raise RateReached if the caller's limits leave no request in this minute; nothing is locked or counted."""
    owners = subjects_of_caller(principal.tenant, principal.project, principal.lineage or (principal.key_id,))
    tier = tier_subject(principal.tier)
    rows = await LimitRepository(session).limits({*owners, tier})
    per_minute = {row.subject: row.value for row in rows if row.name == "requests_per_minute"}
    if (of_tier := per_minute.pop(tier, None)) is not None:
        per_minute.setdefault(principal.tenant, of_tier)
    counters = {row.subject: row for row in await CounterRepository(session).peek(per_minute)} if per_minute else {}
    for subject, limit in per_minute.items():
        row = counters.get(subject)
        bucket = TokenBucket.full(limit, now) if row is None else TokenBucket(row.requests_free, row.requests_at)
        ensure_rate(owners[subject], "requests", bucket.refilled(limit, now), limit, 1)


class AdmissionBatch:
    """The limits and counters that a batch touches, locked by `read`, changed in memory, written once."""

    def __init__(self, session: AsyncSession, now: int) -> None:
        self._session = session
        self._counter_rows = CounterRepository(session)
        self._budgets = BudgetBatch(session, now)
        self._now = now
        self._limits: dict[str, SubjectLimits] = {}
        self._counters: dict[str, SubjectCounter] = {}
        self._held: dict[str, list[Any]] = defaultdict(list)
        self._new: dict[str, list[dict[str, Any]]] = defaultdict(list)
        self._ended: list[str] = []

    async def read(self, opened: Sequence[OpenedRequest], ended: Collection[str], prices: Prices) -> None:
        """Look up and lock the rows that these requests touch. A transaction that also locks the ledger's head locks it
        first."""
        if opened:
            await self._read_limits(opened)
        limited = (request.id for request in opened if not pools_of(request).keys().isdisjoint(self._limits))
        holders = {*ended, *limited}
        for row in await self._counter_rows.holds(holders) if holders else ():
            self._held[row.request_id].append(row)
        subjects = {pool for request in opened for pool in pools_of(request) if pool in self._limits}
        subjects |= {row.subject for rows in self._held.values() for row in rows}
        for row in await self._counter_rows.counters(subjects) if subjects else ():
            self._counters[row.subject] = SubjectCounter(
                TokenBucket(row.requests_free, row.requests_at),
                TokenBucket(row.tokens_free, row.tokens_at),
                row.running,
            )
        await self._budgets.read(opened, ended, prices)

    def admit(self, request: OpenedRequest) -> RateLimitStatus:
        """Take the request's needs from all its subjects, or from none of them.

        A request is counted once. If a request is admitted again because the first result was lost, it is not counted
        again. Raises LimitReached or RequestTooLarge.
        """
        owners = {pool: word for pool, word in pools_of(request).items() if pool in self._limits}
        counters = {id: self._counters[id].refilled(self._limits[id], self._now) for id in owners}
        if self.holds(request.id):
            return self._status(counters)
        try:
            for subject, owner in owners.items():
                ensure_admits(owner, self._limits[subject], counters[subject], request)
            cost = self._budgets.ensure_affordable(request)
        except LimitReached as reached:
            reached.rate_limits = self._status(counters)
            raise
        for subject, counter in counters.items():
            counters[subject] = counter.with_request(self._limits[subject], request.max_total)
            reserved = 0 if self._limits[subject].tokens_per_minute is None else request.max_total
            hold = {"request_id": request.id, "subject": subject, "tokens": reserved}
            self._new[request.id].append(hold)
        self._counters |= counters
        self._budgets.hold(request, cost)
        return self._status(counters)

    def holds(self, request_id: str) -> bool:
        """Return True if the request has taken anything, now or before."""
        return request_id in self._held or request_id in self._new or self._budgets.holds(request_id)

    def release(self, request_id: str, used: ChargedUsage, unbilled: TokenCounts, tokens: int) -> None:
        """Give back the held but unused amounts of the request. A second release has no effect.

        `used` and `unbilled` count against budgets, `tokens` against limits per minute.
        """
        if self.holds(request_id):
            self._ended.append(request_id)
        for row in self._held.pop(request_id, ()):
            unused = max(0, row.tokens - tokens)
            self._counters[row.subject] = self._counters[row.subject].without_request(unused)
        self._budgets.release(request_id, used, unbilled)

    async def write(self) -> None:
        """Write the changed counters and holds."""
        await self._counter_rows.write_counters([_row(*item) for item in sorted(self._counters.items())])
        await self._counter_rows.add_holds(list(chain.from_iterable(self._new.values())))
        await self._budgets.write()
        if self._ended:
            await self._counter_rows.remove_holds(self._ended)

    async def _read_limits(self, opened: Sequence[OpenedRequest]) -> None:
        pools = {pool for request in opened for pool in pools_of(request)}
        subjects = {pool.removeprefix(BATCH_POOL) for pool in pools}
        tiers = {one.tenant_id: tier_subject(tenant_tier(one.tier)) for one in opened}
        values: dict[str, dict[str, int]] = defaultdict(dict)
        for row in await LimitRepository(self._session).limits(subjects | set(tiers.values())):
            values[row.subject][row.name] = row.value
        for tenant, tier in tiers.items():
            values[tenant] = values[tier] | values[tenant]
        for pool in pools:
            limits = SubjectLimits.of_pool(pool, values[pool.removeprefix(BATCH_POOL)])
            if limits is not None:
                self._limits[pool] = limits

    def _status(self, counters: dict[str, SubjectCounter]) -> RateLimitStatus:
        status = RateLimitStatus()
        for subject, counter in counters.items():
            status = status.tightest(counter.status(self._limits[subject]))
        return status


def _refilled(bucket: TokenBucket, limit: int | None, now: int) -> TokenBucket:
    return bucket if limit is None else bucket.refilled(limit, now)


def _rate_limit(bucket: TokenBucket, limit: int | None) -> RateLimit | None:
    return None if limit is None else RateLimit(limit, bucket.whole, bucket.wait(limit, limit) or 0)


def _row(subject: str, counter: SubjectCounter) -> dict[str, Any]:
    return {
        "subject": subject,
        "requests_free": counter.requests.free,
        "requests_at": counter.requests.at,
        "tokens_free": counter.tokens.free,
        "tokens_at": counter.tokens.at,
        "running": counter.running,
    }
