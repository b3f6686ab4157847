"""What tenants may use: by the minute, at the same time, in all, and in money."""

from loramux.limits.adapters import AdapterCaps, adapter_caps
from loramux.limits.books import Books
from loramux.limits.budgets import Budget
from loramux.limits.demand import Demand
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
from loramux.limits.limits import PERIODS, BudgetState, Limit, Limits
from loramux.limits.names import LIMITS
from loramux.limits.prices import NoPrices, Prices, Tariff, Used
from loramux.limits.standing import Rate, Standing

__all__ = [
    "LIMITS",
    "PERIODS",
    "AdapterCaps",
    "Books",
    "Budget",
    "BudgetSpent",
    "BudgetState",
    "Demand",
    "InvalidLimit",
    "Limit",
    "LimitNotFound",
    "LimitReached",
    "Limits",
    "LimitsError",
    "NoPrices",
    "Prices",
    "QueueFull",
    "Rate",
    "RateReached",
    "RequestTooLarge",
    "Standing",
    "Tariff",
    "TooManyRunning",
    "Used",
    "adapter_caps",
]
