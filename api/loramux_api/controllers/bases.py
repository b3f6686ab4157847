"""/admin/bases, /admin/migrations and /v1/migrations: base models, and adapters that move between them.

Operators add and retire base models while servers run, check a base's adapters on another base, and move adapters that
fit. Tenants read the results for their own adapters.
"""

from __future__ import annotations

import msgspec
from litestar import get, post
from litestar.di import NamedDependency
from litestar.params import FromQuery, JSONBody

from loramux.accounts.tenants.tenants import Tenants
from loramux.common.identity import Principal
from loramux.releases.base_upgrades import BaseUpgrades, Shifted
from loramux.serving.lifecycle import BaseLifecycle
from loramux_api.auth import requires
from loramux_api.openapi import ApiController, OperatorController
from loramux_api.parameters import AfterPosition, PageLimit, PathName
from loramux_api.schemas.bases import BaseBody, BaseObject, RetireBody, base_object
from loramux_api.schemas.migrations import (
    MigrationBody,
    MigrationItemObject,
    MigrationObject,
    MigrationPromoteBody,
    MigrationRollbackBody,
    Outcome,
    ReportObject,
    ShiftedList,
    item_object,
    migration_object,
    report_object,
    shifted_object,
)
from loramux_api.schemas.tenancy import Listing

PAGE = 500
"""Maximum number of adapters that one call moves, as in `releases.base_upgrades`."""


class AdminBaseController(OperatorController):
    """The base models of this server."""

    path = "/admin/bases"

    @get(summary="List base models")
    async def list_bases(self, lifecycle: NamedDependency[BaseLifecycle]) -> Listing[BaseObject]:
        """List the base models of the settings file and the base models that were added, with their state on this
        server.
        """
        return Listing(data=[base_object(status) for status in lifecycle.statuses()])

    @post(status_code=202, summary="Add a base model")
    async def add(
        self, data: JSONBody[BaseBody], lifecycle: NamedDependency[BaseLifecycle], operators: NamedDependency[Tenants]
    ) -> BaseObject:
        """Check a base model and start its engines on every server. The list shows when the base model is served.

        A retired base model is served again. Other base models are served without interruption, even if this base model
        does not load.
        """
        return base_object(await lifecycle.add(operators.changes, msgspec.to_builtins(data)))

    @post("/retire", status_code=202, summary="Retire a base model")
    async def retire(
        self, data: JSONBody[RetireBody], lifecycle: NamedDependency[BaseLifecycle], operators: NamedDependency[Tenants]
    ) -> BaseObject:
        """Refuse new uploads and requests for a base model, and stop its engines when no request runs.

        After that, requests to the base's adapters get 410, and the error names the base model to use instead.
        """
        return base_object(await lifecycle.retire(operators.changes, data.name, data.successor, force=data.force))


class AdminMigrationController(OperatorController):
    """Migrations of every tenant's adapters."""

    path = "/admin/migrations"

    @get(summary="List migrations")
    async def list_migrations(
        self, base_upgrades: NamedDependency[BaseUpgrades], limit: PageLimit = 100
    ) -> Listing[MigrationObject]:
        """List migrations of adapters between base models, newest first."""
        return Listing(data=[migration_object(one) for one in await base_upgrades.newest(limit)])

    @post(status_code=202, summary="Begin a migration")
    async def begin(
        self,
        data: JSONBody[MigrationBody],
        operators: NamedDependency[Tenants],
        base_upgrades: NamedDependency[BaseUpgrades],
    ) -> MigrationObject:
        """Check the adapters of one base model on another base model in the background. No answer changes."""
        made = await base_upgrades.begin(
            operators.changes,
            source=data.source,
            target=data.target,
            tenant=data.tenant,
            adapter=data.adapter,
            evaluates=data.evaluate,
        )
        return migration_object(made)

    @get("/{migration_id:str}", summary="Describe a migration")
    async def get_migration(
        self, migration_id: PathName, base_upgrades: NamedDependency[BaseUpgrades]
    ) -> MigrationObject:
        """Return one migration with its counts."""
        return migration_object(await base_upgrades.get(migration_id))

    @get("/{migration_id:str}/items", summary="List a migration's adapters")
    async def list_items(
        self,
        migration_id: PathName,
        base_upgrades: NamedDependency[BaseUpgrades],
        outcome: FromQuery[Outcome | None] = None,
        after: AfterPosition = None,
        limit: PageLimit = 100,
    ) -> Listing[MigrationItemObject]:
        """List the adapters with their results. `after` is the last position of the previous page."""
        wanted = {} if outcome is None else {"outcomes": (outcome,)}
        found = await base_upgrades.items(migration_id, after=-1 if after is None else after, limit=limit, **wanted)
        return Listing(data=[item_object(item) for item in found])

    @post("/{migration_id:str}/cancel", status_code=200, summary="Cancel a migration")
    async def cancel(
        self,
        migration_id: PathName,
        operators: NamedDependency[Tenants],
        base_upgrades: NamedDependency[BaseUpgrades],
    ) -> MigrationObject:
        """End a running migration. The migration's decisions so far remain, and a further migration continues from
        them.
        """
        return migration_object(await base_upgrades.cancel(operators.changes, migration_id))

    @post("/{migration_id:str}/promote", status_code=200, summary="Move adapters to the target")
    async def promote(
        self,
        migration_id: PathName,
        data: JSONBody[MigrationPromoteBody],
        principal: NamedDependency[Principal],
        base_upgrades: NamedDependency[BaseUpgrades],
    ) -> ShiftedList:
        """Give the new revisions of adapters that fit a share of their aliases: a canary's share, or all requests.

        Release policies apply. One call moves at most 500 adapters; `next` is where the next call begins.
        """
        return _shifted(
            await base_upgrades.shift(
                principal, migration_id, data.weight, tenant=data.tenant, adapter=data.adapter, after=data.after
            )
        )

    @post("/{migration_id:str}/rollback", status_code=200, summary="Move adapters back")
    async def roll_back(
        self,
        migration_id: PathName,
        data: JSONBody[MigrationRollbackBody],
        principal: NamedDependency[Principal],
        base_upgrades: NamedDependency[BaseUpgrades],
    ) -> ShiftedList:
        """Restore the targets that the aliases had before the new revisions."""
        return _shifted(
            await base_upgrades.shift(
                principal, migration_id, 0, tenant=data.tenant, adapter=data.adapter, after=data.after
            )
        )


class MigrationController(ApiController):
    """Results of migrations for the caller's own adapters."""

    path = "/v1/migrations"
    tags = ("Adapters",)
    guards = (requires("read"),)

    @get(summary="List migration reports")
    async def list_reports(
        self,
        principal: NamedDependency[Principal],
        base_upgrades: NamedDependency[BaseUpgrades],
        limit: PageLimit = 100,
    ) -> Listing[ReportObject]:
        """List the results of migrations to another base model for your adapters, newest migration first."""
        found = await base_upgrades.reports(principal, limit)
        return Listing(data=[report_object(migration, item) for migration, item in found])


def _shifted(shifted: list[Shifted]) -> ShiftedList:
    following = shifted[-1].item.position if len(shifted) == PAGE else None
    return ShiftedList(data=[shifted_object(one) for one in shifted], next=following)
