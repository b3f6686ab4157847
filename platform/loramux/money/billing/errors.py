"""Errors of billing.

BillingError ├── InvalidPlan            400  a plan, price or subscription that is inconsistent, or would change a
closed month ├── PeriodNotOpen          400  the period is closed already, not over yet, or an earlier one is still open
├── InvalidPeriod          400  a malformed month ├── InvoiceNotFound        404  the caller has no invoice of that
month ├── UnknownEntry           400  a correction of an entry that is not in the ledger ├── InvalidCorrection      400
a correction of another correction, or one that makes a quantity negative ├── MissingCurrency        400  the GPUs' cost
is not given in a currency that plans of the month have ├── LedgerAltered          500  a closed month, a frozen invoice
or a checkpoint does not agree with the ledger ├── ReconciliationRuns     409  another reconciliation runs └──
LedgerDrift            500  the engines' counts and the ledger do not agree
"""

from __future__ import annotations

from collections.abc import Sequence
from http import HTTPStatus

from loramux.common.errors import LoramuxError

SHOWN = 20
"""Maximum number of problems that a message lists."""


class BillingError(LoramuxError):
    """Base of this package's errors."""


class InvalidPlan(BillingError):
    """The plan is inconsistent, or would change a price. Prices can only be added."""


class PeriodNotOpen(BillingError):
    """The period cannot close: periods close once, in order, when they are over."""


class InvalidPeriod(BillingError):
    """The text is not a calendar month, written 2026-11."""


class InvoiceNotFound(BillingError):
    """The tenant has no invoice of that month, or the month is malformed."""

    code = "invoice_not_found"
    status = HTTPStatus.NOT_FOUND


class UnknownEntry(BillingError):
    """The entry is not in the ledger; the message names the event."""


class InvalidCorrection(BillingError):
    """The correction is not possible; the message names the quantity and its remaining amount."""


class MissingCurrency(BillingError):
    """Amounts in different currencies are never added or subtracted; the message names the missing currencies."""


class LedgerAltered(BillingError):
    """The ledger was changed. The message lists all differences; `problems` has each of them."""

    code = "ledger_altered"
    status = HTTPStatus.INTERNAL_SERVER_ERROR

    def __init__(self, problems: Sequence[str]) -> None:
        shown = "; ".join(problems[:SHOWN])
        more = f"; and {len(problems) - SHOWN} more" if len(problems) > SHOWN else ""
        super().__init__(f"the ledger was altered: {shown}{more}")
        self.problems = tuple(problems)


class ReconciliationRuns(BillingError):
    """This server is already verifying the ledger."""

    code = "reconciliation_under_way"
    status = HTTPStatus.CONFLICT


class LedgerDrift(BillingError):
    """The engines' counts and the ledger differ; the message has the numbers."""

    code = "ledger_drift"
    status = HTTPStatus.INTERNAL_SERVER_ERROR
