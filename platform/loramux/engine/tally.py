"""What requests used, counted from the steps that ran: the engine's own word, which the bill is reconciled against."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import msgspec

from loramux.engine.messages import EngineCount, TokenEvent
from loramux.engine.step import Step


@dataclass(slots=True)
class _Open:
    """A request that has been in a step."""

    num_prompt_tokens: int
    num_reached: int = 0
    """Leading tokens that are behind it; going over them again after a preemption counts no more."""
    num_computed: int = 0
    """Prompt tokens that went through the model."""
    num_output_tokens: int = 0
    num_loads: int = 0

    @property
    def total(self) -> EngineCount:
        """A prompt counts once its first token is out; what never went through the model came from the KV cache."""
        if not self.num_output_tokens:
            return EngineCount()
        return EngineCount(
            prompt_tokens=self.num_prompt_tokens,
            cached_tokens=self.num_prompt_tokens - self.num_computed,
            output_tokens=self.num_output_tokens,
            adapter_loads=self.num_loads,
        )


class Tallies:
    """Counts for requests from their first step to their last event."""

    def __init__(self) -> None:
        self._open: dict[str, _Open] = {}
        self.ended = EngineCount()
        """All requests that have ended, since the start."""

    def note(self, step: Step) -> None:
        """A step is about to run."""
        for chunk in step.chunks:
            sequence = chunk.sequence
            one = self._open.setdefault(sequence.id, _Open(sequence.num_prompt_tokens))
            one.num_computed += max(0, min(chunk.end, one.num_prompt_tokens) - max(chunk.start, one.num_reached))
            one.num_reached = max(one.num_reached, chunk.end)
            one.num_loads = sequence.num_loads

    def tell(self, events: Iterable[TokenEvent]) -> list[TokenEvent]:
        """The same events, those that end a request with what it used."""
        return [self._tell(event) for event in events]

    def _tell(self, event: TokenEvent) -> TokenEvent:
        one = self._open.get(event.request_id)
        if one is not None and event.token_id is not None:
            one.num_output_tokens += 1
        if event.finish_reason is None:
            return event
        self._open.pop(event.request_id, None)
        count = one.total if one is not None else EngineCount()
        self.ended = self.ended + count
        return msgspec.structs.replace(event, count=count)
