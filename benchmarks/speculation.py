"""Speculative decoding on and off: tokens per second of answers that repeat parts of their prompts, and of other
answers.

    python benchmarks/speculation.py [--model 0.5b] [--dtype float32] [--requests 1,4,16] [--edits 0.05,1] [--reps 3]
    python benchmarks/speculation.py --accept 0.8,0.5,0 [--dtype float32] [--requests 1,4,16] [--reps 3]

The engine runs in this process, alternately with drafts and without. Its model has random weights, which take the same
time as trained weights but give meaningless answers. So the answers are scripted: before the sampler reads a row of
logits, the script makes its token the most likely one. An answer repeats a passage of its prompt. With the probability
`--edits` a token is replaced, after which the copy continues: 0.05 is like a rewriting or an extraction, and 1 is a
text without repetition. Requests name the base and four adapters in turn. Forward, sampling, drafting and verification
are the server's own code.

With `--accept`, the drafts are those of a base's own head for multi-token prediction. The base is a hybrid in the form
of Qwen3.5 with a head, both of random weights (`HYBRID`), and all requests name the base itself. A head of random
weights would be right in no place. So after the head has computed its drafts, each of them becomes the scripted token
with the probability `--accept`; the answers are texts without repetition.
"""

from __future__ import annotations

import argparse
import os
import random
import statistics
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from models import ensure
from specs import ADAPTERS, BENCHMARKS, MODELS, VOCAB_SIZE, WORK, ModelSpec
from transformers import Qwen3_5ForCausalLM, Qwen3_5TextConfig

from loramux.common.settings.file import Settings
from loramux.common.settings.serving import EngineSettings, ModelSettings
from loramux.engine.engine import Engine, build_engine
from loramux.engine.execution.loader import LoadedModel, load_model
from loramux.engine.messages import AdapterRef, Request, SamplingParams

sys.path.append(str(BENCHMARKS.parent / "tests/support"))
from multi_token_reference import ReferenceHead

PROMPT_TOKENS = 192
WARM_UP_TOKENS = 24
HYBRID = WORK / "models" / "hybrid"
HYBRID_CONFIG: dict[str, Any] = {
    "vocab_size": VOCAB_SIZE,
    "hidden_size": 1024,
    "intermediate_size": 3072,
    "num_hidden_layers": 16,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "head_dim": 128,
    "linear_num_key_heads": 8,
    "linear_num_value_heads": 8,
    "linear_key_head_dim": 128,
    "linear_value_head_dim": 128,
    "max_position_embeddings": 4096,
    "tie_word_embeddings": True,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
"""Shape of the hybrid, 250 million parameters. Every fourth layer has attention, as in Qwen3.5."""


@dataclass(frozen=True, slots=True)
class Run:
    """One workload under one engine."""

    tokens_per_second: float
    steps: int
    drafted: int
    accepted: int


class Script:
    """Makes the tokens of scripted answers the most likely ones."""

    def __init__(self) -> None:
        self.answers: dict[str, list[int]] = {}

    def steer(self, loaded: LoadedModel) -> None:
        """Steer every row of a model before its sampler chooses."""
        sampler: Any = loaded.runner._sampler  # type: ignore[attr-defined]
        choose = sampler.sample

        def sample(logits: torch.Tensor, chunks: list[Any], masks: Any = None) -> Any:
            row = 0
            for chunk in chunks:
                answer, place = self.answers[chunk.sequence.id], chunk.sequence.num_output_tokens
                for offset in range(chunk.num_sampled):
                    logits[row, answer[min(place + offset, len(answer) - 1)]] = 1e4
                    row += 1
            return choose(logits, chunks, masks)

        sampler.sample = sample

    def draft_by(self, engine: Engine, accept: float) -> None:
        """Let each draft of an engine's head be the scripted token with the probability `accept`."""
        head: Any = engine.scheduler.speculation.head
        draft, rng = type(head).draft.__get__(head), random.Random(0)

        def steered(asked: list[tuple[Any, int]]) -> list[list[int]]:
            found = draft(asked)
            for (sequence, _), drafts in zip(asked, found, strict=True):
                answer, place = self.answers[sequence.id], sequence.num_output_tokens
                for i in range(len(drafts)):
                    right = answer[min(place + i, len(answer) - 1)]
                    drafts[i] = right if rng.random() < accept else (right + 1) % VOCAB_SIZE
            return found

        head.draft = steered


def ensure_hybrid() -> None:
    """Make the hybrid and its head."""
    if HYBRID.exists():
        return
    torch.manual_seed(1234)
    model = Qwen3_5ForCausalLM(Qwen3_5TextConfig(**HYBRID_CONFIG))
    model.save_pretrained(HYBRID)
    ReferenceHead.random(model).save(HYBRID)


def engine_of(loaded: LoadedModel, settings: Settings) -> Engine:
    """Return an engine of the model."""
    return build_engine(loaded, settings, wake=lambda: None)


def settings_of(path: Path, dtype: str, speculation: str) -> Settings:
    """Return the server's defaults for one model."""
    return Settings(
        model=ModelSettings(path=str(path), served_model_name=path.name, dtype=dtype),
        engine=EngineSettings(speculation=speculation, prefix_cache=False, max_num_seqs=64),
    )


def run(
    engine: Engine, script: Script, spec: ModelSpec | None, count: int, tokens: int, edits: float, seed: int
) -> Run:
    """Answer `count` requests at once, with the adapters of `spec` in turn."""
    rng, before = random.Random(seed), engine.stats()
    for number in range(count):
        prompt = [rng.randrange(300, VOCAB_SIZE) for _ in range(PROMPT_TOKENS)]
        script.answers[str(number)] = [
            rng.randrange(300, VOCAB_SIZE) if rng.random() < edits else prompt[20 + place % (PROMPT_TOKENS - 20)]
            for place in range(tokens)
        ]
        name = ADAPTERS[number % 5 - 1] if number % 5 and spec is not None else None
        engine.submit(
            Request(
                id=str(number),
                tenant=f"tenant {number % 5}",
                prompt_token_ids=prompt,
                sampling=SamplingParams(max_tokens=tokens, temperature=0.0, ignore_eos=True),
                adapter=AdapterRef(name, str(spec.adapter_path(name))) if name and spec is not None else None,
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


def compare(script: Script, engines: dict[str, Engine], spec: ModelSpec | None, asked: argparse.Namespace) -> None:
    """Print a line for each number of requests and each kind of text; `engines` are one without drafts and one with."""
    off_way, on_way = engines
    for engine in engines.values():
        run(engine, script, spec, 5, WARM_UP_TOKENS, 0.0, seed=0)
    for count in map(int, asked.requests.split(",")):
        for edits in map(float, asked.edits.split(",")):
            pairs = []
            for rep in range(asked.reps):
                order = (off_way, on_way) if rep % 2 else (on_way, off_way)
                runs = {way: run(engines[way], script, spec, count, asked.tokens, edits, seed=rep) for way in order}
                pairs.append((runs[off_way], runs[on_way]))
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


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", choices=MODELS, default="0.5b")
    parser.add_argument("--dtype", choices=["bfloat16", "float32"], default="float32")
    parser.add_argument("--requests", default="1,4,16")
    parser.add_argument("--edits", default="0.05,1")
    parser.add_argument("--accept", default="", help="shares of right drafts of a head, such as 0.8,0")
    parser.add_argument("--tokens", type=int, default=96)
    parser.add_argument("--reps", type=int, default=3)
    asked = parser.parse_args()
    spec = None if asked.accept else MODELS[asked.model]
    if spec is None:
        ensure_hybrid()
        path, way, asked.edits = HYBRID, "mtp", "1"
    else:
        ensure(spec)
        path, way = spec.model_path, "ngram"
    settings = {name: settings_of(path, asked.dtype, name) for name in ("off", way)}
    loaded = {name: load_model(settings[name]) for name in settings}
    script = Script()
    for model in loaded.values():
        script.steer(model)
    engines = {name: engine_of(loaded[name], settings[name]) for name in settings}
    print(f"{path.name} {asked.dtype}, {torch.get_num_threads()} threads, load {os.getloadavg()[0]:.1f}")
    print(
        f"{'requests':>8}{'edits':>7}{'off tok/s':>11}{'on tok/s':>11}{'ratio':>7}{'spread':>14}"
        f"{'steps':>12}{'accepted':>16}"
    )
    for accept in asked.accept.split(","):
        if accept:
            print(f"drafts of the head, each right with probability {accept}")
            script.draft_by(engines[way], float(accept))
        compare(script, engines, spec, asked)
    print(f"load {os.getloadavg()[0]:.1f}")
    for engine in engines.values():
        engine.close()


if __name__ == "__main__":
    main()
