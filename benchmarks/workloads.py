"""Requests to send: their models, sizes and times. The same seed gives the same workload on every machine.

python benchmarks/workloads.py w64-mix > w64-mix.jsonl
python benchmarks/workloads.py azure-conversation --requests 200 --popularity zipf:1.5 > trace.jsonl
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterable
from dataclasses import dataclass, replace
from pathlib import Path

import msgspec
import numpy as np
from arrivals import PATTERNS, Pattern, choose_adapters
from specs import ADAPTERS, VOCAB_SIZE

from loramux.simulator.scenario import LogNormal, arrival_times
from loramux.simulator.traffic import read_workload

FIRST_PLAIN_TOKEN = 3
"""The first token id that is not a special token."""


class Item(msgspec.Struct, frozen=True, kw_only=True):
    """One request of a workload. It is greedy and generates exactly `max_tokens` tokens."""

    id: str
    prompt_token_ids: list[int]
    max_tokens: int
    adapter: str | None = None
    """Name of the adapter; None: the base model."""
    arrival_s: float = 0.0
    """Seconds after the start, when a run follows the arrivals."""


def load(path: Path) -> list[Item]:
    """Read a JSONL file of requests, or a workload that `loramux plan` takes: a log without texts, or a description."""
    if path.suffix == ".jsonl" and path.read_bytes().startswith(b'{"id"'):
        return msgspec.json.Decoder(Item).decode_lines(path.read_bytes())
    arrivals = read_workload(path)
    adapters = [arrivals.sources[place].adapter for place in arrivals.source]
    names = [adapter and adapter.digest.rpartition("/")[2] for adapter in adapters]
    return items_of(0, arrivals.prompt_tokens, arrivals.output_tokens, names, arrivals.at)


def dump(items: Iterable[Item]) -> bytes:
    """The items as JSONL."""
    return msgspec.json.Encoder().encode_lines(items)


# ---- the comparison's workloads: one set of prompts and lengths, four ways to share it among adapters


@dataclass(frozen=True)
class Suite:
    """Prompts and lengths that its workloads share."""

    requests: int
    seed: int


PROMPTS = LogNormal(np.log(96), 0.9, 16, 512)
OUTPUTS = LogNormal(np.log(56), 0.8, 8, 256)
BASE_SHARE = 1 / 8
SUITES = {"w64": Suite(64, 7), "w24": Suite(24, 8)}
SHARES = {"base": "base", "one": "only:ad03", "mix": "uniform", "zipf": "zipf:1.1"}
"""Return the adapter of each request. base: none. one: the same adapter of the highest rank for all. mix, zipf: an
eighth base, else 16 adapters."""


def comparison(name: str) -> list[Item]:
    """Return a workload by name: `w64-mix`, `w24-base`, ... Within a suite only the adapters differ."""
    suite_name, _, share = name.partition("-")
    if suite_name not in SUITES or share not in SHARES:
        known = ", ".join(f"{suite}-{kind}" for suite in SUITES for kind in SHARES)
        raise ValueError(f"workload {name!r} does not exist; there are {known}")
    suite = SUITES[suite_name]
    lengths = np.random.default_rng(suite.seed)
    prompts = PROMPTS.draw(lengths, suite.requests)
    outputs = OUTPUTS.draw(lengths, suite.requests)
    arrivals = arrival_times(lengths, suite.requests, rate=1.0, cv=1.0)
    # A separate generator, because the choice of adapters must not change the prompts.
    adapters = choose_adapters(np.random.default_rng(suite.seed + 1000), suite.requests, SHARES[share], ADAPTERS)
    if share in {"mix", "zipf"}:
        adapters = _with_base(adapters, suite)
    return items_of(suite.seed, prompts, outputs, adapters, arrivals)


def _with_base(adapters: list[str | None], suite: Suite) -> list[str | None]:
    is_base = np.random.default_rng(suite.seed + 2000).random(suite.requests) < BASE_SHARE
    return [None if base else adapter for base, adapter in zip(is_base, adapters, strict=True)]


# ---- traces: arrival patterns of the literature


def trace(pattern: Pattern, requests: int, adapters: Iterable[str], seed: int) -> list[Item]:
    """`requests` requests that arrive as `pattern` says."""
    rng = np.random.default_rng(seed)
    prompts = pattern.prompts.draw(rng, requests)
    outputs = pattern.outputs.draw(rng, requests)
    arrivals = arrival_times(rng, requests, pattern.rate, pattern.cv)
    return items_of(seed, prompts, outputs, choose_adapters(rng, requests, pattern.popularity, adapters), arrivals)


def items_of(
    seed: int, prompts: np.ndarray, outputs: np.ndarray, adapters: list[str | None], arrivals: np.ndarray
) -> list[Item]:
    """Requests with these lengths, adapters and times, and with random prompts."""
    tokens = np.random.default_rng(seed + 3000)
    return [
        Item(
            id=f"r{i:04d}",
            prompt_token_ids=tokens.integers(FIRST_PLAIN_TOKEN, VOCAB_SIZE, prompts[i]).tolist(),
            max_tokens=int(outputs[i]),
            adapter=adapters[i],
            arrival_s=round(float(arrivals[i]), 5),
        )
        for i in range(len(prompts))
    ]


def _parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Write a workload as JSONL to stdout.")
    parser.add_argument("name", help=f"SUITE-SHARE ({'|'.join(SUITES)})-({'|'.join(SHARES)}) or {'|'.join(PATTERNS)}")
    parser.add_argument("--requests", type=int, default=200, help="of a pattern (default 200)")
    parser.add_argument("--adapters", type=int, help="how many (default: as the pattern says)")
    parser.add_argument("--popularity", help="base, only:NAME, identical, uniform, zipf:EXPONENT or distinct")
    parser.add_argument("--rate", type=float, help="requests a second")
    parser.add_argument("--cv", type=float, help="coefficient of variation of the gaps; 1 is Poisson")
    parser.add_argument("--seed", type=int, default=0)
    return parser.parse_args()


def main() -> None:
    """The command line."""
    arguments = _parse_arguments()
    if arguments.name not in PATTERNS:
        sys.stdout.buffer.write(dump(comparison(arguments.name)))
        return
    overrides = {key: getattr(arguments, key) for key in ("adapters", "popularity", "rate", "cv")}
    pattern = replace(PATTERNS[arguments.name], **{k: v for k, v in overrides.items() if v is not None})
    names = [f"ad{i:02d}" for i in range(pattern.adapters)]
    sys.stdout.buffer.write(dump(trace(pattern, arguments.requests, names, arguments.seed)))


if __name__ == "__main__":
    main()
