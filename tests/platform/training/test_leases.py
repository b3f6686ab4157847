"""Leases of fine-tuning jobs on both databases: one trainer a job, a dead trainer's jobs free, tenants in turn."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

import pytest
from training_jobs import job_of

from loramux.common.identity import Principal, new_id
from loramux.data.entities import Refusal, TrainingCheckpoint, TrainingJob, TrainingOptions, TrainingPlan
from loramux.data.records.base import Viewpoint
from loramux.data.records.contents import ContentRepository
from loramux.data.records.database import Database
from loramux.data.records.leases import trainer_liveness
from loramux.data.records.training import (
    FINISHING,
    MAX_EVENTS,
    PAUSED,
    QUEUED,
    SUCCEEDED,
    TrainingJobs,
    TrainingRepository,
)

pytestmark = pytest.mark.anyio
PLAN = TrainingPlan(
    n_epochs=2, batch_size=4, learning_rate_multiplier=1.5, sequences=10, epoch_tokens=100, total_steps=6
)

Enrol = Callable[[str], Awaitable[Principal]]


@pytest.fixture
async def acme(enrol: Enrol) -> Principal:
    return await enrol("acme")


@pytest.fixture
async def globex(enrol: Enrol) -> Principal:
    return await enrol("globex")


async def add(database: Database, caller: Principal, **more: object) -> TrainingJob:
    job = job_of(caller, database, new_id("ftjob"), **{"options": TrainingOptions(n_epochs=2), **more})
    async with database.begin() as session:
        await TrainingRepository(session, caller.tenant).add(job)
    return job


async def test_job_is_read_as_it_was_written(database: Database, acme: Principal) -> None:
    job = await add(database, acme, plan=PLAN, error=Refusal("code", "message", "param"))
    async with database.read() as session:
        assert await TrainingRepository(session, acme.tenant).get(job.id, Viewpoint.of(acme)) == job


async def test_adapter_that_an_unfinished_job_begins_with_is_kept_until_its_end(
    database: Database, acme: Principal
) -> None:
    job, digests = await add(database, acme, state=PAUSED, adapter_digest="sha256:1"), ("sha256:1", "sha256:2")
    async with database.begin() as session:
        assert await ContentRepository(session).unused(digests) == {"sha256:2"}
        await TrainingJobs(session).change(job.id, state=SUCCEEDED)
        assert await ContentRepository(session).unused(digests) == set(digests)


async def test_one_of_two_trainers_takes_a_job(database: Database, acme: Principal) -> None:
    job = await add(database, acme)

    async def take(trainer: str) -> bool:
        async with database.begin() as session:
            return await TrainingJobs(session).take(job.id, trainer) is not None

    assert sorted(await asyncio.gather(*(take(f"trainer_{n}") for n in range(4)))) == [False, False, False, True]


async def test_jobs_of_a_dead_trainer_are_free_and_those_of_a_living_one_are_not(
    database: Database, acme: Principal
) -> None:
    job = await add(database, acme)

    async def release() -> str | None:
        async with database.begin() as session:
            jobs = TrainingJobs(session)
            await jobs.release_dead()
            held = await jobs.held(job.id, server_id="server_1")
            assert held is not None
            return held.trainer_id

    async with trainer_liveness(database, "trainer_1"):
        async with database.begin() as session:
            await TrainingJobs(session).take(job.id, "trainer_1")
        assert await release() == "trainer_1"
    assert await release() is None
    async with database.begin() as session:
        taken = await TrainingJobs(session).take(job.id, "trainer_2")
    assert taken is not None
    assert taken.trainer_attempts == 2


async def test_tenant_with_fewer_running_jobs_is_next(database: Database, acme: Principal, globex: Principal) -> None:
    first, second = await add(database, acme), await add(database, acme)
    later = await add(database, globex)
    async with database.begin() as session:
        jobs = TrainingJobs(session)
        assert [job.id for job in await jobs.waiting()] == [first.id, second.id, later.id]
        await jobs.take(first.id, "trainer_1")
        assert [job.id for job in await jobs.waiting()] == [later.id, second.id]


async def test_tenants_take_turns_if_one_job_runs_at_a_time(
    database: Database, acme: Principal, globex: Principal
) -> None:
    ended, second = await add(database, acme), await add(database, acme)
    later = await add(database, globex)
    async with database.begin() as session:
        jobs = TrainingJobs(session)
        await jobs.change(ended.id, state=SUCCEEDED, started_at=database.now(), finished_at=database.now())
        assert [job.id for job in await jobs.waiting()] == [later.id, second.id]


async def test_job_that_is_unfinished_for_too_long_is_cancelled_with_the_reason(
    database: Database, acme: Principal
) -> None:
    now, reason = database.now(), Refusal("overdue", "The job did not end in time.")
    old, paused = await add(database, acme, created_at=now - 2), await add(database, acme, created_at=1, state=PAUSED)
    young, ended = await add(database, acme, created_at=now), await add(database, acme, created_at=1, state=SUCCEEDED)
    async with database.begin() as session:
        await TrainingJobs(session).cancel_overdue(now - 1, reason)
    wanted = {}
    async with database.read() as session:
        for job in await TrainingRepository(session, acme.tenant).before(Viewpoint.of(acme), None, 9):
            wanted[job.id] = (job.wanted, job.error)
    assert wanted[old.id] == wanted[paused.id] == ("cancel", reason)
    assert wanted[young.id] == wanted[ended.id] == (None, None)


async def test_writes_of_a_trainer_that_has_lost_its_lease_are_refused(database: Database, acme: Principal) -> None:
    job = await add(database, acme, trainer_id="trainer_2")
    async with database.begin() as session:
        assert await TrainingJobs(session).held(job.id, trainer_id="trainer_1") is None
        assert await TrainingJobs(session).held(job.id, trainer_id="trainer_2") == job


async def test_surplus_checkpoints_are_those_of_old_epochs_and_within_epochs(
    database: Database, acme: Principal
) -> None:
    job = await add(database, acme)
    async with database.begin() as session:
        jobs = TrainingJobs(session)
        for step, is_epoch in ((1, False), (2, True), (4, True), (5, False), (6, True), (7, False)):
            checkpoint = TrainingCheckpoint(
                job_id=job.id,
                step=step,
                files=("a", "b"),
                is_epoch=is_epoch,
                trained_tokens=step,
                metrics="{}",
                created_at=step,
            )
            await jobs.add_checkpoint(checkpoint)
        surplus = await jobs.drop_surplus_checkpoints(job.id, epochs=2)
        assert [one.step for one in surplus] == [5, 2, 1]
        kept = await jobs.checkpoints(job.id)
        assert [(one.step, one.files) for one in kept] == [(7, ("a", "b")), (6, ("a", "b")), (4, ("a", "b"))]


async def test_log_is_numbered_and_bounded(
    database: Database, acme: Principal, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("loramux.data.records.training.MAX_EVENTS", 3)
    assert MAX_EVENTS >= 1000
    job = await add(database, acme)
    async with database.begin() as session:
        for number in range(5):
            await TrainingJobs(session).log(job.id, f"event {number}", number)
    async with database.read() as session:
        jobs = TrainingRepository(session, acme.tenant)
        assert [one.number for one in await jobs.events(job.id, None, 10)] == [3, 2, 1]
        assert [one.message for one in await jobs.events(job.id, 3, 1)] == ["event 1"]


async def test_cancelling_all_jobs_of_a_tenant_deletes_the_samples_of_its_logs_and_no_figures(
    database: Database, acme: Principal, globex: Principal
) -> None:
    ended, others = await add(database, acme, state=SUCCEEDED), await add(database, globex)
    entries = (("Step 1", '{"step":1,"train_loss":2.5}'), ("Answers", '{"samples":[{"answer":"x"}],"step":1}'))
    async with database.begin() as session:
        for job in (ended, others):
            for message, data in entries:
                await TrainingJobs(session).log(job.id, message, 1, data=data)
        await TrainingRepository(session, acme.tenant).cancel_all()
    async with database.read() as session:
        left = [await TrainingRepository(session, one.tenant_id).events(one.id, None, 9) for one in (ended, others)]
    assert [[event.message for event in events] for events in left] == [["Step 1"], ["Answers", "Step 1"]]


async def test_adopted_and_cancelled_jobs(database: Database, acme: Principal) -> None:
    running, ending = await add(database, acme, state=QUEUED, plan=PLAN), await add(database, acme, state=FINISHING)
    async with database.begin() as session:
        jobs = TrainingJobs(session)
        await jobs.adopt_abandoned("server_2")
        assert {job.id: job.attempts for job in await jobs.of("server_2")} == {running.id: 2, ending.id: 2}
        await TrainingRepository(session, acme.tenant).cancel_all()
    async with database.begin() as session:
        wanted = {job.id: job.wanted for job in await TrainingJobs(session).of("server_2")}
    assert wanted == {running.id: "cancel", ending.id: None}
