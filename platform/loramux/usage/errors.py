"""What usage refuses.

UsageError
├── InvalidQuery(field, message)   a question that cannot be answered: 400
├── RequestRefused                 a request or settlement that the database refuses (our own fault: 500)
├── IdempotencyMismatch            the key came with another request before: 422
├── StillRunning                   the key's request has no answer yet: 409
├── UnknownRequest                 a settlement for a request that was never opened (likewise)
└── UsageClosed                    the writer is not running
"""

from __future__ import annotations


class UsageError(Exception):
    """Base of what this package raises."""


class InvalidQuery(UsageError):
    """The field that is wrong, its limit, and what to write instead."""

    code = "invalid_value"

    def __init__(self, field: str, message: str) -> None:
        super().__init__(message)
        self.field = field
        self.message = message


class IdempotencyMismatch(UsageError):
    """The message names the key."""

    code = "idempotency_key_reused"


class StillRunning(UsageError):
    """The message names the key."""

    code = "idempotency_key_in_use"


class RequestRefused(UsageError):
    """The message names the request and the rule."""


class UnknownRequest(UsageError):
    """The message names the request."""


class UsageClosed(UsageError):
    """Nothing is written before start() or after stop()."""
