"""FOCUS 1.2, the FinOps Foundation's Cost and Usage Specification: a tenant's bill as rows of this specification.

A row is one part of an invoice line: one day, adapter, project, key and set of tags. BilledCost adds up, over an
invoice's rows, to the invoice. https://focus.finops.org/focus-specification/v1-2/; its machine-readable rules are the
model 1.2.0.1 of the foundation's `focus-validator`.
"""

from __future__ import annotations

import json
from datetime import UTC, datetime
from decimal import Decimal
from typing import Any

import msgspec

from loramux.common.units import DAY, SECOND, SECONDS_PER_DAY
from loramux.money.billing.invoices import MEANINGS, Bill, Tax
from loramux.money.exports.tables import Column, Row
from loramux.money.pricing import NANO_DIGITS, Charge, PricedLine, to_decimal

GROUP_BY = ("model", "adapter_digest", "project_id", "api_key_id", "tags")
"""The columns that a bill is divided by for these rows."""

DECIMALS = frozenset(
    {
        "BilledCost",
        "ConsumedQuantity",
        "ContractedCost",
        "ContractedUnitPrice",
        "EffectiveCost",
        "ListCost",
        "ListUnitPrice",
        "PricingCurrencyContractedUnitPrice",
        "PricingCurrencyEffectiveCost",
        "PricingCurrencyListUnitPrice",
        "PricingQuantity",
    }
)
TIMES = frozenset({"BillingPeriodEnd", "BillingPeriodStart", "ChargePeriodEnd", "ChargePeriodStart"})
# fmt: off
NAMES = (
    "BilledCost", "BillingAccountId", "BillingAccountName", "BillingAccountType", "BillingCurrency", "BillingPeriodEnd",
    "BillingPeriodStart", "ChargeCategory", "ChargeClass", "ChargeDescription", "ChargeFrequency", "ChargePeriodEnd",
    "ChargePeriodStart", "CommitmentDiscountStatus", "ConsumedQuantity", "ConsumedUnit", "ContractedCost",
    "ContractedUnitPrice", "EffectiveCost", "InvoiceId", "InvoiceIssuerName", "ListCost", "ListUnitPrice",
    "PricingCategory", "PricingCurrency", "PricingCurrencyContractedUnitPrice", "PricingCurrencyEffectiveCost",
    "PricingCurrencyListUnitPrice", "PricingQuantity", "PricingUnit", "ProviderName", "PublisherName", "ResourceId",
    "ResourceName", "ResourceType", "ServiceCategory", "ServiceName", "ServiceSubcategory", "SkuId", "SkuMeter",
    "SkuPriceDetails", "SkuPriceId", "SubAccountId", "SubAccountName", "SubAccountType", "Tags", "x_ApiKeyId",
)
# fmt: on
FOCUS_COLUMNS = tuple(
    Column(name, "decimal" if name in DECIMALS else "time" if name in TIMES else "text") for name in NAMES
)
"""The specification's columns, without those about zones, regions, capacity reservations and commitment discounts,
which this service does not have. One of the omitted columns is included, always null, because rules about other columns
read it. One column is loramux's own, with the prefix `x_` that the specification requires.
"""

UNITS = {
    "adapter_load": "Loads",
    "adapter_byte_seconds": "Byte-Seconds",
    "adapter_resident_byte_seconds": "Byte-Seconds",
}


class Seller(msgspec.Struct, frozen=True, kw_only=True):
    """Names of the seller and the buyer."""

    provider: str
    """The provider, publisher and issuer of invoices."""
    tenant_id: str
    tenant_name: str


def focus_rows(bill: Bill, seller: Seller) -> list[Row]:
    """Return the rows of one bill, which was divided by GROUP_BY."""
    rows = [_usage(bill, seller, line, part) for line, part in bill.charges()]
    if bill.shortfall:
        rows.append(_minimum(bill, seller))
    if bill.tax is not None and bill.tax_amount:
        rows.append(_tax(bill, seller, bill.tax))
    return rows


def _usage(bill: Bill, seller: Seller, line: PricedLine, part: Charge) -> Row:
    model, digest, project, key, tags = part.group
    cost = to_decimal(part.nanos, NANO_DIGITS)
    is_late = part.day < bill.period.month.starts_at // DAY
    row = _common(bill, seller, part.day, cost) | {
        "ChargeCategory": "Usage",
        "ChargeClass": "Correction" if is_late else None,  # for an invoiced period; otherwise null
        "ChargeDescription": f"{MEANINGS[line.meter]} of {model}",
        "ChargeFrequency": "Usage-Based",
        "ConsumedQuantity": Decimal(part.quantity),
        "ConsumedUnit": UNITS.get(line.meter, "Tokens"),
        "ResourceId": digest or model,
        "ResourceName": model,
        "ResourceType": "LoRA Adapter" if digest else "Base Model",
        "SkuId": f"{line.meter}/{line.base_model}/{line.tier}",
        "SkuMeter": MEANINGS[line.meter],
        "SubAccountId": project,
        "SubAccountName": project,
        "SubAccountType": "Project" if project else None,
        "Tags": tags or None,
        "x_ApiKeyId": key or None,
    }
    return row | (_priced(line, part, cost) if line.price else {})


def _priced(line: PricedLine, part: Charge, cost: Decimal) -> Row:
    """Return a blended unit price for the part, because the part may include several steps of the price."""
    assert line.price is not None
    unit = (cost / part.quantity).quantize(Decimal(1).scaleb(-NANO_DIGITS)) if part.quantity else Decimal(0)
    details = {
        f"x_PriceAbove{step.above}": f"{to_decimal(step.nanos, NANO_DIGITS):f} per {line.price.per}"
        for step in line.price.steps
    }
    return {
        "ListUnitPrice": unit,
        "ContractedUnitPrice": unit,
        "PricingCurrencyListUnitPrice": unit,
        "PricingCurrencyContractedUnitPrice": unit,
        "PricingCategory": "Standard",
        "PricingQuantity": Decimal(part.quantity),
        "PricingUnit": UNITS.get(line.meter, "Tokens"),
        "SkuPriceId": line.price.id,
        "SkuPriceDetails": json.dumps(details),
    }


def _minimum(bill: Bill, seller: Seller) -> Row:
    last_day = bill.period.month.ends_at // DAY - 1
    cost = bill.amount(bill.shortfall)
    return _common(bill, seller, last_day, cost) | {
        "ChargeCategory": "Adjustment",
        "ChargeDescription": "Up to the plan's minimum",
        "ChargeFrequency": "Recurring",
    }


def _tax(bill: Bill, seller: Seller, tax: Tax) -> Row:
    last_day = bill.period.month.ends_at // DAY - 1
    return _common(bill, seller, last_day, bill.amount(bill.tax_amount)) | {
        "ChargeCategory": "Tax",
        "ChargeDescription": f"{tax.name} {tax.percent.normalize():f} %",
        "ChargeFrequency": "Recurring",
    }


def _common(bill: Bill, seller: Seller, day: int, cost: Decimal) -> dict[str, Any]:
    month, currency = bill.period.month, bill.currency.code
    return {
        "BilledCost": cost,
        "EffectiveCost": cost,
        "ListCost": cost,
        "ContractedCost": cost,
        "PricingCurrencyEffectiveCost": cost,
        "BillingAccountId": seller.tenant_id,
        "BillingAccountName": seller.tenant_name,
        "BillingAccountType": "Tenant",
        "BillingCurrency": currency,
        "PricingCurrency": currency,
        "BillingPeriodStart": _time(month.starts_at // SECOND),
        "BillingPeriodEnd": _time(month.ends_at // SECOND),
        "ChargePeriodStart": _time(day * SECONDS_PER_DAY),
        "ChargePeriodEnd": _time((day + 1) * SECONDS_PER_DAY),
        "InvoiceId": f"INV-{month}-{seller.tenant_name}" if bill.period.is_closed else None,
        "InvoiceIssuerName": seller.provider,
        "ProviderName": seller.provider,
        "PublisherName": seller.provider,
        "ServiceCategory": "AI and Machine Learning",
        "ServiceSubcategory": "Generative AI",
        "ServiceName": "LoRA fine-tune hosting",
    }


def _time(seconds: int) -> datetime:
    return datetime.fromtimestamp(seconds, UTC)
