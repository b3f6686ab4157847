"""POST /v1/completions: the answer, whole or in chunks."""

from __future__ import annotations

from collections.abc import Iterable

from msgspec import UNSET, UnsetType

from loramux.gateway import Answer, Delta, TokenUsage
from loramux_api.answering import Writer
from loramux_api.schemas.answers import TextChoice, TextCompletion, TextLogprobs, UsageObject
from loramux_api.schemas.completions import CompletionBody
from loramux_api.schemas.usage import usage_object


class CompletionWriter(Writer):
    """Writes one request's answer."""

    def __init__(self, body: CompletionBody, generation: Answer, fingerprint: str) -> None:
        self._body = body
        self._generation = generation
        self._fingerprint = fingerprint
        self._begun: set[int] = set()
        """Choices whose first chunk is out."""

    def opening(self) -> Iterable[TextCompletion]:
        """A stream of texts begins with text."""
        return ()

    def chunk(self, delta: Delta) -> TextCompletion | None:
        """The event for a delta; None where it has nothing that the client asked for."""
        if not (delta.text or delta.finish_reason or delta.logprobs or self._body.return_token_ids):
            return None
        choice = self._choice(delta, None if not delta.logprobs else self._logprobs(delta))
        if delta.index in self._begun:
            choice.prompt_token_ids = UNSET
        self._begun.add(delta.index)
        return self._completion([choice], None if self._body.include_usage else UNSET)

    def closing(self, usage: TokenUsage) -> Iterable[TextCompletion]:
        """The usage, where it was asked for."""
        if self._body.include_usage:
            yield self._completion([], usage_object(usage))

    def whole(self, choices: list[Delta], usage: TokenUsage) -> TextCompletion:
        """The answer in one piece; each choice's deltas come joined."""
        return self._completion([self._choice(c, self._logprobs(c)) for c in choices], usage_object(usage))

    def _completion(self, choices: list[TextChoice], usage: UsageObject | UnsetType | None) -> TextCompletion:
        return TextCompletion(
            id=self._generation.id,
            created=self._generation.created,
            model=self._generation.model,
            choices=choices,
            system_fingerprint=self._fingerprint,
            usage=usage,
        )

    def _choice(self, delta: Delta, logprobs: TextLogprobs | None) -> TextChoice:
        told = bool(self._body.return_token_ids)
        prompt = delta.index // (self._body.n or 1)
        return TextChoice(
            index=delta.index,
            text=delta.text,
            logprobs=logprobs,
            finish_reason=delta.finish_reason,
            token_ids=list(delta.token_ids) if told else UNSET,
            prompt_token_ids=self._generation.prompt_token_ids[prompt] if told else UNSET,
        )

    def _logprobs(self, delta: Delta) -> TextLogprobs | None:
        if self._body.logprobs is None:
            return None
        ones = delta.logprobs
        return TextLogprobs(
            tokens=[one.token.text for one in ones],
            token_logprobs=[one.logprob for one in ones],
            top_logprobs=[
                {token.text: logprob for token, logprob in one.top} | {one.token.text: one.logprob} for one in ones
            ],
            text_offset=[one.offset for one in ones],
        )
