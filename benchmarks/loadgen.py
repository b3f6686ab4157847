"""Send a workload to any OpenAI-compatible server, as streaming completions from token ids, and report the figures.

    python benchmarks/loadgen.py http://127.0.0.1:8000/v1 w64-mix.jsonl --api-key KEY --adapter-name bench/{adapter}
    python benchmarks/loadgen.py http://127.0.0.1:8001/v1 w64-mix.jsonl --waves 16

One JSON line goes to stdout, a table to stderr.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import msgspec
from figures import Outcome, summarise
from progress import bar, console
from rich.table import Table
from workloads import Item, load

TIMEOUT = httpx.Timeout(3600.0, connect=30.0)
"""Maximum time of a request, which may wait for all other requests in the queue of the slowest system."""
RETURN_TOKEN_IDS = {"return_token_ids": True}
"""vLLM's field, and ours: answers contain their token ids."""


@dataclass(frozen=True)
class Target:
    """One server, and its names for the models of a workload."""

    url: str
    """Up to and including `/v1`."""
    api_key: str = ""
    base_name: str = "base"
    adapter_name: str = "{adapter}"
    extra_body: dict[str, Any] = field(default_factory=dict)
    """Fields that only this server knows."""
    adapter_bodies: dict[str | None, dict[str, Any]] = field(default_factory=dict)
    """Fields of each adapter's requests (None: the base's), if the server does not choose an adapter by `model`."""

    def model(self, adapter: str | None) -> str:
        """The `model` of a request."""
        return self.base_name if adapter is None else self.adapter_name.format(adapter=adapter)

    def body(self, item: Item) -> dict[str, Any]:
        """A completion of exactly `item.max_tokens` tokens. ignore_eos and min_tokens are vLLM's, and usual."""
        return {
            "model": self.model(item.adapter),
            "prompt": item.prompt_token_ids,
            "max_tokens": item.max_tokens,
            "min_tokens": item.max_tokens,
            "ignore_eos": True,
            "temperature": 0,
            "stream": True,
            "stream_options": {"include_usage": True},
            **self.extra_body,
            **self.adapter_bodies.get(item.adapter, {}),
        }


# ---- when requests are sent: waves one after the other, each a list of (second it is due, request)

Plan = list[list[tuple[float, Item]]]


def at_once(items: Sequence[Item]) -> Plan:
    """Everything at the start."""
    return [[(0.0, item) for item in items]]


def in_waves(items: Sequence[Item], size: int) -> Plan:
    """Static batching: all requests are due at the start, but only `size` are sent at a time, and the next batch waits
    for all of them.
    """
    return [[(0.0, item) for item in items[i : i + size]] for i in range(0, len(items), size)]


def as_arrived(items: Sequence[Item], speed: float = 1.0) -> Plan:
    """Send each request at its own time, `speed` times as fast as in the workload."""
    return [[(item.arrival_s / speed, item) for item in items]]


# ---- the drive


class _Choice(msgspec.Struct):
    text: str = ""
    token_ids: list[int] | None = None


class _Usage(msgspec.Struct):
    completion_tokens: int = 0


class _Event(msgspec.Struct):
    choices: list[_Choice] = []
    usage: _Usage | None = None
    error: msgspec.Raw = msgspec.Raw()


_decode_event = msgspec.json.Decoder(_Event).decode


@dataclass(eq=False)
class _Stream:
    """One arriving answer."""

    item: Item
    due: float
    token_ids: list[int] = field(default_factory=list)
    first: float | None = None
    output_tokens: int = 0
    error: str | None = None

    def take(self, event: _Event) -> None:
        for choice in event.choices:
            if self.first is None and (choice.text or choice.token_ids):
                self.first = time.perf_counter()
            self.token_ids += choice.token_ids or ()
        if event.usage is not None:
            self.output_tokens = event.usage.completion_tokens
        if bytes(event.error):
            self.error = bytes(event.error).decode()

    def outcome(self) -> Outcome:
        return Outcome(
            id=self.item.id,
            ttft_s=None if self.first is None else self.first - self.due,
            total_s=time.perf_counter() - self.due,
            output_tokens=self.output_tokens,
            token_ids=self.token_ids,
            error=self.error,
        )


async def drive(
    target: Target, plan: Plan, on_end: Callable[[Outcome], None] = lambda _: None
) -> tuple[list[Outcome], float]:
    """Send the plan. Return the outcome of every request, and the seconds from the first due time to the last end.

    A failed request is an outcome with an error. Other requests continue.
    """
    headers = {"Authorization": f"Bearer {target.api_key}"} if target.api_key else {}
    limits = httpx.Limits(max_connections=None, max_keepalive_connections=None)
    async with httpx.AsyncClient(headers=headers, timeout=TIMEOUT, limits=limits) as client:
        start = time.perf_counter()

        async def send(due: float, item: Item) -> Outcome:
            await asyncio.sleep(max(0.0, start + due - time.perf_counter()))
            outcome = await _send(client, target, _Stream(item, start + due))
            on_end(outcome)
            return outcome

        outcomes: list[Outcome] = []
        for wave in plan:
            outcomes += await asyncio.gather(*(send(due, item) for due, item in wave))
        return outcomes, time.perf_counter() - start


async def _send(client: httpx.AsyncClient, target: Target, stream: _Stream) -> Outcome:
    try:
        async with client.stream("POST", f"{target.url}/completions", json=target.body(stream.item)) as response:
            if response.is_success:
                await _read(response, stream)
            else:
                stream.error = f"{response.status_code}: {(await response.aread()).decode(errors='replace')[:300]}"
    except (httpx.HTTPError, msgspec.DecodeError) as error:
        stream.error = f"{type(error).__name__}: {error}"
    return stream.outcome()


async def _read(response: httpx.Response, stream: _Stream) -> None:
    async for line in response.aiter_lines():
        if line.startswith("data: {"):
            stream.take(_decode_event(line[6:]))
    if stream.error is None and not stream.output_tokens:
        stream.error = "the stream ended without usage"


# ---- the command line


def _parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Drive an OpenAI-compatible server with a JSONL workload.")
    parser.add_argument("url", help="up to and including /v1")
    parser.add_argument("workload", type=Path, help="a file that workloads.py wrote")
    parser.add_argument("--api-key", default="")
    parser.add_argument("--base-name", default="base", help="the base model's served name (default base)")
    parser.add_argument("--adapter-name", default="{adapter}", help="such as bench/{adapter} (default {adapter})")
    parser.add_argument("--extra-body", type=json.loads, default={}, help="JSON of fields that only this server knows")
    pace = parser.add_mutually_exclusive_group()
    pace.add_argument("--waves", type=int, metavar="N", help="static batching: N at a time, the next wait for all")
    pace.add_argument("--speed", type=float, metavar="X", help="follow the workload's arrivals, X times as fast")
    return parser.parse_args()


def _plan(arguments: argparse.Namespace, items: Sequence[Item]) -> Plan:
    if arguments.waves is not None:
        return in_waves(items, arguments.waves)
    if arguments.speed is not None:
        return as_arrived(items, arguments.speed)
    return at_once(items)


def drive_with_bar(target: Target, plan: Plan) -> tuple[list[Outcome], float]:
    """Run `drive` to its end, with a progress bar on stderr."""
    with bar("requests") as progress:
        task = progress.add_task("driving", total=sum(map(len, plan)))
        return asyncio.run(drive(target, plan, on_end=lambda _: progress.advance(task)))


def main() -> None:
    """The command line."""
    arguments = _parse_arguments()
    names = (arguments.base_name, arguments.adapter_name)
    target = Target(arguments.url.rstrip("/"), arguments.api_key, *names, arguments.extra_body)
    items = load(arguments.workload)
    outcomes, wall_s = drive_with_bar(target, _plan(arguments, items))
    figures = summarise(items, outcomes, wall_s)
    print(msgspec.json.encode(figures).decode())
    table = Table("figure", "value")
    for name, value in msgspec.structs.asdict(figures).items():
        table.add_row(name, f"{value:.2f}" if isinstance(value, float) else str(value))
    console().print(table)


if __name__ == "__main__":
    main()
