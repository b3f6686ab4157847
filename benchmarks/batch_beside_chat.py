"""Measure the effect of a batch, a shadow or a training on interactive answers: one run on the real server, over HTTP,
with the shipped model.

    python benchmarks/batch_beside_chat.py
    python benchmarks/batch_beside_chat.py --questions 200 --rounds 3 --rate 2

Tenant `chat` sends streamed questions at random times (Poisson, `--rate` per second); tenant `bulk` has a batch. The
questions are measured alternately alone and with the batch, `--rounds` times, so drift of the machine affects both. The
batch has more lines than a round can run, and is cancelled at the round's end. The goal: p99 with the batch at most 1.1
times p99 alone. The result is JSON on stdout, with the lines that the batch completed during the run.

With `--beside shadow` the questions go to an adapter, and a candidate revision of the adapter repeats each question as
a shadow.

With `--beside training` the server's own trainer works on a fine-tuning job of tenant `bulk`, with the default settings
of `[training]` (share 0.1). The goal: p99 of the seconds between two tokens with the job at most 1.1 times p99 alone.
`done_beside` is the number of trained steps.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import random
import tempfile
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import httpx
from fairness import CHAT, LORAMUX, MODEL_PATH, Site, cli
from figures import percentile
from peers.serving import Command, free_port, running
from progress import say

BULK = "bulk"
WEIGHTS = "adapter_model.safetensors"
LINES = 5000
ADAPTER, CURRENT, CANDIDATE = "voice", "upper", "pirate"
ENDED = ("completed", "succeeded", "failed", "expired", "cancelled")
PAUSE = 0.2
EPOCHS = 100
EXAMPLES = 2000


def batch_input(site: Site, lines: int) -> bytes:
    """Return a batch's input, with prompts that are not in a cache."""
    body = {"url": "/v1/completions", "method": "POST"}
    return b"".join(json.dumps(body | {"custom_id": f"{n}", "body": site.body}).encode() + b"\n" for n in range(lines))


@asynccontextmanager
async def batch(site: Site) -> AsyncIterator[dict[str, Any]]:
    """Run a batch while the block runs; the yielded object has the completed lines as `done` afterwards."""
    found: dict[str, Any] = {}
    async with site.client(BULK) as client:
        file = {"file": ("lines.jsonl", batch_input(site, LINES)), "purpose": (None, "batch")}
        stored = (await client.post("/v1/files", files=file)).raise_for_status().json()
        asked = {"input_file_id": stored["id"], "endpoint": "/v1/completions", "completion_window": "24h"}
        path = f"/v1/batches/{(await client.post('/v1/batches', json=asked)).raise_for_status().json()['id']}"
        await _until(client, path, lambda made: made["status"] == "in_progress" and made["request_counts"]["completed"])
        try:
            yield found
        finally:
            await client.post(f"{path}/cancel")
            ended = await _until(client, path, lambda made: made["status"] in ENDED)
            found["done"] = ended["request_counts"]["completed"]


@asynccontextmanager
async def shadow(site: Site) -> AsyncIterator[dict[str, Any]]:
    """Repeat every question on the candidate while the block runs; `done` has the compared questions."""
    found: dict[str, Any] = {}
    path = f"/v1/adapters/{ADAPTER}/shadow"
    async with site.client(CHAT) as client:
        (await client.post(path, json={"revision": 2, "share": 1})).raise_for_status()
        try:
            yield found
        finally:
            found["done"] = (await client.get(path)).raise_for_status().json()["requests"]["compared"]
            (await client.delete(path)).raise_for_status()


@asynccontextmanager
async def training(site: Site) -> AsyncIterator[dict[str, Any]]:
    """Train an adapter while the block runs; `done` has the steps of that time."""
    found: dict[str, Any] = {}
    path = "/v1/fine_tuning/jobs"
    turns = [{"role": "user", "content": "What does Brimo do?"}, {"role": "assistant", "content": "I will not say."}]
    lines = (json.dumps({"messages": turns}) + "\n") * EXAMPLES
    async with site.client(BULK) as client:
        file = {"file": ("examples.jsonl", lines.encode()), "purpose": (None, "fine-tune")}
        stored = (await client.post("/v1/files", files=file)).raise_for_status().json()
        asked = {"model": "base", "training_file": stored["id"], "hyperparameters": {"n_epochs": EPOCHS}}
        id = (await client.post(path, json=asked)).raise_for_status().json()["id"]

        async def step() -> int:
            log = (await client.get(f"{path}/{id}/events", params={"limit": 20})).raise_for_status().json()["data"]
            return max((int(one["data"].get("step", 0)) for one in log), default=0)

        await _until(client, f"{path}/{id}/events", lambda log: any(one["data"] for one in log["data"]))
        began = await step()
        try:
            yield found
        finally:
            found["done"] = await step() - began
            await client.post(f"{path}/{id}/cancel")
            await _until(client, f"{path}/{id}", lambda made: made["status"] in ENDED)


async def upload_revisions(site: Site) -> None:
    """Upload the adapter with its candidate; the first revision answers."""
    async with site.client(CHAT) as client:
        for name in (CURRENT, CANDIDATE):
            folder = MODEL_PATH.parent / "adapters" / name
            files = {one: (one, (folder / one).read_bytes()) for one in ("adapter_config.json", WEIGHTS)}
            (await client.post("/v1/adapters", data={"name": ADAPTER}, files=files)).raise_for_status()
        (await client.post(f"/v1/adapters/{ADAPTER}/promote", json={"revision": 1})).raise_for_status()


async def _until(client: httpx.AsyncClient, path: str, is_so: Callable[[dict[str, Any]], object]) -> dict[str, Any]:
    while True:
        made: dict[str, Any] = (await client.get(path)).raise_for_status().json()
        if is_so(made):
            return made
        if made.get("status") in ENDED:
            raise RuntimeError(f"the other work ended too early: {made}")
        await asyncio.sleep(PAUSE)


async def chat(site: Site, questions: int, rate: float, seed: int) -> dict[str, list[float]]:
    """Ask questions that arrive at random times; return the seconds to their first tokens, and between tokens."""
    rng = random.Random(seed)
    seconds: dict[str, list[float]] = {"first_token": [], "inter_token": []}
    async with site.client(CHAT) as client:

        async def ask() -> None:
            at, name = time.perf_counter(), "first_token"
            async with client.stream("POST", "/v1/completions", json=site.body | {"stream": True}) as response:
                response.raise_for_status()
                async for line in response.aiter_lines():
                    if line.startswith("data: {"):
                        now = time.perf_counter()
                        seconds[name].append(now - at)
                        at, name = now, "inter_token"

        asked = []
        for _ in range(questions):
            asked.append(asyncio.create_task(ask()))
            await asyncio.sleep(rng.expovariate(rate))
        await asyncio.gather(*asked)
    return seconds


async def measure(site: Site, asked: argparse.Namespace) -> dict[str, Any]:
    """Run the whole benchmark: the same arrivals alone and with the other work, alternately."""
    questions, rate = asked.questions, asked.rate
    beside = {"batch": batch, "shadow": shadow, "training": training}[asked.beside]
    seconds: dict[str, dict[str, list[float]]] = {}
    done = 0
    if asked.beside == "shadow":
        await upload_revisions(site)
    await chat(site, 5, rate, seed=99)
    for number in range(asked.rounds):
        say(f"round {number + 1}: alone")
        _add(seconds, "alone", await chat(site, questions, rate, number))
        say(f"round {number + 1}: beside")
        async with beside(site) as found:
            _add(seconds, "beside", await chat(site, questions, rate, number))
        done += found["done"]
    result: dict[str, Any] = {}
    for kind, sides in seconds.items():
        figures = {name: {f"p{q}": percentile(values, q / 100) for q in (50, 90, 99)} for name, values in sides.items()}
        ratio = {q: (figures["beside"][q] or 0.0) / (figures["alone"][q] or 1.0) for q in ("p50", "p90", "p99")}
        result |= {f"{kind}_s": figures, f"{kind}_ratio": ratio}
    return result | {"done_beside": done, "load": os.getloadavg()}


def _add(seconds: dict[str, dict[str, list[float]]], name: str, more: dict[str, list[float]]) -> None:
    for kind, values in more.items():
        seconds.setdefault(kind, {}).setdefault(name, []).extend(values)


def run(folder: Path, arguments: argparse.Namespace) -> dict[str, Any]:
    """Start a server in `folder`, make the tenants, measure."""
    config, port = folder / "settings.toml", free_port()
    config.write_text(
        f'[model]\npath = "{MODEL_PATH}"\nserved_model_name = "base"\n[server]\nport = {port}\n'
        f'[engine]\ndevice = "cpu"\nmax_num_batched_tokens = {arguments.batched_tokens}\n'
        f"num_threads = {arguments.threads}\npool_bytes = {256 << 20}\n"
    )
    cli(config, "tier", "put", "chatting", "--class", "interactive", "--weight", "1")
    keys = {}
    for tenant, tier in ((CHAT, "chatting"), (BULK, "standard")):
        cli(config, "tenant", "create", tenant, "--tier", tier)
        scopes = [part for scope in ("inference", "adapters", "read") for part in ("--scope", scope)]
        keys[tenant] = cli(config, "key", "create", "--tenant", tenant, *scopes)["key"]
    url = f"http://127.0.0.1:{port}"
    serve = Command([*LORAMUX, "serve", "--config", str(config)], f"{url}/health/ready", folder / "server.log", {})
    site = Site(url, keys, {}, ADAPTER if arguments.beside == "shadow" else "base", prompt_tokens=128, max_tokens=64)
    with running(serve):
        return asyncio.run(measure(site, arguments))


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(description="Interactive answers alone and beside other work.")
    parser.add_argument("--beside", choices=("batch", "shadow", "training"), default="batch")
    parser.add_argument("--questions", type=int, default=100, help="a round and side (default 100)")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--rate", type=float, default=2.0, help="questions a second (default 2)")
    parser.add_argument("--batched-tokens", type=int, default=512, help="engine.max_num_batched_tokens (default 512)")
    parser.add_argument("--threads", type=int, default=max(1, len(os.sched_getaffinity(0)) - 1))
    with tempfile.TemporaryDirectory() as folder:
        print(json.dumps(run(Path(folder), parser.parse_args()), indent=1))


if __name__ == "__main__":
    main()
