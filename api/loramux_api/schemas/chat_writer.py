"""POST /v1/chat/completions: the answer, whole or in chunks."""

from __future__ import annotations

from collections.abc import Iterable

from msgspec import UNSET, UnsetType

from loramux.gateway import Answer, Delta, Token, TokenLogprob, TokenUsage
from loramux_api.answering import Writer
from loramux_api.schemas.answers import (
    AssistantMessage,
    ChatChoice,
    ChatChunk,
    ChatChunkChoice,
    ChatCompletion,
    ChatDelta,
    ChatLogprob,
    ChatLogprobs,
    TopLogprob,
)
from loramux_api.schemas.chat import ChatBody
from loramux_api.schemas.usage import usage_object


class ChatWriter(Writer):
    """Writes one request's answer."""

    def __init__(self, body: ChatBody, generation: Answer, fingerprint: str) -> None:
        self._body = body
        self._generation = generation
        self._fingerprint = fingerprint

    def opening(self) -> Iterable[ChatChunk]:
        """Every choice begins with its role."""
        for index in range(self._body.n or 1):
            delta = ChatDelta(role="assistant", content="", refusal=None)
            chunk = self._chunk(ChatChunkChoice(index=index, delta=delta))
            chunk.prompt_token_ids = self._prompt_token_ids
            yield chunk

    def chunk(self, delta: Delta) -> ChatChunk | None:
        """The event for a delta; None where it has nothing that the client asked for."""
        logprobs, token_ids = self._logprobs(delta), self._token_ids(delta)
        if not (delta.text or delta.finish_reason or delta.logprobs or token_ids):
            return None
        return self._chunk(
            ChatChunkChoice(
                index=delta.index,
                delta=ChatDelta() if delta.finish_reason else ChatDelta(content=delta.text),
                logprobs=logprobs if delta.logprobs else None,
                finish_reason=delta.finish_reason,
                token_ids=token_ids,
            )
        )

    def closing(self, usage: TokenUsage) -> Iterable[ChatChunk]:
        """The usage, where it was asked for."""
        if self._body.include_usage:
            chunk = self._chunk()
            chunk.usage = usage_object(usage)
            yield chunk

    def whole(self, choices: list[Delta], usage: TokenUsage) -> ChatCompletion:
        """The answer in one piece; each choice's deltas come joined."""
        return ChatCompletion(
            id=self._generation.id,
            created=self._generation.created,
            model=self._generation.model,
            choices=[self._choice(choice) for choice in choices],
            usage=usage_object(usage),
            system_fingerprint=self._fingerprint,
            prompt_token_ids=self._prompt_token_ids,
        )

    @property
    def _prompt_token_ids(self) -> list[int] | UnsetType:
        return self._generation.prompt_token_ids[0] if self._body.return_token_ids else UNSET

    def _choice(self, choice: Delta) -> ChatChoice:
        return ChatChoice(
            index=choice.index,
            message=AssistantMessage(content=choice.text),
            logprobs=self._logprobs(choice),
            finish_reason=choice.finish_reason,
            token_ids=self._token_ids(choice),
        )

    def _chunk(self, *choices: ChatChunkChoice) -> ChatChunk:
        return ChatChunk(
            id=self._generation.id,
            created=self._generation.created,
            model=self._generation.model,
            system_fingerprint=self._fingerprint,
            choices=list(choices),
            usage=None if self._body.include_usage else UNSET,
        )

    def _token_ids(self, delta: Delta) -> list[int] | UnsetType:
        return list(delta.token_ids) if self._body.return_token_ids else UNSET

    def _logprobs(self, delta: Delta) -> ChatLogprobs | None:
        return ChatLogprobs([_logprob(one) for one in delta.logprobs]) if self._body.logprobs else None


def _logprob(one: TokenLogprob) -> ChatLogprob:
    return ChatLogprob(
        token=one.token.text,
        logprob=one.logprob,
        bytes=list(one.token.bytes),
        top_logprobs=[_top(token, logprob) for token, logprob in one.top],
    )


def _top(token: Token, logprob: float) -> TopLogprob:
    return TopLogprob(token=token.text, logprob=logprob, bytes=list(token.bytes))
