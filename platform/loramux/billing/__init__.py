"""Money: plans and prices, periods and invoices, costs and margins, and the proof that engines and bill agree."""

from loramux.billing.billing import Billing
from loramux.billing.budget_prices import PlanPrices
from loramux.billing.catalog import Catalog, Plan, Subscriptions
from loramux.billing.costs import CostPage, CostsQuery, cost_page, costs_of
from loramux.billing.errors import (
    BillingError,
    Drift,
    InvalidPeriod,
    InvalidPlan,
    InvoiceNotFound,
    PeriodNotOpen,
    UnknownEntry,
)
from loramux.billing.invoices import Bill, Invoice, InvoiceLine, document
from loramux.billing.margin import Earned, Margin, margins
from loramux.billing.periods import Month, Period
from loramux.billing.plans import PlanDraft, read_plans
from loramux.billing.reconcile import Reconciliation, reconcile

__all__ = [
    "Bill",
    "Billing",
    "BillingError",
    "Catalog",
    "CostPage",
    "CostsQuery",
    "Drift",
    "Earned",
    "InvalidPeriod",
    "InvalidPlan",
    "Invoice",
    "InvoiceLine",
    "InvoiceNotFound",
    "Margin",
    "Month",
    "Period",
    "PeriodNotOpen",
    "Plan",
    "PlanDraft",
    "PlanPrices",
    "Reconciliation",
    "Subscriptions",
    "UnknownEntry",
    "cost_page",
    "costs_of",
    "document",
    "margins",
    "read_plans",
    "reconcile",
]
