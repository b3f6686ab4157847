"""The parts of an answer in their order, for APIs that send each as an object of its own: a thought, a text, calls."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Literal

from loramux.gateway import CallDelta, Delta


@dataclass(slots=True)
class AnswerPart:
    """A part, as far as it has come."""

    kind: Literal["thought", "text", "call"]
    index: int
    """Its place in the answer."""
    call_id: str = ""
    name: str = ""
    """The called function."""
    pieces: list[str] = field(default_factory=list)

    @property
    def text(self) -> str:
        """The whole text; a call's arguments."""
        return "".join(self.pieces)


@dataclass(frozen=True, slots=True)
class PartChange:
    """The news of a part."""

    step: Literal["begins", "grows", "ends"]
    part: AnswerPart
    piece: str = ""
    """The text by which it grows."""


class AnswerParts:
    """Divides an answer's deltas into its parts. One is under way at a time."""

    def __init__(self) -> None:
        self.count = 0
        """Parts that have begun."""
        self._open: AnswerPart | None = None

    def push(self, delta: Delta) -> Iterator[PartChange]:
        """Yield the changes that a delta makes."""
        if delta.thought:
            yield from self._grow("thought", delta.thought)
        if delta.text:
            yield from self._grow("text", delta.text)
        for call in delta.calls:
            yield from self._push_call(call)

    def begin(self, part: AnswerPart) -> Iterator[PartChange]:
        """Begin a part; the one under way ends."""
        yield from self.end()
        self._open = part
        self.count += 1
        yield PartChange("begins", part)

    def end(self) -> Iterator[PartChange]:
        """End the part under way, if there is one."""
        if self._open is not None:
            ended, self._open = self._open, None
            yield PartChange("ends", ended)

    def _grow(self, kind: Literal["thought", "text"], text: str) -> Iterator[PartChange]:
        if self._open is None or self._open.kind != kind:
            yield from self.begin(AnswerPart(kind, self.count))
        yield self._add(text)

    def _push_call(self, call: CallDelta) -> Iterator[PartChange]:
        if call.id is not None and call.name is not None:
            yield from self.begin(AnswerPart("call", self.count, call.id, call.name))
        if call.arguments:
            yield self._add(call.arguments)

    def _add(self, piece: str) -> PartChange:
        assert self._open is not None, "it has begun"
        self._open.pieces.append(piece)
        return PartChange("grows", self._open, piece)
