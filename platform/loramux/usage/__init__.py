"""What was used, and the proof of it."""

from loramux.records.counts import Counted
from loramux.records.errors import ChainBroken
from loramux.records.ledger import LedgerEntry
from loramux.records.requests import AnsweredRequest
from loramux.records.usage import UsageTotals
from loramux.usage.claims import Answered, Claim, ClaimedOnce
from loramux.usage.errors import (
    IdempotencyMismatch,
    InvalidQuery,
    RequestRefused,
    StillRunning,
    UnknownRequest,
    UsageClosed,
    UsageError,
)
from loramux.usage.operations import OpenedRequest, Settlement
from loramux.usage.query import UsageBucket, UsagePage, UsageQuery, UsageResult
from loramux.usage.usage import Usage

__all__ = [
    "Answered",
    "AnsweredRequest",
    "ChainBroken",
    "Claim",
    "ClaimedOnce",
    "Counted",
    "IdempotencyMismatch",
    "InvalidQuery",
    "LedgerEntry",
    "OpenedRequest",
    "RequestRefused",
    "Settlement",
    "StillRunning",
    "UnknownRequest",
    "Usage",
    "UsageBucket",
    "UsageClosed",
    "UsageError",
    "UsagePage",
    "UsageQuery",
    "UsageResult",
    "UsageTotals",
]
