"""LoRAX's routes, for who comes from there: `adapter_id` among the parameters, answers as its clients read them."""

from __future__ import annotations

from typing import Any

import msgspec
from litestar import Controller, MediaType, Request, Response, post
from litestar.di import NamedDependency
from litestar.openapi import ResponseSpec
from litestar.params import JSONBody

from loramux.gateway import CompletionService, GatewayError, Platform
from loramux.limits import LimitsError
from loramux.registry import RegistryError
from loramux.tenants import Principal, TenantsError
from loramux_api.answering import answer
from loramux_api.auth import requires
from loramux_api.openapi import REFUSALS
from loramux_api.problems import problem_of
from loramux_api.schemas.lorax import GenerateBody, Generated, LoraxError, to_ask
from loramux_api.schemas.lorax_writer import LoraxWriter
from loramux_api.schemas.strict import StrictJSON

ANSWERS = {200: ResponseSpec(Generated, description="With stream: server-sent events, one a token."), **REFUSALS}

VALIDATION, OVERLOADED = "validation", "overloaded"
ERROR_TYPES = {401: VALIDATION, 403: VALIDATION, 404: VALIDATION, 422: VALIDATION, 429: OVERLOADED, 503: OVERLOADED}


def refused(
    _: Request[Any, Any, Any], error: GatewayError | RegistryError | TenantsError | LimitsError
) -> Response[Any]:
    """The refusal, in LoRAX's shape: 422 where the request has to be changed."""
    problem = problem_of(error)
    status = 422 if problem.status == 400 else problem.status
    content = LoraxError(problem.error.message, ERROR_TYPES.get(status, "generation"))
    return Response(content, status_code=status, media_type=MediaType.JSON, headers=problem.all_headers())


class LoraxController(Controller):
    """Continue a text with the adapter that `parameters.adapter_id` names."""

    path = "/"
    tags = ("Inference",)
    guards = (requires("inference"),)
    exception_handlers = {kind: refused for kind in (GatewayError, RegistryError, TenantsError, LimitsError)}  # noqa: RUF012  Litestar's

    @post(
        "/generate",
        dto=StrictJSON[GenerateBody],
        return_dto=None,
        status_code=200,
        summary="Continue a text, as LoRAX does",
        responses=ANSWERS,
    )
    async def generate(
        self,
        data: JSONBody[GenerateBody],
        request: Request[Any, Any, Any],
        principal: NamedDependency[Principal],
        platform: NamedDependency[Platform],
    ) -> Response[Any]:
        """One answer; with `stream`, token by token."""
        return await _answered(data, request, principal, platform)

    @post(
        "/generate_stream",
        dto=StrictJSON[GenerateBody],
        return_dto=None,
        status_code=200,
        summary="Continue a text token by token, as LoRAX does",
        responses=ANSWERS,
    )
    async def generate_stream(
        self,
        data: JSONBody[GenerateBody],
        request: Request[Any, Any, Any],
        principal: NamedDependency[Principal],
        platform: NamedDependency[Platform],
    ) -> Response[Any]:
        """One event a token; the last one has the whole text and the details."""
        return await _answered(msgspec.structs.replace(data, stream=True), request, principal, platform)

    @post(
        "/",
        dto=StrictJSON[GenerateBody],
        return_dto=None,
        status_code=200,
        summary="Continue a text, as LoRAX's Python client asks for it",
        responses=ANSWERS,
    )
    async def compatible(
        self,
        data: JSONBody[GenerateBody],
        request: Request[Any, Any, Any],
        principal: NamedDependency[Principal],
        platform: NamedDependency[Platform],
    ) -> Response[Any]:
        """As /generate; an answer in one piece is in a list."""
        whole = await _answered(data, request, principal, platform)
        if isinstance(whole.content, bytes):
            whole.content = b"[" + whole.content + b"]"
        return whole


async def _answered(
    data: GenerateBody, request: Request[Any, Any, Any], principal: Principal, platform: Platform
) -> Response[Any]:
    completions: CompletionService = platform.completions
    generation = await completions.begin(principal, to_ask(data, platform.settings.model.served_model_name))
    writer = LoraxWriter(data, generation, completions.facts.eos_token_ids)
    return await answer(request, generation, writer, stream=data.stream)
