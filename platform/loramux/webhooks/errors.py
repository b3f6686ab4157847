"""Errors of webhooks.

WebhookError
├── InvalidEndpoint      an address that cannot be called, or an unknown kind of event: 400
├── TooManyEndpoints     the tenant's limit is reached: 400
├── TooManyTests         the tenant tests as many webhooks at once as it may: 429
└── EndpointNotFound     none such, or another tenant's: 404, and the same answer
"""

from __future__ import annotations

from http import HTTPStatus

from loramux.errors import LoramuxError


class WebhookError(LoramuxError):
    """Base of this package's errors."""


class InvalidEndpoint(WebhookError):
    """The message names the rule."""


class TooManyEndpoints(WebhookError):
    """The message names the limit."""

    code = "too_many_webhooks"


class TooManyTests(WebhookError):
    """The message names the limit."""

    code = "too_many_webhook_tests"
    status = HTTPStatus.TOO_MANY_REQUESTS
    retry_after = 10


class EndpointNotFound(WebhookError):
    """The message repeats the id."""

    code = "webhook_not_found"
    status = HTTPStatus.NOT_FOUND

    def __init__(self, id: str) -> None:
        super().__init__(f"there is no webhook {id[:80]!r}", "webhook_id")
