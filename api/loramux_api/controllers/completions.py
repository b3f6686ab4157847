"""POST /v1/completions."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from litestar import Controller, Request, Response, post
from litestar.di import NamedDependency
from litestar.openapi import ResponseSpec
from litestar.params import JSONBody

from loramux.gateway import CompletionService
from loramux.tenants import Principal
from loramux_api.answering import answer
from loramux_api.auth import requires
from loramux_api.idempotency import claim_of
from loramux_api.openapi import REFUSALS
from loramux_api.schemas.answers import TextCompletion
from loramux_api.schemas.completion_writer import CompletionWriter
from loramux_api.schemas.completions import CompletionBody, to_ask
from loramux_api.schemas.headers import Deadline, IdempotencyKey
from loramux_api.schemas.strict import StrictJSON


class CompletionController(Controller):
    """Texts and token ids."""

    path = "/v1/completions"
    tags = ("Inference",)
    guards = (requires("inference"),)

    @post(
        dto=StrictJSON[CompletionBody],
        return_dto=None,
        status_code=200,
        summary="Continue texts",
        responses={
            200: ResponseSpec(TextCompletion, description="With stream: server-sent text_completion events."),
            **REFUSALS,
        },
    )
    async def create(
        self,
        data: JSONBody[CompletionBody],
        request: Request[Any, Any, Any],
        principal: NamedDependency[Principal],
        completions: NamedDependency[CompletionService],
        x_loramux_deadline_ms: Deadline = None,
        idempotency_key: IdempotencyKey = None,
    ) -> Response[Any]:
        """Continue one or several prompts with an adapter of yours, or with the base model."""
        ask = replace(to_ask(data), deadline_ms=x_loramux_deadline_ms, claim=await claim_of(request, idempotency_key))
        generation = await completions.begin(principal, ask)
        writer = CompletionWriter(data, generation, completions.fingerprint)
        return await answer(request, generation, writer, stream=bool(data.stream))
