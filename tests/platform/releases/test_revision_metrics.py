"""Counts of revisions, added by several servers to the same hours."""

from __future__ import annotations

from collections.abc import Awaitable, Callable

import pytest

from loramux.common.identity import Principal, ProjectId
from loramux.data.entities import FIRST_TOKEN_BOUNDS
from loramux.data.records.database import Database
from loramux.data.records.revision_metrics import COUNTED, Caller, RevisionHour, RevisionMetricsRepository
from loramux.releases.metrics import HOUR, quantile


@pytest.mark.anyio
async def test_revision_hours_add_up_over_servers_and_windows(
    database: Database, enrol: Callable[[str], Awaitable[Principal]]
) -> None:
    acme, globex = await enrol("acme"), await enrol("globex")
    all_of_acme = Caller(acme.tenant, None)
    for tenant, project, hour, count in (
        (acme.tenant, "", 5, 1),
        (acme.tenant, "project_1", 5, 2),
        (acme.tenant, "project_1", 9, 4),
        (globex.tenant, "project_1", 9, 100),
    ):
        async with database.begin() as session:
            counts = {
                RevisionHour(tenant, project, "acme/bot@1", hour * HOUR): {"completed": count, "first_token_3": count}
            }
            await RevisionMetricsRepository(session).add(counts)
    async with database.read() as session:
        metrics = RevisionMetricsRepository(session)
        all_hours = await metrics.sums(all_of_acme, "acme/bot", 0)
        last = await metrics.sums(all_of_acme, "acme/bot", 6 * HOUR)
        assert await metrics.sums(all_of_acme, "acme/bo", 0) == {}
        of_project = await metrics.sums(Caller(acme.tenant, ProjectId("project_1")), "acme/bot", 0)
        by_model = await metrics.sums_by_model(Caller(acme.tenant, ProjectId("project_1")), 0, 10)
    assert all_hours["acme/bot@1"] == dict.fromkeys(COUNTED, 0) | {"completed": 7, "first_token_3": 7}
    assert last["acme/bot@1"]["completed"] == 4
    assert of_project == by_model
    assert of_project["acme/bot@1"]["completed"] == 6
    async with database.begin() as session:
        await RevisionMetricsRepository(session).forget(9 * HOUR)
        left = await RevisionMetricsRepository(session).sums(all_of_acme, "acme/bot", 0)
    assert left["acme/bot@1"]["completed"] == 4


@pytest.mark.parametrize(
    ("bucket", "share", "seconds"), [(0, 0.5, 0.0025), (3, 0.5, 0.0375), (15, 0.99, 30.0), (3, 1.0, 0.05)]
)
def test_quantile_is_between_the_bounds_of_its_counter(bucket: int, share: float, seconds: float) -> None:
    counts = [0] * (len(FIRST_TOKEN_BOUNDS) + 1)
    assert quantile(counts, share) is None
    counts[bucket] = 10
    assert quantile(counts, share) == pytest.approx(seconds)
