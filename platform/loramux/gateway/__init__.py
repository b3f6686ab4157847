"""Requests for completions on their way into the house and back: no HTTP, no SQL."""

from loramux.engine import EngineClient, EngineDied
from loramux.gateway.adapters import AdapterService
from loramux.gateway.answers import Answer, join_by_choice
from loramux.gateway.ask import Ask, Conversation, Delta, FinishReason, Message, Prompt, Token, TokenLogprob, TokenUsage
from loramux.gateway.errors import (
    Draining,
    EngineDown,
    GatewayError,
    GenerationFailed,
    InvalidRequest,
    OverCapacity,
    Unavailable,
)
from loramux.gateway.generation import Generation
from loramux.gateway.platform import (
    BillingDesk,
    Platform,
    migrate,
    open_billing,
    open_platform,
    open_sinks,
    open_tenants,
)
from loramux.gateway.service import CompletionService
from loramux.gateway.tags import canonical_tags
from loramux.records import RecordsError

__all__ = [
    "AdapterService",
    "Answer",
    "Ask",
    "BillingDesk",
    "CompletionService",
    "Conversation",
    "Delta",
    "Draining",
    "EngineClient",
    "EngineDied",
    "EngineDown",
    "FinishReason",
    "GatewayError",
    "Generation",
    "GenerationFailed",
    "InvalidRequest",
    "Message",
    "OverCapacity",
    "Platform",
    "Prompt",
    "RecordsError",
    "Token",
    "TokenLogprob",
    "TokenUsage",
    "Unavailable",
    "canonical_tags",
    "join_by_choice",
    "migrate",
    "open_billing",
    "open_platform",
    "open_sinks",
    "open_tenants",
]
