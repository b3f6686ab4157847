"""What serves beside the platform: batches, evaluations, shadows, and the releases' guards, policies and migrations."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass

from loramux.batches import Batch, Batches, Files, open_batches
from loramux.gateway import Platform
from loramux.jobs import JobRunner
from loramux.releases import (
    BaseMigrations,
    CanaryGuards,
    Evaluations,
    ReleasePolicies,
    RevisionMetrics,
    Shadows,
    open_base_migrations,
    open_canary_guards,
    open_evaluations,
    open_revision_metrics,
    open_shadows,
)
from loramux_api.auth import Connection
from loramux_api.batch_endpoints import batch_endpoints


@dataclass(frozen=True, slots=True)
class Services:
    """The services of an open platform; requests reach them by `services_of`."""

    batches: Batches
    files: Files
    jobs: JobRunner[Batch]
    """Runs the batches of this server."""
    evaluations: Evaluations
    guards: CanaryGuards
    shadows: Shadows
    policies: ReleasePolicies
    migrations: BaseMigrations
    revision_metrics: RevisionMetrics


@asynccontextmanager
async def open_services(platform: Platform) -> AsyncIterator[Services]:
    """Run the services of `platform` while the block runs."""
    async with (
        open_revision_metrics(platform) as revision_metrics,
        open_batches(platform, batch_endpoints(platform)) as batches,
        open_evaluations(platform, batches) as evaluations,
        open_canary_guards(platform) as guards,
        open_shadows(platform, batches.files) as shadows,
        open_base_migrations(platform, evaluations) as migrations,
    ):
        yield Services(
            batches=batches.batches,
            files=batches.files,
            jobs=batches.jobs,
            evaluations=evaluations,
            guards=guards,
            shadows=shadows,
            policies=ReleasePolicies(platform),
            migrations=migrations,
            revision_metrics=revision_metrics,
        )


def services_of(connection: Connection) -> Services:
    """Return the services that the application runs."""
    services = connection.app.state.services
    assert isinstance(services, Services)
    return services
