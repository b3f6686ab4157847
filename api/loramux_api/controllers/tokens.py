"""POST /tokenize and /detokenize, as vLLM has them. They cost nothing; one at a time is worked on for a tenant."""

from __future__ import annotations

from litestar import Controller, post
from litestar.di import NamedDependency
from litestar.params import JSONBody

from loramux.gateway import CompletionService
from loramux.tenants import Principal
from loramux_api.auth import requires
from loramux_api.bodies import InferenceRequest
from loramux_api.openapi import REFUSALS
from loramux_api.schemas.strict import StrictJSON
from loramux_api.schemas.tokens import DetokenizeBody, Detokenized, TokenizeBody, Tokens, to_tokenize


class TokenController(Controller):
    """Texts to tokens, and back."""

    tags = ("Inference",)
    guards = (requires("inference"),)
    request_class = InferenceRequest

    @post(
        "/tokenize",
        dto=StrictJSON[TokenizeBody],
        return_dto=None,
        status_code=200,
        summary="Tokenize a text or a conversation",
        responses=REFUSALS,
    )
    async def tokenize(
        self,
        data: JSONBody[TokenizeBody],
        principal: NamedDependency[Principal],
        completions: NamedDependency[CompletionService],
    ) -> Tokens:
        """Return the tokens that the model would read, of any number; an adapter's own template and tokens count."""
        found = await completions.tokenize(principal, to_tokenize(data))
        return Tokens(
            count=len(found.token_ids),
            max_model_len=found.context,
            tokens=found.token_ids,
            token_strs=found.pieces if data.return_token_strs else None,
        )

    @post(
        "/detokenize",
        dto=StrictJSON[DetokenizeBody],
        return_dto=None,
        status_code=200,
        summary="Turn tokens into text",
        responses=REFUSALS,
    )
    async def detokenize(
        self,
        data: JSONBody[DetokenizeBody],
        principal: NamedDependency[Principal],
        completions: NamedDependency[CompletionService],
    ) -> Detokenized:
        """Return the text of a model's tokens, special ones too."""
        return Detokenized(await completions.detokenize(principal, data.model or "", data.tokens))
