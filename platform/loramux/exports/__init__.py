"""The ledger and its costs in the formats that finance and metering systems take."""

from loramux.exports.delivery import AlertDelivery, Sink, SinkDelivery
from loramux.exports.focus import FOCUS_COLUMNS, focus_rows
from loramux.exports.invoice_render import InvoiceFormat, write_invoice
from loramux.exports.sinks import WebhookSink, make_sink
from loramux.exports.tables import FORMATS, LEDGER_COLUMNS, ExportedFile, ExportError, ledger_pages, write_table
from loramux.records.sinks import ParkedEvent

__all__ = [
    "FOCUS_COLUMNS",
    "FORMATS",
    "LEDGER_COLUMNS",
    "AlertDelivery",
    "ExportError",
    "ExportedFile",
    "InvoiceFormat",
    "ParkedEvent",
    "Sink",
    "SinkDelivery",
    "WebhookSink",
    "focus_rows",
    "ledger_pages",
    "make_sink",
    "write_invoice",
    "write_table",
]
