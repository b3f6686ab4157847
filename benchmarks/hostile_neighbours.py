"""Measure the effect of a tenant's hostile requests on other tenants: one real server, over HTTP.

    python benchmarks/hostile_neighbours.py
    python benchmarks/hostile_neighbours.py --rounds 9 --seconds 12      ten minutes
    python benchmarks/hostile_neighbours.py --quick                      half a minute, to see that all of it runs
    python benchmarks/hostile_neighbours.py --hostile "pools/lines that wait" "pools/slow body"
    python benchmarks/hostile_neighbours.py --hostile images --seconds 30    on a base that reads images

Tenant `steady` streams a few long answers at a time, and stores a small file twice a second. Tenant `hostile` sends
requests of one kind in every window. `hostile_requests.py` lists them, and sends them from a separate process. The
windows alternate within each round, so that a slow minute of the machine affects all of them.

The main measured time is that between two tokens of `steady`'s answers. The result is JSON on stdout: for each hostile
kind, p99 over the p99 of its baseline in each round, the median and the quartiles; the goal is a median of at most 1.1.
A baseline is as many requests of `hostile` that ask for nothing bad: `harmless` answers, whose rows are computed in the
same steps, small `requests` that compute nothing, or `pictures`, which are ordinary images. It shows what the requests'
number costs, because the client of `hostile` and the server share the machine's processors. `p99_over_alone` has the
same ratios over windows without requests of `hostile`. The longest pause and the longest upload of each window tell of
stalls that are too rare for a p99.
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
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import httpx
from fairness import LORAMUX, MODEL_PATH, cli
from figures import percentile
from models import save_image_model
from peers.serving import Command, free_port, running
from progress import say
from specs import BENCHMARKS

STEADY, HOSTILE = "steady", "hostile"
BASELINES: Mapping[str, str] = {"formats": "harmless", "bodies": "requests", "pools": "requests", "images": "pictures"}
"""Hostile kinds, each with the kind that it is compared with."""
TEXT_KINDS = tuple(kind for kind in BASELINES if kind != "images")
"""Hostile kinds on a base that reads text only."""
SCOPES = tuple(f"--scope={scope}" for scope in ("inference", "adapters", "usage", "keys", "webhooks"))
STREAMS = 4
MAX_TOKENS = 256
SETTLING_SECONDS = 1.0
"""The beginning of a window that is not measured: the requests of the window before have an end."""
SMALL_FILE = b'{"custom_id": "1", "method": "POST", "url": "/v1/completions", "body": {"model": "base", "prompt": "x"}}'


@dataclass(frozen=True)
class Plan:
    """The measured windows."""

    rounds: int
    seconds: float
    """Length of a window."""
    threads: int = 1
    """Threads of the engine."""
    hostile: tuple[str, ...] = TEXT_KINDS

    def __post_init__(self) -> None:
        if self.is_of_images and not all(kind.startswith("images") for kind in self.hostile):
            raise ValueError("images need a base of their own: measure them without other kinds")

    @property
    def is_of_images(self) -> bool:
        """Return whether the base must read images."""
        return any(kind.startswith("images") for kind in self.hostile)


class Streams:
    """The answers that `steady` reads, one after the other in each of STREAMS places, and its uploads."""

    def __init__(self, client: httpx.AsyncClient) -> None:
        self._client = client
        self._pauses: list[float] = []
        self._uploads: list[float] = []

    def take(self) -> dict[str, float]:
        """Return the figures since the last call, in milliseconds."""
        pauses, self._pauses = self._pauses, []
        uploads, self._uploads = self._uploads, []
        figures = {
            "p99": percentile(pauses, 0.99),
            "longest_pause": max(pauses, default=None),
            "longest_upload": max(uploads, default=None),
        }
        return {name: round(1000 * (seconds or 0.0), 2) for name, seconds in figures.items()}

    async def read(self, place: int) -> None:
        """Ask without end."""
        for number in itertools.count():
            body = {"model": "base", "prompt": f"Story {number} of place {place}.", "max_tokens": MAX_TOKENS}
            # With its id, every token is an event, also a token that is only a part of a character.
            options = {"stream": True, "ignore_eos": True, "return_token_ids": True}
            latest: float | None = None
            async with self._client.stream("POST", "/v1/completions", json=body | options) as response:
                response.raise_for_status()
                async for line in response.aiter_lines():
                    if line.startswith("data: {"):
                        now = time.perf_counter()
                        if latest is not None:
                            self._pauses.append(now - latest)
                        latest = now

    async def upload(self) -> None:
        """Store a small file, and remove it, without end."""
        while True:
            began = time.perf_counter()
            files = {"file": ("one.jsonl", SMALL_FILE)}
            stored = await self._client.post("/v1/files", data={"purpose": "batch"}, files=files)
            self._uploads.append(time.perf_counter() - began)
            (await self._client.delete(f"/v1/files/{stored.raise_for_status().json()['id']}")).raise_for_status()
            await asyncio.sleep(0.5)


class Neighbour:
    """The process that sends the requests of `hostile`."""

    def __init__(self, process: asyncio.subprocess.Process) -> None:
        assert process.stdin is not None, "it is a pipe"
        assert process.stdout is not None, "it is a pipe"
        self._stdin, self._stdout = process.stdin, process.stdout

    async def send(self, kind: str) -> None:
        """Begin with the requests of a kind, in place of those before."""
        self._stdin.write(f"{kind}\n".encode())
        await self.expect(kind)

    async def expect(self, line: str) -> None:
        """Wait for a line of the process."""
        if (said := (await self._stdout.readline()).decode().strip()) != line:
            raise RuntimeError(f"the neighbour said {said!r} instead of {line!r}")

    async def end(self) -> dict[str, dict[str, int]]:
        """Return how its requests have ended."""
        self._stdin.close()
        found: dict[str, dict[str, int]] = json.loads(await self._stdout.readline())
        return found


@asynccontextmanager
async def neighbour(url: str, key: str) -> AsyncIterator[Neighbour]:
    """Start the process, and end it with the block."""
    pipe = asyncio.subprocess.PIPE
    command = (sys.executable, str(BENCHMARKS / "hostile_requests.py"), url, key)
    process = await asyncio.create_subprocess_exec(*command, stdin=pipe, stdout=pipe, limit=1 << 20)
    try:
        started = Neighbour(process)
        await started.expect("ready")
        yield started
    finally:
        if process.returncode is None:
            process.kill()
        await process.wait()


async def measure(url: str, keys: dict[str, str], plan: Plan) -> dict[str, Any]:
    """Return the ratios of each round, and what became of the hostile requests."""
    windows = (*dict.fromkeys(("alone", *map(baseline_of, plan.hostile))), *plan.hostile)
    figures: list[dict[str, dict[str, float]]] = []
    async with client_of(url, keys[STEADY]) as steady, neighbour(url, keys[HOSTILE]) as other:
        streams = Streams(steady)
        readers = [asyncio.create_task(streams.read(place)) for place in range(STREAMS)]
        readers.append(asyncio.create_task(streams.upload()))
        for turn in range(plan.rounds + 1):
            found: dict[str, dict[str, float]] = {}
            length = plan.seconds if turn else plan.seconds / 4  # the first round warms
            for kind in windows if turn % 2 else reversed(windows):
                await other.send(kind)
                settling = min(SETTLING_SECONDS, length / 4)
                await asyncio.sleep(settling)
                streams.take()
                await asyncio.sleep(length - settling)
                found[kind] = streams.take()
            if turn:
                figures.append(found)
                say(f"round {turn}: {found} ms")
        for reader in readers:
            if reader.done():
                reader.result()
            reader.cancel()
        await asyncio.gather(*readers, return_exceptions=True)
        ended = await other.end()
    return {
        "p99_over_baseline": {kind: summary(figures, kind, baseline_of(kind)) for kind in plan.hostile},
        "p99_over_alone": {kind: summary(figures, kind, "alone") for kind in windows[1:]},
        "milliseconds": figures,
        "ended": ended,
        "load": os.getloadavg()[0],
    }


def baseline_of(kind: str) -> str:
    """Return the kind that a hostile kind, or some of its requests, are compared with."""
    return BASELINES[kind.partition("/")[0]]


def summary(figures: list[dict[str, dict[str, float]]], kind: str, baseline: str) -> dict[str, Any]:
    """Return the ratios of a kind over its baseline, their median and their quartiles."""
    ratios = [one[kind]["p99"] / one[baseline]["p99"] for one in figures]
    quartiles = statistics.quantiles(ratios, n=4) if len(ratios) > 1 else []
    return {"median": statistics.median(ratios), "quartiles": quartiles[::2], "ratios": ratios}


def client_of(url: str, key: str) -> httpx.AsyncClient:
    return httpx.AsyncClient(base_url=url, headers={"Authorization": f"Bearer {key}"}, timeout=httpx.Timeout(120.0))


def run(folder: Path, plan: Plan) -> dict[str, Any]:
    """Start a server in `folder`, make the tenants, measure."""
    config, port = folder / "settings.toml", free_port()
    path = save_image_model(folder / "base") if plan.is_of_images else MODEL_PATH
    config.write_text(
        f'[model]\npath = "{path}"\nserved_model_name = "base"\n[server]\nport = {port}\n'
        f'[logging]\nlevel = "error"\n[validation]\nparity = false\n'
        f"[batches]\nallow_private_judges = true\n[webhooks]\nallow_private_addresses = true\n"
        f'[engine]\ndevice = "cpu"\nnum_threads = {plan.threads}\npool_bytes = {128 << 20}\n'
    )
    keys = {}
    for tenant in (STEADY, HOSTILE):
        cli(config, "tenant", "create", tenant)
        keys[tenant] = cli(config, "key", "create", "--tenant", tenant, *SCOPES)["key"]
    cli(config, "tenant", "allow-judges", HOSTILE)
    url = f"http://127.0.0.1:{port}"
    serve = Command([*LORAMUX, "serve", "--config", str(config)], f"{url}/health/ready", folder / "server.log", {})
    with running(serve):
        return asyncio.run(measure(url, keys, plan))


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(description="Inter-token times beside a tenant's hostile requests.")
    parser.add_argument("--rounds", type=int, default=9, help="each has a window of every kind (default 9)")
    parser.add_argument("--seconds", type=float, default=12.0, help="of a window (default 12)")
    parser.add_argument("--threads", type=int, default=1, help="engine.num_threads (default 1)")
    parser.add_argument("--hostile", nargs="+", default=list(TEXT_KINDS), help="kinds, or kind/beginning of names")
    parser.add_argument("--quick", action="store_true", help="one round of windows of 4 s")
    given = parser.parse_args()
    try:
        plan = Plan(given.rounds, given.seconds, given.threads, tuple(given.hostile))
    except ValueError as error:
        parser.error(str(error))
    if given.quick:
        plan = replace(plan, rounds=1, seconds=4.0)
    with tempfile.TemporaryDirectory() as folder:
        print(json.dumps(run(Path(folder), plan), indent=1))


if __name__ == "__main__":
    main()
