"""Pipelines of the base and three adapters over one context: activated LoRAs with and without reuse, and plain LoRAs.

    python benchmarks/pipelines.py [--model 20m] [--context 1500] [--turns 3] [--conversations 4] [--threads 2]

In each turn the base answers the context, then each adapter evaluates the answer with a few tokens, and the base
continues over all answers and some new tokens. The requests of a conversation are sent to an engine in this process one
after the other. Activated LoRAs share the base's KV of the context; plain LoRAs of the same rank have their own. The
figures are, for each stage: the prompt tokens that were computed, which are exact whatever else the machine does, and
the median time to the first token. `loramux simulate alora-pipelines` has the same pipelines for an 8B on a GPU.
"""

from __future__ import annotations

import argparse
import json
import random
import shutil
import statistics
import time
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

from models import ensure
from specs import ADAPTERS, MODELS, VOCAB_SIZE, ModelSpec, rank_of

from loramux.common.settings.file import Settings
from loramux.common.settings.serving import EngineSettings, ModelSettings
from loramux.engine.engine import Engine, build_engine
from loramux.engine.execution.loader import load_model
from loramux.engine.messages import AdapterRef, Request, SamplingParams

INVOCATION = (7, 11, 13, 17)
RANK = 32
EVALUATORS = [name for number, name in enumerate(ADAPTERS) if rank_of(number) == RANK][:3]
ANSWER, EVALUATION, ADDED = 64, 8, 40
"""Tokens of the base's answer, of an evaluation, and of what each later turn adds."""


@dataclass(frozen=True)
class Way:
    """A kind of adapters, with or without reuse."""

    label: str
    activated: bool
    prefix_cache: bool


WAYS = (
    Way("activated LoRA, reuse", activated=True, prefix_cache=True),
    Way("activated LoRA, prefix_cache off", activated=True, prefix_cache=False),
    Way("plain LoRA, reuse", activated=False, prefix_cache=True),
)


@dataclass
class Stage:
    """The requests of one stage of all conversations."""

    prompt_tokens: int = 0
    cached_tokens: int = 0
    first_token_s: list[float] = field(default_factory=list)

    @property
    def computed_tokens(self) -> int:
        """Prompt tokens that went through the model."""
        return self.prompt_tokens - self.cached_tokens


class Bench:
    """An engine, and conversations that it has answered."""

    def __init__(self, spec: ModelSpec, way: Way, threads: int) -> None:
        settings = Settings(
            model=ModelSettings(path=str(spec.model_path), served_model_name=spec.name),
            engine=EngineSettings(device="cpu", num_threads=threads, prefix_cache=way.prefix_cache),
        )
        self._engine: Engine = build_engine(load_model(settings), settings, wake=lambda: None)
        self._adapters = [_adapter(spec, name, activated=way.activated) for name in EVALUATORS]
        self._count = 0
        self.stages: defaultdict[str, Stage] = defaultdict(Stage)
        self._warm_up()

    def converse(self, seed: int, context_tokens: int, turns: int) -> None:
        """Run one conversation from its first request to its last token."""
        rng = random.Random(seed)
        context = _words(rng, context_tokens)
        for turn in range(turns):
            stage = f"base, turn {turn + 1}"
            context += self._ask(stage, context, None, ANSWER)
            answers = [
                self._ask(f"evaluations, turn {turn + 1}", [*context, *INVOCATION], adapter, EVALUATION)
                for adapter in self._adapters
            ]
            context += [token for answer in answers for token in answer] + _words(rng, ADDED)

    def _warm_up(self) -> None:
        """Load the adapters, and run each kind of step once."""
        for adapter in (None, *self._adapters):
            self._ask("", [*_words(random.Random(-1), 64), *INVOCATION], adapter, 2)
        self.stages.clear()

    def _ask(self, stage: str, prompt: list[int], adapter: AdapterRef | None, output: int) -> list[int]:
        """Return the answer's tokens."""
        self._count += 1
        request = Request(
            id=str(self._count),
            tenant="agent",
            prompt_token_ids=list(prompt),
            sampling=SamplingParams(max_tokens=output, temperature=0.0, ignore_eos=True),
            adapter=adapter,
        )
        answer: list[int] = []
        figures, began = self.stages[stage], time.perf_counter()
        figures.prompt_tokens += len(prompt)
        self._engine.submit(request)
        while len(answer) < output:
            report = self._engine.step()
            for event in report.events if report else []:
                assert event.fault is None, event.fault
                if event.token_id is not None:
                    if not answer:
                        figures.first_token_s.append(time.perf_counter() - began)
                        figures.cached_tokens += event.cached_tokens
                    answer.append(event.token_id)
        return answer

    def close(self) -> None:
        """Stop the engine's threads."""
        self._engine.close()


def _words(rng: random.Random, count: int) -> list[int]:
    """Return random tokens that are not in the invocation."""
    return [rng.randrange(max(INVOCATION) + 1, VOCAB_SIZE) for _ in range(count)]


def _adapter(spec: ModelSpec, name: str, *, activated: bool) -> AdapterRef:
    """Return an adapter, or the activated LoRA with the same weights."""
    path = spec.adapter_path(name)
    if activated:
        path = _activated(path)
    return AdapterRef(digest=f"sha256:{path.name}", path=str(path))


def _activated(plain: Path) -> Path:
    """Make an activated LoRA of a plain one's files, if it does not exist."""
    path = plain.with_name(f"{plain.name}-activated")
    shutil.copytree(plain, path, dirs_exist_ok=True)
    config = json.loads((plain / "adapter_config.json").read_text())
    (path / "adapter_config.json").write_text(json.dumps(config | {"alora_invocation_tokens": list(INVOCATION)}))
    return path


def measure(
    spec: ModelSpec, *, context: int, turns: int, conversations: int, threads: int
) -> Iterator[tuple[Way, dict[str, Stage]]]:
    """Yield the stages of each way."""
    for way in WAYS:
        bench = Bench(spec, way, threads)
        for seed in range(conversations):
            bench.converse(seed, context, turns)
        bench.close()
        yield way, bench.stages


def main() -> None:
    """Print the tables."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", choices=MODELS, default="20m")
    parser.add_argument("--context", type=int, default=1500, help="tokens of the first turn")
    parser.add_argument("--turns", type=int, default=3)
    parser.add_argument("--conversations", type=int, default=4)
    parser.add_argument("--threads", type=int, default=2)
    options = parser.parse_args()
    spec = MODELS[options.model]
    ensure(spec)
    lengths = {"context": options.context, "turns": options.turns, "conversations": options.conversations}
    for way, stages in measure(spec, threads=options.threads, **lengths):
        computed = sum(stage.computed_tokens for stage in stages.values())
        print(f"{way.label}: {computed:,} prompt tokens computed", flush=True)
        for name, stage in stages.items():
            median = 1e3 * statistics.median(stage.first_token_s)
            print(f"  {name:<22}{stage.computed_tokens:>8,} of {stage.prompt_tokens:>8,}   {median:9.1f} ms")


if __name__ == "__main__":
    main()
