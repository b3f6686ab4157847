"""Why a request is not admitted.

LimitsError(code, field, message)
├── InvalidLimit            a limit or a budget that cannot be: 400
├── LimitNotFound           there is none such: 404
├── RequestTooLarge         more tokens than a whole minute has: it could wait for ever: 400
└── LimitReached            not now: 429, with `retry_after` where waiting helps
    ├── RateReached         requests or tokens of this minute are used up
    ├── TooManyRunning      so many requests run already
    ├── QueueFull           so many wait already
    └── BudgetSpent         the money of the period is spent or held
"""

from __future__ import annotations

from loramux.limits.standing import Standing

SECOND = 1_000_000


class LimitsError(Exception):
    """A stable code, the field that is wrong, and a sentence with the way out."""

    code = "invalid_value"

    def __init__(self, message: str, field: str | None = None) -> None:
        super().__init__(message)
        self.message = message
        self.field = field


class InvalidLimit(LimitsError):
    """The message says what can be."""


class LimitNotFound(LimitsError):
    """The message names it."""

    code = "not_found"


class RequestTooLarge(LimitsError):
    """The message names the limit and the request's size."""

    code = "request_exceeds_rate_limit"


class LimitReached(LimitsError):
    """`kind` is what the field's clients read: `requests`, `tokens`, or `insufficient_quota`."""

    code = "rate_limit_exceeded"
    kind = "requests"

    def __init__(self, message: str, *, wait: int | None, standing: Standing | None = None) -> None:
        """`wait` in microseconds; None where waiting does not help."""
        super().__init__(message)
        self.retry_after = None if wait is None else max(1, -(-wait // SECOND))
        """Whole seconds."""
        self.standing = standing


class RateReached(LimitReached):
    """Of requests or tokens by the minute."""

    def __init__(self, message: str, kind: str, *, wait: int | None, standing: Standing | None = None) -> None:
        super().__init__(message, wait=wait, standing=standing)
        self.kind = kind


class TooManyRunning(LimitReached):
    """Of requests at the same time."""

    code = "concurrency_limit_exceeded"


class QueueFull(LimitReached):
    """Of requests that wait for their first token."""

    code = "queue_limit_exceeded"


class BudgetSpent(LimitReached):
    """Of money."""

    code = "insufficient_quota"
    kind = "insufficient_quota"
