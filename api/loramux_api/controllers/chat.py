"""POST /v1/chat/completions."""

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
from loramux_api.schemas.answers import ChatCompletion
from loramux_api.schemas.chat import ChatBody, to_ask
from loramux_api.schemas.chat_writer import ChatWriter
from loramux_api.schemas.headers import Deadline, IdempotencyKey
from loramux_api.schemas.strict import StrictJSON


class ChatController(Controller):
    """Conversations."""

    path = "/v1/chat/completions"
    tags = ("Inference",)
    guards = (requires("inference"),)

    @post(
        dto=StrictJSON[ChatBody],
        return_dto=None,
        status_code=200,
        summary="Continue a conversation",
        responses={
            200: ResponseSpec(ChatCompletion, description="With stream: server-sent chat.completion.chunk events."),
            **REFUSALS,
        },
    )
    async def create(
        self,
        data: JSONBody[ChatBody],
        request: Request[Any, Any, Any],
        principal: NamedDependency[Principal],
        completions: NamedDependency[CompletionService],
        x_loramux_deadline_ms: Deadline = None,
        idempotency_key: IdempotencyKey = None,
    ) -> Response[Any]:
        """Answer a conversation with an adapter of yours, or with the base model."""
        ask = replace(to_ask(data), deadline_ms=x_loramux_deadline_ms, claim=await claim_of(request, idempotency_key))
        generation = await completions.begin(principal, ask)
        writer = ChatWriter(data, generation, completions.fingerprint)
        return await answer(request, generation, writer, stream=bool(data.stream))
