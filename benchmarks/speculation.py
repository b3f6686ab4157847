"""Speculative decoding on and off: tokens per second of answers that repeat parts of their prompts, and of other
answers.

    python benchmarks/speculation.py [--model 0.5b] [--dtype float32] [--requests 1,4,16] [--edits 0.05,1] [--reps 3]

The engine runs in this process, alternately with drafts and without. Its model has random weights, which take the same
time as trained weights but give meaningless answers. So the answers are scripted: before the sampler reads a row of
logits, the script makes its token the most likely one. An answer repeats a passage of its prompt. With the probability
`--edits` a token is replaced, after which the copy continues: 0.05 is like a rewriting or an extraction, and 1 is a
text without repetition. Requests name the base and four adapters in turn. Forward, sampling, drafting and verification
are the server's own code.
"""

from __future__ import annotations

import argparse
import os
import random
import statistics
import time
from dataclasses import dataclass
from typing import Any

import torch
from models import ensure
from specs import ADAPTERS, MODELS, VOCAB_SIZE, ModelSpec

from loramux.common.settings.file import Settings
from loramux.common.settings.serving import EngineSettings, ModelSettings
from loramux.engine.engine import Engine, build_engine
from loramux.engine.execution.loader import LoadedModel, load_model
from loramux.engine.messages import AdapterRef, Request, SamplingParams

PROMPT_TOKENS = 192
WARM_UP_TOKENS = 24


@dataclass(frozen=True, slots=True)
class Run:
    """One workload under one engine."""

    tokens_per_second: float
    steps: int
    drafted: int
    accepted: int


class Script:
    """Makes the tokens of scripted answers the most likely ones."""

    def __init__(self, loaded: LoadedModel) -> None:
        self.answers: dict[str, list[int]] = {}
        self._sampler: Any = loaded.runner._sampler  # type: ignore[attr-defined]
        self._sample = self._sampler.sample
        self._sampler.sample = self.sample

    def sample(self, logits: torch.Tensor, chunks: list[Any], masks: Any = None) -> Any:
        """Steer every row, then let the sampler choose."""
        row = 0
        for chunk in chunks:
            answer, place = self.answers[chunk.sequence.id], chunk.sequence.num_output_tokens
            for offset in range(chunk.num_sampled):
                logits[row, answer[min(place + offset, len(answer) - 1)]] = 1e4
                row += 1
        return self._sample(logits, chunks, masks)


def engine_of(loaded: LoadedModel, settings: Settings) -> Engine:
    """Return an engine of the model; the engines of one model take turns."""
    return build_engine(loaded, settings, wake=lambda: None)


def settings_of(spec: ModelSpec, dtype: str, speculation: str) -> Settings:
    """Return the server's defaults for one model."""
    return Settings(
        model=ModelSettings(path=str(spec.model_path), served_model_name=spec.name, dtype=dtype),
        engine=EngineSettings(speculation=speculation, prefix_cache=False, max_num_seqs=64),
    )


def run(engine: Engine, script: Script, spec: ModelSpec, count: int, tokens: int, edits: float, seed: int) -> Run:
    """Answer `count` requests at once."""
    rng, before = random.Random(seed), engine.stats()
    for number in range(count):
        prompt = [rng.randrange(300, VOCAB_SIZE) for _ in range(PROMPT_TOKENS)]
        script.answers[str(number)] = [
            rng.randrange(300, VOCAB_SIZE) if rng.random() < edits else prompt[20 + place % (PROMPT_TOKENS - 20)]
            for place in range(tokens)
        ]
        name = ADAPTERS[number % 5 - 1] if number % 5 else None
        engine.submit(
            Request(
                id=str(number),
                tenant=f"tenant {number % 5}",
                prompt_token_ids=prompt,
                sampling=SamplingParams(max_tokens=tokens, temperature=0.0, ignore_eos=True),
                adapter=AdapterRef(name, str(spec.adapter_path(name))) if name else None,
            )
        )
    generated, began, ended = 0, 0.0, 0.0
    while not engine.is_idle:
        report = engine.step()
        ended = time.perf_counter()
        told = [event for event in report.events if event.token_id is not None] if report else []
        began = began or (
            ended if told else 0.0
        )  # measured from the first token on, because prompts take the same time
        generated += len(told)
    after = engine.stats()
    return Run(
        generated / (ended - began),
        after.steps - before.steps,
        after.drafted_tokens - before.drafted_tokens,
        after.accepted_tokens - before.accepted_tokens,
    )


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", choices=MODELS, default="0.5b")
    parser.add_argument("--dtype", choices=["bfloat16", "float32"], default="float32")
    parser.add_argument("--requests", default="1,4,16")
    parser.add_argument("--edits", default="0.05,1")
    parser.add_argument("--tokens", type=int, default=96)
    parser.add_argument("--reps", type=int, default=3)
    asked = parser.parse_args()
    spec = MODELS[asked.model]
    ensure(spec)
    settings = {way: settings_of(spec, asked.dtype, way) for way in ("off", "ngram")}
    loaded = load_model(settings["off"])
    script = Script(loaded)
    engines = {way: engine_of(loaded, chosen) for way, chosen in settings.items()}
    print(f"{spec.name} {asked.dtype}, {torch.get_num_threads()} threads, load {os.getloadavg()[0]:.1f}")
    print(
        f"{'requests':>8}{'edits':>7}{'off tok/s':>11}{'on tok/s':>11}{'ratio':>7}{'spread':>14}"
        f"{'steps':>12}{'accepted':>16}"
    )
    for engine in engines.values():
        run(engine, script, spec, 5, WARM_UP_TOKENS, 0.0, seed=0)
    for count in map(int, asked.requests.split(",")):
        for edits in map(float, asked.edits.split(",")):
            pairs = []
            for rep in range(asked.reps):
                order = ("off", "ngram") if rep % 2 else ("ngram", "off")
                runs = {way: run(engines[way], script, spec, count, asked.tokens, edits, seed=rep) for way in order}
                pairs.append((runs["off"], runs["ngram"]))
            ratios = [on.tokens_per_second / off.tokens_per_second for off, on in pairs]
            off, on = (statistics.median(one[i].tokens_per_second for one in pairs) for i in (0, 1))
            last_off, last_on = pairs[-1]
            spread, steps = f"{min(ratios):.2f}-{max(ratios):.2f}", f"{last_off.steps}/{last_on.steps}"
            accepted = f"{last_on.accepted}/{last_on.drafted}"
            print(
                f"{count:8}{edits:7.2f}{off:11.1f}{on:11.1f}{statistics.median(ratios):7.2f}{spread:>14}{steps:>12}"
                f"{accepted:>16}",
                flush=True,
            )
    print(f"load {os.getloadavg()[0]:.1f}")
    for engine in engines.values():
        engine.close()


if __name__ == "__main__":
    main()
