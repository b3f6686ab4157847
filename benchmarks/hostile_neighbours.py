"""Measure the effect of a tenant's hostile formats and templates on other tenants: one real server, over HTTP.

    python benchmarks/hostile_neighbours.py
    python benchmarks/hostile_neighbours.py --rounds 10 --seconds 8

Tenant `steady` streams a few long answers at a time. Tenant `hostile` sends as many requests at a time in every window:

- `harmless`: answers in its own small formats, and an adapter with a plain chat template;
- `hostile`: the 200 schemas, expressions and grammars of `tests/support/hostile_grammars.py`, each in a new form, so
  that no result of a trial is reused, and the same adapter with conversations for which its template loops, recurses or
  grows.

The windows alternate within each round, so that a slow minute of the machine affects both. The measured time is that
between two tokens of `steady`'s answers. The result is JSON on stdout: p99 hostile over p99 harmless in each round, the
median and the quartiles; the goal is a median of at most 1.1. A baseline without any other tenant would be unfair,
because the rows of `hostile` are computed in the same steps.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import json
import os
import statistics
import sys
import tempfile
import time
from collections import Counter
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import httpx
from fairness import LORAMUX, MODEL_PATH, cli
from figures import percentile
from peers.serving import Command, free_port, running
from progress import say
from specs import BENCHMARKS

from loramux.constraints.formats import AnswerFormat, Choice, Grammar, JsonObject, JsonSchema, Regex

sys.path.append(str(BENCHMARKS.parent / "tests/support"))
from hostile_grammars import corpus

STEADY, HOSTILE = "steady", "hostile"
STREAMS, ATTACKS = 4, 6
MAX_TOKENS, TOKENS_OF_ATTACK = 256, 24
ADAPTER = BENCHMARKS.parent / "demo/loramux_demo/assets/adapters/pirate"
TRICKS = {
    "endless": "{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}",
    "wide": "{{ asked * 100000000 }}",
    "doubling": (
        "{% set ns = namespace(s='a') %}{% for i in range(40) %}{% set ns.s = ns.s + ns.s %}{% endfor %}{{ ns.s }}"
    ),
    "power": "{{ ((asked | length) ** 9999999) | string | length }}",
    "recursion": "{% macro f(x) %}{{ f(x) }}{% endmacro %}{{ f(1) }}",
}
"""Hostile parts of the template, each for conversations that name it. For other conversations the template is plain, so
that the upload passes. Each part depends on the conversation, because constant parts are computed, and refused, when a
template is compiled.
"""
TEMPLATE = (
    "{% set asked = messages[-1].content %}"
    + "".join(f"{{% if asked == '{name}' %}}{trick}{{% endif %}}" for name, trick in TRICKS.items())
    + "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}assistant:"
)

Body = dict[str, Any]


def hostile_bodies() -> Iterator[Body]:
    """Yield requests without end: formats of the corpus alternate with conversations for which the template fails."""
    formats, tricks = corpus(), itertools.cycle(TRICKS)
    for number in itertools.count():
        yield format_body(fresh(formats[number * 7 % len(formats)][1], number))
        if number % 2:
            yield chat_body(next(tricks))


def harmless_bodies() -> Iterator[Body]:
    """Yield as many requests of each kind, which ask for nothing bad."""
    for number in itertools.count():
        yield format_body(Choice([f"yes {number}", "no"]))
        if number % 2:
            yield chat_body(f"hello {number}")


def chat_body(content: str) -> Body:
    return {"model": f"{HOSTILE}/pirate", "messages": [{"role": "user", "content": content}]}


def format_body(format: AnswerFormat) -> Body:
    match format:
        case JsonSchema(schema):
            outputs: Body = {"json": schema}
        case Regex(pattern):
            outputs = {"regex": pattern}
        case Grammar(text):
            outputs = {"grammar": text}
        case Choice(texts):
            outputs = {"choice": texts}
        case JsonObject():
            outputs = {"json_object": True}
    return {"model": "base", "messages": [{"role": "user", "content": "go"}], "structured_outputs": outputs}


def fresh(format: AnswerFormat, number: int) -> AnswerFormat:
    """Return an equally hostile format with another text, because results of trials are kept by tenant and text."""
    match format:
        case JsonSchema(schema) if isinstance(schema, dict):
            return JsonSchema(schema | {"description": str(number)}, format.strict)
        case Grammar(text):
            return Grammar(f"{text}\n// {number}")
        case Choice(texts):
            return Choice([*texts, f"{number} more"])
        case Regex(pattern):
            return Regex(f"({pattern})|{number}")
    return format


class Streams:
    """The answers that `steady` reads, one after the other in each of STREAMS places."""

    def __init__(self, client: httpx.AsyncClient) -> None:
        self._client = client
        self.pauses: list[float] = []
        """Seconds between two tokens, since the last call of `take`."""

    def take(self) -> list[float]:
        """Return the pauses so far, and forget them."""
        taken, self.pauses = self.pauses, []
        return taken

    async def read(self, place: int) -> None:
        """Ask without end."""
        for number in itertools.count():
            body = {"model": "base", "prompt": f"Story {number} of place {place}.", "max_tokens": MAX_TOKENS}
            options = {"stream": True, "ignore_eos": True, "stream_options": {"include_usage": False}}
            latest: float | None = None
            async with self._client.stream("POST", "/v1/completions", json=body | options) as response:
                response.raise_for_status()
                async for line in response.aiter_lines():
                    if line.startswith("data: {"):
                        now = time.perf_counter()
                        if latest is not None:
                            self.pauses.append(now - latest)
                        latest = now


@asynccontextmanager
async def attacks(client: httpx.AsyncClient, bodies: Iterator[Body], seen: Counter[str]) -> AsyncIterator[None]:
    """Keep ATTACKS requests running while the block runs; `seen` counts how they end."""

    async def attack() -> None:
        for body in bodies:
            answer = await client.post("/v1/chat/completions", json=body | {"max_tokens": TOKENS_OF_ATTACK})
            refusal = answer.json().get("error") or {}
            seen[refusal.get("code") or str(answer.status_code)] += 1

    tasks = [asyncio.create_task(attack()) for _ in range(ATTACKS)]
    try:
        yield
        for task in tasks:
            if task.done():
                task.result()
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


async def measure(url: str, keys: dict[str, str], rounds: int, seconds: float) -> dict[str, Any]:
    """Return the ratio of each round, and what became of the attacks."""
    kinds = {"harmless": harmless_bodies(), "hostile": hostile_bodies()}
    seen: dict[str, Counter[str]] = {kind: Counter() for kind in kinds}
    ratios, figures = [], []
    async with client_of(url, keys[STEADY]) as steady, client_of(url, keys[HOSTILE]) as other:
        streams = Streams(steady)
        readers = [asyncio.create_task(streams.read(place)) for place in range(STREAMS)]
        for turn in range(rounds + 1):
            p99: dict[str, float] = {}
            for kind in kinds if turn % 2 else reversed(kinds):
                async with attacks(other, kinds[kind], seen[kind]):
                    await asyncio.sleep(min(1.0, seconds / 4))  # the window before has an end
                    streams.take()
                    await asyncio.sleep(seconds)
                    p99[kind] = percentile(streams.take(), 0.99) or 0.0
            if turn:  # the first round warms
                ratios.append(p99["hostile"] / p99["harmless"])
                figures.append({kind: round(value * 1000, 2) for kind, value in p99.items()})
                say(f"round {turn}: p99 {figures[-1]} ms, ratio {ratios[-1]:.3f}")
        for reader in readers:
            if reader.done():
                reader.result()
            reader.cancel()
        await asyncio.gather(*readers, return_exceptions=True)
    quartiles = statistics.quantiles(ratios, n=4) if len(ratios) > 1 else []
    return {
        "ratios": ratios,
        "median": statistics.median(ratios),
        "quartiles": quartiles[::2],
        "p99_ms": figures,
        "ended": seen,
        "load": os.getloadavg()[0],
    }


def client_of(url: str, key: str) -> httpx.AsyncClient:
    return httpx.AsyncClient(base_url=url, headers={"Authorization": f"Bearer {key}"}, timeout=httpx.Timeout(120.0))


async def upload(url: str, key: str) -> None:
    """Give `hostile` an adapter whose template is plain on the trial's conversations."""
    files = {
        name: (name, (ADAPTER / name).read_bytes()) for name in ("adapter_config.json", "adapter_model.safetensors")
    }
    files["chat_template.jinja"] = ("chat_template.jinja", TEMPLATE.encode())
    async with client_of(url, key) as client:
        answer = await client.post("/v1/adapters", data={"name": "pirate"}, files=files)
        if answer.is_error:
            raise RuntimeError(answer.text)


def run(folder: Path, rounds: int, seconds: float, threads: int) -> dict[str, Any]:
    """Start a server in `folder`, make the tenants, measure."""
    config, port = folder / "settings.toml", free_port()
    config.write_text(
        f'[model]\npath = "{MODEL_PATH}"\nserved_model_name = "base"\n[server]\nport = {port}\n'
        f'[logging]\nlevel = "error"\n[validation]\nparity = false\n'
        f'[engine]\ndevice = "cpu"\nnum_threads = {threads}\npool_bytes = {128 << 20}\n'
    )
    keys = {}
    for tenant in (STEADY, HOSTILE):
        cli(config, "tenant", "create", tenant)
        keys[tenant] = cli(config, "key", "create", "--tenant", tenant)["key"]
    url = f"http://127.0.0.1:{port}"
    serve = Command([*LORAMUX, "serve", "--config", str(config)], f"{url}/health/ready", folder / "server.log", {})
    with running(serve):
        asyncio.run(upload(url, keys[HOSTILE]))
        return asyncio.run(measure(url, keys, rounds, seconds))


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(description="Inter-token times beside a tenant's hostile formats and templates.")
    parser.add_argument("--rounds", type=int, default=9, help="each has a window of both kinds (default 9)")
    parser.add_argument("--seconds", type=float, default=12.0, help="of a window (default 12)")
    parser.add_argument("--threads", type=int, default=1, help="engine.num_threads (default 1)")
    given = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        print(json.dumps(run(Path(folder), given.rounds, given.seconds, given.threads), indent=1))


if __name__ == "__main__":
    main()
