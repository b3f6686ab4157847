"""An engine whose sequences are preempted again and again."""

from __future__ import annotations

from loramux.engine.engine import Engine
from loramux.engine.scheduling.sequence import Step


def preempting(engine: Engine, every: int = 3) -> Engine:
    """Preempt the last running sequence before every `every`-th step."""
    scheduler = engine.scheduler
    plan = scheduler.plan

    def preempting_plan() -> Step:
        if scheduler.running and engine.stats().steps % every == every - 1:
            scheduler.state.preempt(scheduler.running[-1])
        return plan()

    scheduler.plan = preempting_plan
    return engine
