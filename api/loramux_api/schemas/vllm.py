"""vLLM's words for loading and unloading adapters at run time."""

from __future__ import annotations

from collections.abc import Mapping
from typing import ClassVar

import msgspec

from loramux_api.schemas.strict import Body, Unsupported


class LoadLoraBody(Body):
    """`LoadLoRAAdapterRequest`."""

    lora_name: str = ""
    """`adapter` of the key's own tenant, or `tenant/adapter` of any."""
    lora_path: str = ""
    """A folder below `adapters.local_root`, absolute or from there."""
    load_inplace: bool = False

    ignored: ClassVar[frozenset[str]] = frozenset({"base_model_name"})
    unsupported: ClassVar[Mapping[str, Unsupported]] = {
        "is_3d_lora_weight": Unsupported("the adapter's own configuration says what its weights are.", (None, False))
    }


class UnloadLoraBody(Body):
    """`UnloadLoRAAdapterRequest`."""

    lora_name: str = ""

    ignored: ClassVar[frozenset[str]] = frozenset({"lora_int_id"})


class VllmError(msgspec.Struct, kw_only=True):
    """`ErrorInfo`: `code` is the HTTP status."""

    message: str
    type: str
    param: str | None = None
    code: int


class VllmErrorAnswer(msgspec.Struct):
    """`ErrorResponse`."""

    error: VllmError
