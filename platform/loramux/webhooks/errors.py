"""What is refused about webhooks.

WebhookError(code, field, message)
├── InvalidEndpoint      an address that cannot be told, or an event that does not exist: 400
├── TooManyEndpoints     the tenant's limit is reached: 400
└── EndpointNotFound     none such, or another tenant's: 404, and the same answer
"""

from __future__ import annotations


class WebhookError(Exception):
    """A stable code, the field that is wrong, and a sentence with the way out."""

    code = "invalid_value"

    def __init__(self, message: str, field: str | None = None) -> None:
        super().__init__(message)
        self.message = message
        self.field = field


class InvalidEndpoint(WebhookError):
    """The message says what can be."""


class TooManyEndpoints(WebhookError):
    """The message names the limit."""

    code = "too_many_webhooks"


class EndpointNotFound(WebhookError):
    """The message repeats the id."""

    code = "webhook_not_found"

    def __init__(self, id: str) -> None:
        super().__init__(f"there is no webhook {id[:80]!r}", "webhook_id")
