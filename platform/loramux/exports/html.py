"""An invoice as a page that prints well; a browser's "save as PDF" makes the PDF."""

from __future__ import annotations

from datetime import UTC, datetime

import jinja2

from loramux.billing import Invoice

PAGE = """<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<title>{{ invoice.id }}</title>
<style>
  @page { size: A4; margin: 20mm }
  body { font: 11pt/1.4 system-ui, sans-serif; max-width: 180mm; margin: 2em auto; color: #111 }
  table { border-collapse: collapse; width: 100%; margin: 1.5em 0 }
  th, td { padding: .35em .5em; border-bottom: 1px solid #ccc; text-align: left }
  td.number, th.number { text-align: right; font-variant-numeric: tabular-nums }
  tr { break-inside: avoid }
  tfoot td { border-top: 2px solid #111; font-weight: 600 }
  small { color: #555; word-break: break-all }
</style>
</head>
<body>
<h1>{{ "Invoice" if invoice.status == "final" else "Draft invoice" }} {{ invoice.id }}</h1>
<p>{{ issuer }}<br>to <strong>{{ invoice.tenant_name }}</strong> ({{ invoice.tenant_id }})<br>
for {{ day(invoice.period_start) }} to {{ day(invoice.period_end - 1) }}, UTC</p>
<table>
<thead><tr><th>Description</th><th class="number">Quantity</th><th>Price</th>
<th class="number">Amount ({{ invoice.currency }})</th></tr></thead>
<tbody>
{% for line in invoice.lines %}<tr><td>{{ line.description }}</td><td class="number">{{ line.quantity }}</td>
<td>{% for step in line.steps %}{% if line.steps | length > 1 %}above {{ step.above }}: {% endif %}
{{ step.price }} per {{ line.per }}{% if not loop.last %}<br>{% endif %}
{% endfor %}</td><td class="number">{{ line.amount }}</td></tr>
{% endfor %}</tbody>
<tfoot><tr><td colspan="3">Total</td><td class="number">{{ invoice.total }}</td></tr></tfoot>
</table>
{% if invoice.waived %}<p>Not charged: {% for meter, quantity in invoice.waived | dictsort %}{{ quantity }} {{ meter }}
{%- if not loop.last %}, {% endif %}{% endfor %}.</p>{% endif %}
<p><small>Ledger entries {{ invoice.first_sequence }} to {{ invoice.last_sequence or "now" }}
{%- if invoice.ledger_digest %}, digest {{ invoice.ledger_digest }}{% endif %}.</small></p>
</body>
</html>
"""


def invoice_html(invoice: Invoice, issuer: str) -> str:
    """The page; whatever a name holds is text in it."""
    environment = jinja2.Environment(autoescape=True, undefined=jinja2.StrictUndefined)
    return environment.from_string(PAGE).render(invoice=invoice, issuer=issuer, day=_day)


def _day(seconds: int) -> str:
    return datetime.fromtimestamp(seconds, UTC).date().isoformat()
