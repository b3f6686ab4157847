"""A trainer without torch: it takes a job as `loramux trainer` does, and writes what a test tells it to."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

from loramux.common.identity import new_id
from loramux.common.settings.file import Settings
from loramux.data.entities import Refusal, TrainingCheckpoint, TrainingJob, TrainingPlan
from loramux.data.records.database import Database
from loramux.data.records.leases import trainer_liveness
from loramux.data.records.training import FINISHING, QUEUED, RUNNING, TrainingJobs
from loramux.data.storage.objects import open_objects
from loramux.training.protocol import ADAPTER_FILES
from loramux.training.trainer import checkpoint_object

PATIENCE = 30.0


class ScriptedTrainer:
    def __init__(self, settings: Settings, database: Database) -> None:
        self.id = new_id("trainer")
        self.database = database
        self._objects = open_objects(settings.records.blobs, {})

    async def take(self, job_id: str) -> TrainingJob:
        async with self.database.begin() as session:
            job = await TrainingJobs(session).take(job_id, self.id)
        assert job is not None, "another trainer has it"
        return job

    async def plan(self, job_id: str, tokens: int, epochs: int = 1) -> None:
        made = TrainingPlan(
            n_epochs=epochs,
            batch_size=8,
            learning_rate_multiplier=1.0,
            sequences=10,
            epoch_tokens=tokens // epochs,
            total_steps=2 * epochs,
            digests={"training_file": "d" * 64},
        )
        async with self.database.begin() as session:
            jobs = TrainingJobs(session)
            job = await jobs.held(job_id, trainer_id=self.id)
            assert job is not None
            await jobs.change(job_id, plan=made, state=RUNNING if job.state == RUNNING else QUEUED)

    async def until(self, job_id: str, *states: str) -> TrainingJob:
        async with asyncio.timeout(PATIENCE):
            while True:
                async with self.database.read() as session:
                    found = await TrainingJobs(session).of_trainer_and_id(self.id, job_id)
                if found is not None and (found.state in states or found.wanted in states):
                    return found
                await asyncio.sleep(0.05)

    async def save(self, job_id: str, adapter: Path, step: int, tokens: int, *, is_epoch: bool = True) -> None:
        for name in ADAPTER_FILES:
            self._objects.put_file(checkpoint_object(job_id, step, name), _copied(adapter / name))
        checkpoint = TrainingCheckpoint(
            job_id=job_id,
            step=step,
            files=ADAPTER_FILES,
            is_epoch=is_epoch,
            trained_tokens=tokens,
            metrics=f'{{"step":{step},"train_loss":0.5}}',
            created_at=self.database.now(),
        )
        async with self.database.begin() as session:
            jobs = TrainingJobs(session)
            assert await jobs.held(job_id, trainer_id=self.id) is not None
            await jobs.add_checkpoint(checkpoint)
            await jobs.change(job_id, trained_tokens=tokens)

    async def end(self, job_id: str, outcome: str, error: Refusal | None = None) -> None:
        async with self.database.begin() as session:
            jobs = TrainingJobs(session)
            assert await jobs.held(job_id, trainer_id=self.id) is not None
            await jobs.change(job_id, state=FINISHING, outcome=outcome, error=error, trainer_id=None)


def _copied(file: Path) -> Path:
    """A copy that the store may take."""
    copy = file.with_name(f"{file.name}.{new_id('copy')}")
    copy.write_bytes(file.read_bytes())
    return copy


@asynccontextmanager
async def scripted_trainer(settings: Settings) -> AsyncIterator[ScriptedTrainer]:
    database = Database(settings.records.url)
    trainer = ScriptedTrainer(settings, database)
    try:
        async with trainer_liveness(database, trainer.id):
            yield trainer
    finally:
        await database.close()
