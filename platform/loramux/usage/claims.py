"""Requests that may be sent again under an idempotency key: one runs, the others get its answer.

A claim is made in the transaction that opens the request and answered in the one that settles it, so that after a crash
at any moment a repeated request finds either its whole answer or a free key.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import msgspec
from sqlalchemy.ext.asyncio import AsyncSession

from loramux.records import Principal, TenantId
from loramux.records.idempotency import ClaimRepository
from loramux.records.identity import new_id
from loramux.usage.errors import IdempotencyMismatch, StillRunning

KEPT_SECONDS = 86_400
SECOND = 1_000_000


class Claim(msgspec.Struct, frozen=True):
    """An idempotency key, and a digest of the body that came with it."""

    name: str
    fingerprint: str


class Answered(msgspec.Struct, frozen=True):
    """The request was answered before: its id, and its answer as it was kept."""

    request_id: str
    answer: bytes


class Claimant(msgspec.Struct, frozen=True, kw_only=True):
    """Who claims what, for which request."""

    request_id: str
    tenant: TenantId
    key_id: str
    claim: Claim


Verdict = Answered | IdempotencyMismatch | StillRunning


async def judge(session: AsyncSession, claimants: Sequence[Claimant], now: int) -> dict[str, Verdict]:
    """Claim what is free; what becomes of the others, by request id."""
    if not claimants:
        return {}
    standing = await ClaimRepository(session).claim([_row(one, now) for one in claimants], now)
    verdicts: dict[str, Verdict] = {}
    for one in claimants:
        row = standing[one.tenant, one.key_id, one.claim.name]
        if row.request_id != one.request_id:
            verdicts[one.request_id] = _verdict(one.claim, row)
    return verdicts


class ClaimedOnce:
    """Has a change made once under an idempotency key: claimed and answered in the change's own transaction."""

    def __init__(self, principal: Principal, claim: Claim) -> None:
        self._claimant = Claimant(
            request_id=new_id("change"), tenant=principal.tenant, key_id=principal.key_id, claim=claim
        )

    async def said(self, session: AsyncSession, now: int) -> bytes | None:
        """What the change was answered, where it was made before; else it is claimed.

        Raises IdempotencyMismatch, or StillRunning where the key belongs to a request that generates.
        """
        verdict = (await judge(session, [self._claimant], now)).get(self._claimant.request_id)
        if isinstance(verdict, Exception):
            raise verdict
        return None if verdict is None else verdict.answer

    async def say(self, session: AsyncSession, answer: bytes) -> None:
        """Keep the answer."""
        await settle(session, {self._claimant.request_id: answer})


async def forget_expired(session: AsyncSession, now: int) -> None:
    """Remove what nobody may ask for again."""
    await ClaimRepository(session).remove_expired(now)


async def settle(session: AsyncSession, answers: Mapping[str, bytes | None]) -> None:
    """Keep the answers of these requests; the keys of those without one are free again."""
    claims = ClaimRepository(session)
    kept = {request: answer for request, answer in answers.items() if answer is not None}
    if kept:
        await claims.answer(kept)
    if others := answers.keys() - kept.keys():
        await claims.free(others)


def _verdict(claim: Claim, row: Any) -> Verdict:
    if row.fingerprint != claim.fingerprint:
        return IdempotencyMismatch(
            f"The idempotency key '{claim.name}' came with another request before. Use a new key for a new request."
        )
    if row.answer is None:
        return StillRunning(
            f"The request with the idempotency key '{claim.name}' is still running. Ask again, and you get its answer."
        )
    return Answered(row.request_id, row.answer)


def _row(one: Claimant, now: int) -> dict[str, Any]:
    return {
        "tenant_id": one.tenant,
        "key_id": one.key_id,
        "name": one.claim.name,
        "fingerprint": one.claim.fingerprint,
        "request_id": one.request_id,
        "answer": None,
        "expires_at": now + KEPT_SECONDS * SECOND,
    }
