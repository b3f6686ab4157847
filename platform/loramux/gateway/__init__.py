"""Requests for completions on their way to the engine and back: no HTTP, no SQL."""

from loramux.engine import EngineClient, EngineDied
from loramux.fleet.member import EngineStatus
from loramux.gateway.adapters import AdapterService
from loramux.gateway.calls import CallDelta
from loramux.gateway.checks import canonical_tags, ensure_storage_allowed
from loramux.gateway.errors import (
    Draining,
    EngineDown,
    FolderNotFound,
    GatewayError,
    GenerationFailed,
    InvalidRequest,
    NotAllowed,
    OverCapacity,
    Unavailable,
)
from loramux.gateway.generation import Generation
from loramux.gateway.messages import (
    Answer,
    AskedFormat,
    ChatEnding,
    ChatOptions,
    Conversation,
    Delta,
    FinishReason,
    GenerationRequest,
    Message,
    Prompt,
    PromptText,
    PromptTokenLogprob,
    Timing,
    Token,
    TokenLogprob,
    Truncation,
    join_calls,
)
from loramux.gateway.platform import (
    BillingServices,
    Platform,
    migrate,
    open_billing,
    open_platform,
    open_sinks,
    open_tenants,
    renew_pepper,
    run_periodically,
)
from loramux.gateway.service import CompletionService, ServedBase, service_class_of
from loramux.records import RecordsError
from loramux.records.service_tiers import ServiceTier

__all__ = [
    "AdapterService",
    "Answer",
    "AskedFormat",
    "BillingServices",
    "CallDelta",
    "ChatEnding",
    "ChatOptions",
    "CompletionService",
    "Conversation",
    "Delta",
    "Draining",
    "EngineClient",
    "EngineDied",
    "EngineDown",
    "EngineStatus",
    "FinishReason",
    "FolderNotFound",
    "GatewayError",
    "Generation",
    "GenerationFailed",
    "GenerationRequest",
    "InvalidRequest",
    "Message",
    "NotAllowed",
    "OverCapacity",
    "Platform",
    "Prompt",
    "PromptText",
    "PromptTokenLogprob",
    "RecordsError",
    "ServedBase",
    "ServiceTier",
    "Timing",
    "Token",
    "TokenLogprob",
    "Truncation",
    "Unavailable",
    "canonical_tags",
    "ensure_storage_allowed",
    "join_calls",
    "migrate",
    "open_billing",
    "open_platform",
    "open_sinks",
    "open_tenants",
    "renew_pepper",
    "run_periodically",
    "service_class_of",
]
