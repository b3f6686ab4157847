"""Adapters, their revisions, aliases, pins and grants. Times in Unix seconds."""

from __future__ import annotations

from typing import Literal

import msgspec

from loramux.registry import (
    AdapterInfo,
    AliasInfo,
    AliasVersion,
    GrantInfo,
    PinInfo,
    RevisionInfo,
    WeightedRevision,
    etag,
)
from loramux_api.schemas.resources import SECOND
from loramux_api.schemas.strict import Body


class AliasObject(msgspec.Struct, kw_only=True):
    """A movable name: `tenant/adapter:alias`."""

    object: Literal["adapter.alias"] = "adapter.alias"
    name: str
    targets: list[WeightedRevision]
    """Each gets `weight` of the sum of all weights."""
    version: int
    """The latest of its history."""
    updated_at: int


class AliasVersionObject(msgspec.Struct, kw_only=True):
    """What an alias pointed at from one change to the next."""

    object: Literal["adapter.alias.version"] = "adapter.alias.version"
    version: int
    targets: list[WeightedRevision]
    """Empty where the alias was removed."""
    restores: int | None
    """The version that a rollback went back to."""
    changed_by: str
    """A key's or a member's id."""
    changed_at: int


class Adapter(msgspec.Struct, kw_only=True):
    """An adapter, at the revision that most of its default alias goes to."""

    id: str
    object: Literal["adapter"] = "adapter"
    name: str
    """`tenant/adapter`: what goes into a request's `model`."""
    revision: int
    digest: str
    """sha256 of the two lines that `sha256sum adapter_config.json adapter_model.safetensors` prints."""
    state: str
    rank: int
    size_bytes: int
    created_at: int
    aliases: list[AliasObject]
    expires_at: int | None
    """When it deletes itself."""
    etag: str
    """For If-Match; also in the header ETag."""


class PinObject(msgspec.Struct, kw_only=True):
    """A revision that is kept in the pool."""

    since: int
    pinned_by: str
    used_at: int
    """About when a request last ran with it."""


class RevisionObject(msgspec.Struct, kw_only=True):
    """Immutable weights: `tenant/adapter@3`."""

    id: str
    object: Literal["adapter.revision"] = "adapter.revision"
    name: str
    revision: int
    digest: str
    state: str
    """`ready`, or `deleted` and to be undone until `undo_until`."""
    rank: int
    size_bytes: int
    created_at: int
    deleted_at: int | None
    undo_until: int | None
    expires_at: int | None
    aliases: list[str]
    """Those that have it as a target."""
    pin: PinObject | None


class GrantObject(msgspec.Struct, kw_only=True):
    """A tenant that may call an adapter of yours, at its own cost."""

    object: Literal["adapter.grant"] = "adapter.grant"
    tenant: str
    granted_by: str
    granted_at: int


class Deleted(msgspec.Struct, kw_only=True):
    """What is no more."""

    id: str
    name: str
    object: Literal["adapter.deleted"] = "adapter.deleted"
    deleted: bool = True


class PromoteBody(Body, kw_only=True):
    """Which revision an alias is to mean alone."""

    revision: int
    alias: str = "default"


class AliasBody(Body, kw_only=True):
    """What an alias is to mean."""

    targets: list[WeightedRevision]


class TtlBody(Body, kw_only=True):
    """When something is to delete itself."""

    ttl_s: int | None
    """Seconds from now; null: never."""


def adapter_object(info: AdapterInfo) -> Adapter:
    """The registry's record, as callers see it."""
    return Adapter(
        id=info.id,
        name=info.name,
        revision=info.revision,
        digest=info.digest,
        state=info.state,
        rank=info.rank,
        size_bytes=info.size_bytes,
        created_at=info.created_at // SECOND,
        aliases=[alias_object(alias) for alias in info.aliases],
        expires_at=_seconds(info.expires_at),
        etag=etag(info.version),
    )


def alias_object(info: AliasInfo) -> AliasObject:
    """The registry's record, as callers see it."""
    return AliasObject(
        name=info.name, targets=list(info.targets), version=info.version, updated_at=info.updated_at // SECOND
    )


def alias_version_object(version: AliasVersion) -> AliasVersionObject:
    """The registry's record, as callers see it."""
    return AliasVersionObject(
        version=version.version,
        targets=list(version.targets),
        restores=version.restores,
        changed_by=version.changed_by,
        changed_at=version.changed_at // SECOND,
    )


def revision_object(info: RevisionInfo) -> RevisionObject:
    """The registry's record, as callers see it."""
    return RevisionObject(
        id=info.id,
        name=info.name,
        revision=info.number,
        digest=info.digest,
        state=info.state,
        rank=info.rank,
        size_bytes=info.size_bytes,
        created_at=info.created_at // SECOND,
        deleted_at=_seconds(info.deleted_at),
        undo_until=_seconds(info.purge_at),
        expires_at=_seconds(info.expires_at),
        aliases=list(info.aliases),
        pin=None if info.pin is None else pin_object(info.pin),
    )


def pin_object(info: PinInfo) -> PinObject:
    """The registry's record, as callers see it."""
    return PinObject(since=info.since // SECOND, pinned_by=info.pinned_by, used_at=info.used_at // SECOND)


def grant_object(info: GrantInfo) -> GrantObject:
    """The registry's record, as callers see it."""
    return GrantObject(tenant=info.tenant, granted_by=info.granted_by, granted_at=info.granted_at // SECOND)


def _seconds(moment: int | None) -> int | None:
    return None if moment is None else moment // SECOND
