"""Evaluations: two revisions of an adapter on one set of questions, run as a batch. Row and statements."""

from __future__ import annotations

import msgspec
from sqlalchemy import CheckConstraint, ForeignKey, ForeignKeyConstraint, Index, select, tuple_, update
from sqlalchemy.ext.asyncio import AsyncSession
from sqlalchemy.orm import Mapped, mapped_column

from loramux.records.base import Base
from loramux.records.batches import BatchRow
from loramux.records.identity import ProjectId, TenantId
from loramux.records.leases import LeasedRow, adopt_abandoned

RUNNING, COMPLETED, FAILED = "running", "completed", "failed"


class EvaluationRow(LeasedRow, Base):
    """An evaluation, held by the server that grades it when its batch has ended."""

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
    """`tenant/adapter`."""
    models: Mapped[str]
    """The two revisions, `tenant/adapter@3 tenant/adapter@2`: the candidate first."""
    file_id: Mapped[str]
    """The set of questions."""
    batch_id: Mapped[str]
    grader: Mapped[str]
    """JSON."""
    judge_key: Mapped[bytes | None]
    """The judge's API key, encrypted, until the evaluation ends."""
    state: Mapped[str]
    result: Mapped[str | None]
    """JSON."""
    error: Mapped[str | None]
    created_at: Mapped[int]
    finished_at: Mapped[int | None]


class Evaluation(msgspec.Struct, frozen=True, kw_only=True):
    """An evaluation. Times in microseconds since the epoch."""

    id: str
    tenant_id: TenantId
    project_id: ProjectId
    owner: str
    adapter: str
    models: str
    file_id: str
    batch_id: str
    grader: str
    judge_key: bytes | None = None
    state: str
    server_id: str | None
    attempts: int
    result: str | None = None
    error: str | None = None
    created_at: int
    finished_at: int | None = None


class EvaluationRepository:
    """One tenant's evaluations."""

    def __init__(self, session: AsyncSession, tenant: TenantId) -> None:
        self._session = session
        self._tenant = tenant

    async def add(self, evaluation: Evaluation) -> None:
        """Insert the row."""
        self._session.add(EvaluationRow(**msgspec.structs.asdict(evaluation)))
        await self._session.flush()

    async def get(self, id: str, project: ProjectId) -> Evaluation | None:
        """Find one of the project's evaluations."""
        statement = select(EvaluationRow).where(
            EvaluationRow.tenant_id == self._tenant, EvaluationRow.project_id == project, EvaluationRow.id == id
        )
        row = await self._session.scalar(statement)
        return None if row is None else _evaluation(row)

    async def newest(self, models: str, file_id: str | None) -> str | None:
        """Return the result of the tenant's newest completed evaluation of these two revisions, on that set or any."""
        statement = select(EvaluationRow.result).where(
            EvaluationRow.tenant_id == self._tenant,
            EvaluationRow.adapter == models.partition("@")[0],
            EvaluationRow.models == models,
            EvaluationRow.state == COMPLETED,
        )
        if file_id is not None:
            statement = statement.where(EvaluationRow.file_id == file_id)
        return await self._session.scalar(statement.order_by(EvaluationRow.created_at.desc()).limit(1))

    async def newest_of(self, adapter: str, file_id: str | None) -> Evaluation | None:
        """Return the tenant's newest completed evaluation of an adapter (`tenant/adapter`), on that set or any."""
        statement = select(EvaluationRow).where(
            EvaluationRow.tenant_id == self._tenant,
            EvaluationRow.adapter == adapter,
            EvaluationRow.state == COMPLETED,
        )
        if file_id is not None:
            statement = statement.where(EvaluationRow.file_id == file_id)
        row = await self._session.scalar(statement.order_by(EvaluationRow.created_at.desc()).limit(1))
        return None if row is None else _evaluation(row)

    async def newest_between(self, models: str) -> Evaluation | None:
        """Return the tenant's newest evaluation of these two revisions, in any state."""
        statement = select(EvaluationRow).where(
            EvaluationRow.tenant_id == self._tenant,
            EvaluationRow.adapter == models.partition("@")[0],
            EvaluationRow.models == models,
        )
        row = await self._session.scalar(statement.order_by(EvaluationRow.created_at.desc()).limit(1))
        return None if row is None else _evaluation(row)

    async def before(
        self, project: ProjectId, adapter: str | None, id: str | None, limit: int, candidate: str | None = None
    ) -> list[Evaluation]:
        """List at most `limit` evaluations of the project older than that one, newest first.

        Of one adapter, of one candidate (`tenant/adapter@3`), or all.
        """
        statement = select(EvaluationRow).where(
            EvaluationRow.tenant_id == self._tenant, EvaluationRow.project_id == project
        )
        if adapter is not None:
            statement = statement.where(EvaluationRow.adapter == adapter)
        if candidate is not None:
            statement = statement.where(EvaluationRow.models.startswith(f"{candidate} ", autoescape=True))
        if id is not None:
            last = select(EvaluationRow.created_at, EvaluationRow.id).where(EvaluationRow.tenant_id == self._tenant)
            end = last.where(EvaluationRow.id == id).scalar_subquery()
            statement = statement.where(tuple_(EvaluationRow.created_at, EvaluationRow.id) < end)
        newest = statement.order_by(EvaluationRow.created_at.desc(), EvaluationRow.id.desc()).limit(limit)
        return [_evaluation(row) for row in await self._session.scalars(newest)]


class EvaluationJobs:
    """Every tenant's evaluations, for the servers that grade them."""

    def __init__(self, session: AsyncSession) -> None:
        self._session = session

    async def adopt_abandoned(self, server_id: str) -> None:
        """Move the unfinished evaluations of dead servers to this one."""
        await adopt_abandoned(self._session, EvaluationRow, EvaluationRow.state == RUNNING, server_id)

    async def ready(self, server_id: str, unfinished: tuple[str, ...]) -> list[Evaluation]:
        """List the server's evaluations whose batch is in none of the states `unfinished`, or gone."""
        statement = (
            select(EvaluationRow)
            .outerjoin(BatchRow, BatchRow.id == EvaluationRow.batch_id)
            .where(EvaluationRow.state == RUNNING, EvaluationRow.server_id == server_id)
            .where(BatchRow.state.is_(None) | BatchRow.state.not_in(unfinished))
        )
        return [_evaluation(row) for row in await self._session.scalars(statement.order_by(EvaluationRow.created_at))]

    async def finish(self, id: str, server_id: str, result: str | None, error: str | None, at: int) -> None:
        """Write the end of an evaluation that this server still holds."""
        mine = (EvaluationRow.id == id, EvaluationRow.server_id == server_id, EvaluationRow.state == RUNNING)
        state = FAILED if result is None else COMPLETED
        values = {"state": state, "result": result, "error": error, "judge_key": None, "finished_at": at}
        await self._session.execute(update(EvaluationRow).where(*mine).values(values))


def _evaluation(row: EvaluationRow) -> Evaluation:
    return Evaluation(**{name: getattr(row, name) for name in Evaluation.__struct_fields__})
