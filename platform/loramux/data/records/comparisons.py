"""Comparisons of a candidate revision with the serving revision: evaluations and shadows. Rows and statements.

An evaluation sends one set of questions to two revisions, as a batch. A shadow repeats a share of an adapter's requests
on the candidate, and keeps sums of the similarity of the answers.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Literal

import msgspec
from sqlalchemy import CheckConstraint, ColumnElement, ForeignKey, ForeignKeyConstraint, Index, select, text, update
from sqlalchemy.orm import Mapped, mapped_column

from loramux.common.identity import ProjectId, TenantId
from loramux.data.entities import Evaluation
from loramux.data.records.adapters import AdapterRow, RevisionRow
from loramux.data.records.aliases import DEFAULT_ALIAS, AliasTargetRow
from loramux.data.records.base import (
    Base,
    Repository,
    TenantScoped,
    among,
    insert_sums,
    newest_first,
    table_of,
    to_struct,
)
from loramux.data.records.batches import BatchRow
from loramux.data.records.database import is_postgresql
from loramux.data.records.leases import LeasedRow, adopt_abandoned
from loramux.data.records.tenants import TenantRow

RUNNING, COMPLETED, FAILED = "running", "completed", "failed"

MILLION = 1_000_000
NOT_ENDED = text("ended_at IS NULL")

ShadowEnd = Literal["stopped", "promoted", "revision_deleted", "adapter_deleted"]


class EvaluationRow(LeasedRow, Base):
    """An evaluation, with a lease of the server that grades it after its batch has ended."""

    __tablename__ = "evaluations"
    __table_args__ = (
        ForeignKeyConstraint(["tenant_id", "project_id"], ["projects.tenant_id", "projects.id"]),
        CheckConstraint("state IN ('running', 'completed', 'failed')", name="state"),
        Index("ix_evaluations_tenant_id_adapter", "tenant_id", "adapter", "created_at"),
        Index("ix_evaluations_state", "state"),
    )

    id: Mapped[str] = mapped_column(primary_key=True)
    tenant_id: Mapped[TenantId] = mapped_column(ForeignKey("tenants.id"))
    project_id: Mapped[ProjectId]
    owner: Mapped[str]
    adapter: Mapped[str]
    """The adapter: `tenant/adapter`."""
    models: Mapped[str]
    """The two revisions, `tenant/adapter@3 tenant/adapter@2`, with the candidate first."""
    file_id: Mapped[str]
    """The id of the file with the questions."""
    batch_id: Mapped[str]
    grader: Mapped[str]
    """The grader as JSON."""
    judge_key: Mapped[bytes | None]
    """The judge's API key, encrypted, until the evaluation ends."""
    state: Mapped[str]
    result: Mapped[str | None]
    """The result as JSON."""
    error: Mapped[str | None]
    created_at: Mapped[int]
    finished_at: Mapped[int | None]


class EvaluationRepository(TenantScoped):
    """One tenant's evaluations."""

    async def add(self, evaluation: Evaluation) -> None:
        """Insert the row."""
        await self._insert(EvaluationRow(**msgspec.structs.asdict(evaluation)))

    async def get(self, id: str, project: ProjectId) -> Evaluation | None:
        """Find one of the project's evaluations."""
        statement = select(EvaluationRow).where(
            EvaluationRow.tenant_id == self._tenant, EvaluationRow.project_id == project, EvaluationRow.id == id
        )
        row = await self._session.scalar(statement)
        return None if row is None else to_struct(Evaluation, row)

    async def newest(self, models: str, file_id: str | None) -> str | None:
        """Return the result of the tenant's newest completed evaluation of two revisions, on that set or on any set."""
        found = await self._newest(*_between(models), *_completed_on(file_id))
        return None if found is None else found.result

    async def newest_of(self, adapter: str, file_id: str | None) -> Evaluation | None:
        """Return the tenant's newest completed evaluation of `tenant/adapter`, on that set or on any set."""
        return await self._newest(EvaluationRow.adapter == adapter, *_completed_on(file_id))

    async def newest_between(self, models: str) -> Evaluation | None:
        """Return the tenant's newest evaluation of these two revisions, in any state."""
        return await self._newest(*_between(models))

    async def before(
        self, project: ProjectId, adapter: str | None, id: str | None, limit: int, candidate: str | None = None
    ) -> list[Evaluation]:
        """List at most `limit` evaluations of the project that are older than the evaluation with this id, newest
        first.

        The list has the evaluations of one adapter, of one candidate (`tenant/adapter@3`), or all evaluations.
        """
        statement = select(EvaluationRow).where(EvaluationRow.project_id == project)
        if adapter is not None:
            statement = statement.where(EvaluationRow.adapter == adapter)
        if candidate is not None:
            statement = statement.where(EvaluationRow.models.startswith(f"{candidate} ", autoescape=True))
        newest = newest_first(statement, EvaluationRow, self._tenant, id, limit)
        return [to_struct(Evaluation, row) for row in await self._session.scalars(newest)]

    async def _newest(self, *conditions: ColumnElement[bool]) -> Evaluation | None:
        statement = select(EvaluationRow).where(EvaluationRow.tenant_id == self._tenant, *conditions)
        row = await self._session.scalar(statement.order_by(EvaluationRow.created_at.desc()).limit(1))
        return None if row is None else to_struct(Evaluation, row)


def _between(models: str) -> tuple[ColumnElement[bool], ...]:
    return EvaluationRow.adapter == models.partition("@")[0], EvaluationRow.models == models


def _completed_on(file_id: str | None) -> tuple[ColumnElement[bool], ...]:
    on_set = () if file_id is None else (EvaluationRow.file_id == file_id,)
    return EvaluationRow.state == COMPLETED, *on_set


class EvaluationJobs(Repository):
    """Every tenant's evaluations. The servers that grade evaluations use this repository."""

    async def adopt_abandoned(self, server_id: str) -> None:
        """Move the unfinished evaluations of dead servers to this one."""
        await adopt_abandoned(self._session, EvaluationRow, EvaluationRow.state == RUNNING, server_id)

    async def ready(self, server_id: str, unfinished: tuple[str, ...]) -> list[Evaluation]:
        """List the server's evaluations whose batch is deleted or has a state that is not in `unfinished`."""
        statement = (
            select(EvaluationRow)
            .outerjoin(BatchRow, BatchRow.id == EvaluationRow.batch_id)
            .where(EvaluationRow.state == RUNNING, EvaluationRow.server_id == server_id)
            .where(BatchRow.state.is_(None) | BatchRow.state.not_in(unfinished))
        )
        return [
            to_struct(Evaluation, row)
            for row in await self._session.scalars(statement.order_by(EvaluationRow.created_at))
        ]

    async def finish(self, id: str, server_id: str, result: str | None, error: str | None, at: int) -> None:
        """Write the end of an evaluation that this server still holds."""
        mine = (EvaluationRow.id == id, EvaluationRow.server_id == server_id, EvaluationRow.state == RUNNING)
        state = FAILED if result is None else COMPLETED
        values = {"state": state, "result": result, "error": error, "judge_key": None, "finished_at": at}
        await self._session.execute(update(EvaluationRow).where(*mine).values(values))


class ShadowRow(Base):
    """A shadow: one candidate revision, on which a share of the adapter's requests is repeated."""

    __tablename__ = "shadows"
    __table_args__ = (
        ForeignKeyConstraint(["tenant_id", "adapter_id"], ["adapters.tenant_id", "adapters.id"]),
        Index("ix_shadows_adapter_id", "adapter_id", "created_at"),
        Index("ix_shadows_running", "adapter_id", unique=True, sqlite_where=NOT_ENDED, postgresql_where=NOT_ENDED),
    )

    id: Mapped[str] = mapped_column(primary_key=True)
    tenant_id: Mapped[TenantId]
    adapter_id: Mapped[str]
    revision: Mapped[int]
    """The candidate's number."""
    share: Mapped[int]
    """The share of the requests, in millionths."""
    max_tokens_per_day: Mapped[int]
    keep_outputs: Mapped[bool]
    created_by: Mapped[str]
    created_at: Mapped[int]
    ended_at: Mapped[int | None]
    ended_because: Mapped[str | None]
    day: Mapped[int]
    """The day (UTC) that `day_tokens` count."""
    day_tokens: Mapped[int]
    """Tokens used on that day, plus the tokens that running requests may still use."""


class ShadowSumRow(Base):
    """One sum over a shadow's comparisons. Several servers add to it."""

    __tablename__ = "shadow_sums"

    shadow_id: Mapped[str] = mapped_column(ForeignKey("shadows.id"), primary_key=True)
    name: Mapped[str] = mapped_column(primary_key=True)
    value: Mapped[int]


class Shadow(msgspec.Struct, frozen=True, kw_only=True):
    """A shadow. Times in microseconds since the epoch."""

    id: str
    tenant_id: TenantId
    adapter_id: str
    revision: int
    share: int
    max_tokens_per_day: int
    keep_outputs: bool
    created_by: str
    created_at: int
    ended_at: int | None
    ended_because: str | None
    day: int
    day_tokens: int


class RunningShadow(msgspec.Struct, frozen=True, kw_only=True):
    """A shadow that has not ended, with the adapter's name."""

    shadow: Shadow
    adapter: str
    """The adapter: `tenant/adapter`."""


class ShadowRepository(Repository):
    """Shadows of adapters that the caller has looked up. Servers that run shadows see the shadows of every tenant."""

    async def add(self, shadow: Shadow) -> None:
        """Insert the row."""
        await self._insert(ShadowRow(**msgspec.structs.asdict(shadow)))

    async def newest(self, adapter_id: str, limit: int) -> list[Shadow]:
        """List an adapter's shadows, newest first."""
        statement = select(ShadowRow).where(ShadowRow.adapter_id == adapter_id)
        newest = statement.order_by(ShadowRow.created_at.desc(), ShadowRow.id.desc()).limit(limit)
        return [to_struct(Shadow, row) for row in await self._session.scalars(newest)]

    async def end(self, id: str, because: ShadowEnd, at: int) -> bool:
        """End a shadow; return False if it has already ended."""
        statement = (
            update(ShadowRow)
            .where(ShadowRow.id == id, ShadowRow.ended_at.is_(None))
            .values(ended_at=at, ended_because=because)
            .returning(ShadowRow.id)
        )
        return await self._session.scalar(statement) is not None

    async def running(self) -> list[RunningShadow]:
        """List the shadows that have not ended."""
        statement = (
            select(ShadowRow, AdapterRow.name, TenantRow.name)
            .join(AdapterRow, AdapterRow.id == ShadowRow.adapter_id)
            .join(TenantRow, TenantRow.id == ShadowRow.tenant_id)
            .where(ShadowRow.ended_at.is_(None))
            .order_by(ShadowRow.id)
        )
        rows = await self._session.execute(statement)
        return [RunningShadow(shadow=to_struct(Shadow, row), adapter=f"{tenant}/{name}") for row, name, tenant in rows]

    async def obsolete(self) -> list[tuple[Shadow, str, ShadowEnd]]:
        """List the running shadows whose candidate is deleted, or is now the default alias's only target.

        Each shadow comes with the adapter's own name and the reason.
        """
        others = (
            select(AliasTargetRow.revision_id)
            .join(RevisionRow, RevisionRow.id == AliasTargetRow.revision_id)
            .where(
                AliasTargetRow.adapter_id == ShadowRow.adapter_id,
                AliasTargetRow.alias == DEFAULT_ALIAS,
                RevisionRow.number != ShadowRow.revision,
            )
        )
        statement = (
            select(ShadowRow, AdapterRow.name, AdapterRow.deleted_at, RevisionRow.deleted_at, others.exists())
            .join(AdapterRow, AdapterRow.id == ShadowRow.adapter_id)
            .outerjoin(
                RevisionRow,
                (RevisionRow.adapter_id == ShadowRow.adapter_id) & (RevisionRow.number == ShadowRow.revision),
            )
            .where(ShadowRow.ended_at.is_(None))
        )
        found: list[tuple[Shadow, str, ShadowEnd]] = []
        for row, name, adapter_gone, revision_gone, has_others in await self._session.execute(statement):
            if adapter_gone is not None:
                found.append((to_struct(Shadow, row), name, "adapter_deleted"))
            elif revision_gone is not None:
                found.append((to_struct(Shadow, row), name, "revision_deleted"))
            elif not has_others:
                found.append((to_struct(Shadow, row), name, "promoted"))
        return found

    async def reserve(self, id: str, tokens: int, day: int) -> Literal["day_limit", "stopped"] | None:
        """Reserve tokens of the day. Return the reason of a failure: too few tokens, or the end of the shadow."""
        used = ShadowRow.day_tokens
        mine = (ShadowRow.id == id, ShadowRow.ended_at.is_(None))
        begun = update(ShadowRow).where(*mine, ShadowRow.day < day).values(day=day, day_tokens=0)
        await self._session.execute(begun)
        statement = (
            update(ShadowRow)
            .where(*mine, used + tokens <= ShadowRow.max_tokens_per_day)
            .values(day_tokens=used + tokens)
            .returning(ShadowRow.id)
        )
        if await self._session.scalar(statement) is not None:
            return None
        ended = await self._session.scalar(select(ShadowRow.ended_at).where(ShadowRow.id == id))
        return "day_limit" if ended is None else "stopped"

    async def give_back(self, id: str, tokens: int, day: int) -> None:
        """Give back unused tokens that were reserved on that day."""
        same_day = (ShadowRow.id == id, ShadowRow.day == day)
        await self._session.execute(update(ShadowRow).where(*same_day).values(day_tokens=ShadowRow.day_tokens - tokens))

    async def add_sums(self, added: Mapping[tuple[str, str], int]) -> None:
        """Add to the sums, by shadow and name."""
        rows = [{"shadow_id": id, "name": name, "value": value} for (id, name), value in sorted(added.items())]
        await self._session.execute(insert_sums(is_postgresql(self._session), table_of(ShadowSumRow), ["value"]), rows)

    async def sums(self, ids: Collection[str]) -> dict[str, dict[str, int]]:
        """Return the sums of these shadows."""
        statement = select(ShadowSumRow).where(among(self._session, ShadowSumRow.shadow_id, ids))
        found: dict[str, dict[str, int]] = {id: {} for id in ids}
        for row in await self._session.scalars(statement.order_by(ShadowSumRow.shadow_id, ShadowSumRow.name)):
            found[row.shadow_id][row.name] = row.value
        return found
