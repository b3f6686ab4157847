"""The requests of one subject of limits and budgets: a tenant, or a project, key or member of a tenant.

A budget that is made within its period begins with the cost of these requests, and reserves the maximum cost of open
requests.
"""

from __future__ import annotations

from typing import Any

import msgspec
from sqlalchemy import ColumnElement, SQLColumnExpression, case, cast, func, or_, select
from sqlalchemy.ext.asyncio import AsyncSession

from loramux.common.identity import TenantId
from loramux.common.units import DAY, TokenCounts
from loramux.data.records.base import BigInt, TenantScoped
from loramux.data.records.credentials import KeyRow
from loramux.data.records.ledger import LedgerRow
from loramux.data.records.requests import OPEN, SHADOW, OpenedRequest, RequestRow
from loramux.data.records.usage import Span

HELD_FOR = ("id", "tenant_id", "key_id", "model", "adapter_digest", "base_model", "tier", "prompt_tokens", "max_tokens")
"""The columns of an open request that decide its maximum cost."""
CANCELLED = "cancelled"
"""The status of an entry whose caller disconnected."""
SUMMED = ("input_tokens", "cached_tokens", "output_tokens", "image_tokens", "adapter_load")


class SubjectUsage(msgspec.Struct, frozen=True):
    """Usage of a subject's requests of one base model and tier on one day (days since the epoch, UTC)."""

    day: int
    base_model: str
    tier: str
    tokens: TokenCounts
    abandoned: TokenCounts
    """Tokens that were computed for callers that disconnected before they could read them. Each prompt counts once;
    these tokens are not billed.
    """
    adapter_loads: int


class SubjectRepository(TenantScoped):
    """One subject's requests, both ended and open. Shadows are not included, because no caller sent them."""

    def __init__(self, session: AsyncSession, tenant: TenantId, subject: str) -> None:
        super().__init__(session, tenant)
        self._subject = subject

    async def used(self, since: int, span: Span) -> list[SubjectUsage]:
        """Sum what was used from `since` (microseconds) on, of the ledger's entries in `span`."""
        keys = (LedgerRow.created_at // DAY).label("day"), LedgerRow.base_model, LedgerRow.tier
        summed = {name: getattr(LedgerRow, name) for name in SUMMED} | _abandoned()
        sums = [cast(func.sum(column), BigInt).label(name) for name, column in summed.items()]
        statement = select(*keys, *sums).where(
            *self._of_subject(LedgerRow),
            LedgerRow.kind == "usage",
            LedgerRow.created_at >= since,
            LedgerRow.sequence >= span.first,
        )
        if span.last is not None:
            statement = statement.where(LedgerRow.sequence <= span.last)
        rows = (await self._session.execute(statement.group_by(*keys))).all()
        return [_usage(row) for row in rows]

    async def open(self, since: int) -> list[OpenedRequest]:
        """List the requests that began at `since` (microseconds) or later and have not ended."""
        columns = [getattr(RequestRow, name) for name in HELD_FOR]
        statement = select(*columns).where(
            *self._of_subject(RequestRow), RequestRow.status == OPEN, RequestRow.created_at >= since
        )
        return [OpenedRequest(**row) for row in (await self._session.execute(statement)).mappings()]

    def _of_subject(self, row: Any) -> list[ColumnElement[bool]]:
        conditions = [row.tenant_id == self._tenant, ~row.tier.endswith(f"/{SHADOW}", autoescape=True)]
        if self._subject == self._tenant:
            return conditions
        # a key's requests are also those of the first key of its rotations, and of the keys and members that made it
        lineage = (" " + KeyRow.lineage + " ").contains(f" {self._subject} ", autoescape=True)
        keys = select(KeyRow.id).where(KeyRow.tenant_id == self._tenant, lineage)
        mine = or_(row.project_id == self._subject, row.key_id == self._subject, row.key_id.in_(keys))
        return [*conditions, mine]


def _usage(row: Any) -> SubjectUsage:
    tokens = TokenCounts(
        prompt=row.input_tokens, cached=row.cached_tokens, output=row.output_tokens, image=row.image_tokens
    )
    prompt, uncached = row.abandoned_prompt, row.abandoned_uncached
    abandoned = TokenCounts(
        prompt=prompt, cached=prompt - uncached, output=row.abandoned_output, image=row.abandoned_image
    )
    return SubjectUsage(row.day, row.base_model, row.tier, tokens, abandoned, row.adapter_load)


def _abandoned() -> dict[str, ColumnElement[int]]:
    """Return the tokens that an entry's caller did not read, as computed by `money.usage.settlement.prompts_once`."""
    is_abandoned = LedgerRow.status == CANCELLED
    # looked up only for these entries, because a join would look up every request of the period
    asked = select(RequestRow.prompt_tokens).where(RequestRow.id == LedgerRow.request_id).scalar_subquery()
    prompts = func.coalesce(asked, LedgerRow.input_tokens + LedgerRow.waived_input_tokens)
    left = _least(LedgerRow.waived_input_tokens, prompts - LedgerRow.input_tokens)
    uncached = _least(left, LedgerRow.waived_input_tokens - LedgerRow.waived_cached_tokens)
    found = {
        "abandoned_prompt": left,
        "abandoned_uncached": uncached,
        "abandoned_output": LedgerRow.waived_output_tokens,
        "abandoned_image": _least(uncached, LedgerRow.waived_image_tokens),
    }
    return {name: case((is_abandoned, column), else_=0) for name, column in found.items()}


def _least(one: SQLColumnExpression[int], other: SQLColumnExpression[int]) -> ColumnElement[int]:
    return case((one < other, one), else_=other)
