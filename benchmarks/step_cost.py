"""Host time of a step: all of a decode step on a GPU's path, part by part; and planning alone with many requests.

    python benchmarks/step_cost.py gpu [--rows 64 256] [--contexts 100 32000] [--steps 200] [--rounds 3]
    python benchmarks/step_cost.py scheduler [--rows 256] [--steps 200] [--adapters 10000] [--tenants 100000]

`gpu` needs no GPU. The engine is the one of a GPU, with a tiny model, and its device does nothing
(`tests/support/idle_device.py`). So the time of CUDA's driver is not included: a replay, two copies and two events a
step. Microseconds are medians over decode steps; each round makes all engines anew, and the best round counts. `rest`
is what no other column names, mostly the pipeline itself.

`scheduler` runs the engine's own scheduler with a pool and adapters of the simulator. The number of waiting requests
equals that of running requests. In a `roomy` pool, rows are scarce. In a `tight` pool, pages are scarce, so that every
step checks whether the next request fits. Microseconds are medians over steps in which every row decodes. The last two
rows show the same times after traffic of `--tenants` tenants over `--adapters` adapters, which are all idle in the
pool: earlier traffic must not make a step slower. `flows` and `known` are the numbers of objects that the scheduler
remembers.
"""

from __future__ import annotations

import argparse
import gc
import os
import statistics
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass
from itertools import product
from multiprocessing import Pipe
from pathlib import Path
from typing import Any

import msgspec
from specs import BENCHMARKS

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


KINDS: dict[str, tuple[int, dict[str, Any]]] = {
    "plain": (0, {}),
    "adapters": (32, {}),
    "penalties": (0, {"frequency_penalty": 0.5, "repetition_penalty": 1.1}),
    "logprobs": (0, {"logprobs": 5}),
    "all": (32, {"temperature": 0.7, "top_p": 0.9, "frequency_penalty": 0.5, "logprobs": 5}),
}
"""Requests that are measured: number of adapters, and parameters of sampling."""

PARTS = ("plan", "count", "pack", "sampling", "inputs", "lists", "copy", "choose", "read", "commit", "report", "send")
"""Parts of a step, in their order: plan it; count it for statistics; place its rows; its rows' parameters of sampling;
its inputs and new pages; its work lists; the copy to the device; what follows the replay, and the copy back; read the
tokens of the step before; commit it; the report, and its bytes to the server."""


class PartTimes:
    """Seconds in named parts of a step, each without the parts inside it."""

    def __init__(self) -> None:
        self.seconds: defaultdict[str, float] = defaultdict(float)
        self._inside = [0.0]

    def watch(self, owner: Any, name: str, part: str) -> None:
        """Count the time of the function `owner.name` to `part`."""
        setattr(owner, name, self.timed(getattr(owner, name), part))

    def timed(self, function: Callable[..., Any], part: str) -> Callable[..., Any]:
        """Return `function`, whose time counts to `part`."""

        def run(*args: Any, **kwargs: Any) -> Any:
            self._inside.append(0.0)
            began = time.perf_counter()
            result = function(*args, **kwargs)
            spent = time.perf_counter() - began
            self.seconds[part] += spent - self._inside.pop()
            self._inside[-1] += spent
            return result

        return run


def measure_parts(engine: Any, steps: int) -> dict[str, float]:
    """Return the median microseconds of each part of a decode step, of the `rest`, and of them all."""
    from loramux.engine.execution import gpu_runner

    times, pack = PartTimes(), gpu_runner.pack
    runner, scheduler = engine._runner, engine.scheduler
    for owner, name, part in (
        (scheduler, "plan", "plan"),
        (engine, "_count_step", "count"),
        (gpu_runner, "pack", "pack"),
        (runner._sampler, "stage", "sampling"),
        (runner._buffers, "fill", "inputs"),
        (runner._decode_graphs, "stage", "lists"),
        (runner._buffers.memory, "send", "copy"),
        (runner, "sample", "choose"),
        (engine._pipeline, "_complete", "read"),
        (scheduler, "commit_ahead", "commit"),
        (engine, "_report", "report"),
    ):
        times.watch(owner, name, part)
    step, encode = times.timed(engine.step, "rest"), msgspec.msgpack.Encoder().encode
    receiver, sender = Pipe(duplex=False)
    send = times.timed(lambda report: sender.send_bytes(encode(report)), "send")
    found: list[dict[str, float]] = []
    for _ in range(steps):
        times.seconds.clear()
        send(step())
        found.append(dict(times.seconds, total=sum(times.seconds.values())))
        receiver.recv_bytes()
    gpu_runner.pack = pack
    return {part: 1e6 * statistics.median(one.get(part, 0.0) for one in found) for part in (*PARTS, "rest", "total")}


def measure_gpu(rows: list[int], contexts: list[int], kinds: list[str], steps: int, rounds: int) -> None:
    """Print the table of a GPU's steps."""
    os.environ["TRITON_INTERPRET"], os.environ["CUDA_VISIBLE_DEVICES"] = "1", ""
    sys.path.append(str(BENCHMARKS.parent / "tests/support"))
    from idle_device import IdleDevice, Load, no_launches

    print(f"{'rows':>4}{'context':>8} {'kind':10}" + "".join(f"{part:>9}" for part in (*PARTS, "rest", "total")))
    with tempfile.TemporaryDirectory() as folder, no_launches():
        device = IdleDevice(Path(folder))
        for count, context, kind in product(rows, contexts, kinds):
            adapters, sampling = KINDS[kind]
            found = []
            for _ in range(rounds):
                engine = device.decoding(Load(count, context, adapters, sampling))
                gc.collect()
                gc.freeze()  # as an engine's process does
                found.append(measure_parts(engine, steps))
                engine.close()
                gc.unfreeze()
            best = min(found, key=lambda one: one["total"])
            print(f"{count:4}{context:8} {kind:10}" + "".join(f"{part:9.0f}" for part in best.values()), flush=True)


def measure_scheduler(rows: int, steps: int, adapters: int, tenants: int) -> None:
    """Print the table of the scheduler alone."""
    print(f"{'pool':8}{'prefix cache':14}{'rows':>6}{'plan us':>10}{'commit us':>11}{'flows':>8}{'known':>8}")
    cases = [(tight, cache, ADAPTERS, 0) for tight in (False, True) for cache in (False, True)]
    cases += [(False, cache, adapters, tenants) for cache in (False, True)]
    for tight, prefix_cache, known, seen in cases:
        bench = Bench(rows, tight=tight, prefix_cache=prefix_cache, adapters=known, tenants=seen)
        cost = measure(bench, steps)
        name, cache = ("tight" if tight else "roomy"), ("on" if prefix_cache else "off")
        counts = f"{cost.flows:8}{cost.known:8}"
        print(f"{name:8}{cache:14}{cost.rows:6}{cost.plan:10.0f}{cost.commit:11.0f}{counts}")


def main() -> None:
    """Print a table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    tables = parser.add_subparsers(dest="table", required=True)
    gpu = tables.add_parser("gpu")
    gpu.add_argument("--rows", type=int, nargs="+", default=[64, 256])
    gpu.add_argument("--contexts", type=int, nargs="+", default=[100, 32_000])
    gpu.add_argument("--kinds", choices=KINDS, nargs="+", default=list(KINDS))
    gpu.add_argument("--rounds", type=int, default=3)
    alone = tables.add_parser("scheduler")
    alone.add_argument("--rows", type=int, default=256)
    alone.add_argument("--adapters", type=int, default=10_000)
    alone.add_argument("--tenants", type=int, default=100_000)
    for table in (gpu, alone):
        table.add_argument("--steps", type=int, default=200)
    asked = parser.parse_args()
    if asked.table == "gpu":
        measure_gpu(asked.rows, asked.contexts, asked.kinds, asked.steps, asked.rounds)
    else:
        measure_scheduler(asked.rows, asked.steps, asked.adapters, asked.tenants)


if __name__ == "__main__":
    main()
