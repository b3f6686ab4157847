"""Fine-tuning jobs, their logs and their checkpoints, and the leases of servers and trainers on them.

Two processes hold a job. Its server (`server_id`) holds its cost in the ledger, registers its result and bills it. A
trainer (`trainer_id`) reads its examples and trains. Each writes only after it has checked, in the same transaction,
that it still holds the job. The bytes of checkpoints are objects in the store: stored before the row is inserted, and
removed after the job has ended.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Any

import msgspec
from sqlalchemy import (
    CheckConstraint,
    ForeignKey,
    ForeignKeyConstraint,
    Index,
    UniqueConstraint,
    delete,
    func,
    or_,
    select,
    update,
)
from sqlalchemy.ext.asyncio import AsyncSession
from sqlalchemy.orm import Mapped, mapped_column

from loramux.common.identity import ProjectId, TenantId
from loramux.data.entities import (
    SAMPLES,
    Refusal,
    TrainingCheckpoint,
    TrainingEvent,
    TrainingJob,
    TrainingOptions,
    TrainingPlan,
)
from loramux.data.records.base import Base, Repository, TenantScoped, Viewpoint, newest_first, to_struct
from loramux.data.records.leases import LeasedRow, adopt_abandoned, dead_trainers
from loramux.data.records.tenants import lock_tenant

VALIDATING_FILES, QUEUED, RUNNING, PAUSED = "validating_files", "queued", "running", "paused"
FINISHING = "finishing"
"""A trainer has ended its work; the server registers the result and bills it."""
SUCCEEDED, FAILED, CANCELLED = "succeeded", "failed", "cancelled"
TRAINABLE = (VALIDATING_FILES, QUEUED, RUNNING)
"""States in which a trainer may hold a job."""
UNFINISHED = (*TRAINABLE, PAUSED, FINISHING)
MAX_EVENTS = 10_000
"""Entries of one job's log; later ones are not written."""


class TrainingJobRow(LeasedRow, Base):
    """A fine-tuning job. `data.entities.TrainingJob` explains the columns."""

    __tablename__ = "training_jobs"
    __table_args__ = (
        UniqueConstraint("tenant_id", "id"),
        ForeignKeyConstraint(["tenant_id", "project_id"], ["projects.tenant_id", "projects.id"]),
        CheckConstraint(
            "state IN ('validating_files', 'queued', 'running', 'paused', 'finishing',"
            " 'succeeded', 'failed', 'cancelled')",
            name="state",
        ),
        CheckConstraint("wanted IN ('pause', 'cancel')", name="wanted"),
        Index("ix_training_jobs_tenant_id_created_at", "tenant_id", "created_at"),
        Index("ix_training_jobs_state", "state"),
    )

    id: Mapped[str] = mapped_column(primary_key=True)
    tenant_id: Mapped[TenantId] = mapped_column(ForeignKey("tenants.id"))
    project_id: Mapped[ProjectId]
    owner: Mapped[str]
    key_id: Mapped[str]
    model: Mapped[str]
    base_model: Mapped[str]
    adapter_digest: Mapped[str | None]
    template_digest: Mapped[str]
    context: Mapped[int]
    adapter: Mapped[str]
    training_file_id: Mapped[str]
    validation_file_id: Mapped[str | None]
    options: Mapped[str]
    """A `TrainingOptions` as JSON."""
    tags: Mapped[str]
    state: Mapped[str]
    wanted: Mapped[str | None]
    trainer_id: Mapped[str | None]
    trainer_attempts: Mapped[int]
    request_id: Mapped[str | None]
    plan: Mapped[str | None]
    """A `TrainingPlan` as JSON."""
    trained_tokens: Mapped[int]
    outcome: Mapped[str | None]
    error: Mapped[str | None]
    """A `Refusal` as JSON."""
    result: Mapped[str | None]
    created_at: Mapped[int]
    started_at: Mapped[int | None]
    finished_at: Mapped[int | None]
    estimated_finish: Mapped[int | None]


class TrainingEventRow(Base):
    """An entry of a job's log."""

    __tablename__ = "training_events"

    job_id: Mapped[str] = mapped_column(ForeignKey("training_jobs.id", ondelete="CASCADE"), primary_key=True)
    number: Mapped[int] = mapped_column(primary_key=True, autoincrement=False)
    level: Mapped[str]
    message: Mapped[str]
    data: Mapped[str | None]
    created_at: Mapped[int]


class TrainingCheckpointRow(Base):
    """A checkpoint of a job."""

    __tablename__ = "training_checkpoints"

    job_id: Mapped[str] = mapped_column(ForeignKey("training_jobs.id", ondelete="CASCADE"), primary_key=True)
    step: Mapped[int] = mapped_column(primary_key=True, autoincrement=False)
    files: Mapped[str]
    """Names of its files, separated by line breaks."""
    is_epoch: Mapped[bool]
    trained_tokens: Mapped[int]
    metrics: Mapped[str]
    result: Mapped[str | None]
    created_at: Mapped[int]


class TrainingRepository(TenantScoped):
    """One tenant's fine-tuning jobs."""

    async def add(self, job: TrainingJob) -> None:
        """Insert the row."""
        await self._insert(TrainingJobRow(**_columns(msgspec.structs.asdict(job))))

    async def get(self, id: str, seen: Viewpoint, *, lock: bool = False) -> TrainingJob | None:
        """Find one of the jobs that the caller sees, and lock it if wanted."""
        statement = select(TrainingJobRow).where(
            TrainingJobRow.tenant_id == self._tenant, TrainingJobRow.id == id, *seen.conditions(TrainingJobRow)
        )
        row = await self._session.scalar(statement.with_for_update() if lock else statement)
        return None if row is None else _job(row)

    async def before(self, seen: Viewpoint, id: str | None, limit: int, tags: Sequence[str] = ()) -> list[TrainingJob]:
        """List at most `limit` jobs older than that one, newest first.

        `tags`: members of the JSON object of tags that a job must have, such as `"team":"a"`. A quote within a name or
        a value is escaped, so such a text is found as a member only. LIKE would not distinguish cases on SQLite.
        """
        column = TrainingJobRow.tags
        having = (func.replace(column, member, "") != column for member in tags)
        statement = select(TrainingJobRow).where(*seen.conditions(TrainingJobRow), *having)
        newest = newest_first(statement, TrainingJobRow, self._tenant, id, limit)
        return [_job(row) for row in await self._session.scalars(newest)]

    async def count_unfinished(self) -> int:
        """Count the unfinished jobs; no job of the tenant is added until this transaction ends."""
        await lock_tenant(self._session, self._tenant)
        ours = (TrainingJobRow.tenant_id == self._tenant, TrainingJobRow.state.in_(UNFINISHED))
        return await self._session.scalar(select(func.count()).select_from(TrainingJobRow).where(*ours)) or 0

    async def user_of(self, file_id: str) -> str | None:
        """Return the id of an unfinished job that reads this file."""
        ours = (TrainingJobRow.tenant_id == self._tenant, TrainingJobRow.state.in_(UNFINISHED))
        reads = or_(TrainingJobRow.training_file_id == file_id, TrainingJobRow.validation_file_id == file_id)
        return await self._session.scalar(select(TrainingJobRow.id).where(*ours, reads).limit(1))

    async def cancel_all(self) -> None:
        """Cancel every unfinished job, and delete the texts in the logs of all jobs."""
        ours = TrainingJobRow.tenant_id == self._tenant
        unfinished = TrainingJobRow.state.in_((*TRAINABLE, PAUSED))
        await self._session.execute(update(TrainingJobRow).where(ours, unfinished).values(wanted="cancel"))
        logs = TrainingEventRow.job_id.in_(select(TrainingJobRow.id).where(ours))
        texts = TrainingEventRow.data.startswith(f'{{"{SAMPLES}"')
        await self._session.execute(delete(TrainingEventRow).where(logs, texts))

    async def events(self, id: str, before: int | None, limit: int) -> list[TrainingEvent]:
        """List at most `limit` entries of a job's log, newest first, that are older than the entry `before`."""
        statement = select(TrainingEventRow).where(TrainingEventRow.job_id == id)
        if before is not None:
            statement = statement.where(TrainingEventRow.number < before)
        newest = statement.order_by(TrainingEventRow.number.desc()).limit(limit)
        return [to_struct(TrainingEvent, row) for row in await self._session.scalars(newest)]

    async def checkpoints(self, id: str) -> list[TrainingCheckpoint]:
        """List a job's checkpoints, newest first."""
        return await _checkpoints(self._session, id)

    async def change(self, id: str, **values: object) -> None:
        """Set columns of a job, which the caller has locked."""
        await _change(self._session, id, values)


class TrainingJobs(Repository):
    """Every tenant's jobs, as the servers and trainers that work on them need them."""

    async def adopt_abandoned(self, server_id: str) -> None:
        """Move the unfinished jobs of dead servers to this one."""
        await adopt_abandoned(self._session, TrainingJobRow, TrainingJobRow.state.in_(UNFINISHED), server_id)

    async def of(self, server_id: str) -> list[TrainingJob]:
        """List the server's unfinished jobs, oldest first."""
        return await self._jobs(TrainingJobRow.state.in_(UNFINISHED), TrainingJobRow.server_id == server_id)

    async def of_trainer(self, trainer_id: str) -> list[TrainingJob]:
        """List the jobs that this trainer holds, oldest first."""
        return await self._jobs(TrainingJobRow.state.in_(TRAINABLE), TrainingJobRow.trainer_id == trainer_id)

    async def of_trainer_and_id(self, trainer_id: str, id: str) -> TrainingJob | None:
        """Return a job that this trainer holds, without a lock."""
        mine = (TrainingJobRow.id == id, TrainingJobRow.trainer_id == trainer_id)
        found = await self._jobs(TrainingJobRow.state.in_(TRAINABLE), *mine)
        return found[0] if found else None

    async def held(self, id: str, *, server_id: str | None = None, trainer_id: str | None = None) -> TrainingJob | None:
        """Lock and return an unfinished job that this server or this trainer holds."""
        mine = TrainingJobRow.server_id == server_id if trainer_id is None else TrainingJobRow.trainer_id == trainer_id
        statement = select(TrainingJobRow).where(TrainingJobRow.id == id, mine, TrainingJobRow.state.in_(UNFINISHED))
        row = await self._session.scalar(statement.with_for_update())
        return None if row is None else _job(row)

    async def release_dead(self, *, besides: str = "") -> None:
        """Take the jobs of dead trainers from them. `besides`: the trainer that asks, which lives."""
        held = (TrainingJobRow.trainer_id != besides, TrainingJobRow.state.in_(TRAINABLE))
        trainers = [id for id in await self._session.scalars(select(TrainingJobRow.trainer_id).where(*held).distinct())]
        if dead := await dead_trainers(self._session, [id for id in trainers if id is not None]):
            freed = update(TrainingJobRow).where(*held, TrainingJobRow.trainer_id.in_(dead)).values(trainer_id=None)
            await self._session.execute(freed)

    async def waiting(self) -> list[TrainingJob]:
        """List the jobs that no trainer holds, in the order in which trainers should take them.

        Tenants with the fewest held jobs come first, then those whose last job began longest ago, so that tenants take
        turns even if one job runs at a time. A tenant's own jobs come oldest first.
        """
        free = await self._jobs(TrainingJobRow.state.in_(TRAINABLE), TrainingJobRow.trainer_id.is_(None))
        taken = TrainingJobRow.state.in_(TRAINABLE), TrainingJobRow.trainer_id.is_not(None)
        busy = Counter(await self._session.scalars(select(TrainingJobRow.tenant_id).where(*taken)))
        last = select(TrainingJobRow.tenant_id, func.max(TrainingJobRow.started_at)).group_by(TrainingJobRow.tenant_id)
        tenants = {job.tenant_id for job in free}
        rows = await self._session.execute(last.where(TrainingJobRow.tenant_id.in_(tenants)))
        began = {tenant: at or 0 for tenant, at in rows}
        return sorted(free, key=lambda job: (busy[job.tenant_id], began[job.tenant_id]))

    async def cancel_overdue(self, before: int, reason: Refusal) -> None:
        """Order the end of the unfinished jobs that were created before that time."""
        overdue = (TrainingJobRow.state.in_((*TRAINABLE, PAUSED)), TrainingJobRow.created_at < before)
        values = _columns({"wanted": "cancel", "error": reason})
        await self._session.execute(update(TrainingJobRow).where(*overdue).values(values))

    async def take(self, id: str, trainer_id: str) -> TrainingJob | None:
        """Give a job that no trainer holds to this one; None if another one was faster."""
        statement = select(TrainingJobRow).where(
            TrainingJobRow.id == id, TrainingJobRow.trainer_id.is_(None), TrainingJobRow.state.in_(TRAINABLE)
        )
        row = await self._session.scalar(statement.with_for_update())
        if row is None:
            return None
        row.trainer_id, row.trainer_attempts = trainer_id, row.trainer_attempts + 1
        await self._session.flush()
        return _job(row)

    async def change(self, id: str, **values: object) -> None:
        """Set columns of a job that is held and locked."""
        await _change(self._session, id, values)

    async def log(self, id: str, message: str, at: int, *, level: str = "info", data: str | None = None) -> None:
        """Append an entry to the log of a job that is held and locked."""
        last = select(func.coalesce(func.max(TrainingEventRow.number), 0)).where(TrainingEventRow.job_id == id)
        number = (await self._session.scalar(last) or 0) + 1
        if number <= MAX_EVENTS:
            event = TrainingEventRow(job_id=id, number=number, level=level, message=message, data=data, created_at=at)
            await self._insert(event)

    async def add_checkpoint(self, checkpoint: TrainingCheckpoint) -> None:
        """Insert the row of a checkpoint, or replace that of the same step."""
        columns = msgspec.structs.asdict(checkpoint) | {"files": "\n".join(checkpoint.files)}
        await self._put(TrainingCheckpointRow(**columns))

    async def checkpoints(self, id: str) -> list[TrainingCheckpoint]:
        """List a job's checkpoints, newest first."""
        return await _checkpoints(self._session, id)

    async def drop_surplus_checkpoints(self, id: str, epochs: int) -> list[TrainingCheckpoint]:
        """Delete and return all checkpoints of a held job but the newest one and those of the last `epochs` epochs."""
        found = await self.checkpoints(id)
        kept = {one.step for one in [*found[:1], *[one for one in found if one.is_epoch][:epochs]]}
        surplus = [one for one in found if one.step not in kept]
        rows = TrainingCheckpointRow.job_id == id, TrainingCheckpointRow.step.in_([one.step for one in surplus])
        await self._session.execute(delete(TrainingCheckpointRow).where(*rows))
        return surplus

    async def note_result(self, id: str, step: int, result: str) -> None:
        """Record the revision that was made of a checkpoint."""
        found = TrainingCheckpointRow.job_id == id, TrainingCheckpointRow.step == step
        await self._session.execute(update(TrainingCheckpointRow).where(*found).values(result=result))

    async def inputs(self) -> list[str]:
        """List the files that unfinished jobs read."""
        columns = TrainingJobRow.training_file_id, TrainingJobRow.validation_file_id
        rows = await self._session.execute(select(*columns).where(TrainingJobRow.state.in_(UNFINISHED)))
        return [id for row in rows for id in row if id is not None]

    async def unfinished(self, ids: Sequence[str]) -> frozenset[str]:
        """Return those of `ids` that are unfinished jobs."""
        statement = select(TrainingJobRow.id).where(TrainingJobRow.id.in_(ids), TrainingJobRow.state.in_(UNFINISHED))
        return frozenset(await self._session.scalars(statement))

    async def forget(self, before: int) -> None:
        """Delete the jobs that finished before that time, with their logs."""
        await self._session.execute(delete(TrainingJobRow).where(TrainingJobRow.finished_at < before))

    async def _jobs(self, *conditions: Any) -> list[TrainingJob]:
        statement = select(TrainingJobRow).where(*conditions).order_by(TrainingJobRow.created_at, TrainingJobRow.id)
        return [_job(row) for row in await self._session.scalars(statement)]


async def _change(session: AsyncSession, id: str, values: dict[str, Any]) -> None:
    await session.execute(update(TrainingJobRow).where(TrainingJobRow.id == id).values(_columns(values)))


async def _checkpoints(session: AsyncSession, id: str) -> list[TrainingCheckpoint]:
    statement = select(TrainingCheckpointRow).where(TrainingCheckpointRow.job_id == id)
    rows = await session.scalars(statement.order_by(TrainingCheckpointRow.step.desc()))
    return [to_struct(TrainingCheckpoint, row, files=tuple(row.files.split("\n"))) for row in rows]


_STRUCTS: dict[str, Any] = {"options": TrainingOptions, "plan": TrainingPlan | None, "error": Refusal | None}
"""Columns that hold a struct as JSON."""


def _columns(values: dict[str, Any]) -> dict[str, Any]:
    found = {name: values[name] for name in _STRUCTS if values.get(name) is not None}
    return values | {name: msgspec.json.encode(value).decode() for name, value in found.items()}


def _job(row: TrainingJobRow) -> TrainingJob:
    columns = {name: getattr(row, name) for name in _STRUCTS}
    structs = {
        name: None if text is None else msgspec.json.decode(text, type=_STRUCTS[name]) for name, text in columns.items()
    }
    return to_struct(TrainingJob, row, **structs)


async def digests_of_unfinished_jobs(session: AsyncSession) -> frozenset[str]:
    """Return the digests of the adapters that unfinished jobs begin with."""
    digest = TrainingJobRow.adapter_digest
    statement = select(digest).where(TrainingJobRow.state.in_(UNFINISHED), digest.is_not(None)).distinct()
    return frozenset(one for one in await session.scalars(statement) if one is not None)
