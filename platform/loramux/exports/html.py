"""An invoice as a page of HTML."""

from __future__ import annotations

import jinja2

from loramux.billing import Invoice
from loramux.exports.printed import printed

PAGE = """<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<title>{{ invoice.title }}</title>
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
<h1>{{ invoice.title }}</h1>
<p>{{ invoice.issuer }}<br>to <strong>{{ invoice.tenant }}</strong><br>for {{ invoice.period }}</p>
<table>
<thead><tr><th>Description</th><th class="number">Quantity</th><th>Price</th>
<th class="number">Amount ({{ invoice.currency }})</th></tr></thead>
<tbody>
{% for line in invoice.lines %}<tr><td>{{ line.description }}</td><td class="number">{{ line.quantity }}</td>
<td>{% for price in line.prices %}{{ price }}{% if not loop.last %}<br>{% endif %}
{% endfor %}</td><td class="number">{{ line.amount }}</td></tr>
{% endfor %}</tbody>
<tfoot><tr><td colspan="3">Total</td><td class="number">{{ invoice.total }}</td></tr></tfoot>
</table>
{% if invoice.waived %}<p>{{ invoice.waived }}</p>{% endif %}
<p><small>{{ invoice.proof }}</small></p>
</body>
</html>
"""


def invoice_html(invoice: Invoice, issuer: str) -> str:
    """The page; whatever a name holds is text in it."""
    environment = jinja2.Environment(autoescape=True, undefined=jinja2.StrictUndefined)
    return environment.from_string(PAGE).render(invoice=printed(invoice, issuer))
