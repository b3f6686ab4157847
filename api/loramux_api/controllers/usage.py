"""GET /v1/organization/usage/completions, /costs and /invoices/{month}, and GET /v1/requests."""

from __future__ import annotations

from typing import Literal

from litestar import MediaType, Response, get
from litestar.di import NamedDependency, Provide
from litestar.params import FromQuery

from loramux.common.identity import Principal
from loramux.common.jobs import run_blocking
from loramux.common.settings.file import Settings
from loramux.data.entities import FIRST_TOKEN_BOUNDS
from loramux.money.billing.costs import CostPage, CostsQuery
from loramux.money.billing.service import BillingService
from loramux.money.exports.invoice_render import InvoiceFormat, PrintedInvoice, print_invoice, write_invoice
from loramux.money.pricing import encode_money
from loramux.money.usage.query import UsagePage, UsageQuery
from loramux.money.usage.service import UsageService
from loramux.releases.metrics import RevisionMetrics, ServiceLevel
from loramux.serving.errors import InvalidRequest
from loramux_api.auth import requires
from loramux_api.bodies import AnyRequest
from loramux_api.downloads import file_headers
from loramux_api.openapi import ApiController, ResponseSpec
from loramux_api.parameters import (
    CostsLimit,
    EndTime,
    OptionalText,
    PageLimit,
    PathName,
    QueryText,
    StartTime,
    TopModels,
    UsageLimit,
)
from loramux_api.schemas.requests import RequestObject, request_object
from loramux_api.schemas.tenancy import Listing

LISTS = ("group_by", "models", "api_key_ids", "user_ids", "project_ids")
COST_LISTS = ("group_by", "project_ids")
SINGLES = ("start_time", "end_time", "bucket_width", "limit", "page", "top_models")
MEDIA_TYPES: dict[InvoiceFormat, str] = {
    "json": "application/json",
    "html": "text/html; charset=utf-8",
    "pdf": "application/pdf",
}


def usage_query(
    request: AnyRequest,
    start_time: StartTime,
    end_time: EndTime = None,
    bucket_width: QueryText = "1d",
    limit: UsageLimit = None,
    page: OptionalText = None,
    top_models: TopModels = None,
    batch: FromQuery[bool | None] = None,
) -> UsageQuery:
    """Parse the query parameters. Raises InvalidQuery, InvalidRequest."""
    return UsageQuery(
        start_time=start_time,
        end_time=end_time,
        bucket_width=bucket_width,
        batch=batch,
        limit=limit,
        page=page,
        top_models=top_models,
        **_lists(request, LISTS, ("batch",)),
    )


def costs_query(
    request: AnyRequest,
    start_time: StartTime,
    end_time: EndTime = None,
    bucket_width: QueryText = "1d",
    limit: CostsLimit = None,
    page: OptionalText = None,
    top_models: TopModels = None,
) -> CostsQuery:
    """Parse the query parameters. Raises InvalidQuery, InvalidRequest."""
    return CostsQuery(
        start_time=start_time,
        end_time=end_time,
        bucket_width=bucket_width,
        limit=limit,
        page=page,
        top_models=top_models,
        **_lists(request, COST_LISTS),
    )


class UsageController(ApiController):
    """Usage and costs of the caller's tenant."""

    path = "/v1/organization"
    tags = ("Usage",)
    guards = (requires("usage"),)

    @get(
        "/usage/completions",
        summary="Usage of completions",
        dependencies={"query_of_usage": Provide(usage_query, sync_to_thread=False)},
    )
    async def completions(
        self,
        query_of_usage: NamedDependency[UsageQuery],
        principal: NamedDependency[Principal],
        usage: NamedDependency[UsageService],
    ) -> UsagePage:
        """Return tokens and requests in time buckets, in the format of OpenAI's usage API.

        `group_by` (model, api_key_id, project_id, user_id, batch, service_tier), `models`, `api_key_ids`, `project_ids`
        and `user_ids` may be repeated, with or without `[]`. A user is the value of `user` in requests. `batch` keeps
        only lines of batches, or everything else. Times are Unix seconds. With `top_models`, the answer names only this
        many models: the models with the most tokens in the whole time. All other models are summed under null.
        """
        return await usage.completions(principal, query_of_usage)

    @get(
        "/costs",
        summary="Costs",
        responses={200: ResponseSpec(CostPage, description="Amounts are numbers.")},
        dependencies={"query_of_costs": Provide(costs_query, sync_to_thread=False)},
    )
    async def costs(
        self,
        query_of_costs: NamedDependency[CostsQuery],
        principal: NamedDependency[Principal],
        billing: NamedDependency[BillingService],
    ) -> Response[bytes]:
        """Return the costs by day (UTC), in the format of OpenAI's costs API.

        `group_by` (line_item, project_id, api_key_id, model, tags) and `project_ids` may be repeated, with or without
        `[]`. Days of an open period can still change. Fields that the query does not group by are null. With
        `top_models`, the answer names only this many models: the models with the most tokens in the whole time. All
        other models are summed under null.
        """
        page = await billing.costs(principal, query_of_costs)
        content = await run_blocking(principal.tenant, encode_money, page, as_numbers=True)
        return Response(content, media_type=MediaType.JSON)


class ServiceLevelController(ApiController):
    """Service levels of the caller's tenant: promised and measured."""

    path = "/v1/organization/service_levels"
    tags = ("Usage",)
    guards = (requires("usage"),)

    @get(summary="Service levels")
    async def service_levels(
        self,
        principal: NamedDependency[Principal],
        revision_metrics: NamedDependency[RevisionMetrics],
        window: FromQuery[Literal["1h", "24h", "7d", "30d"]] = "24h",
        first_token_s: FromQuery[float] = 2.5,
    ) -> Listing[ServiceLevel]:
        """Return, for each model that your tenant used in the window, the share of requests that it answered, and the
        share that it answered in time.

        `first_token_s` is the allowed time to the first token: 0.005, 0.01, 0.025, 0.05, 0.1, 0.2, 0.35, 0.5, 0.75, 1,
        1.5, 2.5, 5, 10 or 30 seconds. A key of one project without the scope `projects` sees its project's requests.
        """
        if first_token_s not in FIRST_TOKEN_BOUNDS:
            bounds = ", ".join(f"{bound:g}" for bound in FIRST_TOKEN_BOUNDS)
            raise InvalidRequest(f"'first_token_s' is one of {bounds}.", field="first_token_s")
        return Listing(data=await revision_metrics.service_levels(principal, window, first_token_s))


class InvoiceController(ApiController):
    """Invoices of the caller's tenant."""

    path = "/v1/organization/invoices"
    tags = ("Usage",)
    guards = (requires("billing"),)

    @get("/{month:str}", summary="Invoice")
    async def invoice(
        self,
        month: PathName,
        principal: NamedDependency[Principal],
        billing: NamedDependency[BillingService],
        settings: NamedDependency[Settings],
        format: FromQuery[InvoiceFormat] = "json",
    ) -> Response[bytes]:
        """Return the invoice of a closed month (UTC, such as 2026-11), or the draft of the open month.

        `format` is json, html or pdf. Amounts are strings in the invoice's currency.
        """
        made = await billing.own_invoice(principal, month)
        content = await run_blocking(principal.tenant, write_invoice, made, format, settings.billing)
        headers = file_headers(f"{made.id}.{format}", "inline")
        return Response(content, media_type=MEDIA_TYPES[format], headers=headers)

    @get("/{month:str}/printed", summary="Invoice as texts")
    async def printed(
        self,
        month: PathName,
        principal: NamedDependency[Principal],
        billing: NamedDependency[BillingService],
        settings: NamedDependency[Settings],
    ) -> PrintedInvoice:
        """Return the texts of the same invoice's PDF: quantities and prices with their units, the tax with its rate."""
        made = await billing.own_invoice(principal, month)
        return await run_blocking(principal.tenant, print_invoice, made, settings.billing)


class RequestController(ApiController):
    """The log of a tenant's requests to adapters."""

    path = "/v1/requests"
    tags = ("Adapters",)
    guards = (requires("usage"),)

    @get(summary="List an adapter's requests")
    async def list_requests(
        self,
        principal: NamedDependency[Principal],
        usage: NamedDependency[UsageService],
        adapter: QueryText,
        before: OptionalText = None,
        limit: PageLimit = 100,
        background: FromQuery[bool] = True,
    ) -> Listing[RequestObject]:
        """List your requests to an adapter, newest first, with the revision that answered. The list contains no prompts
        and no answers.

        `before` is the id of the last request on the previous page. With `background` false, the lines of batches,
        evaluations and shadows are left out.
        """
        found = await usage.answered_by(principal, adapter, before, limit, background=background)
        return Listing(data=[request_object(request) for request in found])


def _lists(request: AnyRequest, lists: tuple[str, ...], others: tuple[str, ...] = ()) -> dict[str, tuple[str, ...]]:
    """Return the repeatable parameters. Unknown parameters are refused, because an ignored filter would give a wrong
    answer.
    """
    given = request.query_params
    for name in given:
        if name.removesuffix("[]") not in (*lists, *SINGLES, *others):
            known = ", ".join((*SINGLES, *others, *lists))
            raise InvalidRequest(
                f"Unknown parameter: '{name[:80]}'. This endpoint takes {known}.",
                field=name[:80],
                code="unknown_parameter",
            )
    return {name: tuple(given.getall(name, []) + given.getall(f"{name}[]", [])) for name in lists}
