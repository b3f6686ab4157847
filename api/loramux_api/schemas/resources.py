"""Models and adapters."""

from __future__ import annotations

from typing import Literal

import msgspec

from loramux.registry import AdapterInfo

SECOND = 1_000_000
"""Microseconds."""


class Model(msgspec.Struct, kw_only=True):
    """The base model, or one of the caller's adapters."""

    id: str
    object: Literal["model"] = "model"
    created: int
    owned_by: str
    parent: str | None = None
    """The base model under an adapter."""
    max_model_len: int


class ModelList(msgspec.Struct, kw_only=True):
    """Every model that the caller can name."""

    object: Literal["list"] = "list"
    data: list[Model]


class Adapter(msgspec.Struct, kw_only=True):
    """An adapter at its current revision."""

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
    """Unix seconds."""


class AdapterList(msgspec.Struct, kw_only=True):
    """The caller's adapters."""

    object: Literal["list"] = "list"
    data: list[Adapter]


class Deleted(msgspec.Struct, kw_only=True):
    """What is no more."""

    id: str
    name: str
    object: Literal["adapter.deleted"] = "adapter.deleted"
    deleted: bool = True


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
    )
