"""Every table, for the migrations and their test."""

from __future__ import annotations

from loramux.records import (
    billing_models,
    idempotency_models,
    ledger_models,
    lifecycle_models,
    limit_models,
    models,
    tenancy_models,
    upload_models,
    webhook_models,
)

METADATA = models.Base.metadata
TABLE_MODULES = (
    models,
    lifecycle_models,
    tenancy_models,
    limit_models,
    idempotency_models,
    ledger_models,
    billing_models,
    webhook_models,
    upload_models,
)
