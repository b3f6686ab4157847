"""Money: plans and prices, periods and invoices, costs and margins, and the proof that engines and ledger agree."""

from loramux.billing.catalog import Catalog, Plan, PlanPrices, PlanSpec, PlanTariff, Subscriptions, read_plans
from loramux.billing.costs import CostPage, CostsQuery
from loramux.billing.errors import (
    BillingError,
    InvalidCorrection,
    InvalidPeriod,
    InvalidPlan,
    LedgerAltered,
    LedgerDrift,
    PeriodNotOpen,
    UnknownEntry,
)
from loramux.billing.invoices import Bill, Invoice, InvoiceLine, InvoiceParty, Tax, document
from loramux.billing.periods import Month, Period
from loramux.billing.reconcile import (
    Checkpoint,
    Checkpoints,
    LedgerProof,
    LedgerState,
    Reconciliation,
    ReconciliationOutcome,
    reconcile,
)
from loramux.billing.service import BillingService

__all__ = [
    "Bill",
    "BillingError",
    "BillingService",
    "Catalog",
    "Checkpoint",
    "Checkpoints",
    "CostPage",
    "CostsQuery",
    "InvalidCorrection",
    "InvalidPeriod",
    "InvalidPlan",
    "Invoice",
    "InvoiceLine",
    "InvoiceParty",
    "LedgerAltered",
    "LedgerDrift",
    "LedgerProof",
    "LedgerState",
    "Month",
    "Period",
    "PeriodNotOpen",
    "Plan",
    "PlanPrices",
    "PlanSpec",
    "PlanTariff",
    "Reconciliation",
    "ReconciliationOutcome",
    "Subscriptions",
    "Tax",
    "UnknownEntry",
    "document",
    "read_plans",
    "reconcile",
]
