"""Usage: requests opened and settled in the ledger, and sums over it."""

from loramux.records.errors import ChainBroken
from loramux.records.ledger import LedgerEntry
from loramux.records.requests import AnsweredRequest, IdempotencyClaim, OpenedRequest
from loramux.records.usage import UsageTotals
from loramux.usage.errors import (
    IdempotencyMismatch,
    InvalidQuery,
    RequestRefused,
    StillRunning,
    UnknownRequest,
    UsageClosed,
    UsageError,
)
from loramux.usage.idempotency import AnswerStorage, IdempotencyGuard, StoredAnswer
from loramux.usage.query import LATEST, UsageBucket, UsagePage, UsageQuery, UsageResult
from loramux.usage.service import UsageService
from loramux.usage.settlement import MAX_BILLED_LOADS, USAGE, EndedBy, Settlement

__all__ = [
    "LATEST",
    "MAX_BILLED_LOADS",
    "USAGE",
    "AnswerStorage",
    "AnsweredRequest",
    "ChainBroken",
    "EndedBy",
    "IdempotencyClaim",
    "IdempotencyGuard",
    "IdempotencyMismatch",
    "InvalidQuery",
    "LedgerEntry",
    "OpenedRequest",
    "RequestRefused",
    "Settlement",
    "StillRunning",
    "StoredAnswer",
    "UnknownRequest",
    "UsageBucket",
    "UsageClosed",
    "UsageError",
    "UsagePage",
    "UsageQuery",
    "UsageResult",
    "UsageService",
    "UsageTotals",
]
