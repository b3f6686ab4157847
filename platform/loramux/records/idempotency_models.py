"""The table of requests that may be sent again: what was asked under a key, and what was answered."""

from __future__ import annotations

from sqlalchemy import ForeignKey, Index
from sqlalchemy.orm import Mapped, mapped_column

from loramux.records.identity import TenantId
from loramux.records.models import Base


class ClaimRow(Base):
    """One idempotency key of one caller; gone with a request that was not completed, so that it can be tried again."""

    __tablename__ = "idempotency_claims"
    __table_args__ = (
        Index("ix_idempotency_claims_request_id", "request_id"),
        Index("ix_idempotency_claims_expires_at", "expires_at"),
    )

    tenant_id: Mapped[TenantId] = mapped_column(ForeignKey("tenants.id"), primary_key=True)
    key_id: Mapped[str] = mapped_column(primary_key=True)
    """The API key, or the member: another caller's idempotency keys are its own."""
    name: Mapped[str] = mapped_column(primary_key=True)
    """The idempotency key."""
    fingerprint: Mapped[str]
    """Of the request's body: the same key with another is refused."""
    request_id: Mapped[str]
    answer: Mapped[bytes | None]
    """None while it runs."""
    expires_at: Mapped[int]
