"""The bases that a machine has decide which jobs its trainers take, and if its server starts a trainer."""

from __future__ import annotations

from pathlib import Path
from typing import Any, cast

import msgspec
import pytest
from training_jobs import job_of

from loramux.common.identity import Principal
from loramux.common.settings.file import Settings, SettingsError
from loramux.common.settings.server import TrainingSettings
from loramux.common.settings.serving import ModelSettings
from loramux.data.records.database import Database
from loramux.data.records.training import TrainingJobs, TrainingRepository
from loramux.server.trainer import open_trainer
from loramux.training.local import LocalTrainer
from loramux.training.share import ComputeShare
from loramux.training.trainer import Trainer, TrainerParts
from loramux.training.worker import TrainingServer, TrainingWorker

pytestmark = pytest.mark.anyio
UNUSED = cast(Any, None)


class NotedTrainer(LocalTrainer):
    def __init__(self) -> None:
        super().__init__((), b"", cast(Any, None))
        self.starts = 0

    async def ensure_runs(self) -> None:
        self.starts += 1


class Bases:
    """The bases on a machine."""

    def __init__(self, **folders: Path) -> None:
        self.folders = folders

    async def __call__(self) -> dict[str, Path]:
        return dict(self.folders)


async def add(database: Database, caller: Principal, base: str) -> str:
    job = job_of(caller, database, f"ftjob-{base}", model=base, base_model=base)
    async with database.begin() as session:
        await TrainingRepository(session, caller.tenant).add(job)
    return job.id


async def test_server_without_the_base_of_a_waiting_job_starts_no_trainer_until_the_base_comes(
    database: Database, enrol: Any, tmp_path: Path
) -> None:
    await add(database, await enrol("acme"), "far")
    server = TrainingServer(
        server_id="server_1",
        database=database,
        blobs=UNUSED,
        tenants=UNUSED,
        uploads=UNUSED,
        usage=UNUSED,
        settings=TrainingSettings(),
        keep_seconds=60,
    )
    local, bases = NotedTrainer(), Bases(near=tmp_path)
    worker = TrainingWorker(server, local, bases)
    await worker.tend()
    assert local.starts == 0
    bases.folders["far"] = tmp_path
    await worker.tend()
    assert local.starts == 1
    await worker.jobs.stop()


async def test_trainer_takes_the_jobs_of_bases_that_came_after_its_start_and_no_others(
    database: Database, enrol: Any, tmp_path: Path
) -> None:
    acme = await enrol("acme")
    late = await add(database, acme, "late")
    await add(database, acme, "far")
    bases = Bases()
    trainer = Trainer(TrainerParts(database, UNUSED, bases, UNUSED, TrainingSettings(jobs=2), ComputeShare(1)))
    trainer.jobs.look = lambda: None  # type: ignore[method-assign]  # taken, and not run
    assert await trainer.tend() == 0
    bases.folders["late"] = tmp_path
    assert await trainer.tend() == 1
    async with database.read() as session:
        (held,) = await TrainingJobs(session).of_trainer(trainer.id)
    assert held.id == late
    assert msgspec.structs.asdict(held)["trainer_attempts"] == 1


async def test_trainer_without_the_card_of_its_settings_is_refused_at_its_start(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("loramux.server.trainer.CARDS", tmp_path / "nvidiactl")
    settings = Settings(
        model=ModelSettings(path=".", served_model_name="tiny"),
        training=TrainingSettings(device="cuda", local_trainer=False),
    )
    with pytest.raises(SettingsError, match="this machine has no NVIDIA card"):
        async with open_trainer(settings, UNUSED):
            pass
