"""Names of adapters and what they mean: upload, resolve, list, delete."""

from loramux.registry.entities import AdapterInfo, ResolvedModel, Revision
from loramux.registry.errors import (
    AdapterNotFound,
    InvalidName,
    ModelNotFound,
    RegistryError,
    RevisionUnavailable,
    TooManyAdapters,
    ValidationUnavailable,
)
from loramux.registry.intake import Arrival, Intake, Withdrawn
from loramux.registry.names import ModelName, parse_model
from loramux.registry.registry import Registry

__all__ = [
    "AdapterInfo",
    "AdapterNotFound",
    "Arrival",
    "Intake",
    "InvalidName",
    "ModelName",
    "ModelNotFound",
    "Registry",
    "RegistryError",
    "ResolvedModel",
    "Revision",
    "RevisionUnavailable",
    "TooManyAdapters",
    "ValidationUnavailable",
    "Withdrawn",
    "parse_model",
]
