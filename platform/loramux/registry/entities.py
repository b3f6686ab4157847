"""What the registry knows, as it is shown."""

from __future__ import annotations

from pathlib import Path

import msgspec

from loramux.records import Principal
from loramux.records.adapters import Listed


class AdapterInfo(msgspec.Struct, frozen=True, kw_only=True):
    """An adapter and its current revision. `created_at` is the revision's, in microseconds since the epoch."""

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


def info_of(principal: Principal, listed: Listed) -> AdapterInfo:
    """What the caller is told of one of its adapters."""
    adapter, revision = listed
    return AdapterInfo(
        id=adapter.id,
        name=f"{principal.tenant_name}/{adapter.name}",
        revision=revision.number,
        digest=revision.digest,
        state=revision.state,
        rank=revision.rank,
        size_bytes=revision.size_bytes,
        created_at=revision.created_at,
    )
