"""Names of adapters and their meaning: resolve, release, share, pin, delete. Uploads are in `loramux.uploads`."""

from loramux.records.pins import ActivePin
from loramux.registry.aliases import AliasService, check_alias
from loramux.registry.bases import AbsentBase, BaseModel, BaseModels
from loramux.registry.blob_gc import BlobCollector
from loramux.registry.changes import UNCONDITIONAL, AdapterChange, AnswerStore, ChangeService, Preconditions
from loramux.registry.entities import (
    MAX_REVISION,
    AdapterInfo,
    AliasInfo,
    AliasVersion,
    GrantInfo,
    PinInfo,
    ResolvedModel,
    Revision,
    RevisionInfo,
    RevisionNumber,
    WeightedRevision,
    engine_key,
    etag,
)
from loramux.registry.errors import (
    AdapterNotFound,
    BaseRetired,
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
from loramux.registry.registry import Registry, open_registry
from loramux.registry.resolver import ModelName, ModelResolver, parse_model

__all__ = [
    "MAX_REVISION",
    "UNCONDITIONAL",
    "AbsentBase",
    "ActivePin",
    "AdapterChange",
    "AdapterInfo",
    "AdapterNotFound",
    "AliasInfo",
    "AliasService",
    "AliasVersion",
    "AnswerStore",
    "BaseModel",
    "BaseModels",
    "BaseRetired",
    "BlobCollector",
    "ChangeConflict",
    "ChangeService",
    "GrantInfo",
    "InvalidChange",
    "InvalidName",
    "ModelName",
    "ModelNotFound",
    "ModelResolver",
    "PartNotFound",
    "PinInfo",
    "PreconditionFailed",
    "Preconditions",
    "Registry",
    "RegistryError",
    "ResolvedModel",
    "Revision",
    "RevisionInfo",
    "RevisionNumber",
    "RevisionUnavailable",
    "TooManyAdapters",
    "ValidationUnavailable",
    "WeightedRevision",
    "check_alias",
    "engine_key",
    "etag",
    "open_registry",
    "parse_model",
]
