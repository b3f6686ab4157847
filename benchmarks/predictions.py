"""Predict random workloads with the simulator and a measured profile, then run them over HTTP on the same machine.

    python benchmarks/predictions.py                       # 20 workloads, about 9 minutes on a quiet machine
    python benchmarks/predictions.py --workloads 3 --seconds 5 --measure-seconds 20

`loramux measure` measures the machine with the server's own settings. Each workload has a random rate, burstiness,
lengths, adapters, ranks and popularity, at 20% to 85% of what the profile says that the engine carries. It is predicted
before it runs. The server, its engine and the client share the machine, so the engine leaves one core to the others.

The table has the predicted and the measured throughput (prompt and output tokens per second) and first tokens, and
their errors. The last lines have the median and the worst error; the exit code is 1 if a median misses its goal: 5% for
the throughput, 15% for p50 and p99 of the first token. One JSON line goes to stdout.
"""

from __future__ import annotations

import argparse
import asyncio
import math
import os
import statistics
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass

import msgspec
import numpy as np
from figures import Outcome
from loadgen import as_arrived, at_once, drive
from models import ensure
from peers.loramux_server import Loramux, settings_text
from peers.serving import SystemFailed, free_port
from progress import say
from rich.console import Console
from rich.table import Table
from specs import ADAPTERS, MAX_MODEL_LEN, MODELS, WORK, Setup, rank_of
from workloads import Item, items_of

from loramux.common.settings.file import Settings, load_settings
from loramux.engine.execution.assembly import choose_device
from loramux.engine.execution.memory_plan import limits_on
from loramux.engine.messages import AdapterRef, ServiceClass, StepLimits
from loramux.engine.scheduling.policy import Policy
from loramux.simulator.hardware import StepTime, StepWork
from loramux.simulator.profiles import Profile, read_profile
from loramux.simulator.scenario import LogNormal, Scenario, arrival_times, choose
from loramux.simulator.simulation import Simulation
from loramux.simulator.traffic import Arrivals, TrafficSource

GOALS = {"tokens_per_s": 0.05, "ttft_ms_p50": 0.15, "ttft_ms_p99": 0.15}
"""Largest median of the errors."""
POPULARITIES = ("uniform", "zipf:1.0", "zipf:1.5", "identical")
BURSTS = (0.5, 1.0, 1.0, 2.0, 4.0)
"""Coefficients of variation of the gaps; Poisson is drawn twice as often."""
LEAST_LOAD, MOST_LOAD = 0.2, 0.85
SIGMA = 0.6


class Workload(msgspec.Struct, frozen=True, kw_only=True):
    """The random properties of a workload."""

    rate: float
    cv: float
    prompt_tokens: int
    """Median of the prompts."""
    output_tokens: int
    """Median of the answers."""
    adapters: int
    """0: the base."""
    popularity: str
    load: float
    """Share of the engine's capacity, by the profile."""
    seed: int


class Figures(msgspec.Struct, frozen=True, kw_only=True):
    """Predicted or measured."""

    tokens_per_s: float
    ttft_ms_p50: float
    ttft_ms_p99: float


class Row(msgspec.Struct, frozen=True, kw_only=True):
    """One workload, predicted and measured."""

    workload: Workload
    requests: int
    predicted: Figures
    measured: Figures
    errors: dict[str, float]
    """Predicted over measured, less one."""


class Result(msgspec.Struct, frozen=True, kw_only=True):
    """The whole run."""

    machine: str
    commit: str
    model: str
    rows: list[Row]
    median_errors: dict[str, float]
    worst_errors: dict[str, float]


@dataclass(frozen=True)
class Predictor:
    """The simulator with the server's settings on the measured machine."""

    profile: Profile
    settings: Settings

    @property
    def _limits(self) -> StepLimits:
        engine = self.settings.engine
        return limits_on(choose_device(engine.device), engine)

    def draw(self, number: int) -> Workload:
        """Draw a workload; its rate follows from its share of the engine's capacity."""
        rng = np.random.default_rng([2026, number])
        prompt, output = (
            int(math.exp(rng.uniform(math.log(low), math.log(high)))) for low, high in ((24, 320), (12, 96))
        )
        adapters = int(rng.choice([0, 1, 2, 4, 8, 16]))
        load = float(rng.uniform(LEAST_LOAD, MOST_LOAD))
        return Workload(
            rate=load / self._request_seconds(prompt, output, adapters),
            cv=float(rng.choice(BURSTS)),
            prompt_tokens=prompt,
            output_tokens=output,
            adapters=adapters,
            popularity=str(rng.choice(POPULARITIES)),
            load=load,
            seed=number,
        )

    def _request_seconds(self, prompt: int, output: int, adapters: int) -> float:
        """Return the seconds of the engine that a mean request takes in a full batch."""
        mean = math.exp(SIGMA**2 / 2)
        prompt, output = round(prompt * mean), round(output * mean)
        rows = self._limits.max_num_seqs
        steps = StepTime(self.profile.device, self.profile.model)
        ranks = [rank_of(number) for number in range(adapters)]
        size = self.profile.model.adapter_bytes(1) * sum(ranks)
        row_ranks = int(rows * sum(ranks) / max(1, adapters))
        context = rows * (prompt + output // 2)
        decode = steps.seconds(StepWork(rows, context, context, size, row_ranks, rows, adapters))
        prefill = steps.seconds(StepWork(prompt, prompt, prompt * prompt // 2, 0, 0, 1))
        return prefill + output * decode / rows

    def predict(self, items: Sequence[Item]) -> Figures:
        """Simulate the requests; all adapters are in the pool, as in the warm server."""
        ranks = {adapter: rank_of(number) for number, adapter in enumerate(ADAPTERS)}
        names = sorted({item.adapter for item in items}, key=str)
        sources = [
            TrafficSource(
                "bench",
                AdapterRef(name, "") if name else None,
                ranks.get(name or "", 0),
                ServiceClass.STANDARD,
                1.0,
                None,
                preload=name is not None,
            )
            for name in names
        ]
        outputs = np.array([item.max_tokens for item in items])
        arrivals = Arrivals(
            sources,
            np.array([names.index(item.adapter) for item in items]),
            np.array([item.arrival_s for item in items]),
            np.array([len(item.prompt_token_ids) for item in items]),
            outputs,
            outputs,
        )
        report = Simulation(self._scenario(float(arrivals.at[-1])), arrivals).run()
        return Figures(
            tokens_per_s=report.throughput_tokens_per_s,
            ttft_ms_p50=report.ttft_ms.p50 or 0.0,
            ttft_ms_p99=report.ttft_ms.p99 or 0.0,
        )

    def _scenario(self, duration_s: float) -> Scenario:
        block_size = self.profile.engine["block_size"]
        assert isinstance(block_size, int)
        limits = self._limits
        return Scenario(
            duration_s=max(duration_s, 1e-3),
            device=self.profile.device,
            model=self.profile.model,
            block_size=block_size,
            max_num_seqs=limits.max_num_seqs,
            max_num_batched_tokens=limits.max_num_batched_tokens,
            max_mixed_prefill_tokens=limits.max_mixed_prefill_tokens,
            policy=Policy.from_settings(self.settings, math.inf, limits.max_draft_tokens),
            clients=(),
        )


def items_for(workload: Workload, seconds: float) -> list[Item]:
    """The requests of a workload: as many as come in `seconds`."""
    rng = np.random.default_rng([7, workload.seed])
    count = max(8, round(workload.rate * seconds))
    half = MAX_MODEL_LEN // 2
    prompts = LogNormal(math.log(workload.prompt_tokens), SIGMA, 4, half).draw(rng, count)
    outputs = LogNormal(math.log(workload.output_tokens), SIGMA, 2, half - 1).draw(rng, count)
    adapters: list[str | None] = [None] * count
    if workload.adapters:
        adapters = [ADAPTERS[place] for place in choose(rng, count, workload.popularity, workload.adapters)]
    return items_of(workload.seed, prompts, outputs, adapters, arrival_times(rng, count, workload.rate, workload.cv))


def figures_of(items: Sequence[Item], outcomes: Sequence[Outcome], wall_s: float) -> Figures:
    """Return what the client measured. Raises SystemFailed if a request failed."""
    if failed := [outcome.error for outcome in outcomes if outcome.error is not None]:
        raise SystemFailed(f"{len(failed)} of {len(items)} requests failed, the first with {failed[0]}")
    tokens = sum(len(item.prompt_token_ids) for item in items) + sum(outcome.output_tokens for outcome in outcomes)
    firsts = [1e3 * outcome.ttft_s for outcome in outcomes if outcome.ttft_s is not None]
    p50, p99 = np.quantile(firsts, [0.5, 0.99], method="inverted_cdf")  # as the simulator counts
    return Figures(tokens_per_s=tokens / wall_s, ttft_ms_p50=float(p50), ttft_ms_p99=float(p99))


def errors_of(predicted: Figures, measured: Figures) -> dict[str, float]:
    """Predicted over measured, less one."""
    return {name: getattr(predicted, name) / getattr(measured, name) - 1 for name in GOALS}


def measure(setup: Setup, seconds: float) -> tuple[Profile, Settings]:
    """Run `loramux measure` with the settings that the server will have."""
    folder = setup.scratch / "predictions"
    folder.mkdir(parents=True, exist_ok=True)
    file, profile = folder / "settings.toml", folder / "profile.json"
    file.write_text(settings_text(setup, free_port()))
    command = ["measure", "--config", str(file), "--output", str(profile), "--seconds", f"{seconds:g}"]
    done = subprocess.run([sys.executable, "-m", "loramux_api", *command], stdout=subprocess.DEVNULL, check=False)
    if done.returncode:
        raise SystemFailed(f"loramux {' '.join(command)} ended with {done.returncode}")
    return read_profile(str(profile)), load_settings(file)


def run(predictor: Predictor, setup: Setup, count: int, seconds: float) -> list[Row]:
    """Predict and run each workload, one after the other, on one server."""
    workloads = [predictor.draw(number) for number in range(count)]
    requests = [items_for(workload, seconds) for workload in workloads]
    predicted = [predictor.predict(items) for items in requests]
    rows = []
    with Loramux().serving(setup) as serving:
        warm = [
            Item(id=f"w{n}", prompt_token_ids=[5] * 16, max_tokens=8, adapter=name) for n, name in enumerate(ADAPTERS)
        ]
        asyncio.run(drive(serving.target, at_once(warm)))
        for workload, items, expected in zip(workloads, requests, predicted, strict=True):
            outcomes, wall_s = asyncio.run(drive(serving.target, as_arrived(items)))
            measured = figures_of(items, outcomes, wall_s)
            errors = errors_of(expected, measured)
            rows.append(
                Row(workload=workload, requests=len(items), predicted=expected, measured=measured, errors=errors)
            )
            say(
                f"workload {len(rows)} of {count}: "
                + ", ".join(f"{name} {100 * e:+.1f}%" for name, e in errors.items())
            )
    return rows


def table_of(rows: Sequence[Row]) -> Table:
    """The table: for each figure predicted, measured and error."""
    table = Table("workload", "req/s", "cv", "in/out", "adapters", "load")
    for name in GOALS:
        table.add_column(f"{name}\npredicted", justify="right")
        table.add_column("measured", justify="right")
        table.add_column("error", justify="right")
    for number, row in enumerate(rows):
        one = row.workload
        cells = [f"{number}", f"{one.rate:.1f}", f"{one.cv:g}", f"{one.prompt_tokens}/{one.output_tokens}"]
        cells += [f"{one.adapters} {one.popularity}" if one.adapters else "base", f"{one.load:.0%}"]
        for name in GOALS:
            cells += [f"{getattr(figures, name):,.0f}" for figures in (row.predicted, row.measured)]
            cells.append(f"{100 * row.errors[name]:+.1f}%")
        table.add_row(*cells)
    return table


def main() -> None:
    """Measure, predict, run, and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--workloads", type=int, default=20)
    parser.add_argument("--seconds", type=float, default=15.0, help="of each workload")
    parser.add_argument("--measure-seconds", type=float, default=60.0)
    parser.add_argument("--model", choices=MODELS, default="90m")
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--threads", type=int, default=max(1, len(os.sched_getaffinity(0)) - 1))
    asked = parser.parse_args()
    spec = MODELS[asked.model]
    ensure(spec)
    setup = Setup(spec, asked.dtype, asked.threads, scratch=WORK / "runs")
    profile, settings = measure(setup, asked.measure_seconds)
    rows = run(Predictor(profile, settings), setup, asked.workloads, asked.seconds)
    medians = {name: statistics.median(abs(row.errors[name]) for row in rows) for name in GOALS}
    worst = {name: max((row.errors[name] for row in rows), key=abs) for name in GOALS}
    result = Result(
        machine=profile.machine,
        commit=profile.commit,
        model=asked.model,
        rows=rows,
        median_errors=medians,
        worst_errors=worst,
    )
    print(msgspec.json.encode(result).decode())
    out = Console(stderr=True, width=200)
    out.print(table_of(rows))
    for name, goal in GOALS.items():
        verdict = "kept" if medians[name] <= goal else "MISSED"
        out.print(f"{name}: median error {medians[name]:.1%} (goal {goal:.0%}, {verdict}), worst {worst[name]:+.1%}")
    sys.exit(any(medians[name] > goal for name, goal in GOALS.items()))


if __name__ == "__main__":
    main()
