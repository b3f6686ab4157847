"""The ledger and its costs in the formats that finance and metering systems take."""

from loramux.exports.alerts import AlertDelivery
from loramux.exports.delivery import Delivery, Sink
from loramux.exports.errors import ExportError
from loramux.exports.files import FORMATS, ExportedFile, write_table
from loramux.exports.focus import FOCUS_COLUMNS, focus_rows
from loramux.exports.invoices import InvoiceFormat, write_invoice
from loramux.exports.ledger import LEDGER_COLUMNS, ledger_pages
from loramux.exports.sinks import make_sink
from loramux.exports.webhook_sink import WebhookSink
from loramux.records.sinks import Parked

__all__ = [
    "FOCUS_COLUMNS",
    "FORMATS",
    "LEDGER_COLUMNS",
    "AlertDelivery",
    "Delivery",
    "ExportError",
    "ExportedFile",
    "InvoiceFormat",
    "Parked",
    "Sink",
    "WebhookSink",
    "focus_rows",
    "ledger_pages",
    "make_sink",
    "write_invoice",
    "write_table",
]
