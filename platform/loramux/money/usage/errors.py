"""Refusals of usage.

UsageError
├── InvalidQuery          a query that cannot be answered: 400
├── RequestRefused        a request or settlement that the database refuses (our own fault: 500)
├── IdempotencyMismatch   the key came with another request before: 422
├── StillRunning          the key's request has no answer yet: 409
├── UnknownRequest        a settlement of a request that was never opened (our own fault: 500)
└── UsageClosed           the writer is not running

RecordsUnavailable        (of `data.records`)
└── TooManyUnsettled      too many requests wait to be settled: 503
"""

from __future__ import annotations

from http import HTTPStatus

from loramux.common.errors import LoramuxError
from loramux.data.records.errors import RecordsUnavailable


class UsageError(LoramuxError):
    """Base of this package's errors."""


class InvalidQuery(UsageError):
    """The query cannot be answered; the message names the field's limit and a value that works."""


class IdempotencyMismatch(UsageError):
    """The message names the key."""

    code = "idempotency_key_reused"
    status = HTTPStatus.UNPROCESSABLE_ENTITY


class StillRunning(UsageError):
    """The message names the key."""

    code = "idempotency_key_in_use"
    status = HTTPStatus.CONFLICT
    retry_after = 1


class RequestRefused(UsageError):
    """The message names the request and the rule."""

    code = "internal_error"
    status = HTTPStatus.INTERNAL_SERVER_ERROR
    public_message = "The request could not be recorded."


class UnknownRequest(UsageError):
    """The message names the request."""

    code = "internal_error"
    status = HTTPStatus.INTERNAL_SERVER_ERROR
    public_message = "The request could not be recorded."


class UsageClosed(UsageError):
    """The service was called before start() or after stop()."""

    code = "server_draining"
    status = HTTPStatus.SERVICE_UNAVAILABLE
    retry_after = 5
    public_message = "This server is shutting down. Please retry in a few seconds."


class TooManyUnsettled(RecordsUnavailable):
    """Too many requests wait to be settled. Unlike after its base, the refused request has no row in the database."""
