"""Times of whole steps of the engine's runner: decode and prefill with their floors, and PEFT's own forward."""

from __future__ import annotations

import time
from collections.abc import Callable
from statistics import median

import torch
from floors import StepBytes, adapter_bytes, kv_bytes_per_token
from grid import Grid, Mix
from kernel_times import Bench
from serving_model import DoesNotFit, ServingModel, make_model
from timing import synchronize

from loramux.engine.scheduling.sequence import Step


def measure_steps(bench: Bench, serving: ServingModel) -> None:
    """Decode over the grid, then prefill."""
    base: dict[tuple[int, int], float] = {}
    for batch, context, mix in bench.grid.decodes():
        cell = {"batch": batch, "context": context, "mix": mix.name}
        try:
            step = serving.step([(1, context)] * batch, mix)
        except DoesNotFit as reason:
            bench.report.add("Decode step", **cell, **dict.fromkeys(DECODE_COLUMNS), note=str(reason))
            continue
        taken = step_ms(serving, step, bench.grid.repeats)
        if mix.adapters == 0:
            base[batch, context] = taken
        read = step_bytes(bench.grid, serving, batch, context, mix)
        floor = read.floor_ms(bench.ceilings)
        overhead = taken / base[batch, context] - 1  # if the base's step did not fit, no other step does
        figures = (taken, floor, taken / floor, overhead, read.omega, overhead - read.omega)
        bench.report.add("Decode step", **cell, **dict(zip(DECODE_COLUMNS, figures, strict=True)), note="")
    _prefill(bench, serving)


DECODE_COLUMNS = ("ms", "floor_ms", "over_floor", "overhead", "omega", "overhead_less_omega")


def step_bytes(grid: Grid, serving: ServingModel, batch: int, context: int, mix: Mix) -> StepBytes:
    """Inputs of a decode step."""
    return StepBytes(
        weights=serving.loaded.weight_bytes,
        kv=batch * context * kv_bytes_per_token(grid.model),
        adapters=sum(adapter_bytes(grid.model, mix.rank(adapter)) for adapter in range(mix.distinct(batch))),
    )


def step_ms(serving: ServingModel, step: Step, repeats: int) -> float:
    """Return the median milliseconds between the tokens of consecutive steps. As in the engine, one step is always
    launched ahead.
    """
    runner = serving.loaded.runner
    flights = [runner.launch(step), runner.launch(step)]
    taken = []
    mark = time.perf_counter()
    for _ in range(repeats + 2):
        flights.append(runner.launch(step))
        flights.pop(0).events()
        now = time.perf_counter()
        taken.append((now - mark) * 1e3)
        mark = now
    for flight in flights:
        flight.events()
    return median(taken[2:])


def _prefill(bench: Bench, serving: ServingModel) -> None:
    for prompts, length in bench.grid.prefills:
        base = None
        for mix in bench.grid.mixes:
            if mix.adapters is not None and mix.adapters > prompts:
                continue
            cell = {"prompts": prompts, "tokens": prompts * length, "mix": mix.name}
            try:
                taken = step_ms(serving, serving.step([(length, length)] * prompts, mix), bench.grid.repeats)
            except DoesNotFit as reason:
                bench.report.add("Prefill step", **cell, ms=None, tokens_per_s=None, overhead=None, note=str(reason))
                continue
            base = taken if base is None else base
            speed, overhead = prompts * length / taken * 1e3, taken / base - 1
            bench.report.add("Prefill step", **cell, ms=taken, tokens_per_s=speed, overhead=overhead, note="")


def measure_peft(bench: Bench, device: torch.device, dtype: torch.dtype) -> None:
    """PEFT's forward over the same batch, one adapter of rank 16 on all linears, with transformers' own KV cache."""
    import peft
    from transformers import DynamicCache

    model = make_model(bench.grid.model, device, dtype)
    config = peft.LoraConfig(task_type="CAUSAL_LM", r=16, lora_alpha=16, target_modules="all-linear")
    model = peft.get_peft_model(model, config).to(dtype).eval()
    context = bench.grid.contexts[0]
    for batch in bench.grid.batches:
        cache = DynamicCache(config=model.config)
        one = torch.zeros(batch, 1, dtype=torch.long, device=device)
        with torch.inference_mode():
            prompt = torch.zeros(batch, context - 1, dtype=torch.long, device=device)
            model(input_ids=prompt, past_key_values=cache, logits_to_keep=1)

            def forward() -> None:
                model(input_ids=one, past_key_values=cache)  # noqa: B023 - called within this turn of the loop
                cache.crop(-1)  # noqa: B023

            taken = host_ms(forward, device, bench.grid.repeats)
        bench.report.add("PEFT's decode step, one adapter", batch=batch, context=context, ms=taken)


def host_ms(work: Callable[[], object], device: torch.device, repeats: int) -> float:
    """Median milliseconds by the host's clock, the device awaited each time."""
    taken = []
    for _ in range(repeats + 2):
        start = time.perf_counter()
        work()
        synchronize(device)
        taken.append((time.perf_counter() - start) * 1e3)
    return median(taken[2:])
