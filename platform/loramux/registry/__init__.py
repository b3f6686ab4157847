"""Names of adapters and what they mean: upload, resolve, release, share, pin, delete."""

from loramux.records.pins import StandingPin
from loramux.registry.changing import UNCONDITIONAL, Once, Terms
from loramux.registry.entities import (
    AdapterInfo,
    AliasInfo,
    AliasVersion,
    GrantInfo,
    PinInfo,
    ResolvedModel,
    Revision,
    RevisionInfo,
    WeightedRevision,
    etag,
)
from loramux.registry.errors import (
    AdapterNotFound,
    ChangeConflict,
    InvalidChange,
    InvalidName,
    ModelNotFound,
    PartNotFound,
    PreconditionFailed,
    RegistryError,
    RevisionUnavailable,
    TooManyAdapters,
    ValidationUnavailable,
)
from loramux.registry.intake import Arrival, Intake, Withdrawn
from loramux.registry.names import ModelName, parse_model
from loramux.registry.registry import Registry

__all__ = [
    "UNCONDITIONAL",
    "AdapterInfo",
    "AdapterNotFound",
    "AliasInfo",
    "AliasVersion",
    "Arrival",
    "ChangeConflict",
    "GrantInfo",
    "Intake",
    "InvalidChange",
    "InvalidName",
    "ModelName",
    "ModelNotFound",
    "Once",
    "PartNotFound",
    "PinInfo",
    "PreconditionFailed",
    "Registry",
    "RegistryError",
    "ResolvedModel",
    "Revision",
    "RevisionInfo",
    "RevisionUnavailable",
    "StandingPin",
    "Terms",
    "TooManyAdapters",
    "ValidationUnavailable",
    "WeightedRevision",
    "Withdrawn",
    "etag",
    "parse_model",
]
