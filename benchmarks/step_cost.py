"""Host time of a step before and after the device: the time to plan and to commit the step.

    python benchmarks/step_cost.py [--rows 256] [--steps 200] [--adapters 10000] [--tenants 100000]

The engine's own scheduler runs with a pool and adapters of the simulator. The number of waiting requests equals that of
running requests. In a `roomy` pool, rows are scarce. In a `tight` pool, pages are scarce, so that every step checks
whether the next request fits. Microseconds are medians over steps in which every row decodes; the model's own time is
not in them.

The last two rows show the same times after traffic of `--tenants` tenants over `--adapters` adapters, which are all
idle in the pool: earlier traffic must not make a step slower. `flows` and `known` are the numbers of objects that the
scheduler remembers.
"""

from __future__ import annotations

import argparse
import statistics
import time
from dataclasses import dataclass

from loramux.engine.memory.pages import PagePool
from loramux.engine.memory.residency import Residency
from loramux.engine.messages import AdapterRef, Request, SamplingParams, TokenEvent
from loramux.engine.scheduling.policy import PageBudget, Policy, SchedulerLimits
from loramux.engine.scheduling.scheduler import Scheduler
from loramux.simulator.engine import SimulatedStore, VirtualClock
from loramux.simulator.hardware import DEVICES

PROMPT, OUTPUT, BLOCK, ADAPTERS, ADAPTER_PAGES = 256, 1024, 16, 64, 4
MAX_IDLE_PLANS = 100_000
STEP_SECONDS = 0.02


@dataclass(frozen=True, slots=True)
class Cost:
    """Medians, in microseconds."""

    rows: int
    plan: float
    commit: float
    flows: int = 0
    known: int = 0


class Bench:
    """`rows` requests that run, and as many that wait."""

    def __init__(
        self, rows: int, *, tight: bool, prefix_cache: bool, adapters: int = ADAPTERS, tenants: int = 0
    ) -> None:
        per_request = -(-(PROMPT + OUTPUT) // BLOCK)
        num_pages = adapters * ADAPTER_PAGES + per_request * rows * (1 if tight else 4)
        self.clock = VirtualClock()
        refs = [AdapterRef(f"adapter {i}", "") for i in range(adapters)]
        sizes = {ref.digest: (ADAPTER_PAGES, ADAPTER_PAGES) for ref in refs}
        self._store = SimulatedStore(self.clock, DEVICES["h100"], sizes)
        pool = PagePool(num_pages)
        self.scheduler = Scheduler(
            SchedulerLimits(max_num_seqs=2 * rows if tight else rows, max_num_batched_tokens=8192, max_model_len=8192),
            PageBudget(num_pages, BLOCK),
            pool,
            Residency(pool, self._store, self.clock),
            Policy(prefix_cache=prefix_cache, weight_pages=8000.0),
        )
        self._see(tenants, refs)
        for number in range(2 * rows):
            self.scheduler.add(_request(str(number), f"tenant {number % ADAPTERS}", refs[number % ADAPTERS]))

    def _see(self, tenants: int, refs: list[AdapterRef]) -> None:
        """Serve one short request of each of `tenants` tenants, in batches."""
        for first in range(0, tenants, 1000):
            for number in range(first, min(tenants, first + 1000)):
                ref = refs[number % len(refs)]
                self.scheduler.add(_request(f"seen {number}", f"seen {number}", ref, prompt=1, output=1))
            for _ in range(MAX_IDLE_PLANS):
                if self.scheduler.is_idle:
                    break
                self._store.settle()
                step = self.scheduler.plan()
                self.scheduler.drain_events()
                sampled = [TokenEvent(request_id=chunk.sequence.id, token_id=0) for chunk in step.sampling]
                self.clock.advance_to(self.clock.now + STEP_SECONDS)
                self.scheduler.commit(step, sampled)

    def step(self) -> Cost | None:
        """Measure one step; None if not every row decodes."""
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
        if not decoding:
            return None
        flows, known = len(self.scheduler.queue.flows), len(self.scheduler.memory.residency._known)
        return Cost(len(step.chunks), 1e6 * (planned - began), 1e6 * (ended - ran), flows, known)


def _request(name: str, tenant: str, adapter: AdapterRef, prompt: int = PROMPT, output: int = OUTPUT) -> Request:
    return Request(
        id=name,
        tenant=tenant,
        prompt_token_ids=[hash(name), *[0] * (prompt - 1)],
        sampling=SamplingParams(max_tokens=output),
        adapter=adapter,
    )


def measure(bench: Bench, steps: int) -> Cost:
    """The medians of `steps` steps that only decode."""
    costs: list[Cost] = []
    while len(costs) < steps:
        if cost := bench.step():
            costs.append(cost)
    return Cost(
        round(statistics.median(cost.rows for cost in costs)),
        statistics.median(cost.plan for cost in costs),
        statistics.median(cost.commit for cost in costs),
        costs[-1].flows,
        costs[-1].known,
    )


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, default=256)
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--adapters", type=int, default=10_000)
    parser.add_argument("--tenants", type=int, default=100_000)
    asked = parser.parse_args()
    print(f"{'pool':8}{'prefix cache':14}{'rows':>6}{'plan us':>10}{'commit us':>11}{'flows':>8}{'known':>8}")
    cases = [(tight, cache, ADAPTERS, 0) for tight in (False, True) for cache in (False, True)]
    cases += [(False, cache, asked.adapters, asked.tenants) for cache in (False, True)]
    for tight, prefix_cache, adapters, tenants in cases:
        bench = Bench(asked.rows, tight=tight, prefix_cache=prefix_cache, adapters=adapters, tenants=tenants)
        cost = measure(bench, asked.steps)
        name, cache = ("tight" if tight else "roomy"), ("on" if prefix_cache else "off")
        counts = f"{cost.flows:8}{cost.known:8}"
        print(f"{name:8}{cache:14}{cost.rows:6}{cost.plan:10.0f}{cost.commit:11.0f}{counts}")


if __name__ == "__main__":
    main()
