"""Refusals of limits and budgets.

LimitsError ├── InvalidLimit            a limit or a budget out of range: 400 ├── LimitNotFound           no such limit,
budget or subject: 404 ├── RequestTooLarge         more tokens than a whole minute's limit, so it could never begin: 400
└── LimitReached            not now: 429, with `retry_after` if waiting helps
    ├── RateReached         the minute's requests or tokens are used up
    ├── TooManyRunning      the concurrency limit is reached
    ├── QueueFull           the queue limit is reached
    └── BudgetSpent         the money of the period is spent or held
"""

from __future__ import annotations

from http import HTTPStatus

from loramux.common.errors import LoramuxError
from loramux.common.units import SECOND
from loramux.money.limits.definitions import RateLimitStatus


class LimitsError(LoramuxError):
    """Base of the refusals of limits and budgets."""


class InvalidLimit(LimitsError):
    """A limit or a budget is out of range; the message says which values are valid."""


class LimitNotFound(LimitsError):
    """The limit, budget or subject does not exist."""

    code = "not_found"
    status = HTTPStatus.NOT_FOUND


class RequestTooLarge(LimitsError):
    """The request needs more tokens than its limit allows in a minute."""

    code = "request_exceeds_rate_limit"


class LimitReached(LimitsError):
    """The request may not begin now. Clients of OpenAI read `kind`: `requests`, `tokens` or `insufficient_quota`."""

    code = "rate_limit_exceeded"
    status = HTTPStatus.TOO_MANY_REQUESTS
    kind = "requests"

    def __init__(self, message: str, *, wait: int | None, rate_limits: RateLimitStatus | None = None) -> None:
        """`wait` is the time until a retry may succeed, in microseconds; None if waiting does not help."""
        super().__init__(message)
        self.retry_after = None if wait is None else max(1, -(-wait // SECOND))
        """Whole seconds until the caller should try again."""
        self.rate_limits = rate_limits


class RateReached(LimitReached):
    """The minute's requests or tokens are used up."""

    def __init__(
        self, message: str, kind: str, *, wait: int | None, rate_limits: RateLimitStatus | None = None
    ) -> None:
        super().__init__(message, wait=wait, rate_limits=rate_limits)
        self.kind = kind


class TooManyRunning(LimitReached):
    """The limit on concurrent requests is reached."""

    code = "concurrency_limit_exceeded"


class QueueFull(LimitReached):
    """The limit on requests that wait for their first token is reached."""

    code = "queue_limit_exceeded"


class BudgetSpent(LimitReached):
    """The money of the period is spent or held."""

    code = "insufficient_quota"
    kind = "insufficient_quota"
