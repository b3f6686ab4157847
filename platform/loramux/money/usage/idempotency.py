"""Idempotency keys: if several requests have the same key, one request runs, and the others get its answer.

A claim is made in the transaction that opens the request, and concluded in the transaction that settles it. So after a
crash at any moment, a repeated request finds either the whole answer or a free key.

An answer contains the model's text, so it is stored encrypted. The request's digest is keyed. Both keys are derived
from the pepper, which is not in the database.
"""

from __future__ import annotations

import hmac
import os
from collections.abc import Mapping, Sequence
from typing import Any, Protocol

import msgspec
from sqlalchemy.ext.asyncio import AsyncSession

from loramux.common.encryption import Encryption
from loramux.common.identity import Principal, TenantId, new_id
from loramux.common.units import DAY
from loramux.data.entities import IdempotencyClaim
from loramux.data.records.requests import ClaimRepository
from loramux.money.usage.errors import IdempotencyMismatch, StillRunning

ENCRYPTED = b"\x01"
"""First byte of an encrypted answer; earlier releases wrote plain JSON."""


class AnswerStorage:
    """Storage of answers during `retention`, encrypted with AES-256-GCM under a key derived from the pepper."""

    def __init__(self, pepper: bytes, retention: int = DAY) -> None:
        """`retention` in microseconds."""
        self.retention = retention
        self._encryption = Encryption(pepper, b"idempotency answers")
        self._digest_key = hmac.digest(pepper, b"idempotency digests", "sha256")

    @classmethod
    def temporary(cls) -> AnswerStorage:
        """Return a storage whose answers can be read only in this process."""
        return cls(os.urandom(32))

    def digest(self, fingerprint: str) -> str:
        """Return a keyed digest of a request's fingerprint. Without the key, the digest cannot confirm a guess of the
        request.
        """
        return hmac.digest(self._digest_key, fingerprint.encode(), "sha256").hex()

    def encrypt(self, answer: bytes, request_id: str) -> bytes:
        """Return the stored form of an answer, which belongs to this request alone."""
        return ENCRYPTED + self._encryption.encrypt(answer, request_id)

    def decrypt(self, stored: bytes, request_id: str) -> bytes | None:
        """Return the answer; None if it was encrypted with another pepper."""
        if not stored.startswith(ENCRYPTED):
            return stored
        return self._encryption.decrypt(stored.removeprefix(ENCRYPTED), request_id)


class StoredAnswer(msgspec.Struct, frozen=True):
    """The answer of an earlier request under the same key, and that request's id."""

    request_id: str
    answer: bytes


class Claimant(Protocol):
    """A request, or a change, that came with an idempotency key; `OpenedRequest` is one."""

    @property
    def id(self) -> str:
        """Id of the request or change that makes the claim."""

    @property
    def tenant_id(self) -> TenantId:
        """The caller's tenant."""

    @property
    def key_id(self) -> str:
        """The caller's id: idempotency keys of different callers are different."""

    @property
    def claim(self) -> IdempotencyClaim | None:
        """The idempotency key; None for a request without a key."""


Rejection = StoredAnswer | IdempotencyMismatch | StillRunning
"""The reasons not to run a request."""


async def claim_keys(
    session: AsyncSession, claimants: Sequence[Claimant], now: int, storage: AnswerStorage
) -> dict[str, Rejection]:
    """Claim the free keys; return by id the reasons why the other claimants must not run."""
    keyed = [(one, one.claim) for one in claimants if one.claim is not None]
    rows = await ClaimRepository(session).claim([_row(one, claim, now, storage) for one, claim in keyed], now)
    rejections: dict[str, Rejection] = {}
    for one, claim in keyed:
        row = rows[one.tenant_id, claim.holder or one.key_id, claim.name]
        if row.request_id != one.id:
            rejections[one.id] = _rejection(claim, row, storage)
    return rejections


async def conclude_claims(session: AsyncSession, answers: Mapping[str, bytes | None], storage: AnswerStorage) -> None:
    """Store the answers of these requests; keys of requests without an answer become free again."""
    claims = ClaimRepository(session)
    stored = {id: storage.encrypt(answer, id) for id, answer in answers.items() if answer is not None}
    if stored:
        await claims.answer(stored)
    if freed := answers.keys() - stored.keys():
        await claims.free(freed)


class IdempotencyGuard:
    """Makes a change once under an idempotency key: claimed and answered in the change's own transaction."""

    def __init__(self, principal: Principal, claim: IdempotencyClaim, storage: AnswerStorage) -> None:
        self.id = new_id("change")
        self.tenant_id, self.key_id = principal.tenant, principal.key_id
        self.claim: IdempotencyClaim | None = claim
        self._storage = storage

    async def find_answer(self, session: AsyncSession, now: int) -> bytes | None:
        """Return the stored answer of a change that was made before; otherwise claim the key and return None.

        Raises IdempotencyMismatch, or StillRunning if the key belongs to a request that is running.
        """
        rejection = (await claim_keys(session, [self], now, self._storage)).get(self.id)
        if isinstance(rejection, Exception):
            raise rejection
        return None if rejection is None else rejection.answer

    async def store_answer(self, session: AsyncSession, answer: bytes) -> None:
        """Store the answer in the change's transaction."""
        await conclude_claims(session, {self.id: answer}, self._storage)


def _rejection(claim: IdempotencyClaim, row: Any, storage: AnswerStorage) -> Rejection:
    # releases before the digest stored the fingerprint itself
    if row.fingerprint not in (storage.digest(claim.fingerprint), claim.fingerprint):
        return IdempotencyMismatch(
            f"The idempotency key '{claim.name}' came with another request before. Use a new key for a new request.",
            "Idempotency-Key",
        )
    if row.answer is None:
        return StillRunning(
            f"The request with the idempotency key '{claim.name}' is still running. Ask again, and you get its answer.",
            "Idempotency-Key",
        )
    answer = storage.decrypt(row.answer, row.request_id)
    if answer is None:
        return IdempotencyMismatch(
            f"The answer under the idempotency key '{claim.name}' cannot be read any more. Use a new key.",
            "Idempotency-Key",
        )
    return StoredAnswer(row.request_id, answer)


def _row(one: Claimant, claim: IdempotencyClaim, now: int, storage: AnswerStorage) -> dict[str, Any]:
    return {
        "tenant_id": one.tenant_id,
        "key_id": claim.holder or one.key_id,
        "name": claim.name,
        "fingerprint": storage.digest(claim.fingerprint),
        "request_id": one.id,
        "answer": None,
        "expires_at": now + storage.retention if claim.expires_at is None else claim.expires_at,
    }
