"""Tokens per second of the whole engine: scheduler, residency, runner and sampler over one queue of requests."""

from __future__ import annotations

import json
import random
import time
from pathlib import Path
from tempfile import TemporaryDirectory

import torch
from grid import Grid, Mix
from kernel_times import Bench
from safetensors.torch import save_file
from serving_model import ServingModel

from loramux.engine.engine import build_engine
from loramux.engine.messages import AdapterRef, Request, SamplingParams

TARGETS = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
ADAPTERS = 8


def measure_throughput(bench: Bench, serving: ServingModel) -> None:
    """The same requests to the base alone, and to eight adapters of mixed ranks."""
    with TemporaryDirectory() as folder:
        mix = Mix("8 mixed", ADAPTERS, tuple(sorted({rank for m in bench.grid.mixes for rank in m.ranks})))
        refs = [save_adapter(Path(folder) / str(n), serving, mix.rank(n)) for n in range(ADAPTERS)]
        for name, adapters in (("base", []), ("8 mixed", refs)):
            requests = make_requests(bench.grid, adapters)
            seconds, tokens = run(serving, requests)
            bench.report.add(
                "End to end",
                requests=len(requests),
                mix=name,
                output_tokens=tokens,
                s=seconds,
                tokens_per_s=tokens / seconds,
            )


def make_requests(grid: Grid, adapters: list[AdapterRef]) -> list[Request]:
    """Return four times as many requests as can run at once. All are due immediately, and their lengths are between
    half and all of the shortest context.
    """
    rng = random.Random(0)
    half = max(2, grid.contexts[0] // 2)
    return [
        Request(
            id=f"r{number}",
            tenant="bench",
            prompt_token_ids=[rng.randrange(3, grid.model.vocab_size) for _ in range(rng.randrange(half // 2, half))],
            sampling=SamplingParams(max_tokens=rng.randrange(half // 2, half), temperature=0.0, ignore_eos=True),
            adapter=adapters[number % len(adapters)] if adapters else None,
        )
        for number in range(4 * max(grid.batches))
    ]


def run(serving: ServingModel, requests: list[Request]) -> tuple[float, int]:
    """(seconds from the first step to the last token, output tokens); adapters are loaded during the run."""
    engine = build_engine(serving.loaded, serving.settings, wake=lambda: None)
    for request in requests:
        engine.submit(request)
    tokens, start = 0, time.perf_counter()
    while not engine.is_idle:
        report = engine.step()
        for event in report.events if report else []:
            if event.fault is not None:
                raise RuntimeError(f"{event.request_id}: {event.fault.message}")
            tokens += event.token_id is not None
    seconds = time.perf_counter() - start
    engine.close()
    return seconds, tokens


def save_adapter(folder: Path, serving: ServingModel, rank: int) -> AdapterRef:
    """A PEFT adapter of random weights on all linears."""
    folder.mkdir()
    tensors = {}
    for name, shape in serving.loaded.base.modules.items():
        prefix = f"base_model.model.{name}"
        tensors[f"{prefix}.lora_A.weight"] = torch.randn(rank, shape.in_features).mul_(shape.in_features**-0.5)
        tensors[f"{prefix}.lora_B.weight"] = torch.randn(shape.out_features, rank).mul_(0.01)
    save_file(
        {name: tensor.to(torch.bfloat16) for name, tensor in tensors.items()}, folder / "adapter_model.safetensors"
    )
    config = {"peft_type": "LORA", "task_type": "CAUSAL_LM", "r": rank, "lora_alpha": rank, "target_modules": TARGETS}
    (folder / "adapter_config.json").write_text(json.dumps(config))
    return AdapterRef(digest=f"bench-{folder.name}", path=str(folder))
