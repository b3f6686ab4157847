"""Measure the cost of the fleet's path for one engine: three real servers with the shipped model, alternately, in one
run.

    python benchmarks/fleet_cost.py
    python benchmarks/fleet_cost.py --rounds 12 --requests 48

`direct` gives requests directly to the engine's client, like a server without a fleet: only in this process,
`EngineGroup`'s submit, cancel and forget are replaced. `fleet` is the product, with router, runs that can continue on
another engine, and exchange of service. `channel` is the product with an engine at the other end of the encrypted
channel, on this machine over TCP. Only one server gets requests at a time, in a rotating order, so that a slow minute
of the machine affects all servers. The result is JSON on stdout: for `fleet` and `channel` the ratio of tokens per
second to `direct` in each round, the median and the quartiles; also the CPU time per token of each server process,
without its engine, which a busy machine hardly changes.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import statistics
import subprocess
import sys
import tempfile
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from observability import LORAMUX, MODEL_PATH, Site
from peers.serving import Command, free_port, running
from progress import say

from loramux.fleet.group import EngineGroup

NAMES = ("direct", "fleet", "channel")


def serve_direct(arguments: list[str]) -> None:
    """Run the command line with a group that only passes requests on."""

    def client(group: EngineGroup) -> Any:
        (member,) = group._members.values()  # the part whose cost is measured is removed
        return member.client

    def submit(group: EngineGroup, request: Any, on_event: Any) -> None:
        client(group).submit(request, on_event)

    def cancel(group: EngineGroup, request_id: str) -> None:
        client(group).cancel(request_id)

    def forget(group: EngineGroup, request_id: str) -> None:
        client(group).forget(request_id)

    for replaced in (submit, cancel, forget):
        setattr(EngineGroup, replaced.__name__, replaced)
    sys.argv = ["loramux", *arguments]
    from loramux_api.cli.main import main as command_line

    command_line()


@dataclass(frozen=True)
class Server:
    """A server of one kind."""

    site: Site
    pid: int
    cpu_us: list[float] = field(default_factory=list)
    """CPU time of a token, of each round."""

    @property
    def name(self) -> str:
        """Its kind."""
        return self.site.name

    async def tokens_per_s(self, requests: int, max_tokens: int) -> float:
        """Return the rate, and note the CPU time."""
        before = self._cpu_ns()
        rate = await self.site.tokens_per_s(requests, max_tokens)
        self.cpu_us.append((self._cpu_ns() - before) / 1000 / (requests * max_tokens))
        return rate

    def _cpu_ns(self) -> int:
        threads = Path(f"/proc/{self.pid}/task").glob("*/schedstat")
        return sum(int(thread.read_text().split()[0]) for thread in threads)


def start(stack: ExitStack, folder: Path, name: str) -> Server:
    """Start the server of one kind, with its engine."""
    folder.mkdir()
    config, port, engine_port = folder / "settings.toml", free_port(), free_port()
    engines = f'{{ addresses = ["tcp://127.0.0.1:{engine_port}"] }}' if name == "channel" else "{ min = 1 }"
    config.write_text(
        f'[[bases]]\npath = "{MODEL_PATH}"\nname = "base"\nengines = {engines}\n'
        f'[server]\nport = {port}\n[logging]\nlevel = "error"\n'
        f'[engine]\ndevice = "cpu"\nnum_threads = 1\npool_bytes = {64 << 20}\n'
        f'[fleet]\nkeys = "{folder / "keys"}"\n'
    )
    cli(config, "tenant", "create", "acme")
    key = cli(config, "key", "create", "--tenant", "acme")["key"]
    if name == "channel":
        cli(config, "engine", "keys")
        command = [*LORAMUX, "engine", "serve", "--config", str(config), "--listen", f"tcp://127.0.0.1:{engine_port}"]
        with (folder / "engine.log").open("w") as log:
            engine = subprocess.Popen(command, stdout=log, stderr=log)
        stack.callback(engine.wait)
        stack.callback(engine.kill)
    url = f"http://127.0.0.1:{port}"
    how = [sys.executable, str(Path(__file__).resolve()), "--direct"] if name == "direct" else [*LORAMUX]
    serve = Command([*how, "serve", "--config", str(config)], f"{url}/health/ready", folder / "server.log", {})
    pid, _ = stack.enter_context(running(serve))
    return Server(Site(name, url, key), pid)


def cli(config: Path, *arguments: str) -> dict[str, Any]:
    """Run a command of loramux, and return its output."""
    command = [*LORAMUX, *arguments, "--config", str(config), "--json"]
    answer: dict[str, Any] = json.loads(subprocess.run(command, capture_output=True, text=True, check=True).stdout)
    return answer


async def measure(sites: list[Server], rounds: int, requests: int, max_tokens: int) -> dict[str, Any]:
    """Return the ratios of all rounds, for each kind."""
    for site in sites:
        await site.site.tokens_per_s(requests, max_tokens)  # warm
    ratios: dict[str, list[float]] = {name: [] for name in NAMES[1:]}
    for turn in range(rounds):
        shift = turn % len(sites)
        rates = {site.name: await site.tokens_per_s(requests, max_tokens) for site in sites[shift:] + sites[:shift]}
        for name, found in ratios.items():
            found.append(rates[name] / rates["direct"])
        say(f"round {turn + 1}: " + ", ".join(f"{rates[name]:.0f} tokens/s {name}" for name in NAMES))
    result: dict[str, Any] = {name: summary(found) for name, found in ratios.items()}
    result["cpu_us_per_token"] = {site.name: summary(site.cpu_us) for site in sites}
    return result | {"load": os.getloadavg()[0]}


def summary(values: list[float]) -> dict[str, Any]:
    """Return the median and the quartiles of some values, with all of them."""
    quartiles = statistics.quantiles(values, n=4)
    return {"median": statistics.median(values), "quartiles": [quartiles[0], quartiles[2]], "values": values}


def main() -> None:
    """The command line."""
    if sys.argv[1:2] == ["--direct"]:
        serve_direct(sys.argv[2:])
        return
    parser = argparse.ArgumentParser(description="The cost of the fleet for one engine.")
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--requests", type=int, default=64, help="of each server in each round")
    parser.add_argument("--max-tokens", type=int, default=64)
    given = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder, ExitStack() as stack:
        sites = [start(stack, Path(folder) / name, name) for name in NAMES]
        print(json.dumps(asyncio.run(measure(sites, given.rounds, given.requests, given.max_tokens)), indent=2))


if __name__ == "__main__":
    main()
