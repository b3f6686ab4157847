"""Invoices: a tenant's period, line by line, each rounded once; the document that is kept is the invoice."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from decimal import Decimal

import msgspec

from loramux.billing.catalog import Subscriptions
from loramux.billing.periods import Period
from loramux.pricing import Charge, Currency, Line, Price, Usage, charge, to_decimal
from loramux.pricing.money import NANO_DIGITS
from loramux.records import TenantId
from loramux.records.quantities import DailyQuantities

Group = tuple[str | None, ...]

MEANINGS = {
    "input_uncached": "Input tokens",
    "input_cached": "Input tokens found in the cache",
    "output": "Output tokens",
    "adapter_load": "Adapter loads",
    "adapter_byte_seconds": "Adapter storage, byte-seconds",
    "adapter_resident_byte_seconds": "Adapters kept resident, byte-seconds",
}
MINIMUM = "minimum_commitment"


class InvoiceStep(msgspec.Struct, frozen=True):
    """From `above` units on, `per` units cost `price`."""

    above: int
    price: Decimal


class InvoiceLine(msgspec.Struct, frozen=True, kw_only=True):
    """One price's usage. `amount` is in the currency, with its digits."""

    description: str
    meter: str
    base_model: str
    tier: str
    price_id: str | None
    """None: nothing is charged for it."""
    per: int
    steps: tuple[InvoiceStep, ...]
    quantity: int
    amount: Decimal


class Invoice(msgspec.Struct, frozen=True, kw_only=True):
    """One tenant's period. A draft changes with every entry until its period is closed."""

    id: str
    status: str
    """`draft` or `final`."""
    tenant_id: TenantId
    tenant_name: str
    period: str
    period_start: int
    """Unix seconds, as all times here."""
    period_end: int
    first_sequence: int
    last_sequence: int | None
    ledger_digest: str | None
    currency: str
    lines: tuple[InvoiceLine, ...]
    total: Decimal
    waived: dict[str, int]
    """What was used and is not billed, by meter."""


class Bill(msgspec.Struct, frozen=True, kw_only=True):
    """A tenant's charges in one period, and whom each part of them belongs to."""

    period: Period
    subscriptions: Subscriptions
    currency: Currency
    lines: tuple[Line[Group], ...]
    waived: dict[str, int]

    @property
    def usage_total(self) -> int:
        """Minor units, without the minimum."""
        return sum(line.amount for line in self.lines)

    @property
    def shortfall(self) -> int:
        """What is missing to the plan's minimum, in minor units; nothing while the period is open."""
        plan = self.subscriptions.plan_at(self.period.month.ends_at - 1)
        if plan is None or not self.period.is_closed:
            return 0
        return max(0, plan.minimum - self.usage_total)

    @property
    def total(self) -> int:
        """Minor units."""
        return self.usage_total + self.shortfall

    def amount(self, minor: int) -> Decimal:
        """Minor units as a number in the currency."""
        return to_decimal(minor, self.currency.digits)

    def charges(self) -> list[tuple[Line[Group], Charge[Group]]]:
        """Every part of every line."""
        return [(line, part) for line in self.lines for part in line.charges]


NO_CURRENCY = Currency("XXX", 0)
"""ISO 4217's code for no currency: of tenants without a plan, who are charged nothing."""


def bill(period: Period, subscriptions: Subscriptions, quantities: Sequence[DailyQuantities]) -> Bill:
    """What a tenant owes for a period's quantities."""
    currency = subscriptions.plans[0][1].currency if subscriptions.plans else NO_CURRENCY
    usages = [Usage(q.day, q.base_model, q.tier, q.group, q.quantities) for q in quantities]
    waived: dict[str, int] = {}
    for one in quantities:
        for meter, quantity in one.quantities.items():
            if meter.startswith("waived_"):
                waived[meter] = waived.get(meter, 0) + quantity
    lines = tuple(charge(usages, subscriptions.prices_at, currency))
    return Bill(period=period, subscriptions=subscriptions, currency=currency, lines=lines, waived=waived)


def invoice(of: Bill, tenant_id: TenantId, tenant_name: str) -> Invoice:
    """A bill as it is sent."""
    month, span = of.period.month, of.period.span
    return Invoice(
        id=f"INV-{month}-{tenant_name}",
        status="final" if of.period.is_closed else "draft",
        tenant_id=tenant_id,
        tenant_name=tenant_name,
        period=str(month),
        period_start=month.starts_at // 1_000_000,
        period_end=month.ends_at // 1_000_000,
        first_sequence=span.first,
        last_sequence=span.last,
        ledger_digest=of.period.digest,
        currency=of.currency.code,
        lines=tuple(_lines(of)),
        total=of.amount(of.total),
        waived=of.waived,
    )


def document(made: Invoice) -> str:
    """The invoice as JSON; amounts are texts, so that no reader makes floats of them."""
    return msgspec.json.encode(made, order="sorted").decode()


def digest(text: str) -> str:
    """sha256 of a document."""
    return "sha256:" + hashlib.sha256(text.encode()).hexdigest()


def _lines(of: Bill) -> list[InvoiceLine]:
    lines = [
        InvoiceLine(
            description=_description(line),
            meter=line.meter,
            base_model=line.base_model,
            tier=line.tier,
            price_id=line.price.id if line.price else None,
            per=line.price.per if line.price else 1,
            steps=_steps(line.price),
            quantity=line.quantity,
            amount=of.amount(line.amount),
        )
        for line in of.lines
    ]
    if of.shortfall:
        lines.append(
            InvoiceLine(
                description="Up to the plan's minimum",
                meter=MINIMUM,
                base_model="",
                tier="",
                price_id=None,
                per=1,
                steps=(),
                quantity=1,
                amount=of.amount(of.shortfall),
            )
        )
    return lines


def _steps(price: Price | None) -> tuple[InvoiceStep, ...]:
    return tuple(InvoiceStep(step.above, to_decimal(step.nanos, NANO_DIGITS)) for step in price.steps) if price else ()


def _description(line: Line[Group]) -> str:
    where = ", ".join(part for part in (line.base_model, line.tier) if part not in ("", "*"))
    told = MEANINGS[line.meter] + (f" ({where})" if where else "")
    return told if line.price else f"{told}, without a price"
