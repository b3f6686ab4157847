"""Refusals of pushes.

RegistryError(message, field)
├── AlreadyLoaded        400  the name has other weights, and the push does not replace them
├── InvalidPlace         400  a place that cannot have an adapter
├── TooManySeries        400  the tenant has as many series as the settings allow
├── PlaceNotAllowed      403  the settings name no folder, or do not allow shared memory
├── PlaceNotFound        404  no adapter of this tenant is there
└── TooManyPushes        429  the tenant's earlier pushes are still being checked
"""

from __future__ import annotations

from http import HTTPStatus

from loramux.catalog.registry.errors import RegistryError


class AlreadyLoaded(RegistryError):
    """The name has other weights. vLLM refuses such a load too, unless it replaces the weights in place."""

    code = "adapter_already_loaded"

    def __init__(self, name: str) -> None:
        super().__init__(
            f"The lora adapter '{name[:160]}' has already been loaded. "
            "If you want to load the adapter in place, set 'load_inplace' to True.",
            "lora_name",
        )


class InvalidPlace(RegistryError):
    """The place is no path and no segment. The message states what is accepted."""

    code = "invalid_value"


class TooManySeries(RegistryError):
    """The tenant has as many series as the settings allow. The message names the setting."""

    code = "too_many_series"


class PlaceNotAllowed(RegistryError):
    """The settings allow no pushes from this kind of place. The message names the setting."""

    code = "not_permitted"
    status = HTTPStatus.FORBIDDEN


class PlaceNotFound(RegistryError):
    """The place is absent, belongs to another tenant or user, or has no adapter. The caller cannot tell the
    difference.
    """

    code = "adapter_files_missing"
    status = HTTPStatus.NOT_FOUND


class TooManyPushes(RegistryError):
    """Earlier pushes of the tenant wait for their check."""

    code = "too_many_pushes"
    status = HTTPStatus.TOO_MANY_REQUESTS
    retry_after = 1
