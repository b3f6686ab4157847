"""Money: plans and prices, periods and invoices, costs and margins, and the proof that engines and ledger agree."""

from loramux.billing.catalog import Catalog, Plan, PlanPrices, PlanTariff, Subscriptions
from loramux.billing.checkpoints import Checkpoint, Checkpoints
from loramux.billing.costs import CostPage, CostsQuery, Margin, Revenue, cost_page, costs_of, margins
from loramux.billing.errors import (
    BillingError,
    InvalidCorrection,
    InvalidPeriod,
    InvalidPlan,
    InvoiceNotFound,
    LedgerAltered,
    LedgerDrift,
    PeriodNotOpen,
    ReconciliationRuns,
    UnknownEntry,
)
from loramux.billing.invoices import Bill, Invoice, InvoiceLine, InvoiceParty, Tax, Terms, document
from loramux.billing.periods import Month, Period
from loramux.billing.plans import PlanSpec, PriceSpec, read_plans
from loramux.billing.proof import LedgerProof, LedgerState, ReconciliationOutcome
from loramux.billing.reconcile import Reconciliation, reconcile
from loramux.billing.service import BillingService, Correction

__all__ = [
    "Bill",
    "BillingError",
    "BillingService",
    "Catalog",
    "Checkpoint",
    "Checkpoints",
    "Correction",
    "CostPage",
    "CostsQuery",
    "InvalidCorrection",
    "InvalidPeriod",
    "InvalidPlan",
    "Invoice",
    "InvoiceLine",
    "InvoiceNotFound",
    "InvoiceParty",
    "LedgerAltered",
    "LedgerDrift",
    "LedgerProof",
    "LedgerState",
    "Margin",
    "Month",
    "Period",
    "PeriodNotOpen",
    "Plan",
    "PlanPrices",
    "PlanSpec",
    "PlanTariff",
    "PriceSpec",
    "Reconciliation",
    "ReconciliationOutcome",
    "ReconciliationRuns",
    "Revenue",
    "Subscriptions",
    "Tax",
    "Terms",
    "UnknownEntry",
    "cost_page",
    "costs_of",
    "document",
    "margins",
    "read_plans",
    "reconcile",
]
