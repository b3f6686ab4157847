"""The list of models on the wire."""

from __future__ import annotations

from typing import Literal

import msgspec


class Model(msgspec.Struct, kw_only=True):
    """The base model, or one of the caller's adapters."""

    id: str
    object: Literal["model"] = "model"
    created: int
    owned_by: str
    root: str
    """The base model itself, or the adapter's own name."""
    parent: str | None = None
    """The base model under an adapter."""
    max_model_len: int


class ModelList(msgspec.Struct, kw_only=True):
    """Every model that the caller can name."""

    object: Literal["list"] = "list"
    data: list[Model]
