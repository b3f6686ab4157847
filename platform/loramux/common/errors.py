"""The one tree of errors that a caller may see.

    LoramuxError(message, field)      code, status
    ├── serving.ServingError          requests for completions
    ├── registry.RegistryError        adapters, revisions, aliases, pins and grants
    ├── uploads.*                     (below RegistryError)
    ├── tenants.TenantsError          keys, members, projects, tenants and tiers
    ├── limits.LimitsError            rate limits, queue limits and budgets
    ├── usage.UsageError              usage queries and idempotency keys
    ├── billing.BillingError          plans, periods, invoices
    ├── fleet.FleetError              orders to engines
    ├── webhooks.WebhookError         endpoints
    ├── exports.ExportError           files and sinks
    ├── storage.StorageError          blobs and staging
    └── records.RecordsError          the database

Each package draws its own part of the tree in its `errors.py`, or in the module that raises them. A class sets `code`
(stable, read by clients) and `status` (the HTTP status that the API answers with); an instance carries the sentence and
the field. Faults of the server itself are not in this tree: they are bugs and keep their traceback.
"""

from __future__ import annotations

from http import HTTPStatus

import msgspec


class LoramuxError(Exception):
    """A refusal: a sentence with the way out, the name of the field, a stable code and an HTTP status."""

    code: str = "invalid_value"
    status: int = HTTPStatus.BAD_REQUEST
    retry_after: int | None = None
    """Seconds after which the same request may succeed; None if waiting does not help."""
    public_message: str | None = None
    """The sentence for callers, if `message` is only for the operator's log."""

    def __init__(self, message: str, field: str | None = None) -> None:
        super().__init__(message)
        self.message = message
        self.field = field


class Rejection(msgspec.Struct, frozen=True, kw_only=True):
    """The reason why an upload did not become a revision. The reason is stored in the upload and its report."""

    code: str
    """The error code, stable because clients read it."""
    field: str | None
    """The field, file or tensor at fault."""
    message: str
