"""Measure the cost of logs, metrics and traces: two real servers with the shipped model, alternately, in one run.

    python benchmarks/observability.py
    python benchmarks/observability.py --pairs 12 --requests 48

`quiet` logs only errors, has no traces and is not scraped. `watched` writes a JSON line per request, sends each
request's spans to a collector in a separate process, and is scraped every second. Only one of the two servers gets
requests at a time, in alternating order, so that a slow minute of the machine affects both. The result is JSON on
stdout: the ratio of tokens per second in each pair, their median and spread.
"""

from __future__ import annotations

import argparse
import asyncio
import http.server
import json
import multiprocessing
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import AsyncIterator
from contextlib import ExitStack, asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
from peers.serving import Command, free_port, running
from progress import say
from specs import BENCHMARKS

MODEL_PATH = BENCHMARKS.parent / "demo/loramux_demo/assets/base"
LORAMUX = (sys.executable, "-m", "loramux_api")
TIMEOUT = httpx.Timeout(600.0, connect=30.0)
IN_FLIGHT = 16
SCRAPE_SECONDS = 1.0


@dataclass(frozen=True)
class Site:
    """A server, and a key for it."""

    name: str
    url: str
    key: str

    async def tokens_per_s(self, requests: int, max_tokens: int) -> float:
        """Return the output tokens per second of `requests` streamed answers, with IN_FLIGHT requests at a time."""
        limits = httpx.Limits(max_connections=IN_FLIGHT)
        headers = {"Authorization": f"Bearer {self.key}"}
        async with httpx.AsyncClient(base_url=self.url, headers=headers, timeout=TIMEOUT, limits=limits) as client:
            began = time.perf_counter()
            places = asyncio.Semaphore(IN_FLIGHT)

            async def ask() -> None:
                body = {"model": "base", "prompt": _prompt(), "max_tokens": max_tokens, "ignore_eos": True}
                async with places, client.stream("POST", "/v1/completions", json=body | {"stream": True}) as response:
                    response.raise_for_status()
                    async for _ in response.aiter_bytes():
                        pass

            await asyncio.gather(*(ask() for _ in range(requests)))
            return requests * max_tokens / (time.perf_counter() - began)


@asynccontextmanager
async def scraped(url: str) -> AsyncIterator[None]:
    """Read `/metrics` every second, as Prometheus would, until the block ends."""

    async def scrape() -> None:
        async with httpx.AsyncClient(base_url=url, timeout=TIMEOUT) as client:
            while True:
                (await client.get("/metrics")).raise_for_status()
                await asyncio.sleep(SCRAPE_SECONDS)

    task = asyncio.create_task(scrape())
    try:
        yield
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)


async def measure(quiet: Site, watched: Site, pairs: int, requests: int, max_tokens: int) -> dict[str, Any]:
    """Return the ratios of all pairs."""
    for site in (quiet, watched):
        await site.tokens_per_s(requests, max_tokens)  # warm
    ratios = []
    for pair in range(pairs):
        rates: dict[str, float] = {}
        for site in (quiet, watched) if pair % 2 == 0 else (watched, quiet):
            if site is watched:
                async with scraped(site.url):
                    rates[site.name] = await site.tokens_per_s(requests, max_tokens)
            else:
                rates[site.name] = await site.tokens_per_s(requests, max_tokens)
        ratios.append(rates[watched.name] / rates[quiet.name])
        say(f"pair {pair + 1}: {rates[quiet.name]:.0f} tokens/s quiet, {rates[watched.name]:.0f} watched")
    quartiles = statistics.quantiles(ratios, n=4)
    return {"ratios": ratios, "median": statistics.median(ratios), "quartiles": [quartiles[0], quartiles[2]]}


def collect_spans(port: int) -> None:
    """Accept OTLP over HTTP and throw it away."""

    class Collector(http.server.BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_POST(self) -> None:
            self.rfile.read(int(self.headers["content-length"]))
            self.send_response(200)
            self.send_header("content-length", "0")
            self.end_headers()

        def log_message(self, *_: object) -> None:
            pass

    http.server.ThreadingHTTPServer(("127.0.0.1", port), Collector).serve_forever()


def run(folder: Path, pairs: int, requests: int, max_tokens: int) -> dict[str, Any]:
    """Start both servers in `folder`, and measure."""
    collector_port = free_port()
    collector = multiprocessing.Process(target=collect_spans, args=(collector_port,), daemon=True)
    collector.start()
    extra = {
        "quiet": '[logging]\nlevel = "error"\n',
        "watched": f'[logging]\nformat = "json"\n[tracing]\nendpoint = "http://127.0.0.1:{collector_port}"\n',
    }
    with ExitStack() as stack:
        sites = [_start(stack, folder / name, name, text) for name, text in extra.items()]
        stack.callback(collector.terminate)
        return asyncio.run(measure(sites[0], sites[1], pairs, requests, max_tokens))


def _start(stack: ExitStack, folder: Path, name: str, extra: str) -> Site:
    folder.mkdir()
    config, port = folder / "settings.toml", free_port()
    config.write_text(
        f'[model]\npath = "{MODEL_PATH}"\nserved_model_name = "base"\n[server]\nport = {port}\n'
        f'[engine]\ndevice = "cpu"\nnum_threads = 1\npool_bytes = {64 << 20}\n{extra}'
    )
    _cli(config, "tenant", "create", "acme")
    key = _cli(config, "key", "create", "--tenant", "acme")["key"]
    url = f"http://127.0.0.1:{port}"
    serve = Command([*LORAMUX, "serve", "--config", str(config)], f"{url}/health/ready", folder / "server.log", {})
    stack.enter_context(running(serve))
    return Site(name, url, key)


def _cli(config: Path, *arguments: str) -> dict[str, Any]:
    command = [*LORAMUX, *arguments, "--config", str(config), "--json"]
    answer: dict[str, Any] = json.loads(subprocess.run(command, capture_output=True, text=True, check=True).stdout)
    return answer


def _prompt() -> list[int]:
    return [1 + byte % 250 for byte in os.urandom(32)]


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(description="The cost of logs, metrics and traces.")
    parser.add_argument("--pairs", type=int, default=9)
    parser.add_argument("--requests", type=int, default=64, help="of each server in each pair")
    parser.add_argument("--max-tokens", type=int, default=64)
    given = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        print(json.dumps(run(Path(folder), given.pairs, given.requests, given.max_tokens), indent=2))


if __name__ == "__main__":
    main()
