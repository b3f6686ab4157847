"""Requests for completions on their way into the house and back: no HTTP, no SQL."""

from loramux.engine import EngineClient, EngineDied
from loramux.gateway.adapters import AdapterService
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
from loramux.gateway.platform import Platform, migrate, open_platform, open_tenants
from loramux.gateway.service import CompletionService
from loramux.records import RecordsError

__all__ = [
    "AdapterService",
    "Ask",
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
    "migrate",
    "open_platform",
    "open_tenants",
]
