"""A server that adopts a running job: its budget holds the cost once, and a trainer outlives the database's restart."""

from __future__ import annotations

import asyncio
from typing import Any, cast

import pytest
import sqlalchemy as sa
from flat_prices import FlatPrices, give_flat_plan
from training_jobs import job_of

from loramux.accounts.tenants.tenants import Tenants
from loramux.common.identity import Principal
from loramux.common.settings.server import TrainingSettings
from loramux.data.entities import TrainingJob, TrainingPlan
from loramux.data.records.base import Viewpoint
from loramux.data.records.database import Database
from loramux.data.records.leases import dead_trainers, trainer_liveness
from loramux.data.records.requests import TRAINING, OpenedRequest, charged_tier
from loramux.data.records.training import RUNNING, TrainingJobs, TrainingRepository
from loramux.money.limits.limits import Limits
from loramux.money.usage.service import UsageService
from loramux.training.worker import TrainingServer, TrainingWorker

pytestmark = pytest.mark.anyio
UNUSED = cast(Any, None)
TOKENS, PRICE = 100, 3
PLAN = TrainingPlan(
    n_epochs=1, batch_size=4, learning_rate_multiplier=1.0, sequences=10, epoch_tokens=TOKENS, total_steps=3
)


def opened(job: TrainingJob, caller: Principal) -> OpenedRequest:
    return OpenedRequest(
        id=f"{job.id}.{job.attempts}",
        tenant_id=job.tenant_id,
        key_id=job.key_id,
        project_id=job.project_id,
        model=job.model,
        adapter_digest=None,
        base_model=job.base_model,
        tier=charged_tier(caller.tier, TRAINING),
        tags="",
        prompt_tokens=TOKENS,
        max_tokens=0,
        lineage=caller.lineage,
    )


async def test_adopted_job_goes_on_within_a_budget_that_covers_it_once(
    database: Database, tenants: Tenants, enrol: Any
) -> None:
    acme, prices = await enrol("acme"), FlatPrices(PRICE, 0)
    await give_flat_plan(database, "acme")
    await Limits(tenants.changes).put_budget(acme.tenant, acme.tenant, "month", TOKENS * PRICE)
    dying, other = UsageService(database, prices), UsageService(database, prices)
    await dying.start()
    running = {"state": RUNNING, "plan": PLAN, "trainer_id": "trainer_1", "server_id": dying.server_id}
    job = job_of(acme, database, "ftjob-1", **running)
    async with database.begin() as session:
        await TrainingRepository(session, acme.tenant).add(job)
        await TrainingJobs(session).change(job.id, request_id=f"{job.id}.1")
    await dying.open(opened(job, acme))
    await dying.stop()  # its request stays open, as after a crash
    await other.start()
    server = TrainingServer(
        server_id=other.server_id,
        database=database,
        blobs=UNUSED,
        tenants=tenants,
        uploads=UNUSED,
        usage=other,
        settings=TrainingSettings(),
        keep_seconds=60,
    )
    worker = TrainingWorker(server, None, UNUSED)
    async with trainer_liveness(database, "trainer_1"):
        await worker.tend()
        async with asyncio.timeout(30):
            while (found := await read(database, acme, job.id)).request_id != f"{job.id}.2":
                assert found.error is None
                await asyncio.sleep(0.02)
    assert (found.state, found.wanted, found.trainer_id) == (RUNNING, None, "trainer_1")
    await worker.jobs.stop()
    await other.stop()


async def read(database: Database, caller: Principal, id: str) -> TrainingJob:
    async with database.read() as session:
        found = await TrainingRepository(session, caller.tenant).get(id, Viewpoint.of(caller))
    assert found is not None
    return found


@pytest.mark.parametrize("backend", ["postgresql"], indirect=True)
async def test_trainer_whose_connection_was_cut_shows_again_that_it_lives(database: Database) -> None:
    async def is_dead() -> bool:
        async with database.begin() as session:
            return await dead_trainers(session, ["trainer_1"]) == ["trainer_1"]

    async with trainer_liveness(database, "trainer_1"):
        assert not await is_dead()
        async with database.begin() as session:
            holder = sa.text("SELECT pg_terminate_backend(pid) FROM pg_locks WHERE locktype = 'advisory' AND granted")
            await session.execute(holder)
        async with asyncio.timeout(30):
            while not await is_dead():  # noqa: ASYNC110  PostgreSQL notices a moment later
                await asyncio.sleep(0.01)
            while await is_dead():  # noqa: ASYNC110
                await asyncio.sleep(0.1)
    assert await is_dead()
