"""What the demo does once the server runs: upload, ask, read the bill."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from loramux_demo.accounts import Customer, read_sharing, usage_of
from loramux_demo.assets import OWNERS, load_prompts
from loramux_demo.drive import drive, first_of_each_model, plan_calls
from loramux_demo.report import Report


def tour(url: str, keys: dict[str, str], tell: Callable[[str], None]) -> Report:
    """Take every customer through their day; raises click.ClickException where the server refuses something."""
    customers = [Customer(tenant, url, key) for tenant, key in keys.items()]
    for customer in customers:
        tell(f"uploading the adapters of {customer.tenant}")
        customer.upload_adapters()
    first, rest = first_of_each_model(plan_calls(load_prompts()))
    tell(f"asking each of {len(first)} models a question, which brings its adapter into memory")
    driven = asyncio.run(drive(url, keys, first))
    tell(f"sending {len(rest)} requests at once")
    driven += asyncio.run(drive(url, keys, rest))
    tell("reading the bill")
    return Report(
        url=url,
        drive=driven,
        sharing=read_sharing(url),
        usage=tuple(sorted(row for customer in customers for row in customer.usage())),
        usage_of_responses=tuple(usage_of(driven.answers)),
        isolated=all(
            customer.is_told_nothing_of(f"{other}/{adapter}")
            for customer in customers
            for other, adapters in OWNERS.items()
            if other != customer.tenant
            for adapter in adapters
        ),
    )
