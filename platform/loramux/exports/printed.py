"""What an invoice says on paper, whatever it is printed with."""

from __future__ import annotations

from datetime import UTC, datetime

import msgspec

from loramux.billing import Invoice, InvoiceLine


class PrintedLine(msgspec.Struct, frozen=True):
    """One line, as texts; a price may have several steps."""

    description: str
    quantity: str
    prices: tuple[str, ...]
    amount: str


class PrintedInvoice(msgspec.Struct, frozen=True, kw_only=True):
    """An invoice as texts, from top to bottom."""

    title: str
    issuer: str
    tenant: str
    period: str
    currency: str
    lines: tuple[PrintedLine, ...]
    total: str
    waived: str | None
    proof: str


def printed(invoice: Invoice, issuer: str) -> PrintedInvoice:
    """`issuer`: who sends it."""
    waived = ", ".join(f"{quantity} {meter}" for meter, quantity in sorted(invoice.waived.items()))
    digest = f", digest {invoice.ledger_digest}" if invoice.ledger_digest else ""
    return PrintedInvoice(
        title=f"{'Invoice' if invoice.status == 'final' else 'Draft invoice'} {invoice.id}",
        issuer=issuer,
        tenant=f"{invoice.tenant_name} ({invoice.tenant_id})",
        period=f"{_day(invoice.period_start)} to {_day(invoice.period_end - 1)}, UTC",
        currency=invoice.currency,
        lines=tuple(_line(line) for line in invoice.lines),
        total=str(invoice.total),
        waived=f"Not charged: {waived}." if waived else None,
        proof=f"Ledger entries {invoice.first_sequence} to {invoice.last_sequence or 'now'}{digest}.",
    )


def _line(line: InvoiceLine) -> PrintedLine:
    above = [f"above {step.above}: " if len(line.steps) > 1 else "" for step in line.steps]
    prices = tuple(
        f"{told}{step.price.normalize():f} per {line.per}" for told, step in zip(above, line.steps, strict=True)
    )
    return PrintedLine(line.description, str(line.quantity), prices, str(line.amount))


def _day(seconds: int) -> str:
    return datetime.fromtimestamp(seconds, UTC).date().isoformat()
