"""An answer, as it comes or as it was kept for whoever sends the same request again."""

from __future__ import annotations

import dataclasses
from collections.abc import AsyncIterator, Iterable, Sequence
from itertools import chain
from typing import Protocol

import msgspec

from loramux.gateway.ask import Delta, TokenUsage
from loramux.limits import Standing
from loramux.usage import Answered


class Answer(Protocol):
    """What is read of a request: a Generation, or a Replay of one."""

    id: str
    model: str
    created: int
    """Unix seconds."""
    prompt_token_ids: list[list[int]]
    standing: Standing
    """What is left of the caller's limits by the minute."""
    replayed: bool

    @property
    def usage(self) -> TokenUsage:
        """What it is charged."""

    async def started(self) -> None:
        """Wait for the first sign of life; raises what the request failed with before there was one."""

    def __aiter__(self) -> AsyncIterator[Delta]: ...

    def abandon(self) -> None:
        """Nobody reads on."""


class KeptAnswer(msgspec.Struct, frozen=True):
    """Everything that clients can ask of an answer."""

    model: str
    created: int
    prompt_token_ids: list[list[int]]
    deltas: list[Delta]
    """One a choice, whole."""
    usage: TokenUsage


class Replay:
    """An answer from the records, which costs nothing and takes nothing of any limit."""

    replayed = True

    def __init__(self, answered: Answered) -> None:
        kept = msgspec.msgpack.decode(answered.answer, type=KeptAnswer)
        self.id = answered.request_id
        self.model = kept.model
        self.created = kept.created
        self.prompt_token_ids = kept.prompt_token_ids
        self.usage = kept.usage
        self.standing = Standing()
        self._deltas = kept.deltas

    async def started(self) -> None:
        """At once."""

    async def __aiter__(self) -> AsyncIterator[Delta]:
        for delta in self._deltas:
            if delta.text or delta.token_ids:
                yield dataclasses.replace(delta, finish_reason=None)
        for delta in self._deltas:
            yield Delta(index=delta.index, finish_reason=delta.finish_reason)

    def abandon(self) -> None:
        """Nothing runs."""


def encode_answer(answer: Answer, deltas: Iterable[Delta]) -> bytes:
    """The answer as it is kept, of all its deltas."""
    kept = KeptAnswer(answer.model, answer.created, answer.prompt_token_ids, join_by_choice(deltas), answer.usage)
    return msgspec.msgpack.encode(kept)


def join_by_choice(deltas: Iterable[Delta]) -> list[Delta]:
    """Every choice's deltas joined into one, in order."""
    by_choice: dict[int, list[Delta]] = {}
    for delta in deltas:
        by_choice.setdefault(delta.index, []).append(delta)
    return [_joined(by_choice[index]) for index in sorted(by_choice)]


def _joined(deltas: Sequence[Delta]) -> Delta:
    return Delta(
        index=deltas[-1].index,
        text="".join(delta.text for delta in deltas),
        token_ids=tuple(chain.from_iterable(delta.token_ids for delta in deltas)),
        logprobs=tuple(chain.from_iterable(delta.logprobs for delta in deltas)),
        finish_reason=deltas[-1].finish_reason,
    )
