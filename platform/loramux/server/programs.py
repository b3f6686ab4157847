"""Programs that use the request path: batches, evaluations, shadows, guards, release policies, moves between bases.

Batches know no wire format: `endpoints` maps the endpoint names that a line may use to the parsers of bodies and the
writers of answers.
"""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass

from loramux.batches.files import Files
from loramux.batches.lines import BatchEndpoints
from loramux.batches.run import BatchServer, Window
from loramux.batches.service import Batches, BatchWorker
from loramux.common.jobs import JobRunner, run_periodically
from loramux.data.entities import Batch
from loramux.releases.base_upgrades import BaseUpgrades
from loramux.releases.evaluations import Evaluations
from loramux.releases.judges import KeyVault, open_judges
from loramux.releases.metrics import RevisionMetrics, open_revision_metrics
from loramux.releases.policies import CanaryGuards, ReleasePolicies, open_canary_guards
from loramux.releases.shadows import Shadows, open_shadows
from loramux.server.platform import Platform

BATCH_SECONDS = 10.0
SWEEP_SECONDS = 3600.0
EVALUATION_SECONDS = 5.0
MOVE_SECONDS = 5.0


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


@asynccontextmanager
async def open_programs(platform: Platform, endpoints: BatchEndpoints) -> AsyncIterator[Programs]:
    """Run the programs of `platform` while the block runs. Another server continues unfinished work after its end."""
    database, blobs, completions, adapters = platform.database, platform.blobs, platform.completions, platform.adapters
    server_id = platform.usage.server_id
    async with AsyncExitStack() as stack:
        revision_metrics = await stack.enter_async_context(open_revision_metrics(database, completions))
        files = Files(
            database, blobs, platform.settings.batches, platform.settings.privacy.file_seconds, platform.memory
        )
        stack.callback(files.threads.close)
        worker = _batch_worker(platform, files, endpoints)
        stack.push_async_callback(worker.jobs.stop)
        batches = Batches(database, worker, files, endpoints, platform.settings.batches)
        await stack.enter_async_context(run_periodically(BATCH_SECONDS, worker.tend))
        await stack.enter_async_context(run_periodically(SWEEP_SECONDS, worker.sweep))
        evaluations = Evaluations(
            database=database,
            blobs=blobs,
            files=files,
            batches=batches,
            queries=adapters.queries,
            completions=completions,
            server_id=server_id,
            judges=await stack.enter_async_context(open_judges(platform.settings.batches)),
            keys=KeyVault(platform.tenants.pepper),
        )
        stack.push_async_callback(evaluations.stop)
        await stack.enter_async_context(run_periodically(EVALUATION_SECONDS, evaluations.tend))
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
        )


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
