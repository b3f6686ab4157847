"""What the registry knows, as it is shown. Times in microseconds since the epoch."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import msgspec

from loramux.records.aliases import DEFAULT_ALIAS, Pointed, targets_of
from loramux.records.lifecycle_models import AliasVersionRow, GrantRow, PinRow
from loramux.records.models import AdapterRow, RevisionRow


class WeightedRevision(msgspec.Struct, frozen=True):
    """A revision by its number, and its share of an alias: `weight` of the sum over the alias's targets."""

    revision: int
    weight: int


class AliasInfo(msgspec.Struct, frozen=True, kw_only=True):
    """What an alias points at."""

    name: str
    targets: tuple[WeightedRevision, ...]
    """By revision number."""
    version: int
    """Of its history."""
    updated_at: int

    @property
    def main(self) -> int:
        """The revision with the largest share, of equal ones the newest."""
        return max(self.targets, key=lambda target: (target.weight, target.revision)).revision


class AliasVersion(msgspec.Struct, frozen=True, kw_only=True):
    """What an alias pointed at, from one change to the next; at nothing where it was removed."""

    version: int
    targets: tuple[WeightedRevision, ...]
    restores: int | None
    """The version that a rollback went back to."""
    changed_by: str
    changed_at: int


class AdapterInfo(msgspec.Struct, frozen=True, kw_only=True):
    """An adapter, and the revision that most of its default alias goes to. `created_at` is that revision's."""

    id: str
    name: str
    """`tenant/adapter`."""
    revision: int
    digest: str
    state: str
    rank: int
    """The largest of its modules'."""
    size_bytes: int
    created_at: int
    aliases: tuple[AliasInfo, ...]
    version: int
    """Counts the changes of everything under the adapter's name."""
    expires_at: int | None


class PinInfo(msgspec.Struct, frozen=True, kw_only=True):
    """Since when a revision is kept in the pool, by whom, and about when it was last used."""

    since: int
    pinned_by: str
    used_at: int


class RevisionInfo(msgspec.Struct, frozen=True, kw_only=True):
    """One of an adapter's revisions: `ready`, or `deleted` and to be undone until `purge_at`."""

    id: str
    name: str
    """`tenant/adapter@3`."""
    number: int
    digest: str
    state: str
    rank: int
    size_bytes: int
    created_at: int
    deleted_at: int | None
    purge_at: int | None
    expires_at: int | None
    aliases: tuple[str, ...] = ()
    """Those that have it as a target."""
    pin: PinInfo | None = None


class GrantInfo(msgspec.Struct, frozen=True, kw_only=True):
    """A tenant that may call somebody else's adapter."""

    tenant: str
    granted_by: str
    granted_at: int


class Revision(msgspec.Struct, frozen=True, kw_only=True):
    """Immutable weights: a digest, and the local folder with the verified files."""

    adapter_id: str
    number: int
    digest: str
    directory: Path


class ResolvedModel(msgspec.Struct, frozen=True, kw_only=True):
    """What a model name means at this moment: `tenant/adapter@3`, or the base model (no revision)."""

    name: str
    base_model: str
    """The base model's served name."""
    revision: Revision | None


def etag(version: int) -> str:
    """An adapter's version as HTTP has it."""
    return f'"{version}"'


def alias_info(pointed: Pointed) -> AliasInfo:
    """The rows, as they are shown."""
    return AliasInfo(
        name=pointed.alias.name,
        targets=tuple(WeightedRevision(target.revision.number, target.weight) for target in pointed.targets),
        version=pointed.alias.version,
        updated_at=pointed.alias.updated_at,
    )


def version_info(row: AliasVersionRow) -> AliasVersion:
    """The row, as it is shown."""
    return AliasVersion(
        version=row.version,
        targets=tuple(WeightedRevision(number, weight) for number, weight in sorted(targets_of(row).items())),
        restores=row.restores,
        changed_by=row.changed_by,
        changed_at=row.changed_at,
    )


def adapter_info(tenant_name: str, adapter: AdapterRow, aliases: Sequence[Pointed]) -> AdapterInfo:
    """The rows, as they are shown."""
    infos = {pointed.alias.name: alias_info(pointed) for pointed in aliases}
    main = infos[DEFAULT_ALIAS].main
    revision = next(t.revision for pointed in aliases for t in pointed.targets if t.revision.number == main)
    return AdapterInfo(
        id=adapter.id,
        name=f"{tenant_name}/{adapter.name}",
        revision=revision.number,
        digest=revision.digest,
        state=revision.state,
        rank=revision.rank,
        size_bytes=revision.size_bytes,
        created_at=revision.created_at,
        aliases=tuple(infos.values()),
        version=adapter.version,
        expires_at=adapter.expires_at,
    )


def revision_info(
    adapter_name: str, revision: RevisionRow, aliases: Sequence[Pointed] = (), pin: PinRow | None = None
) -> RevisionInfo:
    """The rows, as they are shown; `adapter_name` is `tenant/adapter`."""
    naming = (pointed for pointed in aliases if any(t.revision.id == revision.id for t in pointed.targets))
    return RevisionInfo(
        id=revision.id,
        name=f"{adapter_name}@{revision.number}",
        number=revision.number,
        digest=revision.digest,
        state=revision.state,
        rank=revision.rank,
        size_bytes=revision.size_bytes,
        created_at=revision.created_at,
        deleted_at=revision.deleted_at,
        purge_at=revision.purge_at,
        expires_at=revision.expires_at,
        aliases=tuple(pointed.alias.name for pointed in naming),
        pin=None if pin is None else pin_info(pin),
    )


def pin_info(pin: PinRow) -> PinInfo:
    """The row, as it is shown."""
    return PinInfo(since=pin.since, pinned_by=pin.pinned_by, used_at=pin.used_at)


def grant_info(grant: GrantRow) -> GrantInfo:
    """The row, as it is shown."""
    return GrantInfo(tenant=grant.grantee, granted_by=grant.granted_by, granted_at=grant.granted_at)
