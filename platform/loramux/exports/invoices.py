"""Invoices as files: the document itself, a page, or a PDF."""

from __future__ import annotations

from pathlib import Path
from typing import Literal

from loramux.billing import Invoice, document
from loramux.exports.html import invoice_html
from loramux.settings import BillingSettings

InvoiceFormat = Literal["json", "html", "pdf"]


def write_invoice(invoice: Invoice, kind: InvoiceFormat, settings: BillingSettings) -> bytes:
    """The file's content. Raises ExportError where a PDF's font lacks a letter."""
    if kind == "json":
        return document(invoice).encode()
    if kind == "html":
        return invoice_html(invoice, settings.issuer).encode()
    from loramux.exports.pdf import invoice_pdf  # fpdf2 takes a while to import

    return invoice_pdf(invoice, settings.issuer, None if settings.font is None else Path(settings.font))
