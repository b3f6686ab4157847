"""The steps of the demo on a running server: upload the adapters, send the requests, read the usage."""

from __future__ import annotations

import asyncio
import ssl
from collections.abc import Callable

from loramux_demo.assets import OWNERS, load_prompts
from loramux_demo.customers import Customer, read_sharing, usage_of
from loramux_demo.drive import drive, first_of_each_model, plan_calls
from loramux_demo.report import Report


def tour(
    url: str,
    keys: dict[str, str],
    show_progress: Callable[[str], None],
    *,
    internal_url: str | None = None,
    verify: ssl.SSLContext | bool = True,
) -> Report:
    """Run all steps and return the report. Raises click.ClickException if the server refuses a call.

    `internal_url` has the metrics, where they have a port of their own.
    """
    customers = [Customer(tenant, url, key, verify) for tenant, key in keys.items()]
    for customer in customers:
        show_progress(f"uploading the adapters of {customer.tenant}")
        customer.upload_adapters()
    first, rest = first_of_each_model(plan_calls(load_prompts()))
    show_progress(f"sending one request to each of {len(first)} models, which loads its adapter")
    driven = asyncio.run(drive(url, keys, first, verify))
    show_progress(f"sending {len(rest)} requests at once")
    driven += asyncio.run(drive(url, keys, rest, verify))
    show_progress("reading the usage")
    return Report(
        url=url,
        drive=driven,
        sharing=read_sharing(internal_url or url),
        usage=tuple(sorted(row for customer in customers for row in customer.usage())),
        usage_of_responses=tuple(usage_of(driven.answers)),
        isolated=all(
            customer.cannot_detect(f"{other}/{adapter}")
            for customer in customers
            for other, adapters in OWNERS.items()
            if other != customer.tenant
            for adapter in adapters
        ),
    )
