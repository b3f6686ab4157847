"""Adapters, their revisions, aliases, pins and grants. Times are Unix seconds."""

from __future__ import annotations

from typing import Annotated, Literal

import msgspec
from msgspec import Meta

from loramux.catalog.registry.aliases import MAX_TARGETS
from loramux.catalog.registry.entities import (
    AdapterInfo,
    AliasInfo,
    AliasVersion,
    GrantInfo,
    PinInfo,
    RevisionInfo,
    RevisionNumber,
    WeightedRevision,
    etag,
)
from loramux.common.bundle import AddedToken, Bundle, ProblemType, SamplingDefaults, VectorPooling
from loramux.common.units import SECOND
from loramux.data.entities import TrainingCard
from loramux_api.bodies import Body
from loramux_api.schemas.bounds import Name
from loramux_api.schemas.tenancy import Listing, seconds


class AliasObject(msgspec.Struct, kw_only=True):
    """A movable name: `tenant/adapter:alias`."""

    object: Literal["adapter.alias"] = "adapter.alias"
    name: str
    targets: list[WeightedRevision]
    """Revisions by weight: the weight is the share of requests that a revision gets."""
    version: int
    """Number of the latest change in its history."""
    updated_at: int


class AliasVersionObject(msgspec.Struct, kw_only=True):
    """Targets of an alias from one change to the next."""

    object: Literal["adapter.alias.version"] = "adapter.alias.version"
    version: int
    targets: list[WeightedRevision]
    """Targets; empty if the alias was removed."""
    restores: int | None
    """Version that a rollback restored; null for other changes."""
    changed_by: str
    """Id of the key or the member that made the change."""
    changed_by_name: str | None
    """Name of the key or the member; null if it has no name."""
    changed_at: int


class Adapter(msgspec.Struct, kw_only=True):
    """An adapter, at the revision with the largest weight in its default alias."""

    id: str
    object: Literal["adapter"] = "adapter"
    name: str
    """Name `tenant/adapter`, the value of a request's `model`."""
    revision: int
    digest: str
    """sha256 of what `sha256sum` prints of adapter_config.json, adapter_model.safetensors and, if there is one,
    bundle.json.
    """
    state: str
    rank: int
    size_bytes: int
    created_at: int
    aliases: list[AliasObject]
    expires_at: int | None
    """Time of the automatic deletion, in Unix seconds; null: never."""
    etag: str
    """Value for `If-Match`; also in the header `ETag`."""


class AdapterPage(Listing[Adapter], kw_only=True):
    """Adapters by name. If `has_more` is true, request the next page with `after` set to `last_id`."""

    first_id: str | None
    last_id: str | None
    has_more: bool


class PinObject(msgspec.Struct, kw_only=True):
    """A revision that is kept in the pool."""

    since: int
    pinned_by: str
    used_at: int
    """Approximate time of the last request that used the revision."""


class BundleObject(msgspec.Struct, kw_only=True):
    """Settings and parts of a revision in addition to its weights. If a field is null or empty, the base's value
    applies.
    """

    task: Literal["SEQ_CLS", "TOKEN_CLS", "FEATURE_EXTRACTION"] | None
    """PEFT's name of the task that the adapter was trained for; null: generating text."""
    num_labels: int
    """Number of rows of a classifier's head."""
    labels: list[str]
    """Classes of a classifier, in the order of its head's rows."""
    problem_type: ProblemType | None
    """Interpretation of a classifier's numbers; null: each input has one class."""
    pooling: VectorPooling | None
    """Reduction of a text's hidden states to its vector; null: the base's reduction."""
    matryoshka_dimensions: list[int]
    """Lengths to which the revision's vectors may be cut."""
    chat_template: str | None
    special_tokens: dict[str, str]
    """Variables for the chat template."""
    added_tokens: list[AddedToken]
    eos_token_ids: list[int]
    """Tokens that end an answer, instead of the base's."""
    sampling: SamplingDefaults
    """Defaults for requests that leave a parameter out."""
    max_tokens: int | None
    stop: list[str]
    """Stop strings for requests without any."""
    system_prompt: str | None
    """System prompt for conversations that begin without a system message."""
    tool_parser: str | None
    description: str | None
    license: str | None


class RevisionObject(msgspec.Struct, kw_only=True):
    """Immutable weights: `tenant/adapter@3`."""

    id: str
    object: Literal["adapter.revision"] = "adapter.revision"
    name: str
    revision: int
    digest: str
    state: str
    """State of the revision: `ready` or `deleted`. A deletion can be undone until `undo_until`."""
    rank: int
    size_bytes: int
    created_at: int
    deleted_at: int | None
    undo_until: int | None
    expires_at: int | None
    aliases: list[str]
    """Aliases that have the revision as a target."""
    pin: PinObject | None
    bundle: BundleObject | msgspec.UnsetType | None = msgspec.UNSET
    """Bundle that is used with the revision's weights; null: the revision has no bundle. Lists leave this field out."""
    training: TrainingCard | msgspec.UnsetType | None = msgspec.UNSET
    """The fine-tuning job that has made the revision: digests of its data, its hyperparameters and its figures. Null:
    the revision was uploaded. Lists leave this field out.
    """


class GrantObject(msgspec.Struct, kw_only=True):
    """A tenant that may call one of your adapters, at its own cost."""

    object: Literal["adapter.grant"] = "adapter.grant"
    tenant: str
    granted_by: str
    """Id of the key or the member that made the grant."""
    granted_by_name: str | None
    """Name of the key or the member; null if it has no name."""
    granted_at: int


class Deleted(msgspec.Struct, kw_only=True):
    """The deleted adapter."""

    id: str
    name: str
    object: Literal["adapter.deleted"] = "adapter.deleted"
    deleted: bool = True


class DeletedAdapterObject(msgspec.Struct, kw_only=True):
    """A deleted adapter, which `POST /v1/adapters/{name}/undelete` restores until `undo_until`."""

    object: Literal["adapter.deleted"] = "adapter.deleted"
    name: str
    """Name `tenant/adapter`."""
    deleted_at: int
    undo_until: int
    revisions: int
    """Number of revisions that are restored with the adapter."""


class PromoteBody(Body, kw_only=True):
    """The revision that becomes an alias's only target."""

    revision: RevisionNumber
    alias: Name = "default"


class AliasBody(Body, kw_only=True):
    """New targets of an alias."""

    targets: Annotated[list[WeightedRevision], Meta(max_length=MAX_TARGETS)]


class TtlBody(Body, kw_only=True):
    """Time until an automatic deletion."""

    ttl_s: int | None
    """Seconds from now until the deletion; null: never."""


def adapter_object(info: AdapterInfo) -> Adapter:
    """Return the registry's record as a JSON object."""
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
        expires_at=seconds(info.expires_at),
        etag=etag(info.version),
    )


def alias_object(info: AliasInfo) -> AliasObject:
    """Return the registry's record as a JSON object."""
    return AliasObject(
        name=info.name, targets=list(info.targets), version=info.version, updated_at=info.updated_at // SECOND
    )


def alias_version_object(version: AliasVersion) -> AliasVersionObject:
    """Return the registry's record as a JSON object."""
    return AliasVersionObject(
        version=version.version,
        targets=list(version.targets),
        restores=version.restores,
        changed_by=version.changed_by,
        changed_by_name=version.changed_by_name,
        changed_at=version.changed_at // SECOND,
    )


def revision_object(info: RevisionInfo) -> RevisionObject:
    """Return the registry's record as a JSON object."""
    return RevisionObject(
        id=info.id,
        name=info.name,
        revision=info.number,
        digest=info.digest,
        state=info.state,
        rank=info.rank,
        size_bytes=info.size_bytes,
        created_at=info.created_at // SECOND,
        deleted_at=seconds(info.deleted_at),
        undo_until=seconds(info.purge_at),
        expires_at=seconds(info.expires_at),
        aliases=list(info.aliases),
        pin=None if info.pin is None else pin_object(info.pin),
        bundle=bundle_object(info.bundle) if isinstance(info.bundle, Bundle) else info.bundle,
        training=info.training,
    )


def bundle_object(bundle: Bundle) -> BundleObject:
    """Return the registry's record as a JSON object."""
    return msgspec.convert(msgspec.structs.asdict(bundle), BundleObject, from_attributes=True)


def pin_object(info: PinInfo) -> PinObject:
    """Return the registry's record as a JSON object."""
    return PinObject(since=info.since // SECOND, pinned_by=info.pinned_by, used_at=info.used_at // SECOND)


def grant_object(info: GrantInfo) -> GrantObject:
    """Return the registry's record as a JSON object."""
    return GrantObject(
        tenant=info.tenant,
        granted_by=info.granted_by,
        granted_by_name=info.granted_by_name,
        granted_at=info.granted_at // SECOND,
    )
