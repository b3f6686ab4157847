"""POST /v1/completions."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable
from dataclasses import replace
from typing import Any, cast

import msgspec
from litestar import Controller, Request, Response, post
from litestar.di import NamedDependency
from litestar.openapi import ResponseSpec
from litestar.params import JSONBody
from msgspec import UNSET, UnsetType

from loramux.gateway import Answer, CompletionService, Delta, TokenLogprob
from loramux.tenants import Principal
from loramux.units import TokenCounts
from loramux_api.answering import CollectedChoice, Writer, respond
from loramux_api.auth import requires
from loramux_api.bodies import InferenceRequest
from loramux_api.headers import Deadline, IdempotencyKey, claim_of
from loramux_api.openapi import REFUSALS
from loramux_api.schemas.answers import TextChoice, TextCompletion, TextLogprobs, UsageObject, usage_object
from loramux_api.schemas.completions import CompletionBody, to_request
from loramux_api.schemas.strict import StrictJSON


class CompletionController(Controller):
    """Texts and token ids."""

    path = "/v1/completions"
    tags = ("Inference",)
    guards = (requires("inference"),)
    request_class = InferenceRequest

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
        claim = await claim_of(request, idempotency_key)
        asked = replace(to_request(data), deadline_ms=x_loramux_deadline_ms, claim=claim)
        answer = await completions.begin(principal, asked)
        writer = CompletionWriter(data, answer, completions.fingerprint_of(answer))
        return await respond(request, answer, writer, stream=bool(data.stream))


class CompletionWriter(Writer):
    """Writes one answer in OpenAI's shape."""

    def __init__(self, body: CompletionBody, answer: Answer, fingerprint: str) -> None:
        self._body = body
        self._answer = answer
        self._fingerprint = fingerprint
        self._collected: defaultdict[int, CollectedChoice] = defaultdict(CollectedChoice)
        self._begun: set[int] = set()
        """Choices whose first chunk is out."""

    def opening(self) -> Iterable[TextCompletion]:
        """Return nothing: a stream of texts begins with text."""
        return ()

    def chunk(self, delta: Delta) -> TextCompletion | None:
        """Return the event for a delta; None where it has nothing that the client asked for."""
        if not (delta.text or delta.finish_reason or delta.logprobs or self._body.return_token_ids):
            return None
        choice = self._choice(delta, None if not delta.logprobs else self._logprobs(delta))
        if delta.index in self._begun:
            choice.prompt_token_ids = UNSET
        self._begun.add(delta.index)
        return self._completion([choice], None if self._body.include_usage else UNSET)

    def closing(self, usage: TokenCounts) -> Iterable[TextCompletion]:
        """Return the usage, where it was asked for."""
        if self._body.include_usage:
            yield self._completion([], usage_object(usage))

    def collect(self, delta: Delta) -> None:
        """Take a delta of an answer that is sent in one piece."""
        self._collected[delta.index].add(delta, _alternatives if self._body.logprobs is not None else None)

    def whole(self, usage: TokenCounts) -> TextCompletion:
        """Return the collected answer in one piece."""
        choices = [self._collected_choice(index, self._collected[index]) for index in sorted(self._collected)]
        return self._completion(choices, usage_object(usage))

    def _collected_choice(self, index: int, collected: CollectedChoice) -> TextChoice:
        joined = Delta(
            index=index,
            text="".join(collected.texts),
            token_ids=tuple(collected.token_ids),
            logprobs=tuple(collected.logprobs),
            finish_reason=collected.finish_reason,
        )
        return self._choice(joined, self._logprobs(joined, collected.encoded))

    def _completion(self, choices: list[TextChoice], usage: UsageObject | UnsetType | None) -> TextCompletion:
        return TextCompletion(
            id=self._answer.id,
            created=self._answer.created,
            model=self._answer.model,
            choices=choices,
            system_fingerprint=self._fingerprint,
            service_tier=self._answer.service_tier,
            usage=usage,
        )

    def _choice(self, delta: Delta, logprobs: TextLogprobs | None) -> TextChoice:
        with_ids = bool(self._body.return_token_ids)
        prompt = delta.index // (self._body.n or 1)
        return TextChoice(
            index=delta.index,
            text=delta.text,
            logprobs=logprobs,
            finish_reason=delta.finish_reason,
            token_ids=list(delta.token_ids) if with_ids else UNSET,
            prompt_token_ids=self._answer.prompt_token_ids[prompt] if with_ids else UNSET,
        )

    def _logprobs(self, delta: Delta, alternatives: list[msgspec.Raw] | None = None) -> TextLogprobs | None:
        if self._body.logprobs is None:
            return None
        ones = delta.logprobs
        return TextLogprobs(
            tokens=[one.token.text for one in ones],
            token_logprobs=[one.logprob for one in ones],
            top_logprobs=cast(list[dict[str, float]], alternatives) or [_alternatives(one) for one in ones],
            text_offset=[one.offset for one in ones],
        )


def _alternatives(one: TokenLogprob) -> dict[str, float]:
    return {token.text: logprob for token, logprob in one.top} | {one.token.text: one.logprob}
