"""Entities of the registry as callers see them. Times in microseconds since the epoch."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated

import msgspec

from loramux.common.bundle import Bundle
from loramux.data.entities import TrainingCard
from loramux.data.records.access import GrantRow
from loramux.data.records.adapters import AdapterRow, RevisionRow
from loramux.data.records.aliases import DEFAULT_ALIAS, AliasVersionRow, Pointed, targets_of
from loramux.data.records.base import to_struct
from loramux.data.records.pins import PinRow

MAX_REVISION = 999_999_999
RevisionNumber = Annotated[int, msgspec.Meta(ge=1, le=MAX_REVISION)]


class WeightedRevision(msgspec.Struct, frozen=True):
    """A revision by its number, and its share of an alias: its `weight` divided by the sum over the alias's targets."""

    revision: RevisionNumber
    weight: int


class AliasInfo(msgspec.Struct, frozen=True, kw_only=True):
    """A movable name of an adapter, and its targets."""

    name: str
    targets: tuple[WeightedRevision, ...]
    """Targets in the order of their revision numbers."""
    version: int
    """The latest version of the alias's history."""
    updated_at: int

    @property
    def main(self) -> int:
        """Return the revision with the largest share; of equal shares, the newest revision."""
        return max(self.targets, key=lambda target: (target.weight, target.revision)).revision


class AliasVersion(msgspec.Struct, frozen=True, kw_only=True):
    """The targets of an alias from one change to the next; no targets if the alias was removed."""

    version: int
    targets: tuple[WeightedRevision, ...]
    restores: int | None
    """The version that a rollback restored."""
    changed_by: str
    changed_by_name: str | None
    """The name of the key or the member; None if it has no name."""
    changed_at: int


class AdapterInfo(msgspec.Struct, frozen=True, kw_only=True):
    """An adapter, and the main revision of its default alias. `created_at` is that revision's."""

    id: str
    name: str
    """The adapter's name: `tenant/adapter`."""
    revision: int
    digest: str
    base_model: str
    """The base for which the revision was uploaded; empty if the revision is from a release that had only one base."""
    state: str
    rank: int
    """The largest rank of the revision's modules."""
    size_bytes: int
    created_at: int
    aliases: tuple[AliasInfo, ...]
    version: int
    """The number of changes of everything under the adapter's name."""
    expires_at: int | None


class PinInfo(msgspec.Struct, frozen=True, kw_only=True):
    """A pin: its start, its author, and the approximate time of the revision's last use."""

    since: int
    pinned_by: str
    used_at: int


class RevisionInfo(msgspec.Struct, frozen=True, kw_only=True):
    """A revision of an adapter: `ready`, or `deleted` and restorable until `purge_at`."""

    id: str
    name: str
    """The revision's name: `tenant/adapter@3`."""
    number: int
    digest: str
    base_model: str
    """The base for which the revision was uploaded; empty if the revision is from a release that had only one base."""
    state: str
    rank: int
    size_bytes: int
    created_at: int
    deleted_at: int | None
    purge_at: int | None
    expires_at: int | None
    aliases: tuple[str, ...] = ()
    """Aliases that have the revision as a target."""
    pin: PinInfo | None = None
    bundle: Bundle | msgspec.UnsetType | None = msgspec.UNSET
    """The revision's bundle, which is served with its weights; unset in lists."""
    training: TrainingCard | msgspec.UnsetType | None = msgspec.UNSET
    """The fine-tuning job that has made the revision; None: it was uploaded; unset in lists."""


class CallableAdapter(msgspec.Struct, frozen=True, kw_only=True):
    """An adapter that the caller may call, as a list of models shows it."""

    name: str
    """The adapter's name: `tenant/adapter`."""
    created_at: int
    """The time of the adapter's main revision; for another tenant's adapter, the time of the grant."""
    base_model: str
    """The base of the revision with the largest share of the default alias."""
    version: str | None = None
    """The version that answers, of a training adapter: `tenant/adapter@12`."""


class GrantInfo(msgspec.Struct, frozen=True, kw_only=True):
    """A tenant that may call another tenant's adapter."""

    tenant: str
    granted_by: str
    granted_by_name: str | None = None
    """The name of the key or the member; None if it has no name, and in stored answers of an earlier release."""
    granted_at: int


def etag(version: int) -> str:
    """Format an adapter's version as HTTP writes it."""
    return f'"{version}"'


def alias_info(pointed: Pointed) -> AliasInfo:
    """Build the public record from rows."""
    return AliasInfo(
        name=pointed.alias.name,
        targets=tuple(WeightedRevision(target.revision.number, target.weight) for target in pointed.targets),
        version=pointed.alias.version,
        updated_at=pointed.alias.updated_at,
    )


def version_info(row: AliasVersionRow, name: str | None) -> AliasVersion:
    """Build the public record from a row, and the name of the row's actor."""
    targets = tuple(WeightedRevision(number, weight) for number, weight in sorted(targets_of(row).items()))
    return to_struct(AliasVersion, row, targets=targets, changed_by_name=name)


def adapter_info(tenant_name: str, adapter: AdapterRow, aliases: Sequence[Pointed]) -> AdapterInfo:
    """Build the public record from rows."""
    infos = {pointed.alias.name: alias_info(pointed) for pointed in aliases}
    main = infos[DEFAULT_ALIAS].main
    revision = next(t.revision for pointed in aliases for t in pointed.targets if t.revision.number == main)
    return to_struct(
        AdapterInfo,
        revision,
        id=adapter.id,
        name=f"{tenant_name}/{adapter.name}",
        revision=revision.number,
        aliases=tuple(infos.values()),
        version=adapter.version,
        expires_at=adapter.expires_at,
    )


def revision_info(
    adapter_name: str, revision: RevisionRow, aliases: Sequence[Pointed] = (), pin: PinRow | None = None
) -> RevisionInfo:
    """Build the public record from rows; `adapter_name` is `tenant/adapter`."""
    naming = (pointed for pointed in aliases if any(t.revision.id == revision.id for t in pointed.targets))
    return to_struct(
        RevisionInfo,
        revision,
        name=f"{adapter_name}@{revision.number}",
        aliases=tuple(pointed.alias.name for pointed in naming),
        pin=None if pin is None else to_struct(PinInfo, pin),
        bundle=msgspec.UNSET,
        training=msgspec.UNSET,
    )


def grant_info(grant: GrantRow, name: str | None) -> GrantInfo:
    """Build the public record from a row, and the name of the row's actor."""
    return to_struct(GrantInfo, grant, tenant=grant.grantee, granted_by_name=name)
