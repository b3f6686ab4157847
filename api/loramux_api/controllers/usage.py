"""GET /v1/organization/usage/completions."""

from __future__ import annotations

from typing import Any

from litestar import Controller, Request, get
from litestar.di import NamedDependency, Provide
from litestar.params import FromQuery

from loramux.gateway import InvalidRequest, Platform
from loramux.tenants import Principal
from loramux.usage import UsagePage, UsageQuery
from loramux_api.auth import requires
from loramux_api.openapi import REFUSALS

LISTS = ("group_by", "models", "api_key_ids")
SINGLES = ("start_time", "end_time", "bucket_width", "limit", "page")


def usage_query(
    request: Request[Any, Any, Any],
    start_time: FromQuery[int],
    end_time: FromQuery[int | None] = None,
    bucket_width: FromQuery[str] = "1d",
    limit: FromQuery[int | None] = None,
    page: FromQuery[str | None] = None,
) -> UsageQuery:
    """The question that the URL asks. Raises InvalidQuery, InvalidRequest."""
    lists = _lists(request)
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


class UsageController(Controller):
    """What the caller's tenant has used."""

    path = "/v1/organization/usage"
    tags = ("Usage",)
    guards = (requires("usage"),)

    @get(
        "/completions",
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


def _lists(request: Request[Any, Any, Any]) -> dict[str, tuple[str, ...]]:
    """The repeatable parameters; refuses what nobody knows, since a filter that is ignored answers another question."""
    given = request.query_params
    for name in given:
        if name.removesuffix("[]") not in (*LISTS, *SINGLES):
            known = ", ".join((*SINGLES, *LISTS))
            raise InvalidRequest(
                f"Unknown parameter: '{name[:80]}'. This endpoint takes {known}.",
                param=name[:80],
                code="unknown_parameter",
            )
    return {name: tuple(given.getall(name, []) + given.getall(f"{name}[]", [])) for name in LISTS}
