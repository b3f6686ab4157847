"""Measure whether each tenant gets its share while another tenant sends a flood: one run on the real server, over HTTP,
with the shipped model.

    python benchmarks/fairness.py
    python benchmarks/fairness.py --weights 1,3 --units 20000

Tenant `flood` keeps 64 requests in flight all the time. Tenant `chat` first sends questions alone, then one question at
a time during the flood, which shows the flood's effect on its first token. Then it keeps 32 requests in flight, so both
tenants always have waiting requests. From then on, the service that the engine charges to each tenant, divided by its
weight, must grow equally. The result is JSON on stdout.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import subprocess
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
from figures import percentile
from peers.serving import Command, free_port, running
from progress import say
from prometheus_client.parser import text_string_to_metric_families
from specs import BENCHMARKS

MODEL_PATH = BENCHMARKS.parent / "demo/loramux_demo/assets/base"
FLOOD, CHAT = "flood", "chat"
IN_FLIGHT = {FLOOD: 64, CHAT: 32}
ROWS = 4
"""Number of rows. Few rows and long answers make requests wait for the engine and not for HTTP."""
QUESTIONS = 30
POLL_SECONDS = 0.2
PATIENCE_SECONDS = 600.0
LOOK_SECONDS = 1.5
"""Seconds after which the engine has reported again, because it reports once per second."""
SERVICE = "loramux_tenant_service_units"
TIMEOUT = httpx.Timeout(600.0, connect=30.0)
Samples = dict[str, dict[str, float]]
LORAMUX = (sys.executable, "-m", "loramux_api")


@dataclass(frozen=True)
class Site:
    """A server, and two tenants."""

    url: str
    keys: Mapping[str, str]
    """API keys by the tenant's name."""
    weights: Mapping[str, int]
    """Weights by the tenant's opaque id."""
    model: str
    prompt_tokens: int = 32
    max_tokens: int = 256

    def client(self, tenant: str) -> httpx.AsyncClient:
        """Return a client with the tenant's key and without a limit of connections."""
        headers = {"Authorization": f"Bearer {self.keys[tenant]}"}
        limits = httpx.Limits(max_connections=None, max_keepalive_connections=None)
        return httpx.AsyncClient(base_url=self.url, headers=headers, timeout=TIMEOUT, limits=limits)

    @property
    def body(self) -> dict[str, Any]:
        """A completion of exactly `max_tokens` tokens, of a prompt that no cache knows."""
        prompt = [1 + byte % 250 for byte in os.urandom(self.prompt_tokens)]
        asked = {"model": self.model, "prompt": prompt, "max_tokens": self.max_tokens}
        return asked | {"ignore_eos": True, "temperature": 0}

    async def metrics(self) -> Samples:
        """Return samples of /metrics by name, and for each name by tenant ("" without a tenant)."""
        async with httpx.AsyncClient(base_url=self.url, timeout=TIMEOUT) as client:
            text = (await client.get("/metrics")).raise_for_status().text
        found: defaultdict[str, dict[str, float]] = defaultdict(dict)
        for family in text_string_to_metric_families(text):
            for sample in family.samples:
                found[sample.name][sample.labels.get("tenant", "")] = sample.value
        return found


@asynccontextmanager
async def crowd(site: Site, tenant: str, size: int) -> AsyncIterator[None]:
    """`size` requests of the tenant in flight, each followed by another, until the block ends."""
    async with site.client(tenant) as client:

        async def keep_asking() -> None:
            while True:
                (await client.post("/v1/completions", json=site.body)).raise_for_status()

        tasks = [asyncio.create_task(keep_asking()) for _ in range(size)]
        try:
            yield
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)


def _in_engine(now: Samples) -> float:
    return now["loramux_engine_waiting"][""] + now["loramux_engine_running"][""]


async def _until(site: Site, happened: Callable[[Samples], bool]) -> Samples:
    for _ in range(int(PATIENCE_SECONDS / POLL_SECONDS)):
        await asyncio.sleep(POLL_SECONDS)
        if happened(samples := await site.metrics()):
            return samples
    raise TimeoutError(f"the tenants did not get far in {PATIENCE_SECONDS:.0f} s")


async def shares(site: Site, in_flight: Mapping[str, int], units: float) -> list[float]:
    """Return each tenant's service divided by its weight while all tenants had waiting requests; each got at least
    `units`.
    """
    crowds = [crowd(site, tenant, size) for tenant, size in in_flight.items()]
    async with crowds[0], crowds[1]:
        asked = sum(in_flight.values())
        await _until(site, lambda now: _in_engine(now) >= asked)
        await asyncio.sleep(LOOK_SECONDS)
        before = (await site.metrics())[SERVICE]

        def received(now: Samples) -> list[float]:
            return [(now[SERVICE][id] - before[id]) / weight for id, weight in site.weights.items()]

        return received(await _until(site, lambda now: min(received(now)) >= units))


async def first_tokens(site: Site, tenant: str, questions: int) -> list[float]:
    """Return the seconds to the first token of questions that are sent one after the other."""
    seconds = []
    async with site.client(tenant) as client:
        for _ in range(questions):
            began = time.perf_counter()
            async with client.stream("POST", "/v1/completions", json=site.body | {"stream": True}) as response:
                response.raise_for_status()
                async for line in response.aiter_lines():
                    if line.startswith("data: {"):
                        seconds.append(time.perf_counter() - began)
                        break
    return seconds


async def measure(site: Site, units: float) -> dict[str, Any]:
    """The whole run."""
    say("chat alone")
    alone = await first_tokens(site, CHAT, QUESTIONS)
    say("chat beside the flood")
    async with crowd(site, FLOOD, IN_FLIGHT[FLOOD]):
        beside = await first_tokens(site, CHAT, QUESTIONS)
    say("both at once")
    received = await shares(site, IN_FLIGHT, units)
    return {
        "service_over_weight": received,
        "service_ratio": max(received) / min(received),
        "service_gap_now": (await site.metrics())["loramux_engine_service_gap"][""],
        "chat_ttft_alone_s": {"p50": percentile(alone, 0.5), "p99": percentile(alone, 0.99)},
        "chat_ttft_beside_flood_s": {"p50": percentile(beside, 0.5), "p99": percentile(beside, 0.99)},
        "ttft_p50_ratio": (percentile(beside, 0.5) or 0.0) / (percentile(alone, 0.5) or 1.0),
    }


def run(folder: Path, weights: tuple[int, int], units: float, threads: int) -> dict[str, Any]:
    """Start a server in `folder`, make the tenants, measure."""
    config, port = folder / "settings.toml", free_port()
    config.write_text(
        f'[model]\npath = "{MODEL_PATH}"\nserved_model_name = "base"\n[server]\nport = {port}\n'
        f'[engine]\ndevice = "cpu"\nmax_num_seqs = {ROWS}\nmax_num_batched_tokens = 256\nnum_threads = {threads}\n'
        f"pool_bytes = {64 << 20}\n[scheduler]\ntau = 512\n"
    )
    keys, by_id = {}, {}
    for tenant, weight in zip((FLOOD, CHAT), weights, strict=True):
        cli(config, "tier", "put", f"weight-{weight}", "--class", "standard", "--weight", str(weight))
        by_id[cli(config, "tenant", "create", tenant, "--tier", f"weight-{weight}")["id"]] = weight
        keys[tenant] = cli(config, "key", "create", "--tenant", tenant)["key"]
    url = f"http://127.0.0.1:{port}"
    serve = Command([*LORAMUX, "serve", "--config", str(config)], f"{url}/health/ready", folder / "server.log", {})
    with running(serve):
        return {"weights": weights} | asyncio.run(measure(Site(url, keys, by_id, "base"), units))


def cli(config: Path, *arguments: str) -> dict[str, Any]:
    """Run a command of loramux; return its output as JSON."""
    command = [*LORAMUX, *arguments, "--config", str(config), "--json"]
    answer: dict[str, Any] = json.loads(subprocess.run(command, capture_output=True, text=True, check=True).stdout)
    return answer


def _weights(text: str) -> tuple[int, int]:
    flood, chat = map(int, text.split(","))
    return flood, chat


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(description="Shares and first tokens of two tenants, one of which floods.")
    parser.add_argument("--weights", type=_weights, default=(1, 1), help="of flood and of chat (default 1,1)")
    parser.add_argument("--units", type=float, default=20_000.0, help="service over weight to wait for (default 20000)")
    parser.add_argument("--threads", type=int, default=len(os.sched_getaffinity(0)))
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        print(json.dumps(run(Path(folder), arguments.weights, arguments.units, arguments.threads), indent=1))


if __name__ == "__main__":
    main()
