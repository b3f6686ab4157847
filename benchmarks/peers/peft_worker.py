"""Runs a workload with transformers and PEFT.

Batches are static and padded on the left. Rows of a batch get different adapters by `generate(adapter_names=...)`.

Batches are taken in the workload's order, and each runs until its longest request has ended; tokens generated after a
request's end are not counted. A request's first token has the time of the batch's first step, and its end the time of
the step with its last token, as if PEFT could stream.
"""

from __future__ import annotations

import argparse
import os
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec
import torch
from figures import Outcome
from machine import Watch
from measurements import Drive
from peft import PeftModel
from progress import bar
from specs import MODELS, ModelSpec
from transformers import AutoModelForCausalLM, LogitsProcessorList
from workloads import Item, load

BASE = "__base__"
"""PEFT's own name, in `adapter_names`, of rows without an adapter."""


@dataclass
class StepTimes:
    """A logits processor that changes nothing and notes when each step had its logits."""

    times: list[float] = field(default_factory=list)

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        """Return the scores unchanged."""
        del input_ids
        self.times.append(time.perf_counter())
        return scores


@dataclass(frozen=True)
class Peft:
    """A loaded model with the adapters that a workload asks for."""

    model: Any

    @classmethod
    def load(cls, spec: ModelSpec, dtype: torch.dtype, adapters: Sequence[str]) -> Peft:
        """Load only the base if no adapter is requested, because PEFT's wrappers would cost time."""
        model: Any = AutoModelForCausalLM.from_pretrained(spec.model_path, dtype=dtype)
        for adapter in adapters:
            path, options = spec.adapter_path(adapter), {"adapter_name": adapter, "autocast_adapter_dtype": False}
            if isinstance(model, PeftModel):
                model.load_adapter(path, **options)
            else:
                model = PeftModel.from_pretrained(model, path, **options)
        return cls(model.eval().to(dtype))

    @torch.inference_mode()
    def run_batch(self, batch: Sequence[Item], start: float) -> list[Outcome]:
        """Generate for all of `batch` together; times count from `start`."""
        input_ids, attention_mask = _pad_left(batch)
        longest = max(item.max_tokens for item in batch)
        steps = StepTimes()
        tokens = self.model.generate(
            input_ids=input_ids,
            attention_mask=attention_mask,
            max_new_tokens=longest,
            min_new_tokens=longest,
            do_sample=False,
            pad_token_id=0,
            logits_processor=LogitsProcessorList([steps]),
            **self._adapters_of(batch),
        )
        return [
            Outcome(
                id=item.id,
                ttft_s=steps.times[0] - start,
                total_s=steps.times[item.max_tokens - 1] - start,
                output_tokens=item.max_tokens,
                token_ids=row[: item.max_tokens].tolist(),
            )
            for item, row in zip(batch, tokens[:, input_ids.shape[1] :], strict=True)
        ]

    def _adapters_of(self, batch: Sequence[Item]) -> dict[str, Any]:
        """Return the arguments of `generate` that name adapters. If all rows use one adapter, none: this is faster."""
        if not isinstance(self.model, PeftModel):
            return {}
        names = {item.adapter for item in batch}
        if len(names) == 1 and None not in names:
            self.model.set_adapter(batch[0].adapter)
            return {}
        return {"adapter_names": [item.adapter or BASE for item in batch]}


def _pad_left(batch: Sequence[Item]) -> tuple[torch.Tensor, torch.Tensor]:
    """input_ids and attention_mask, int64[len(batch), longest prompt]."""
    longest = max(len(item.prompt_token_ids) for item in batch)
    input_ids = torch.zeros(len(batch), longest, dtype=torch.long)
    attention_mask = torch.zeros_like(input_ids)
    for row, item in enumerate(batch):
        input_ids[row, longest - len(item.prompt_token_ids) :] = torch.tensor(item.prompt_token_ids)
        attention_mask[row, longest - len(item.prompt_token_ids) :] = 1
    return input_ids, attention_mask


def run(peft: Peft, items: Sequence[Item], batch_size: int) -> tuple[list[Outcome], float]:
    """Run all `items`, one batch at a time; return outcomes and seconds."""
    start = time.perf_counter()
    outcomes: list[Outcome] = []
    with bar("requests") as progress:
        task = progress.add_task("generating", total=len(items))
        for i in range(0, len(items), batch_size):
            outcomes += peft.run_batch(items[i : i + batch_size], start)
            progress.advance(task, batch_size)
    return outcomes, time.perf_counter() - start


def _warm_up(peft: Peft, items: Sequence[Item], batch_size: int) -> None:
    few = [msgspec.structs.replace(item, max_tokens=4) for item in items[:batch_size]]
    peft.run_batch(few, time.perf_counter())


def _parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Run a workload through PEFT and write the drive as JSON.")
    parser.add_argument("model", choices=MODELS)
    parser.add_argument("dtype")
    parser.add_argument("workload", type=Path)
    parser.add_argument("result", type=Path)
    parser.add_argument("--threads", type=int, required=True)
    parser.add_argument("--batch-size", type=int, required=True)
    return parser.parse_args()


def main() -> None:
    """The command line."""
    started = time.perf_counter()
    arguments = _parse_arguments()
    torch.set_num_threads(arguments.threads)
    items = load(arguments.workload)
    adapters = sorted({item.adapter for item in items if item.adapter is not None})
    peft = Peft.load(MODELS[arguments.model], getattr(torch, arguments.dtype), adapters)
    start_s = time.perf_counter() - started
    _warm_up(peft, items, arguments.batch_size)
    with Watch(os.getpid()) as watch:
        outcomes, wall_s = run(peft, items, arguments.batch_size)
    drive = Drive(outcomes=outcomes, wall_s=wall_s, resources=watch.resources, start_s=start_s)
    arguments.result.write_bytes(msgspec.json.encode(drive))


if __name__ == "__main__":
    main()
