"""POST /v1/completions."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence
from typing import Any, cast

import msgspec
from litestar import Response, post
from litestar.di import NamedDependency
from litestar.openapi import ResponseSpec
from litestar.params import JSONBody
from msgspec import UNSET, UnsetType

from loramux.gateway import Answer, Delta, PromptTokenLogprob, Token, TokenLogprob
from loramux.units import TokenCounts
from loramux_api.answering import CollectedChoice, Inference, Writer, prompt_logprob_list, spelled, usage_of_chunk
from loramux_api.auth import requires
from loramux_api.bodies import InferenceRequest
from loramux_api.openapi import ApiController, StreamingOperation
from loramux_api.schemas.chat import TextChoice, TextCompletion, TextLogprobs, UsageObject, usage_object
from loramux_api.schemas.completions import CompletionBody, to_request


class CompletionController(ApiController):
    """Texts and token ids."""

    path = "/v1/completions"
    tags = ("Inference",)
    guards = (requires("inference"),)
    request_class = InferenceRequest

    @post(
        operation_class=StreamingOperation,
        status_code=200,
        summary="Continue texts",
        responses={200: ResponseSpec(TextCompletion, description="With stream: server-sent text_completion events.")},
    )
    async def create(
        self,
        data: JSONBody[CompletionBody],
        inference: NamedDependency[Inference],
    ) -> Response[Any]:
        """Continue one or several prompts with an adapter of yours, or with the base model."""
        fingerprint_of = inference.completions.fingerprint_of
        return await inference.answer(
            to_request(data),
            lambda answer: CompletionWriter(data, answer, fingerprint_of(answer)),
            stream=bool(data.stream),
        )


class CompletionWriter(Writer):
    """Writes one answer in OpenAI's shape."""

    def __init__(self, body: CompletionBody, answer: Answer, fingerprint: str) -> None:
        self._body = body
        self._answer = answer
        self._fingerprint = fingerprint
        self._collected: defaultdict[int, CollectedChoice] = defaultdict(CollectedChoice)
        self._num_tokens = 0
        """Tokens of the answer so far."""
        self._begun: set[int] = set()
        """Choices whose first chunk is out."""
        self._prompt_scores: defaultdict[int, tuple[PromptTokenLogprob, ...]] = defaultdict(tuple)
        """Log probabilities of the choices' prompts, of a stream."""

    def opening(self) -> Iterable[TextCompletion]:
        """Return nothing: a stream of texts begins with text."""
        return ()

    def chunk(self, delta: Delta) -> Iterable[TextCompletion]:
        """Return the event for a delta; none where it has nothing that the client asked for."""
        self._num_tokens += len(delta.token_ids)
        self._prompt_scores[delta.index] += delta.prompt_logprobs
        if not (delta.text or delta.finish_reason or delta.logprobs or self._body.return_token_ids):
            return
        choice = self._choice(delta, None if not delta.logprobs else self._logprobs(delta))
        if delta.index in self._begun:
            choice.prompt_token_ids = UNSET
        else:
            self._repeat_prompt(choice, self._prompt_scores[delta.index])
        self._begun.add(delta.index)
        yield self._completion([choice], usage_of_chunk(self._body, self._answer, self._num_tokens))

    def closing(self, usage: TokenCounts) -> Iterable[TextCompletion]:
        """Return the usage, where it was asked for."""
        if self._body.include_usage:
            yield self._completion([], usage_object(usage))

    def collect(self, delta: Delta) -> None:
        """Take a delta of an answer that is sent in one piece."""
        self._collected[delta.index].add(delta, self._alternatives_of if self._body.logprobs is not None else None)

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
        choice = self._choice(joined, self._logprobs(joined, collected.encoded))
        first = self._collected[index - index % (self._body.n or 1)]
        self._repeat_prompt(choice, first.prompt_logprobs)
        if not self._body.return_token_ids:
            choice.token_ids = choice.prompt_token_ids = None
        if self._body.prompt_logprobs is not None:
            choice.prompt_logprobs = prompt_logprob_list(first.prompt_logprobs)
        return choice

    def _repeat_prompt(self, choice: TextChoice, scores: Sequence[PromptTokenLogprob]) -> None:
        """Put the prompt before a choice's text, and its log probabilities before those of the answer."""
        if not self._body.echo:
            return
        prompt = self._answer.prompt_texts[choice.index // (self._body.n or 1)]
        choice.text = prompt.text + choice.text
        if self._body.logprobs is None:
            return
        of_answer = choice.logprobs or TextLogprobs([], [], [], [])
        most = self._body.logprobs
        alternatives = [self._alternatives(one.token, one.logprob, one.top[:most]) for one in scores]
        choice.logprobs = TextLogprobs(
            tokens=[*(spelled(token, self._body) for token in prompt.tokens), *of_answer.tokens],
            token_logprobs=[None, *(one.logprob for one in scores), *of_answer.token_logprobs],
            top_logprobs=[None, *alternatives, *of_answer.top_logprobs],
            text_offset=[*prompt.offsets, *of_answer.text_offset],
        )

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
        begin = len(self._answer.prompt_texts[delta.index // (self._body.n or 1)].text) if self._body.echo else 0
        return TextLogprobs(
            tokens=[spelled(one.token, self._body) for one in ones],
            token_logprobs=[one.logprob for one in ones],
            top_logprobs=cast(list[dict[str, float] | None], alternatives)
            or [self._alternatives_of(one) for one in ones],
            text_offset=[begin + one.offset for one in ones],
        )

    def _alternatives_of(self, one: TokenLogprob) -> dict[str, float]:
        return self._alternatives(one.token, one.logprob, one.top)

    def _alternatives(self, chosen: Token, logprob: float, top: Iterable[tuple[Token, float]]) -> dict[str, float]:
        return {spelled(token, self._body): value for token, value in ((chosen, logprob), *top)}
