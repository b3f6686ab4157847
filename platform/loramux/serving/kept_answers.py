"""Answers that the records keep for an idempotency key, and their replay."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterator, Sequence

import msgspec

from loramux.common.jobs import HeldUnits
from loramux.common.units import TokenCounts
from loramux.money.limits.definitions import RateLimitStatus
from loramux.money.usage.idempotency import StoredAnswer
from loramux.serving.messages import Answer, Classes, Delta, PromptText, Timing
from loramux.serving.unread import take_readable


class KeptDelta(Delta, frozen=True, kw_only=True, array_like=True):
    """A delta without the names of its fields, because an answer has one per token. Add new fields at the end."""


class KeptAnswer(msgspec.Struct, frozen=True):
    """An answer as the records keep it for an idempotency key. The field names are stored data."""

    model: str
    created: int
    prompt_token_ids: list[list[int]]
    deltas: list[Delta]
    """One whole delta per choice. Releases before `stream` kept answers in this form."""
    usage: dict[str, int]
    service_tier: str = "default"
    stream: list[msgspec.Raw] = []
    """All deltas in their order, so that a stream is repeated byte by byte: each a KeptDelta, as `encode_delta` writes
    it. They are decoded in many turns of the event loop, because an answer may have 400,000 log probabilities.
    """
    prompt_texts: list[PromptText] = []
    timing: Timing | None = None
    classes: Classes = Classes()


class Replay:
    """An answer from the records. A replay is free of charge and does not count in limits."""

    replayed = True

    def __init__(self, answered: StoredAnswer, base_model: str, memory: HeldUnits) -> None:
        """`memory`: the memory of the decoded answer."""
        self._memory = memory
        kept = msgspec.msgpack.decode(answered.answer, type=KeptAnswer)
        self.id = answered.request_id
        self.model = kept.model
        self.base_model = base_model
        self.created = kept.created
        self.prompt_token_ids = kept.prompt_token_ids
        self.prompt_texts = kept.prompt_texts
        self.classes = kept.classes
        self.usage = TokenCounts(
            prompt=kept.usage["prompt_tokens"],
            cached=kept.usage["cached_tokens"],
            output=kept.usage["completion_tokens"],
            image=kept.usage.get("image_tokens", 0),
        )
        self.rate_limits = RateLimitStatus()
        self.service_tier = kept.service_tier
        self.timing = kept.timing
        decoded = (msgspec.msgpack.decode(delta, type=KeptDelta) for delta in kept.stream)
        self._deltas: Iterator[Delta] = decoded if kept.stream else iter(_divided(kept.deltas))

    async def started(self) -> None:
        """Return at once."""

    async def read(self, least: int = 1) -> Sequence[Delta]:  # noqa: ARG002 - all have come
        """Return the next deltas: so few that other requests get their turn."""
        await asyncio.sleep(0)
        return take_readable(self._deltas)

    async def __aiter__(self) -> AsyncIterator[Delta]:
        while deltas := await self.read():
            for delta in deltas:
                yield delta

    def abandon(self) -> None:
        """Give the memory back."""
        self._memory.release()


def _divided(wholes: Sequence[Delta]) -> list[Delta]:
    ends = [Delta(index=whole.index, finish_reason=whole.finish_reason) for whole in wholes]
    return [msgspec.structs.replace(whole, finish_reason=None) for whole in wholes] + ends


def encode_delta(delta: Delta) -> msgspec.Raw:
    """Encode a delta of an answer for `encode_answer`."""
    return msgspec.Raw(msgspec.msgpack.encode(KeptDelta(**msgspec.structs.asdict(delta))))


def encode_answer(answer: Answer, deltas: list[msgspec.Raw]) -> bytes:
    """Encode an answer as bytes that the records keep. `encode_delta` has encoded the deltas when they came."""
    usage = answer.usage
    kept = KeptAnswer(
        model=answer.model,
        created=answer.created,
        prompt_token_ids=answer.prompt_token_ids,
        deltas=[],
        usage={
            "prompt_tokens": usage.prompt,
            "cached_tokens": usage.cached,
            "completion_tokens": usage.output,
            "image_tokens": usage.image,
        },
        service_tier=answer.service_tier,
        stream=deltas,
        prompt_texts=answer.prompt_texts,
        timing=answer.timing,
        classes=answer.classes,
    )
    return msgspec.msgpack.encode(kept)
