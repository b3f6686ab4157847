"""Limits of tenants, projects, keys and members: rates, concurrency, adapters, and money."""

from loramux.limits.admission import AdmissionBatch, check_request_rate
from loramux.limits.budgets import Budget, BudgetState, ChargedUsage, NoPrices, Prices, format_money
from loramux.limits.definitions import LIMITS, AdapterQuota, RateLimitStatus, adapter_quota, tenant_limits
from loramux.limits.errors import (
    BudgetSpent,
    LimitNotFound,
    LimitReached,
    LimitsError,
    QueueFull,
    RateReached,
    RequestTooLarge,
    TooManyRunning,
)
from loramux.limits.limits import PERIODS, Limit, Limits

__all__ = [
    "LIMITS",
    "PERIODS",
    "AdapterQuota",
    "AdmissionBatch",
    "Budget",
    "BudgetSpent",
    "BudgetState",
    "ChargedUsage",
    "Limit",
    "LimitNotFound",
    "LimitReached",
    "Limits",
    "LimitsError",
    "NoPrices",
    "Prices",
    "QueueFull",
    "RateLimitStatus",
    "RateReached",
    "RequestTooLarge",
    "TooManyRunning",
    "adapter_quota",
    "check_request_rate",
    "format_money",
    "tenant_limits",
]
