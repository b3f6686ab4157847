"""Keys and values in FP8 compared with the model's dtype: the change of answers, the memory, and the speed of steps.

    python benchmarks/kv_cache.py [--models demo 20m] [--threads 2]

The demo's trained model answers its own questions, both with the base and with each adapter. A model with random
weights, whose logits are close to each other, continues random prompts of 256 tokens by 64 tokens, a third each with
the base and two adapters. The figures for each model are: the perplexity of the prompts (for the demo, of the expected
answers), the number of greedy answers that equal those of bfloat16 token by token, the share of tokens before the first
difference, the pages of a pool of 128 MiB, and the time of a decoding step of 16 sequences of 1,000 tokens (fewer
tokens if the model's context is shorter).
"""

from __future__ import annotations

import argparse
import math
import random
import statistics
import time
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import takewhile
from pathlib import Path

from models import ensure
from specs import ADAPTERS, MODELS, VOCAB_SIZE
from tokenizers import Tokenizer

from loramux.common.settings.file import Settings
from loramux.common.settings.serving import EngineSettings, ModelSettings
from loramux.engine.engine import Engine, build_engine
from loramux.engine.execution.loader import load_model
from loramux.engine.messages import AdapterRef, ModelFacts, Request, SamplingParams, TokenEvent
from loramux_demo.assets import adapter_folder, base_folder, completion_prompt, load_prompts


@dataclass(frozen=True)
class Form:
    """A format of numbers."""

    dtype: str
    kv_cache_dtype: str

    @property
    def label(self) -> str:
        return f"{self.dtype}, kv_cache_dtype {self.kv_cache_dtype}"


FORMS = (Form("bfloat16", "auto"), Form("bfloat16", "fp8"), Form("float32", "auto"))
"""The last shows what rounding to bfloat16 changes by itself."""
PROMPT, OUTPUT, REQUESTS, STEPS = 256, 64, 48, 40
BLOCK = 64
"""Large enough for the adapters' tiles in FP8 too."""


@dataclass(frozen=True)
class Case:
    """A prompt, the text whose perplexity is measured, and the adapter."""

    prompt: list[int]
    text: list[int]
    """A prompt and the expected text after it. Perplexity is that of the expected text, or of all if it is empty."""
    adapter: Path | None
    output: int
    ends: bool
    """True: the model decides the end of the answer."""


def demo_cases() -> Iterator[Case]:
    tokenizer = Tokenizer.from_file(str(base_folder() / "tokenizer.json"))
    for prompt in load_prompts():
        question = completion_prompt(prompt.question)
        ids, text = (tokenizer.encode(text).ids for text in (question, question + prompt.expected))
        yield Case(ids, text, None if prompt.adapter is None else adapter_folder(prompt.adapter), 32, ends=True)


def random_cases(name: str) -> Iterator[Case]:
    spec, rng = MODELS[name], random.Random(0)
    ensure(spec)
    paths = (None, *(spec.adapter_path(adapter) for adapter in ADAPTERS[:2]))
    for index in range(REQUESTS):
        prompt = [rng.randrange(3, VOCAB_SIZE) for _ in range(PROMPT)]
        yield Case(prompt, prompt, paths[index % len(paths)], OUTPUT, ends=False)


def make_engine(base: Path, form: Form, threads: int) -> tuple[Engine, ModelFacts]:
    settings = Settings(
        model=ModelSettings(path=str(base), served_model_name="base", dtype=form.dtype),
        engine=EngineSettings(
            device="cpu",
            num_threads=threads,
            pool_bytes=128 << 20,
            block_size=BLOCK,
            kv_cache_dtype=form.kv_cache_dtype,
            max_num_seqs=16,
            prefix_cache=False,
        ),
    )
    loaded = load_model(settings)
    return build_engine(loaded, settings, wake=lambda: None), loaded.facts


def request(name: str, prompt: list[int], adapter: Path | None, **sampling: object) -> Request:
    return Request(
        id=name,
        tenant="t",
        prompt_token_ids=prompt,
        sampling=SamplingParams(**{"temperature": 0.0, "ignore_eos": True, **sampling}),
        adapter=None if adapter is None else AdapterRef(digest=f"sha256:{adapter.name}", path=str(adapter)),
    )


def events_of(engine: Engine, count: int) -> Iterator[TokenEvent]:
    """Step until `count` requests have ended."""
    while count:
        report = engine.step()
        for event in report.events if report else []:
            yield event
            count -= event.finish_reason is not None


def perplexity(engine: Engine, cases: list[Case]) -> float:
    found: list[float] = []
    for index, case in enumerate(cases):
        engine.submit(request(f"p{index}", case.text, case.adapter, max_tokens=1, prompt_logprobs=0))
    for event in events_of(engine, len(cases)):
        if event.prompt_logprobs is not None:
            case, start = cases[int(event.request_id[1:])], event.prompt_logprobs.start
            behind = len(case.prompt) if len(case.text) > len(case.prompt) else 0
            tokens = enumerate(event.prompt_logprobs.tokens, start)
            found += [token.logprob for place, token in tokens if place >= behind]
    return math.exp(-statistics.fmean(found))


def answers(engine: Engine, cases: list[Case]) -> list[list[int]]:
    tokens: dict[str, list[int]] = {}
    for index, case in enumerate(cases):
        tokens[f"a{index}"] = []
        engine.submit(request(f"a{index}", case.prompt, case.adapter, max_tokens=case.output, ignore_eos=not case.ends))
    for event in events_of(engine, len(cases)):
        if event.token_id is not None:
            tokens[event.request_id].append(event.token_id)
    return list(tokens.values())


def step_seconds(engine: Engine, length: int) -> float:
    """The median decoding step of 16 sequences of `length` tokens of the base."""
    rng = random.Random(1)
    for index in range(16):
        prompt = [rng.randrange(3, 90) for _ in range(length)]
        engine.submit(request(f"s{index}", prompt, None, max_tokens=STEPS))
    seconds, left = [], 16
    while left:
        start = time.perf_counter()
        report = engine.step()
        events = report.events if report else []
        if len(events) == 16:
            seconds.append(time.perf_counter() - start)
        left -= sum(event.finish_reason is not None for event in events)
    return statistics.median(seconds)


def measure(name: str, threads: int) -> None:
    base = base_folder() if name == "demo" else MODELS[name].model_path
    cases = list(demo_cases() if name == "demo" else random_cases(name))
    first: list[list[int]] = []
    for form in FORMS:
        engine, facts = make_engine(base, form, threads)
        length = min(1000, facts.max_model_len - STEPS)
        said = answers(engine, cases)
        first = first or said
        print(
            f"{name:<6}{form.label:<30}perplexity {perplexity(engine, cases):>10,.4f}   pages "
            f"{facts.pages_total:>6,}   step of 16 at {length} {1e3 * step_seconds(engine, length):6.2f} ms   "
            f"{agreement(first, said)}",
            flush=True,
        )


def agreement(first: list[list[int]], other: list[list[int]]) -> str:
    """Return the number of equal answers, and the share of the first answers' tokens before a difference."""
    pairs = list(zip(first, other, strict=True))
    before = sum(len(list(takewhile(lambda two: two[0] == two[1], zip(a, b, strict=False)))) for a, b in pairs)
    equal, tokens = sum(a == b for a, b in pairs), sum(map(len, first))
    return f"answers equal {equal} of {len(first)}, tokens before a difference {before / tokens:.1%}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="+", choices=["demo", *MODELS], default=["demo", "20m"])
    parser.add_argument("--threads", type=int, default=2)
    options = parser.parse_args()
    for name in options.models:
        measure(name, options.threads)


if __name__ == "__main__":
    main()
