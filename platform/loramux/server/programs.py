"""Programs that use the request path: batches, evaluations, shadows, guards, policies, moves between bases, training.

Batches and training know no wire format: `Provisions` has the formats of their lines.
"""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from functools import partial

import msgspec

from loramux.batches.files import FINE_TUNE, Files
from loramux.batches.lines import BatchEndpoints
from loramux.batches.run import BatchServer, Window
from loramux.batches.service import Batches, BatchWorker
from loramux.common.jobs import JobRunner, run_periodically
from loramux.data.entities import Batch, TrainingJob
from loramux.releases.base_upgrades import BaseUpgrades
from loramux.releases.evaluations import Evaluations
from loramux.releases.judges import KeyVault, open_judges
from loramux.releases.metrics import RevisionMetrics, open_revision_metrics
from loramux.releases.policies import CanaryGuards, ReleasePolicies, open_canary_guards
from loramux.releases.shadows import Shadows, open_shadows
from loramux.server.platform import Platform
from loramux.server.trainer import local_bases
from loramux.training.examples import ExampleFormat, check_file
from loramux.training.local import LocalTrainer
from loramux.training.service import FineTuningJobs
from loramux.training.worker import TrainingServer, TrainingWorker

BATCH_SECONDS = 10.0
SWEEP_SECONDS = 3600.0
EVALUATION_SECONDS = 5.0
MOVE_SECONDS = 5.0
TRAINING_SECONDS = 1.0


@dataclass(frozen=True, slots=True)
class Provisions:
    """Formats and commands that the API provides to the programs."""

    endpoints: BatchEndpoints
    """The endpoints that a line of a batch may use: the body and the answer's writer of each."""
    examples: ExampleFormat
    """The format of a line of a training file."""
    trainer_command: tuple[str, ...] | None
    """The command of a trainer that reads its settings on standard input. None: another worker of this server starts
    the trainer.
    """


@dataclass(frozen=True, slots=True)
class Programs:
    """The programs of an open platform."""

    batches: Batches
    files: Files
    batch_jobs: JobRunner[Batch]
    """Runs the batches of this server."""
    evaluations: Evaluations
    guards: CanaryGuards
    shadows: Shadows
    policies: ReleasePolicies
    base_upgrades: BaseUpgrades
    revision_metrics: RevisionMetrics
    training: FineTuningJobs
    training_jobs: JobRunner[TrainingJob]
    """Registers and bills the fine-tuning jobs of this server."""
    local_trainer: LocalTrainer | None
    """The trainer that this server starts on its own machine, if it does."""


@asynccontextmanager
async def open_programs(platform: Platform, provisions: Provisions) -> AsyncIterator[Programs]:
    """Run the programs of `platform` while the block runs. Another server continues unfinished work after its end."""
    database, blobs, completions, adapters = platform.database, platform.blobs, platform.completions, platform.adapters
    server_id = platform.usage.server_id
    async with AsyncExitStack() as stack:
        revision_metrics = await stack.enter_async_context(open_revision_metrics(database, completions))
        settings, endpoints = platform.settings, provisions.endpoints
        check_examples = partial(check_file, format=provisions.examples, max_lines=settings.training.max_examples)
        files = Files(
            database,
            blobs,
            settings.batches,
            settings.privacy.file_seconds,
            platform.memory,
            {FINE_TUNE: check_examples},
        )
        stack.callback(files.threads.close)
        platform.images.read_files_with(files.read_image)
        worker = _batch_worker(platform, files, endpoints)
        stack.push_async_callback(worker.jobs.stop)
        batches = Batches(database, worker, files, endpoints, platform.settings.batches)
        await stack.enter_async_context(run_periodically(BATCH_SECONDS, worker.tend))
        await stack.enter_async_context(run_periodically(SWEEP_SECONDS, worker.sweep))
        evaluations = await stack.enter_async_context(_open_evaluations(platform, files, batches))
        guards = await stack.enter_async_context(open_canary_guards(database, adapters))
        shadows = await stack.enter_async_context(open_shadows(database, blobs, completions, adapters.queries, files))
        base_upgrades = BaseUpgrades(
            database=database,
            blobs=blobs,
            tenants=platform.tenants,
            lifecycle=platform.lifecycle,
            ingest=platform.ingest,
            adapters=adapters,
            evaluations=evaluations,
            server_id=server_id,
        )
        stack.push_async_callback(base_upgrades.stop)
        await stack.enter_async_context(run_periodically(MOVE_SECONDS, base_upgrades.tend))
        trainer = await stack.enter_async_context(_open_training(platform, provisions))
        yield Programs(
            batches=batches,
            files=files,
            batch_jobs=worker.jobs,
            evaluations=evaluations,
            guards=guards,
            shadows=shadows,
            policies=ReleasePolicies(database, adapters),
            base_upgrades=base_upgrades,
            revision_metrics=revision_metrics,
            training=FineTuningJobs(trainer.server, platform.ingest, completions, settings.adapters, trainer.look),
            training_jobs=trainer.jobs,
            local_trainer=trainer.local,
        )


@asynccontextmanager
async def _open_evaluations(platform: Platform, files: Files, batches: Batches) -> AsyncIterator[Evaluations]:
    """Run this server's evaluations while the block runs."""
    async with open_judges(platform.settings.batches) as judges:
        evaluations = Evaluations(
            database=platform.database,
            blobs=platform.blobs,
            files=files,
            batches=batches,
            queries=platform.adapters.queries,
            completions=platform.completions,
            server_id=platform.usage.server_id,
            judges=judges,
            keys=KeyVault(platform.tenants.pepper),
        )
        try:
            async with run_periodically(EVALUATION_SECONDS, evaluations.tend):
                yield evaluations
        finally:
            await evaluations.stop()


@asynccontextmanager
async def _open_training(platform: Platform, provisions: Provisions) -> AsyncIterator[TrainingWorker]:
    """Look after this server's fine-tuning jobs while the block runs."""
    settings = platform.settings
    local = None
    if settings.training.enabled and settings.training.local_trainer and provisions.trainer_command is not None:
        local = LocalTrainer(provisions.trainer_command, msgspec.json.encode(settings), platform.completions)
    server = TrainingServer(
        server_id=platform.usage.server_id,
        database=platform.database,
        blobs=platform.blobs,
        tenants=platform.tenants,
        uploads=platform.uploads,
        usage=platform.usage,
        settings=settings.training,
        keep_seconds=settings.privacy.file_seconds,
    )
    worker = TrainingWorker(server, local, partial(local_bases, settings, platform.database))
    async with (
        run_periodically(TRAINING_SECONDS, worker.tend),
        run_periodically(SWEEP_SECONDS, worker.sweep),
    ):
        try:
            yield worker
        finally:
            await worker.stop()


def _batch_worker(platform: Platform, files: Files, endpoints: BatchEndpoints) -> BatchWorker:
    completions, settings = platform.completions, platform.settings.batches
    server = BatchServer(
        server_id=platform.usage.server_id,
        database=platform.database,
        blobs=platform.blobs,
        files=files,
        tenants=platform.tenants,
        completions=completions,
        endpoints=endpoints,
        settings=settings,
        memory=platform.memory,
        window=Window(settings, completions.others_waiting, completions.quiet_seconds),
    )
    return BatchWorker(server, platform.usage)
