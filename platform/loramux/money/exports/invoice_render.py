"""Renders invoices: as the JSON document itself, as a page of HTML, and as a PDF by fpdf2 (https://py-pdf.github.io/fpdf2/).

All printed values are first converted to texts (`PrintedInvoice`), so the page and the PDF have the same contents.
"""

from __future__ import annotations

from datetime import UTC, datetime
from decimal import Decimal
from pathlib import Path
from typing import TYPE_CHECKING, Literal

import jinja2
import msgspec

from loramux.common.settings.server import BillingSettings
from loramux.money.billing.invoices import (
    Invoice,
    InvoiceLine,
    InvoiceParty,
    display_prices,
    display_quantity,
    document,
)
from loramux.money.exports.tables import ExportError

if TYPE_CHECKING:
    from fpdf import FPDF

InvoiceFormat = Literal["json", "html", "pdf"]
MARGIN = 20
"""Millimetres, of an A4 page."""
COLUMNS = (56, 38, 48, 28)
"""Widths in millimetres: description, quantity, price, amount."""

PAGE = """<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<title>{{ invoice.title }}</title>
<style>
  @page { size: A4; margin: 20mm }
  body { font: 11pt/1.4 system-ui, sans-serif; max-width: 180mm; margin: 2em auto; color: #111 }
  header { display: flex; justify-content: space-between; gap: 2em }
  table { border-collapse: collapse; width: 100%; margin: 1.5em 0 }
  th, td { padding: .35em .5em; border-bottom: 1px solid #ccc; text-align: left }
  td.number, th.number { text-align: right; font-variant-numeric: tabular-nums }
  tr { break-inside: avoid }
  tfoot td { border-top: 1px solid #111 }
  tfoot tr:last-child td { font-weight: 600 }
  small { color: #555; word-break: break-all }
</style>
</head>
<body>
<h1>{{ invoice.title }}</h1>
<header>
<p>{% for text in invoice.seller %}{{ text }}<br>{% endfor %}</p>
<p>{% for name, value in invoice.facts %}{{ name }}: {{ value }}<br>{% endfor %}</p>
</header>
<p>Bill to<br>{% for text in invoice.buyer %}<strong>{{ text }}</strong><br>{% endfor %}</p>
<table>
<thead><tr><th>Description</th><th class="number">Quantity</th><th>Price</th>
<th class="number">Amount ({{ invoice.currency }})</th></tr></thead>
<tbody>
{% for line in invoice.lines %}<tr><td>{{ line.description }}</td><td class="number">{{ line.quantity }}</td>
<td>{% for price in line.prices %}{{ price }}{% if not loop.last %}<br>{% endif %}
{% endfor %}</td><td class="number">{{ line.amount }}</td></tr>
{% endfor %}</tbody>
<tfoot>{% for name, amount in invoice.totals %}<tr><td colspan="3">{{ name }}</td>
<td class="number">{{ amount }}</td></tr>
{% endfor %}</tfoot>
</table>
{% for note in invoice.notes %}<p>{{ note }}</p>
{% endfor %}<p><small>{{ invoice.proof }}</small></p>
</body>
</html>
"""


WAIVED = {
    "waived_input_uncached": "input tokens",
    "waived_input_cached": "input tokens found in the cache",
    "waived_image_tokens": "input tokens of images",
    "waived_output": "output tokens",
}


class PrintedLine(msgspec.Struct, frozen=True):
    """One invoice line, as texts. A price may have several steps."""

    description: str
    quantity: str
    prices: tuple[str, ...]
    amount: str


class PrintedInvoice(msgspec.Struct, frozen=True, kw_only=True):
    """An invoice as texts, from top to bottom."""

    id: str
    status: str
    """`draft` or `final`."""
    title: str
    seller: tuple[str, ...]
    buyer: tuple[str, ...]
    facts: tuple[tuple[str, str], ...]
    """Number, dates and period, each with its label."""
    currency: str
    lines: tuple[PrintedLine, ...]
    totals: tuple[tuple[str, str], ...]
    """Subtotal, tax and total, each with its label. The total is last."""
    notes: tuple[str, ...]
    proof: str


def write_invoice(invoice: Invoice, kind: InvoiceFormat, settings: BillingSettings) -> bytes:
    """Return the file's content. Raises ExportError if a PDF's font lacks a letter."""
    if kind == "json":
        return document(invoice).encode()
    printed = print_invoice(invoice, settings)
    if kind == "html":
        return render_html(printed).encode()
    moment = datetime.fromtimestamp(invoice.terms.issued_at or invoice.period_end, UTC)
    return render_pdf(printed, moment, None if settings.font is None else Path(settings.font))


def print_invoice(invoice: Invoice, settings: BillingSettings) -> PrintedInvoice:
    """Turn an invoice into texts. An invoice of an earlier release, which froze no seller, takes the seller of the
    settings."""
    terms, is_final = invoice.terms, invoice.status == "final"
    seller = terms.seller or InvoiceParty(name=settings.issuer, address=settings.address, tax_id=settings.tax_id)
    buyer = terms.buyer or InvoiceParty(name=invoice.tenant_name)
    # the digest, not the range of entries: a tenant's printed invoice must not tell how many entries all tenants made
    proof = f"Ledger digest {invoice.ledger_digest}." if invoice.ledger_digest else "From the ledger of an open month."
    return PrintedInvoice(
        id=invoice.id,
        status=invoice.status,
        title=f"{'Invoice' if is_final else 'Draft invoice'} {invoice.id}",
        seller=_party(seller),
        buyer=(*_party(buyer), f"{invoice.tenant_name}, {invoice.tenant_id}"),
        facts=_facts(invoice),
        currency=invoice.currency,
        lines=tuple(_line(line) for line in invoice.lines),
        totals=_totals(invoice),
        notes=_notes(invoice),
        proof=proof,
    )


def _party(party: InvoiceParty) -> tuple[str, ...]:
    return (party.name, *party.address, *([f"Tax number {party.tax_id}"] if party.tax_id else []))


def _facts(invoice: Invoice) -> tuple[tuple[str, str], ...]:
    dates = (("Date", invoice.terms.issued_at), ("Due", invoice.terms.due_at))
    period = f"{_day(invoice.period_start)} to {_day(invoice.period_end - 1)}, UTC"
    return (
        ("Number", invoice.id),
        *((name, _day(moment)) for name, moment in dates if moment is not None),
        ("Period", period),
    )


def _totals(invoice: Invoice) -> tuple[tuple[str, str], ...]:
    total = ("Total", _amount(invoice.total))
    tax = invoice.terms.tax
    if tax is None or invoice.subtotal is None or invoice.tax_amount is None:
        return (total,)
    name = f"{tax.name}, exempt" if tax.is_exempt else f"{tax.name} {tax.percent.normalize():f} %"
    return (("Subtotal", _amount(invoice.subtotal)), (name, _amount(invoice.tax_amount)), total)


def _notes(invoice: Invoice) -> tuple[str, ...]:
    waived = ", ".join(f"{quantity:,} {WAIVED.get(meter, meter)}" for meter, quantity in sorted(invoice.waived.items()))
    is_exempt = invoice.terms.tax is not None and invoice.terms.tax.is_exempt
    notes = (
        "No tax is charged: the buyer is exempt, or accounts for it (reverse charge)." if is_exempt else "",
        f"Not charged: {waived}." if waived else "",
        invoice.terms.note,
    )
    return tuple(filter(None, notes))


def _line(line: InvoiceLine) -> PrintedLine:
    # invoices of earlier releases have the unit in the description
    description = line.description.replace(", byte-seconds", "")
    quantity = display_quantity(line.meter, line.quantity)
    return PrintedLine(description, quantity, tuple(display_prices(line)), _amount(line.amount))


def _amount(amount: Decimal) -> str:
    return format(amount, ",f")


def _day(seconds: int) -> str:
    return datetime.fromtimestamp(seconds, UTC).date().isoformat()


def render_html(invoice: PrintedInvoice) -> str:
    """Render the page; markup in names is shown as text."""
    environment = jinja2.Environment(autoescape=True, undefined=jinja2.StrictUndefined)
    return environment.from_string(PAGE).render(invoice=invoice)


def render_pdf(invoice: PrintedInvoice, moment: datetime, font: Path | None = None) -> bytes:
    """Draw the document; the same invoice gives the same bytes. `font` is a TrueType file, which letters outside
    Latin-1 need.

    Raises ExportError if the letters need a font, or the font cannot be read.
    """
    try:
        from fpdf import FPDF  # slow to import
        from fpdf.errors import FPDFException, FPDFUnicodeEncodingException
    except ImportError:
        raise ExportError("A PDF needs fpdf2: pip install 'loramux[finance]'") from None

    page = FPDF(format="A4")
    page.set_margins(MARGIN, MARGIN)
    page.set_auto_page_break(True, MARGIN)
    page.set_creation_date(moment)
    page.set_title(invoice.title)
    page.set_lang("en")
    try:
        family = _family(page, font)
        page.add_page()
        _draw(page, family, invoice)
        return bytes(page.output())
    except FPDFUnicodeEncodingException as error:
        message = f"the invoice has {error.character!r}, which its font lacks; name a TrueType file in billing.font"
        raise ExportError(message) from None
    except (FPDFException, OSError) as error:
        raise ExportError(f"billing.font: {error}") from None


def _family(page: FPDF, font: Path | None) -> str:
    if font is None:
        return "helvetica"
    page.add_font("invoice", fname=font)
    return "invoice"


def _draw(page: FPDF, family: str, invoice: PrintedInvoice) -> None:
    from fpdf.enums import TableBordersLayout

    page.set_font(family, size=18)
    page.multi_cell(0, 12, invoice.title, new_x="LMARGIN", new_y="NEXT")
    page.set_font(family, size=10)
    facts = "\n".join(f"{name}: {value}" for name, value in invoice.facts)
    plain = page.font_face()
    with page.table(
        col_widths=(90, 80), first_row_as_headings=False, borders_layout=TableBordersLayout.NONE, line_height=5
    ) as head:
        head.row(("\n".join(invoice.seller), facts))
        head.row(("\n".join(("", "Bill to", *invoice.buyer)), ""))
    page.ln(6)
    with page.table(
        col_widths=COLUMNS,
        text_align=("LEFT", "RIGHT", "LEFT", "RIGHT"),
        borders_layout=TableBordersLayout.HORIZONTAL_LINES,
        line_height=6,
        headings_style=plain,
    ) as table:
        table.row(("Description", "Quantity", "Price", f"Amount ({invoice.currency})"))
        for line in invoice.lines:
            table.row((line.description, line.quantity, "\n".join(line.prices), line.amount))
        for name, amount in invoice.totals:
            total = table.row()
            total.cell(name, colspan=3)
            total.cell(amount)
    page.ln(6)
    for text in invoice.notes:
        page.multi_cell(0, 5, text, new_x="LMARGIN", new_y="NEXT")
    page.set_font(family, size=8)
    page.multi_cell(0, 5, invoice.proof, new_x="LMARGIN", new_y="NEXT")
