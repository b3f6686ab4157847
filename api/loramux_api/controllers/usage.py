"""GET /v1/organization/usage/completions and /v1/organization/costs."""

from __future__ import annotations

from typing import Any

import msgspec
from litestar import Controller, MediaType, Request, Response, get
from litestar.di import NamedDependency, Provide
from litestar.params import FromQuery

from loramux.billing import CostsQuery
from loramux.gateway import InvalidRequest, Platform
from loramux.tenants import Principal
from loramux.usage import UsagePage, UsageQuery
from loramux_api.auth import requires
from loramux_api.openapi import REFUSALS

LISTS = ("group_by", "models", "api_key_ids")
COST_LISTS = ("group_by", "project_ids")
SINGLES = ("start_time", "end_time", "bucket_width", "limit", "page")
_exact = msgspec.json.Encoder(decimal_format="number").encode
"""Amounts as JSON numbers with all their digits."""


def usage_query(
    request: Request[Any, Any, Any],
    start_time: FromQuery[int],
    end_time: FromQuery[int | None] = None,
    bucket_width: FromQuery[str] = "1d",
    limit: FromQuery[int | None] = None,
    page: FromQuery[str | None] = None,
) -> UsageQuery:
    """The question that the URL asks. Raises InvalidQuery, InvalidRequest."""
    lists = _lists(request, LISTS)
    return UsageQuery(
        start_time=start_time,
        end_time=end_time,
        bucket_width=bucket_width,
        group_by=lists["group_by"],
        models=lists["models"],
        api_key_ids=lists["api_key_ids"],
        limit=limit,
        page=page,
    )


def costs_query(
    request: Request[Any, Any, Any],
    start_time: FromQuery[int],
    end_time: FromQuery[int | None] = None,
    bucket_width: FromQuery[str] = "1d",
    limit: FromQuery[int | None] = None,
    page: FromQuery[str | None] = None,
) -> CostsQuery:
    """The question that the URL asks. Raises InvalidQuery, InvalidRequest."""
    lists = _lists(request, COST_LISTS)
    return CostsQuery(
        start_time=start_time,
        end_time=end_time,
        bucket_width=bucket_width,
        group_by=lists["group_by"],
        project_ids=lists["project_ids"],
        limit=limit,
        page=page,
    )


class UsageController(Controller):
    """What the caller's tenant has used, and what it costs."""

    path = "/v1/organization"
    tags = ("Usage",)
    guards = (requires("usage"),)

    @get(
        "/usage/completions",
        summary="Usage of completions",
        responses=REFUSALS,
        dependencies={"query_of_usage": Provide(usage_query, sync_to_thread=False)},
    )
    async def completions(
        self,
        query_of_usage: NamedDependency[UsageQuery],
        principal: NamedDependency[Principal],
        platform: NamedDependency[Platform],
    ) -> UsagePage:
        """Tokens and requests in buckets of time, as OpenAI's usage API has it.

        `group_by` (model, api_key_id), `models` and `api_key_ids` may be repeated, with or without `[]`. Times are
        Unix seconds.
        """
        return await platform.usage.completions(principal, query_of_usage)

    @get(
        "/costs",
        summary="Costs",
        responses=REFUSALS,
        dependencies={"query_of_costs": Provide(costs_query, sync_to_thread=False)},
    )
    async def costs(
        self,
        query_of_costs: NamedDependency[CostsQuery],
        principal: NamedDependency[Principal],
        platform: NamedDependency[Platform],
    ) -> Response[bytes]:
        """What the usage costs, by day (UTC), as OpenAI's costs API has it.

        `group_by` (line_item, project_id, api_key_id, model, tags) and `project_ids` may be repeated, with or without
        `[]`. Days of an open period can still change; what is not grouped by is null.
        """
        page = await platform.billing.costs(principal, query_of_costs)
        return Response(_exact(page), media_type=MediaType.JSON)


def _lists(request: Request[Any, Any, Any], lists: tuple[str, ...]) -> dict[str, tuple[str, ...]]:
    """The repeatable parameters; refuses what nobody knows, since a filter that is ignored answers another question."""
    given = request.query_params
    for name in given:
        if name.removesuffix("[]") not in (*lists, *SINGLES):
            known = ", ".join((*SINGLES, *lists))
            raise InvalidRequest(
                f"Unknown parameter: '{name[:80]}'. This endpoint takes {known}.",
                param=name[:80],
                code="unknown_parameter",
            )
    return {name: tuple(given.getall(name, []) + given.getall(f"{name}[]", [])) for name in lists}
