"""GET /v1/organization/invoices/{month}."""

from __future__ import annotations

import asyncio

from litestar import Controller, Response, get
from litestar.di import NamedDependency
from litestar.params import FromPath, FromQuery

from loramux.exports import InvoiceFormat, write_invoice
from loramux.gateway import Platform
from loramux.tenants import Principal
from loramux_api.auth import requires
from loramux_api.openapi import REFUSALS

MEDIA_TYPES: dict[InvoiceFormat, str] = {
    "json": "application/json",
    "html": "text/html; charset=utf-8",
    "pdf": "application/pdf",
}


class InvoiceController(Controller):
    """What the caller's tenant owes."""

    path = "/v1/organization/invoices"
    tags = ("Usage",)
    guards = (requires("billing"),)

    @get("/{month:str}", summary="Invoice", responses=REFUSALS)
    async def invoice(
        self,
        month: FromPath[str],
        principal: NamedDependency[Principal],
        platform: NamedDependency[Platform],
        format: FromQuery[InvoiceFormat] = "json",
    ) -> Response[bytes]:
        """The invoice of a closed month (UTC, 2026-11), or the open month's draft; `format`: json, html or pdf.

        Amounts are texts in the invoice's currency.
        """
        made = await platform.billing.own_invoice(principal, month)
        content = await asyncio.to_thread(write_invoice, made, format, platform.settings.billing)
        named = {"Content-Disposition": f'inline; filename="{made.id}.{format}"'}
        return Response(content, media_type=MEDIA_TYPES[format], headers=named)
