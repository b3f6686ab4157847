"""Search for the settings and the number of GPUs that meet a workload's goals at the least cost, in the simulator."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import msgspec
import numpy as np

from loramux.engine.messages import ServiceClass
from loramux.engine.scheduling.policy import Policy, default_mixed_prefill_tokens
from loramux.simulator.hardware import Device, Model, StepTime, StepWork
from loramux.simulator.report import Resource, SimulationReport
from loramux.simulator.scenario import Batching, Scenario, ScenarioError
from loramux.simulator.simulation import Simulation
from loramux.simulator.traffic import Arrivals

MOST_GPUS = 256
ADAPTER_RANK = 16
"""Rank of the adapters that a plan's memory counts."""
LEAST_CHUNK = 16
"""Fewest prompt tokens of a step that a plan recommends."""
CHUNK_SHARE = 0.75
"""Share of the goal between two tokens that a step with a chunk of a prompt may take; the rest is for decoding rows."""
MOST_LONG_INTERVALS = 0.01
"""Share of the times between two tokens that may miss the goal, because the goal is a P99."""


class Goals(msgspec.Struct, frozen=True, kw_only=True):
    """Latencies that the plan must keep: P99, in milliseconds."""

    ttft_ms: float = 2000.0
    itl_ms: float = 100.0

    def are_kept(self, report: SimulationReport) -> bool:
        """Return whether both P99 of a simulation are within the goals."""
        return (report.ttft_ms.p99 or 0.0) <= self.ttft_ms and (report.itl_ms.p99 or 0.0) <= self.itl_ms


class PlannedSettings(msgspec.Struct, frozen=True, kw_only=True):
    """Settings that a trial simulates."""

    max_num_batched_tokens: int = 2048
    max_mixed_prefill_tokens: int | None = None
    """Maximum number of prompt tokens in a step in which sequences decode; None: the engine's default."""
    max_num_seqs: int = 128
    block_size: int = 16
    class_shares: tuple[float, float, float] = (8.0, 3.0, 1.0)
    """Weights of the classes interactive, standard and batch."""
    batching: Batching = "continuous"
    gpus: int = 1


class Trial(msgspec.Struct, frozen=True, kw_only=True):
    """Settings, and the simulator's figures for them."""

    settings: PlannedSettings
    ttft_ms_p50: float
    ttft_ms_p99: float
    itl_ms_p50: float
    itl_ms_p99: float
    preemption_rate: float
    pool_use: float
    tokens_per_s: float
    """Tokens per second of all GPUs together."""
    adapters_resident: int
    """Maximum number of adapters that one GPU's pool held at the same time."""
    dollars_per_million_tokens: float
    """Cost of a million tokens, prompt and output together."""
    bound_by: Resource = "bandwidth"
    """Resource that is closest to its limit."""
    simulated: int = 1
    """GPUs that were simulated: one, with its part of the traffic, or all of them with the router before them."""

    def excess(self, goals: Goals) -> float:
        """Return the factor by which the worse of the two goals is missed; at most 1 if both goals are met."""
        return max(self.ttft_ms_p99 / goals.ttft_ms, self.itl_ms_p99 / goals.itl_ms)


class Alternative(msgspec.Struct, frozen=True, kw_only=True):
    """Something cheaper than the recommendation, and what it does to the goals."""

    gpu: str
    trial: Trial
    dollars_per_hour: float
    excess: float
    """Factor by which the worse goal is missed; at most 1 if both goals are met, so that it is the better choice."""


class PromptStep(msgspec.Struct, frozen=True, kw_only=True):
    """A step with a chunk of a prompt and one decoding sequence, which misses the goal between two tokens.

    No number of GPUs makes this step shorter.
    """

    tokens: int
    ms: float
    bound_by: Resource


class RankMemory(msgspec.Struct, frozen=True, kw_only=True):
    """Memory of one rank of an engine; of the whole engine if it has one rank."""

    num_ranks: int
    weight_bytes: int
    pool_bytes: int
    pages: int
    adapters: int
    """Adapters of ADAPTER_RANK on all targets that the pool would hold without KV."""


class Plan(msgspec.Struct, frozen=True, kw_only=True):
    """The recommendation, and all trials that it is based on."""

    memory: RankMemory

    recommended: Trial
    goals: Goals
    goals_met: bool
    tried: list[Trial]
    times: str = ""
    """Source of the times of steps: a data sheet, or a measurement."""
    dollars_per_hour: float = 0.0
    """Cost of all GPUs."""
    alternatives: list[Alternative] = []
    """One GPU less, and other GPUs for less money, the most expensive first."""
    prompt_step: PromptStep | None = None
    """Step of a prompt that misses the goal between two tokens on any number of GPUs. It has the engine's default chunk
    if the recommendation has a smaller one, and otherwise the smallest chunk.
    """
    static: list[Trial] = []
    """Static batching, if it was asked for: with as many GPUs, and with the fewest that keep the goals."""


_CHOICES: dict[str, tuple[Any, ...]] = {
    "max_num_batched_tokens": (512, 1024, 4096, 8192),
    "max_num_seqs": (32, 64, 256, 512),
    "block_size": (8, 32),
    "class_shares": ((4.0, 2.0, 1.0), (16.0, 4.0, 1.0)),
}
"""Values to try in addition to the defaults of `PlannedSettings`."""


class Plans(msgspec.Struct, frozen=True, kw_only=True):
    """A plan for each base of a workload."""

    plans: dict[str, Plan]
    """Plans by the base's name."""
    dollars_per_hour: float
    """Cost of all bases together."""


class Planner:
    """Finds the fewest GPUs that keep the goals, then tunes one setting after the other for them and for one GPU
    less."""

    def __init__(self, device: Device, model: Model, arrivals: Arrivals, goals: Goals) -> None:
        self._device = device
        self._model = model
        self._arrivals = arrivals
        self._goals = goals
        self._tried: dict[PlannedSettings, Trial] = {}
        """Trials of one engine, with its part of the traffic."""
        self._fleets: list[Trial] = []
        """Trials of all engines, with the router before them."""
        classes = {source.service_class for source in arrivals.sources}
        self._choices = {knob: c for knob, c in _CHOICES.items() if knob != "class_shares" or len(classes) > 1}
        least = model.least_block_size
        self._step_time = StepTime(device, model)
        self._prompt_step, chunk = self._fitting_chunk()
        self._first = PlannedSettings(
            block_size=max(PlannedSettings().block_size, 1 << (least - 1).bit_length()),
            max_mixed_prefill_tokens=chunk,
        )
        self._choices["block_size"] = tuple(
            size for size in _CHOICES["block_size"] if size >= least and size != self._first.block_size
        )

    @property
    def num_knob_trials(self) -> int:
        """Simulations that tuning takes for one number of GPUs."""
        return sum(map(len, self._choices.values()))

    def plan(
        self,
        on_trial: Callable[[Trial], None] = lambda _: None,
        *,
        gpu: str = "",
        others: Mapping[str, Device] | None = None,
        with_static: bool = False,
    ) -> Plan:
        """Search; `on_trial` gets every simulation. Raises ScenarioError if the model does not fit the device.

        `gpu` is the device's name, and `others` are devices that may be cheaper. `with_static`: simulate static
        batching too.
        """
        best = self._tuned(self._fewest_gpus(self._first, on_trial), on_trial)
        while best.settings.gpus > 1:
            fewer = msgspec.structs.replace(best.settings, gpus=best.settings.gpus - 1)
            candidate = self._tuned(self._try(fewer, on_trial), on_trial)
            if candidate.excess(self._goals) > 1:
                break
            best = candidate
        best = self._routed(best, on_trial)
        alternatives = self._alternatives(best, gpu, others or {}, on_trial)
        tried = [*self._tried.values(), *self._fleets]
        return Plan(
            memory=_memory_of(self._scenario(best.settings, 1)),
            recommended=best,
            goals=self._goals,
            goals_met=best.excess(self._goals) <= 1,
            tried=tried,
            dollars_per_hour=best.settings.gpus * self._device.dollars_per_hour,
            alternatives=alternatives,
            prompt_step=self._prompt_step,
            static=self._static(best, on_trial) if with_static else [],
        )

    def _alternatives(
        self, best: Trial, gpu: str, others: Mapping[str, Device], on_trial: Callable[[Trial], None]
    ) -> list[Alternative]:
        """Return what costs less: one GPU less, and as many GPUs of each other kind as cost less."""
        found = []
        cost = best.settings.gpus * self._device.dollars_per_hour
        if (fewer := best.settings.gpus - 1) > 0:
            trial = self._try(msgspec.structs.replace(best.settings, gpus=fewer), on_trial)
            found.append(self._alternative(gpu, trial, self._device))
        for name, device in others.items():
            gpus = min(MOST_GPUS, math.ceil(cost / device.dollars_per_hour) - 1) if device.dollars_per_hour else 0
            if gpus < 1:
                continue
            planner = Planner(device, self._model, self._arrivals, self._goals)
            try:
                chunk = planner._first.max_mixed_prefill_tokens
                settings = msgspec.structs.replace(best.settings, gpus=gpus, max_mixed_prefill_tokens=chunk)
                trial = planner._try(settings, on_trial)
            except ScenarioError:  # the model does not fit
                continue
            found.append(planner._alternative(name, trial, device))
        return sorted(found, key=lambda one: -one.dollars_per_hour)

    def _alternative(self, gpu: str, trial: Trial, device: Device) -> Alternative:
        cost = trial.settings.gpus * device.dollars_per_hour
        return Alternative(gpu=gpu, trial=trial, dollars_per_hour=cost, excess=trial.excess(self._goals))

    def _static(self, best: Trial, on_trial: Callable[[Trial], None]) -> list[Trial]:
        """Return static batching with as many GPUs, and if it misses a goal, with more."""
        same = self._try(msgspec.structs.replace(best.settings, batching="static"), on_trial)
        if same.excess(self._goals) <= 1:
            return [same]
        return [same, self._fewest_gpus(same.settings, on_trial)]

    def _routed(self, best: Trial, on_trial: Callable[[Trial], None]) -> Trial:
        """Return the plan for whole engines with the router before them.

        The router divides the traffic less evenly than the search assumes, so the plan may need more engines: at most a
        quarter more are tried."""
        fewest = best.settings.gpus
        if fewest == 1 or best.excess(self._goals) > 1:
            return best
        trials = []
        for gpus in range(fewest, math.ceil(1.25 * fewest) + 1):
            settings = msgspec.structs.replace(best.settings, gpus=gpus)
            simulation = Simulation(self._scenario(settings, gpus), self._arrivals)
            trials.append(self._trial(settings, simulation, gpus))
            self._fleets.append(trials[-1])
            on_trial(trials[-1])
            if trials[-1].excess(self._goals) <= 1:
                break
        return min(trials, key=self._rank)

    def _fewest_gpus(self, first: PlannedSettings, on_trial: Callable[[Trial], None]) -> Trial:
        """Find the fewest GPUs with `first`: double until goals are met or more do not help, then bisect."""
        trial, short = self._try(first, on_trial), 0
        while not self._is_enough(trial):
            short, gpus = trial.settings.gpus, trial.settings.gpus * 2
            if gpus > min(MOST_GPUS, len(self._arrivals)):
                return trial
            trial = self._try(msgspec.structs.replace(first, gpus=gpus), on_trial)
        while trial.settings.gpus - short > 1:
            gpus = (trial.settings.gpus + short) // 2
            middle = self._try(msgspec.structs.replace(first, gpus=gpus), on_trial)
            if not self._is_enough(middle):
                short = middle.settings.gpus
            else:
                trial = middle
        return trial

    def _is_enough(self, trial: Trial) -> bool:
        """Return whether the goals are kept, or only the one is missed that more GPUs do not change."""
        is_hopeless = self._prompt_step is not None and self._first.max_mixed_prefill_tokens is None
        return trial.excess(self._goals) <= 1 or (is_hopeless and trial.ttft_ms_p99 <= self._goals.ttft_ms)

    def _fitting_chunk(self) -> tuple[PromptStep | None, int | None]:
        """Return the step of a prompt that misses the goal between two tokens, and the chunk that keeps it.

        Both are None if the engine's default keeps the goal, or if too few steps miss it to move the P99. If no chunk
        keeps the goal, the step is that of the smallest chunk.
        """
        most = min(self._mixed_prefill_tokens(None), int(self._arrivals.prompt_tokens.max()))
        if not self._are_intervals_long(most):
            return None, None
        chunks = range(LEAST_CHUNK, most, LEAST_CHUNK)
        for share in (CHUNK_SHARE, 1.0):
            if fitting := [chunk for chunk in chunks if self._is_short(chunk, share)]:
                return self._step_of(most), fitting[-1]
        return self._step_of(min(most, LEAST_CHUNK)), None

    def _are_intervals_long(self, most: int) -> bool:
        """Return whether steps with chunks of `most` prompt tokens move the P99 between two tokens above the goal, even
        if only two sequences run at a time.
        """
        limit = max((n for n in range(most + 1) if self._is_short(n)), default=-1)
        prompts = self._arrivals.prompt_tokens
        steps = prompts // most * (most > limit) + (prompts % most > max(0, limit))
        return bool(2 * np.sum(steps) > MOST_LONG_INTERVALS * np.sum(self._arrivals.output_tokens))

    def _is_short(self, tokens: int, share: float = 1.0) -> bool:
        return self._step_of(tokens).ms <= share * self._goals.itl_ms

    def _step_of(self, tokens: int) -> PromptStep:
        """Return the step of a chunk of a prompt's `tokens` tokens and of one sequence that decodes."""
        work = StepWork(tokens + 1, tokens + 1, tokens * (tokens + 1) // 2 + 1, 0, 0, 1)
        is_read = self._step_time.read_seconds(work) >= self._step_time.compute_seconds(work)
        ms = 1000 * self._step_time.seconds(work)
        return PromptStep(tokens=tokens, ms=ms, bound_by="bandwidth" if is_read else "arithmetic")

    def _mixed_prefill_tokens(self, chosen: int | None) -> int:
        """Return the chunk of an engine with the planned settings; only a CPU is shared by ranks."""
        return chosen or default_mixed_prefill_tokens(on_cpu=self._device.is_shared_by_ranks)

    def _tuned(self, start: Trial, on_trial: Callable[[Trial], None]) -> Trial:
        best = start
        for knob in self._choices:
            others = [self._try(settings, on_trial) for settings in self._variants(best.settings, knob)]
            best = min([best, *others], key=self._rank)
        return best

    def _variants(self, settings: PlannedSettings, knob: str) -> Iterator[PlannedSettings]:
        for choice in self._choices[knob]:
            yield msgspec.structs.replace(settings, **{knob: choice})

    def _rank(self, trial: Trial) -> tuple[float, float]:
        """Rank trials: trials that meet the goals come first, ordered by their margin minus their preemption rate."""
        excess = trial.excess(self._goals)
        return max(excess, 1.0), excess + trial.preemption_rate

    def _try(self, settings: PlannedSettings, on_trial: Callable[[Trial], None]) -> Trial:
        if settings not in self._tried:
            simulation = Simulation(self._scenario(settings, 1), self._arrivals.on_engine(0, settings.gpus))
            trial = self._tried[settings] = self._trial(settings, simulation, 1)
            on_trial(trial)
        return self._tried[settings]

    def _scenario(self, settings: PlannedSettings, engines: int) -> Scenario:
        scenario = Scenario(
            duration_s=max(1e-3, float(self._arrivals.at[-1])),
            device=self._device,
            model=self._model,
            engines=engines,
            batching=settings.batching,
            block_size=settings.block_size,
            max_num_seqs=settings.max_num_seqs,
            max_num_batched_tokens=settings.max_num_batched_tokens,
            max_mixed_prefill_tokens=self._mixed_prefill_tokens(settings.max_mixed_prefill_tokens),
            policy=Policy(class_shares=dict(zip(ServiceClass, settings.class_shares, strict=True))),
            clients=(),
        )
        if scenario.num_pages < 1:
            raise ScenarioError(_refusal(scenario))
        return scenario

    def _trial(self, settings: PlannedSettings, simulation: Simulation, simulated: int) -> Trial:
        report = simulation.run()
        tokens_per_s = report.throughput_tokens_per_s * settings.gpus / simulated
        dollars = self._device.dollars_per_hour * settings.gpus
        return Trial(
            settings=settings,
            ttft_ms_p50=report.ttft_ms.p50 or 0.0,
            ttft_ms_p99=report.ttft_ms.p99 or 0.0,
            itl_ms_p50=report.itl_ms.p50 or 0.0,
            itl_ms_p99=report.itl_ms.p99 or 0.0,
            preemption_rate=report.preemption_rate,
            pool_use=report.pool_use,
            tokens_per_s=tokens_per_s,
            adapters_resident=max(engine.most_adapters for engine in simulation.engines),
            bound_by=report.bound_by,
            simulated=simulated,
            dollars_per_million_tokens=dollars / (tokens_per_s * 3600 / 1e6) if tokens_per_s else 0.0,
        )


def _memory_of(scenario: Scenario) -> RankMemory:
    pool = scenario.num_pages * scenario.page_bytes
    return RankMemory(
        num_ranks=scenario.model.num_ranks,
        weight_bytes=scenario.model.weight_bytes,
        pool_bytes=pool,
        pages=scenario.num_pages,
        adapters=pool // scenario.model.adapter_bytes(ADAPTER_RANK),
    )


def _refusal(scenario: Scenario) -> str:
    """Return a sentence that names the part that does not fit a device's memory, and the number of ranks that is
    enough.
    """
    model, device = scenario.model, scenario.device
    usable = scenario.memory_utilization * device.memory_bytes
    context = model.kv_bytes_per_token * model.max_model_len
    needed = model.num_ranks * math.ceil((model.weight_bytes + context) / usable)
    found = (
        f"weights of {model.weight_bytes / 1e9:.1f} GB on each of {model.num_ranks} ranks leave no page of KV in the "
        f"{usable / 1e9:.1f} GB of a device that are used"
    )
    if device.is_shared_by_ranks:
        return f"{found}; ranks share it, so that only fewer bits a weight help (--quantization), or a larger one"
    size = 1 << (needed - 1).bit_length()
    return f"{found}; --tensor-parallel-size {size} would fit, or fewer bits a weight (--quantization)"
