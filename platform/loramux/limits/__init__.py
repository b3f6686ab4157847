"""Limits of tenants, projects, keys and members: rates, concurrency, adapters, and money."""

from loramux.limits.admission import AdmissionBatch, check_request_rate
from loramux.limits.budgets import Budget, BudgetState, ChargedUsage, NoPrices, Prices, Tariff, format_money
from loramux.limits.definitions import LIMITS, AdapterQuota, RateLimit, RateLimitStatus, adapter_quota, tenant_limits
from loramux.limits.errors import (
    BudgetSpent,
    InvalidLimit,
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
    "InvalidLimit",
    "Limit",
    "LimitNotFound",
    "LimitReached",
    "Limits",
    "LimitsError",
    "NoPrices",
    "Prices",
    "QueueFull",
    "RateLimit",
    "RateLimitStatus",
    "RateReached",
    "RequestTooLarge",
    "Tariff",
    "TooManyRunning",
    "adapter_quota",
    "check_request_rate",
    "format_money",
    "tenant_limits",
]
