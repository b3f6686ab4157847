"""What the host spends on a step before and after the device: planning it and committing it.

    python benchmarks/step_cost.py [--rows 256] [--steps 200]

The engine's own scheduler, on a pool and adapters of the simulator's, with as many requests again waiting as run. In a
`roomy` pool the rows are what is short; in a `tight` one the pool is, so that every step asks whether the next request
fits. Microseconds are medians over steps in which every row decodes; the model's own time is not in them.
"""

from __future__ import annotations

import argparse
import statistics
import time
from dataclasses import dataclass

from loramux.engine.budget import Budget
from loramux.engine.messages import TokenEvent
from loramux.engine.pages import PagePool
from loramux.engine.policy import Policy
from loramux.engine.request import AdapterRef, Request, SamplingParams
from loramux.engine.residency import Residency
from loramux.engine.scheduler import Scheduler, SchedulerLimits
from loramux.simulator.clock import VirtualClock
from loramux.simulator.hardware import DEVICES
from loramux.simulator.store import SimulatedStore

PROMPT, OUTPUT, BLOCK, ADAPTERS, ADAPTER_PAGES = 256, 1024, 16, 64, 4
STEP_SECONDS = 0.02


@dataclass(frozen=True, slots=True)
class Cost:
    """Medians, in microseconds."""

    rows: int
    plan: float
    commit: float


class Bench:
    """`rows` requests that run, and as many that wait."""

    def __init__(self, rows: int, *, tight: bool, prefix_cache: bool) -> None:
        per_request = -(-(PROMPT + OUTPUT) // BLOCK)
        num_pages = ADAPTERS * ADAPTER_PAGES + per_request * rows * (1 if tight else 4)
        self.clock = VirtualClock()
        refs = [AdapterRef(f"adapter {i}", "") for i in range(ADAPTERS)]
        sizes = {ref.digest: (ADAPTER_PAGES, ADAPTER_PAGES) for ref in refs}
        self._store = SimulatedStore(self.clock, DEVICES["h100"], sizes)
        pool = PagePool(num_pages)
        self.scheduler = Scheduler(
            SchedulerLimits(max_num_seqs=2 * rows if tight else rows, max_num_batched_tokens=8192, max_model_len=8192),
            Budget(num_pages, BLOCK),
            pool,
            Residency(pool, self._store, self.clock),
            Policy(prefix_cache=prefix_cache, weight_pages=8000.0),
        )
        for number in range(2 * rows):
            self.scheduler.add(_request(number, refs[number % ADAPTERS]))

    def step(self) -> Cost | None:
        """One step; None where not every row decodes."""
        self._store.settle()
        began = time.perf_counter()
        step = self.scheduler.plan()
        planned = time.perf_counter()
        events = [TokenEvent(request_id=chunk.sequence.id, token_id=0) for chunk in step.sampling]
        self.clock.advance_to(self.clock.now + STEP_SECONDS)
        ran = time.perf_counter()
        self.scheduler.commit(step, events)
        ended = time.perf_counter()
        decoding = bool(step.chunks) and all(chunk.length == 1 for chunk in step.chunks)
        return Cost(len(step.chunks), 1e6 * (planned - began), 1e6 * (ended - ran)) if decoding else None


def _request(number: int, adapter: AdapterRef) -> Request:
    return Request(
        id=str(number),
        tenant=f"tenant {number % ADAPTERS}",
        prompt_token_ids=[number, *[0] * (PROMPT - 1)],
        sampling=SamplingParams(max_tokens=OUTPUT),
        adapter=adapter,
    )


def measure(rows: int, steps: int, *, tight: bool, prefix_cache: bool) -> Cost:
    """The medians of `steps` steps that only decode."""
    bench = Bench(rows, tight=tight, prefix_cache=prefix_cache)
    costs: list[Cost] = []
    while len(costs) < steps:
        if cost := bench.step():
            costs.append(cost)
    return Cost(
        round(statistics.median(cost.rows for cost in costs)),
        statistics.median(cost.plan for cost in costs),
        statistics.median(cost.commit for cost in costs),
    )


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, default=256)
    parser.add_argument("--steps", type=int, default=200)
    asked = parser.parse_args()
    print(f"{'pool':8}{'prefix cache':14}{'rows':>6}{'plan us':>10}{'commit us':>11}")
    for tight in (False, True):
        for prefix_cache in (False, True):
            cost = measure(asked.rows, asked.steps, tight=tight, prefix_cache=prefix_cache)
            name, cache = ("tight" if tight else "roomy"), ("on" if prefix_cache else "off")
            print(f"{name:8}{cache:14}{cost.rows:6}{cost.plan:10.0f}{cost.commit:11.0f}")


if __name__ == "__main__":
    main()
