"""Invoices of a tenant's period. Each line is rounded once. The stored document is the invoice."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from decimal import Context, Decimal

import msgspec

from loramux.common.identity import TenantId
from loramux.common.units import SECOND
from loramux.data.records.usage import DailyQuantities
from loramux.money.billing.catalog import Subscriptions
from loramux.money.billing.periods import Period
from loramux.money.pricing import (
    NANO_DIGITS,
    Charge,
    Currency,
    Price,
    PricedLine,
    charge,
    encode_money,
    minor_units,
    to_decimal,
)

MEANINGS = {
    "input_uncached": "Input tokens",
    "input_cached": "Input tokens found in the cache",
    "image_tokens": "Input tokens of images",
    "output": "Output tokens",
    "adapter_load": "Adapter loads",
    "adapter_byte_seconds": "Adapter storage",
    "adapter_resident_byte_seconds": "Adapters kept resident",
}
UNITS = {
    "input_uncached": "tokens",
    "input_cached": "tokens",
    "image_tokens": "tokens",
    "output": "tokens",
    "adapter_load": "loads",
    "adapter_byte_seconds": "byte-seconds",
    "adapter_resident_byte_seconds": "byte-seconds",
}
"""The units of `quantity` and `per`."""
GIB_HOUR = (1 << 30) * 3600
"""Byte-seconds in one GiB-hour, the unit that people read."""
SIX_DIGITS = Decimal("0.000001")
MINIMUM = "minimum_commitment"
TAX_SCALE = 10_000
"""Parts of a percent: the precision of a tax rate."""

NO_CURRENCY = Currency("XXX", 0)
"""ISO 4217's code for no currency. Tenants without a plan have this currency, and pay nothing."""


class InvoiceStep(msgspec.Struct, frozen=True):
    """One step of a price: after the first `above` units, `per` units cost `price`."""

    above: int
    price: Decimal


class InvoiceLine(msgspec.Struct, frozen=True, kw_only=True):
    """One price's usage. `amount` is in the currency, with its digits."""

    description: str
    meter: str
    base_model: str
    tier: str
    price_id: str | None
    """Id of the price; None: the line is free of charge."""
    per: int
    steps: tuple[InvoiceStep, ...]
    quantity: int
    unit: str = ""
    amount: Decimal
    display_quantity: str = ""
    """The quantity in a form for people: byte-seconds are shown as GiB-hours, rounded, with thousands separators."""


class InvoiceParty(msgspec.Struct, frozen=True, kw_only=True):
    """The seller or the buyer."""

    name: str
    address: tuple[str, ...] = ()
    tax_id: str | None = None


class Tax(msgspec.Struct, frozen=True, kw_only=True):
    """A tax on a whole invoice."""

    name: str
    percent: Decimal
    is_exempt: bool = False
    """True if the buyer pays no tax, or accounts for it (reverse charge)."""

    def of(self, subtotal: int, currency: Currency) -> int:
        """Return the tax in minor units, rounded once for the whole invoice."""
        if self.is_exempt:
            return 0
        return minor_units(subtotal * currency.nanos * int(self.percent * TAX_SCALE), 100 * TAX_SCALE, currency)


class Terms(msgspec.Struct, frozen=True, kw_only=True):
    """All data of an invoice that do not follow from the ledger. These terms are frozen together with the invoice."""

    seller: InvoiceParty | None = None
    buyer: InvoiceParty | None = None
    tax: Tax | None = None
    issued_at: int | None = None
    """Time of the invoice in Unix seconds; None for a draft."""
    due_at: int | None = None
    note: str = ""


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
    first_sequence: int | None
    """First ledger entry of the period. None on a tenant's own copy: the range would tell it how many entries all
    tenants made.
    """
    last_sequence: int | None
    ledger_digest: str | None
    currency: str
    lines: tuple[InvoiceLine, ...]
    subtotal: Decimal | None = None
    """Sum without tax; None on invoices of earlier releases, which had no tax."""
    tax_amount: Decimal | None = None
    total: Decimal
    waived: dict[str, int]
    """Quantities that were used but not billed, by meter."""
    terms: Terms = Terms()


class Bill(msgspec.Struct, frozen=True, kw_only=True):
    """A tenant's charges in one period, divided by group."""

    period: Period
    subscriptions: Subscriptions
    currency: Currency
    lines: tuple[PricedLine, ...]
    waived: dict[str, int]
    tax: Tax | None = None
    issuer: str = ""
    """The seller's name. For a closed period it is the frozen name; it is empty for a bill without terms."""

    @property
    def usage_total(self) -> int:
        """Sum of the lines in minor units, without the minimum."""
        return sum(line.amount for line in self.lines)

    @property
    def shortfall(self) -> int:
        """The difference to the plan's minimum, in minor units; in an open period every entry reduces it."""
        plan = self.subscriptions.plan_at(self.period.month.ends_at - 1)
        return 0 if plan is None else max(0, plan.minimum - self.usage_total)

    @property
    def subtotal(self) -> int:
        """Sum in minor units, with the minimum and without tax."""
        return self.usage_total + self.shortfall

    @property
    def tax_amount(self) -> int:
        """Minor units."""
        return 0 if self.tax is None else self.tax.of(self.subtotal, self.currency)

    @property
    def total(self) -> int:
        """Sum in minor units, with tax."""
        return self.subtotal + self.tax_amount

    def amount(self, minor: int) -> Decimal:
        """Convert minor units to a number in the currency."""
        return to_decimal(minor, self.currency.digits)

    def charges(self) -> list[tuple[PricedLine, Charge]]:
        """List every part of every line."""
        return [(line, part) for line in self.lines for part in line.charges]


def bill(
    period: Period, subscriptions: Subscriptions, quantities: Sequence[DailyQuantities], terms: Terms | None = None
) -> Bill:
    """Compute a tenant's bill of a period's quantities; without `terms` there is no tax."""
    terms = terms or Terms()
    currency = subscriptions.plans[0][1].currency if subscriptions.plans else NO_CURRENCY
    waived: dict[str, int] = {}
    for one in quantities:
        for meter, quantity in one.quantities.items():
            if meter.startswith("waived_"):
                waived[meter] = waived.get(meter, 0) + quantity
    lines = tuple(charge(quantities, subscriptions.prices_at, currency))
    return Bill(
        period=period,
        subscriptions=subscriptions,
        currency=currency,
        lines=lines,
        waived=waived,
        tax=terms.tax,
        issuer="" if terms.seller is None else terms.seller.name,
    )


def invoice(of: Bill, tenant_id: TenantId, tenant_name: str, terms: Terms) -> Invoice:
    """Turn a bill into an invoice; `terms` have the bill's tax."""
    month, span = of.period.month, of.period.span
    return Invoice(
        id=f"INV-{month}-{tenant_name}",
        status="final" if of.period.is_closed else "draft",
        tenant_id=tenant_id,
        tenant_name=tenant_name,
        period=str(month),
        period_start=month.starts_at // SECOND,
        period_end=month.ends_at // SECOND,
        first_sequence=span.first,
        last_sequence=span.last,
        ledger_digest=of.period.digest,
        currency=of.currency.code,
        lines=tuple(invoice_lines(of)),
        subtotal=of.amount(of.subtotal),
        tax_amount=of.amount(of.tax_amount),
        total=of.amount(of.total),
        waived=of.waived,
        terms=terms,
    )


def document(made: Invoice) -> str:
    """Encode the invoice as JSON. Amounts are texts, so no reader turns them into floats."""
    return encode_money(made).decode()


def read_invoice(text: str) -> Invoice:
    """Decode a stored document."""
    return msgspec.json.decode(text, type=Invoice)


def digest(text: str) -> str:
    """Return the SHA-256 of a document."""
    return "sha256:" + hashlib.sha256(text.encode()).hexdigest()


def invoice_lines(of: Bill) -> list[InvoiceLine]:
    """Return the lines of a bill as an invoice shows them. The difference to the minimum is the last line."""
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
            unit=UNITS[line.meter],
            amount=of.amount(line.amount),
            display_quantity=display_quantity(line.meter, line.quantity),
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


def display_quantity(meter: str, quantity: int) -> str:
    """Format a quantity with a unit for people: tokens, loads or GiB-hours."""
    if UNITS.get(meter) == "byte-seconds":
        hours = (Decimal(quantity) / GIB_HOUR).quantize(SIX_DIGITS)
        return f"{hours.normalize():,f} GiB-hours"
    return f"{quantity:,} {UNITS[meter]}" if meter in UNITS else f"{quantity:,}"


def display_prices(line: InvoiceLine) -> list[str]:
    """Format a line's prices, one for each step, in the unit that people read."""
    shown = []
    for step in line.steps:
        above = f"above {display_quantity(line.meter, step.above)}: " if len(line.steps) > 1 else ""
        if UNITS.get(line.meter) == "byte-seconds":
            # six significant digits, not six decimal places: byte-seconds are cheap
            hourly = Context(prec=6).create_decimal(step.price * GIB_HOUR / line.per)
            shown.append(f"{above}{hourly.normalize():,f} per GiB-hour")
        else:
            shown.append(f"{above}{step.price.normalize():f} per {line.per:,} {UNITS.get(line.meter, '')}".rstrip())
    return shown


def _steps(price: Price | None) -> tuple[InvoiceStep, ...]:
    return (
        tuple(InvoiceStep(step.above, to_decimal(step.nanos, NANO_DIGITS).normalize()) for step in price.steps)
        if price
        else ()
    )


def _description(line: PricedLine) -> str:
    where = ", ".join(part for part in (line.base_model, line.tier) if part not in ("", "*"))
    description = MEANINGS[line.meter] + (f" ({where})" if where else "")
    return description if line.price else f"{description}, without a price"
