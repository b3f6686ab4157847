"""What billing refuses.

BillingError(message, field)
├── InvalidPlan      a plan, price or subscription that cannot be, or would change what was promised
├── PeriodNotOpen    the period is closed already, not over yet, or an earlier one is still open
├── InvalidPeriod    no month is written like that
├── InvoiceNotFound  the caller has none for that month
├── UnknownEntry     a correction of something that is not in the ledger
└── Drift            the engines and the ledger do not agree
"""

from __future__ import annotations


class BillingError(Exception):
    """A sentence with the way out, and the field that it is about."""

    code = "invalid_value"

    def __init__(self, message: str, field: str | None = None) -> None:
        super().__init__(message)
        self.message = message
        self.field = field


class InvalidPlan(BillingError):
    """Prices are only ever added."""


class PeriodNotOpen(BillingError):
    """Periods close once, in order, when they are over."""


class InvalidPeriod(BillingError):
    """A period is a calendar month, written 2026-11."""


class InvoiceNotFound(BillingError):
    """Of a month that is not billed yet, or that nobody writes so."""

    code = "invoice_not_found"


class UnknownEntry(BillingError):
    """The message names the event."""


class Drift(BillingError):
    """The message has the numbers."""
