"""JSON objects of migrations of adapters between base models. Times are Unix seconds."""

from __future__ import annotations

from typing import Annotated, Literal

import msgspec
from msgspec import Meta

from loramux.common.units import SECOND
from loramux.data.entities import BaseUpgrade, UpgradeItem
from loramux.releases.base_upgrades import Shifted, Upgrade
from loramux_api.bodies import Body
from loramux_api.schemas.bounds import Name
from loramux_api.schemas.tenancy import seconds

Outcome = Literal["pending", "evaluating", "fits", "needs_retraining", "refused"]


class MigrationBody(Body, forbid_unknown_fields=True):
    """A migration to begin."""

    source: Name
    """The base model that the adapters are for."""
    target: Name
    """The base model on which the adapters are checked. The target must be served already."""
    tenant: Name | None = None
    """The name of one tenant; null: all tenants."""
    adapter: Name | None = None
    """One adapter, as `tenant/adapter`; null: all adapters."""
    evaluate: bool = True
    """Repeat the owners' evaluations, as batches that belong to the owners and are on their bill."""


class MigrationRollbackBody(Body, forbid_unknown_fields=True):
    """Adapters of a migration to move."""

    tenant: Name | None = None
    adapter: Name | None = None
    """One adapter, as `tenant/adapter`; null: all adapters."""
    after: Annotated[int, Meta(ge=-1, le=2**53)] = -1
    """Position after which the call begins: `next` of the previous call."""


class MigrationPromoteBody(MigrationRollbackBody):
    """Adapters of a migration to move to the target."""

    weight: Annotated[int, Meta(ge=1, le=100)] = 100
    """Percentage of the old revision's traffic that moves to the new revision; below 100 it is a canary."""


class MigrationObject(msgspec.Struct, kw_only=True):
    """A migration."""

    id: str
    object: Literal["base_migration"] = "base_migration"
    source: str
    target: str
    tenant: str | None
    adapter: str | None
    """Name of the adapter, without its tenant."""
    evaluate: bool
    status: Literal["running", "completed", "cancelled", "failed"]
    error: str | None
    outcomes: dict[Outcome, int]
    """Number of revisions by outcome."""
    created_at: int
    finished_at: int | None


class MigrationItemObject(msgspec.Struct, kw_only=True):
    """One revision of a migration."""

    position: int
    object: Literal["base_migration_item"] = "base_migration_item"
    adapter: str
    """Name `tenant/adapter`."""
    revision: int
    outcome: Outcome
    code: str | None
    """Stable code of the reason why the adapter does not fit, or `not_evaluated`."""
    reason: str | None
    new_revision: int | None
    """Number of the revision with the same files for the target."""
    evaluation_id: str | None
    weight: int
    """Part of the adapter's share of aliases, in percent, that the last call moved to the new revision."""


class ReportObject(MigrationItemObject, kw_only=True):
    """Result of a migration for one of your adapters."""

    migration_id: str
    source: str
    target: str
    created_at: int


class ShiftedObject(msgspec.Struct, kw_only=True):
    """An adapter after it was moved, or the reason why it was not."""

    position: int
    adapter: str
    revision: int
    new_revision: int | None
    aliases: list[str]
    """Aliases that were moved."""
    code: str | None
    error: str | None


class ShiftedList(msgspec.Struct, kw_only=True):
    """Adapters that one call moved."""

    data: list[ShiftedObject]
    object: Literal["list"] = "list"
    next: int | None
    """Value of `after` for the next call; null: there are no more adapters."""


def migration_object(found: Upgrade) -> MigrationObject:
    """Return the migration as a JSON object."""
    one = found.upgrade
    return MigrationObject(
        id=one.id,
        source=one.source,
        target=one.target,
        tenant=one.tenant,
        adapter=one.adapter,
        evaluate=bool(one.evaluates),
        status=one.state,  # type: ignore[arg-type]  # the row's check has the four
        error=one.error,
        outcomes=found.counts,  # type: ignore[arg-type]  # the row's check has the five
        created_at=one.created_at // SECOND,
        finished_at=seconds(one.finished_at),
    )


def item_object(item: UpgradeItem) -> MigrationItemObject:
    """Return the result for one revision as a JSON object."""
    return MigrationItemObject(
        position=item.position,
        adapter=item.name,
        revision=item.number,
        outcome=item.outcome,  # type: ignore[arg-type]  # the row's check has the five
        code=item.code,
        reason=item.reason,
        new_revision=item.new_number,
        evaluation_id=item.evaluation_id,
        weight=item.weight,
    )


def report_object(migration: BaseUpgrade, item: UpgradeItem) -> ReportObject:
    """Return the result of a migration for one revision of a tenant."""
    return ReportObject(
        **msgspec.structs.asdict(item_object(item)),
        migration_id=migration.id,
        source=migration.source,
        target=migration.target,
        created_at=migration.created_at // SECOND,
    )


def shifted_object(shifted: Shifted) -> ShiftedObject:
    """Return a moved adapter as a JSON object."""
    return ShiftedObject(
        position=shifted.item.position,
        adapter=shifted.item.name,
        revision=shifted.item.number,
        new_revision=shifted.item.new_number,
        aliases=list(shifted.aliases),
        code=None if shifted.error is None else shifted.error.code,
        error=None if shifted.error is None else shifted.error.message,
    )
