"""A runner on the host that tells its tokens a step late, as a GPU does."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from adapter_zoo import Zoo, load

from loramux.engine.engine import Engine, build_engine
from loramux.engine.execution.runner import CompletedStep, StepGraphs
from loramux.engine.memory.image_rows import ImageRows
from loramux.engine.messages import TokenEvent
from loramux.engine.scheduling.sequence import PENDING, Step


class LateRunner:
    """Knows its tokens at once and returns them when they are read, as a GPU does; replaces PENDING by its own
    tokens."""

    runs_ahead = True
    graphs = StepGraphs()

    def __init__(self, inner: Any) -> None:
        self.bank = inner.bank
        self.forget = inner.forget
        self.image_rows: ImageRows[torch.Tensor] | None = None
        self.unread: list[list[TokenEvent]] = []
        self.pending = 0
        self._inner = inner
        self._last: dict[str, int] = {}

    def launch(self, step: Step) -> CompletedStep:
        assert len(self.unread) <= 1, "one step ahead, no more"
        sequences = [chunk.sequence for chunk in step.chunks if chunk.sequence.token_ids[-1] == PENDING]
        self.pending += len(sequences)
        for sequence in sequences:
            sequence.token_ids[-1] = self._last[sequence.id]
        launched = self._inner.launch(step)
        events = launched.events()
        for sequence in sequences:
            sequence.token_ids[-1] = PENDING
        self._last = {event.request_id: event.token_id or 0 for event in events}
        self.unread.append(events)
        runner = self

        class Late(CompletedStep):
            def events(self) -> list[TokenEvent]:
                assert runner.unread.pop(0) is events, "read in the order of their launches"
                return events

        return Late(events, launched.scores, launched.pooled)


def late_engine(zoo: Zoo, **engine_settings: Any) -> tuple[Engine, LateRunner]:
    loaded, chosen = load(zoo.base, **engine_settings)
    runner = LateRunner(loaded.runner)
    return build_engine(replace(loaded, runner=runner), chosen, wake=lambda: None), runner
