"""An invoice as a PDF, by fpdf2: https://py-pdf.github.io/fpdf2/."""

from __future__ import annotations

from datetime import UTC, datetime
from pathlib import Path

from fpdf import FPDF
from fpdf.enums import TableBordersLayout
from fpdf.errors import FPDFException, FPDFUnicodeEncodingException

from loramux.billing import Invoice
from loramux.exports.errors import ExportError
from loramux.exports.printed import PrintedInvoice, printed

MARGIN = 20
"""Millimetres, of an A4 page."""
COLUMNS = (64, 34, 44, 28)
"""Widths: description, quantity, price, amount."""


def invoice_pdf(invoice: Invoice, issuer: str, font: Path | None = None) -> bytes:
    """The document; the same invoice gives the same bytes. `font`: a TrueType file, for letters beyond Latin-1.

    Raises ExportError where the letters need a font, or the font cannot be read.
    """
    page = FPDF(format="A4")
    page.set_margins(MARGIN, MARGIN)
    page.set_auto_page_break(True, MARGIN)
    page.set_creation_date(datetime.fromtimestamp(invoice.period_end, UTC))
    page.set_title(invoice.id)
    page.set_lang("en")
    try:
        family = _family(page, font)
        page.add_page()
        _print(page, family, printed(invoice, issuer))
        return bytes(page.output())
    except FPDFUnicodeEncodingException as error:
        told = f"the invoice has {error.character!r}, which its font lacks; name a TrueType file in billing.font"
        raise ExportError(told) from None
    except (FPDFException, OSError) as error:
        raise ExportError(f"billing.font: {error}") from None


def _family(page: FPDF, font: Path | None) -> str:
    if font is None:
        return "helvetica"
    page.add_font("invoice", fname=font)
    return "invoice"


def _print(page: FPDF, family: str, invoice: PrintedInvoice) -> None:
    page.set_font(family, size=18)
    page.multi_cell(0, 12, invoice.title, new_x="LMARGIN", new_y="NEXT")
    page.set_font(family, size=10)
    for text in (invoice.issuer, f"to {invoice.tenant}", f"for {invoice.period}"):
        page.multi_cell(0, 6, text, new_x="LMARGIN", new_y="NEXT")
    page.ln(6)
    with page.table(
        col_widths=COLUMNS,
        text_align=("LEFT", "RIGHT", "LEFT", "RIGHT"),
        borders_layout=TableBordersLayout.HORIZONTAL_LINES,
        line_height=6,
        headings_style=page.font_face(),
    ) as table:
        table.row(("Description", "Quantity", "Price", f"Amount ({invoice.currency})"))
        for line in invoice.lines:
            table.row((line.description, line.quantity, "\n".join(line.prices), line.amount))
        total = table.row()
        total.cell("Total", colspan=3)
        total.cell(invoice.total)
    page.ln(6)
    page.set_font(family, size=8)
    for text in filter(None, (invoice.waived, invoice.proof)):
        page.multi_cell(0, 5, text, new_x="LMARGIN", new_y="NEXT")
