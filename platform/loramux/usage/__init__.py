"""Usage: requests opened and settled in the ledger, and sums over it."""

from loramux.records.requests import AnsweredRequest, IdempotencyClaim, OpenedRequest
from loramux.usage.errors import (
    IdempotencyMismatch,
    InvalidQuery,
    RequestRefused,
    StillRunning,
    UnknownRequest,
    UsageClosed,
)
from loramux.usage.idempotency import AnswerStorage, IdempotencyGuard, StoredAnswer
from loramux.usage.query import LATEST, UsagePage, UsageQuery, UsageResult
from loramux.usage.service import UsageService
from loramux.usage.settlement import MAX_BILLED_LOADS, USAGE, EndedBy, Settlement

__all__ = [
    "LATEST",
    "MAX_BILLED_LOADS",
    "USAGE",
    "AnswerStorage",
    "AnsweredRequest",
    "EndedBy",
    "IdempotencyClaim",
    "IdempotencyGuard",
    "IdempotencyMismatch",
    "InvalidQuery",
    "OpenedRequest",
    "RequestRefused",
    "Settlement",
    "StillRunning",
    "StoredAnswer",
    "UnknownRequest",
    "UsageClosed",
    "UsagePage",
    "UsageQuery",
    "UsageResult",
    "UsageService",
]
