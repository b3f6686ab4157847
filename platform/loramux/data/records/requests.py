"""Requests: they are opened before the engine gets them, and closed with the ledger entry that bills them. Also
idempotency keys.

A request is identified by its id, which only the server makes. The tenant of a settlement is read from the row and is
never an argument. An idempotency key is claimed when its request's row is inserted, and gets its answer with the
settlement.

A request is charged at its tenant's tier. If the request's service tier is not `default`, it follows after a slash:
`standard`, `standard/flex`, `gold/priority`, `standard/batch`. The ledger, holds, prices and invoices use this text, so
a price for `standard` covers all requests of this tier, unless a price for `standard/batch` or `*/batch` exists.

`shadow` is the server's own service tier: a request that it repeats on another revision. No limit applies to a shadow,
and all its tokens are waived.

`training` is the service tier of fine-tuning jobs, whose trained tokens are the prompt tokens of one request. Budgets
apply to it, and no limit per minute does.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from functools import cache
from typing import Any

import msgspec
from sqlalchemy import (
    CheckConstraint,
    Executable,
    ForeignKey,
    ForeignKeyConstraint,
    Index,
    bindparam,
    delete,
    select,
    text,
    true,
    tuple_,
    update,
)
from sqlalchemy.orm import Mapped, mapped_column

from loramux.common.identity import ProjectId, TenantId
from loramux.data.entities import CHOSEN, AnsweredRequest, IdempotencyClaim, ServiceTier
from loramux.data.records.adapters import AdapterRow, RevisionRow
from loramux.data.records.base import (
    Base,
    Repository,
    among,
    among_parameter,
    insert_new,
    newest_first,
    table_of,
    text_list,
    to_struct,
)
from loramux.data.records.tenants import TenantRow

OPEN = "open"
SETTLED = "settled"
INTERRUPTED = "interrupted"


class RequestRow(Base):
    """One request, written before the engine gets it, with the maximum number of tokens that it can use."""

    __tablename__ = "requests"
    __table_args__ = (
        ForeignKeyConstraint(["tenant_id", "project_id"], ["projects.tenant_id", "projects.id"]),
        CheckConstraint("status IN ('open', 'settled', 'interrupted')", name="status"),
        CheckConstraint("prompt_tokens >= 0 AND max_tokens >= 0", name="quantities"),
        Index(
            "ix_requests_open",
            "server_id",
            sqlite_where=text("status = 'open'"),
            postgresql_where=text("status = 'open'"),
        ),
        Index(
            "ix_requests_adapter_digest_created_at",
            "adapter_digest",
            "created_at",
            sqlite_where=text("adapter_digest IS NOT NULL"),
            postgresql_where=text("adapter_digest IS NOT NULL"),
        ),
    )

    id: Mapped[str] = mapped_column(primary_key=True)
    tenant_id: Mapped[TenantId]
    key_id: Mapped[str]
    """The id of the API key, or of the member that sent the request."""
    project_id: Mapped[ProjectId | None]
    server_id: Mapped[str]
    """The server process that runs the request. After this process has ended, a sweep closes the request."""
    model: Mapped[str]
    adapter_digest: Mapped[str | None]
    base_model: Mapped[str] = mapped_column(server_default=text("''"))
    tier: Mapped[str] = mapped_column(server_default=text("''"))
    tags: Mapped[str] = mapped_column(server_default=text("''"))
    user_id: Mapped[str | None]
    prompt_tokens: Mapped[int]
    max_tokens: Mapped[int]
    has_holds: Mapped[bool] = mapped_column(server_default=true())
    """False: the request certainly reserves nothing in limits and budgets, so the settlement does not read their
    tables.
    """
    has_claim: Mapped[bool] = mapped_column(server_default=true())
    """False: the request certainly has no idempotency key."""
    status: Mapped[str]
    created_at: Mapped[int]
    settled_at: Mapped[int | None]


class OpenedRequest(msgspec.Struct, frozen=True, kw_only=True):
    """A request before it is queued. The limits check the request, a row stores it, and the ledger entry copies its
    fields.

    `prompt_tokens` and `max_tokens` are the maximum numbers of tokens that the request can use.
    """

    id: str
    tenant_id: TenantId
    key_id: str
    """The id of the API key, or of the member that a token of an identity provider names."""
    project_id: ProjectId | None = None
    model: str
    """The resolved model: `tenant/adapter@3`, the base model's name, or the series of a training adapter."""
    version: str = ""
    """The name of the model that answers: `model`, or a version of the series. Empty: `model`."""
    adapter_digest: str | None
    base_model: str = ""
    tier: str = ""
    tags: str = ""
    """A JSON object of texts with sorted keys; empty without tags."""
    user_id: str | None = None
    """The caller's name for its end user; None: the caller sent no name, or the tenant's requests may not be stored."""
    prompt_tokens: int
    max_tokens: int
    waiting: int = 0
    """Requests of the tenant that already wait for their first token on this server."""
    lineage: tuple[str, ...] = ()
    """The key and its makers (`Principal.lineage`), whose limits apply; empty: only `key_id`."""
    claim: IdempotencyClaim | None = None

    @property
    def max_total(self) -> int:
        """Return the largest number of tokens that it can use, prompt and output together."""
        return self.prompt_tokens + self.max_tokens


class BilledRequest(msgspec.Struct, frozen=True):
    """The fields of a closed request that its ledger entry copies, and two flags for holds and an idempotency key."""

    id: str
    tenant_id: TenantId
    key_id: str
    project_id: ProjectId | None
    model: str
    adapter_digest: str | None
    base_model: str
    tier: str
    tags: str
    user_id: str | None
    prompt_tokens: int
    has_holds: bool
    has_claim: bool


REQUESTS = table_of(RequestRow)
BILLED = tuple(REQUESTS.c[name] for name in BilledRequest.__struct_fields__)


@cache
def _close(on_postgresql: bool) -> Executable:
    open = among_parameter(on_postgresql, REQUESTS.c.id, "ids"), REQUESTS.c.status != SETTLED
    closed = update(REQUESTS).where(*open).values(status=bindparam("end"), settled_at=bindparam("at"))
    return closed.returning(*BILLED)


OPENED = tuple(name for name in OpenedRequest.__struct_fields__ if name in REQUESTS.c)


class RequestRepository(Repository):
    """Requests."""

    async def add(self, opened: Sequence[OpenedRequest], holders: Collection[str], server_id: str, now: int) -> bool:
        """Insert the rows of these requests. Return False if an id exists; then only the other rows are inserted.

        `holders` are the ids of the requests that hold something of limits or budgets.
        """
        rows = [_row(one, one.id in holders, server_id, now) for one in opened]
        return await insert_new(self._session, RequestRow, rows) == len(rows)

    async def owners(self, ids: Collection[str]) -> dict[str, str]:
        """Return the server that opened each of these requests. Requests that do not exist are left out."""
        statement = select(RequestRow.id, RequestRow.server_id).where(among(self._session, RequestRow.id, ids))
        return {id: server for id, server in await self._session.execute(statement)}

    async def note_holds(self, ids: Collection[str]) -> None:
        """Mark these requests as holding something."""
        statement = update(REQUESTS).where(among(self._session, RequestRow.id, ids)).values(has_holds=True)
        await self._session.execute(statement)

    async def servers_with_open(self, *, besides: str) -> list[str]:
        """List the other servers that have open requests."""
        statement = select(RequestRow.server_id).where(RequestRow.status == OPEN, RequestRow.server_id != besides)
        return list(await self._session.scalars(statement.distinct()))

    async def left_open(self, servers: Collection[str], limit: int) -> list[str]:
        """List the ids of at most `limit` requests that these servers have open."""
        statement = select(RequestRow.id).where(RequestRow.status == OPEN, RequestRow.server_id.in_(servers))
        return list(await self._session.scalars(statement.order_by(RequestRow.id).limit(limit)))

    async def is_open(self, id: str) -> bool:
        """Return whether this request is open."""
        statement = select(RequestRow.id).where(RequestRow.id == id, RequestRow.status == OPEN)
        return await self._session.scalar(statement) is not None

    async def close(self, ids: Collection[str], status: str, at: int) -> dict[str, BilledRequest]:
        """Close these requests; return by id the requests that were not yet settled."""
        closed = await self._run(_close, ids=text_list(self._session, ids), end=status, at=at)
        return {row.id: BilledRequest(**row._mapping) for row in closed}

    async def answered_by(
        self,
        tenant: TenantId,
        owner: str,
        adapter: str,
        before: str | None,
        limit: int,
        project: ProjectId | None = None,
        *,
        background: bool = True,
    ) -> list[AnsweredRequest]:
        """List the tenant's requests to `owner`'s adapter, which may be another tenant's, newest first.

        `before` is a request's id. If `project` is set, only its requests are listed. With `background`, requests of
        the service tiers BACKGROUND are listed too.
        """
        digests = (
            select(RevisionRow.digest)
            .join(AdapterRow, AdapterRow.id == RevisionRow.adapter_id)
            .join(TenantRow, TenantRow.id == AdapterRow.tenant_id)
            .where(TenantRow.name == owner, AdapterRow.name == adapter)
        )
        statement = select(RequestRow).where(
            RequestRow.adapter_digest.in_(digests),
            RequestRow.model.startswith(f"{owner}/{adapter}@", autoescape=True),
        )
        if project is not None:
            statement = statement.where(RequestRow.project_id == project)
        if not background:
            statement = statement.where(*(~RequestRow.tier.endswith(f"/{tier}") for tier in BACKGROUND))
        newest = newest_first(statement, RequestRow, tenant, before, limit)
        return [to_struct(AnsweredRequest, row) for row in await self._session.scalars(newest)]


def _row(request: OpenedRequest, has_holds: bool, server_id: str, now: int) -> dict[str, Any]:
    columns: dict[str, Any] = {name: getattr(request, name) for name in OPENED}
    return columns | {
        "server_id": server_id,
        "has_holds": has_holds,
        "has_claim": request.claim is not None,
        "status": OPEN,
        "created_at": now,
    }


class ClaimRow(Base):
    """One idempotency key of one caller. The row is deleted if its request ends without an answer."""

    __tablename__ = "idempotency_claims"
    __table_args__ = (
        Index("ix_idempotency_claims_request_id", "request_id"),
        Index("ix_idempotency_claims_expires_at", "expires_at"),
    )

    tenant_id: Mapped[TenantId] = mapped_column(ForeignKey("tenants.id"), primary_key=True)
    key_id: Mapped[str] = mapped_column(primary_key=True)
    """The API key, the member or the batch. Each caller has its own idempotency keys."""
    name: Mapped[str] = mapped_column(primary_key=True)
    """The idempotency key."""
    fingerprint: Mapped[str]
    """The digest of the request's body. The same key with another body is refused."""
    request_id: Mapped[str]
    answer: Mapped[bytes | None]
    """The stored answer; None while the request runs."""
    expires_at: Mapped[int]


Claimed = tuple[str, str, str]
"""The tenant, the caller and the idempotency key."""

CLAIMS = table_of(ClaimRow)
KEY = (CLAIMS.c.tenant_id, CLAIMS.c.key_id, CLAIMS.c.name)


class ClaimRepository(Repository):
    """Idempotency keys."""

    async def claim(self, rows: Sequence[dict[str, Any]], now: int) -> Mapping[Claimed, Any]:
        """Insert claims whose keys are free; return the current rows of all claims.

        The statement waits for another transaction that claims the same keys at the same time.
        """
        keys = sorted({(row["tenant_id"], row["key_id"], row["name"]) for row in rows})
        await self._session.execute(delete(CLAIMS).where(tuple_(*KEY).in_(keys), CLAIMS.c.expires_at <= now))
        # in a fixed order, so that two transactions that claim the same keys do not wait for each other
        ordered = sorted(rows, key=lambda row: (row["tenant_id"], row["key_id"], row["name"]))
        await insert_new(self._session, ClaimRow, ordered)
        found = await self._session.execute(select(*CLAIMS.c).where(tuple_(*KEY).in_(keys)))
        return {(row.tenant_id, row.key_id, row.name): row for row in found}

    async def answer(self, answers: Mapping[str, bytes]) -> None:
        """Store the answers of these requests."""
        statement = update(CLAIMS).where(CLAIMS.c.request_id == bindparam("request")).values(answer=bindparam("said"))
        rows = [{"request": request, "said": answer} for request, answer in sorted(answers.items())]
        await (await self._session.connection()).execute(statement, rows)

    async def free(self, request_ids: Collection[str]) -> None:
        """Delete the claims of requests that have ended without an answer."""
        await self._session.execute(delete(CLAIMS).where(among(self._session, CLAIMS.c.request_id, request_ids)))

    async def remove_before(self, tenant: TenantId, holder: str, name: str | None) -> None:
        """Delete the holder's claims with names before `name`, or all claims of the holder."""
        mine = (CLAIMS.c.tenant_id == tenant, CLAIMS.c.key_id == holder)
        before = () if name is None else (CLAIMS.c.name < name,)
        await self._session.execute(delete(CLAIMS).where(*mine, *before))

    async def remove_all(self, tenant: TenantId) -> None:
        """Delete every claim of a tenant, with its answer. A request that still runs will store no answer."""
        await self._session.execute(delete(CLAIMS).where(CLAIMS.c.tenant_id == tenant))

    async def remove_expired(self, now: int) -> None:
        """Delete claims past their expiry."""
        await self._session.execute(delete(CLAIMS).where(CLAIMS.c.expires_at <= now))


SHADOW: ServiceTier = "shadow"
TRAINING: ServiceTier = "training"
BACKGROUND: tuple[ServiceTier, ...] = ("batch", SHADOW, TRAINING)
"""Service tiers without a waiting caller. Requests of these tiers begin when the server has free capacity, and do not
count for latency.
"""
PRICED_TIERS: tuple[ServiceTier, ...] = (*CHOSEN, TRAINING)
"""Service tiers that a price may name."""
ANY = "*"
"""A price's wildcard: any base model, or any tier."""


def charged_tier(tier: str, service_tier: ServiceTier) -> str:
    """Return the tier that a request is charged at."""
    return tier if service_tier == "default" else f"{tier}/{service_tier}"


def tenant_tier(charged: str) -> str:
    """Return the tenant's part of a charged tier."""
    return charged.partition("/")[0]


def service_tier(charged: str) -> str:
    """Return the request's part of a charged tier."""
    return charged.partition("/")[2] or "default"


def is_shadow(charged: str) -> bool:
    """Return whether a request of this charged tier is a shadow."""
    return service_tier(charged) == SHADOW


def tier_match(priced: str, charged: str) -> int | None:
    """Return how closely a price's tier fits a charged tier (a larger number is closer); None if it does not fit.

    For `gold/batch` the order, closest first, is: `gold/batch`, `*/batch`, `gold`, `*`.
    """
    of_tenant, _, of_request = priced.partition("/")
    if of_tenant not in (ANY, tenant_tier(charged)) or of_request not in ("", charged.partition("/")[2]):
        return None
    return 2 * bool(of_request) + (of_tenant != ANY)


def is_priced_tier(text: str) -> bool:
    """Return whether a price may have this tier."""
    of_tenant, slash, of_request = text.partition("/")
    return bool(of_tenant) and (not slash or of_request in PRICED_TIERS)
