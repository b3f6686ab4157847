"""What-if questions: `loramux plan` in a process of its own, bounded, one at a time.

The search simulates thousands of steps in plain Python: in the server's process it would slow every stream.
"""

from __future__ import annotations

import asyncio
import json
import math
import os
import sys
import tempfile
from pathlib import Path

import msgspec

from loramux.errors import LoramuxError
from loramux.simulator import Plan

MAX_SECONDS = 90
MAX_REQUESTS = 600
"""Requests of the simulated traffic: a plan takes some forty simulations of them."""
MAX_ANSWER_BYTES = 4 << 20
NICE = 10
SPREAD = 0.7


class PlanRuns(LoramuxError):
    """Another plan is being searched."""

    code = "plan_under_way"
    status = 429
    retry_after = 5


class PlanFailed(LoramuxError):
    """The message has the planner's own words."""

    code = "no_plan"


class Workload(msgspec.Struct, frozen=True, kw_only=True):
    """The traffic that a plan is for."""

    gpu: str
    model: str
    rate: float
    """Requests a second."""
    prompt_tokens: int
    output_tokens: int
    adapters: int
    rank: int
    tenants: int
    ttft_ms: float
    itl_ms: float


class WhatIf:
    """Plans for operators."""

    def __init__(self) -> None:
        self._running = asyncio.Lock()

    async def plan(self, workload: Workload) -> Plan:
        """Search for the fewest GPUs that keep the goals. Raises PlanRuns, PlanFailed."""
        if self._running.locked():
            raise PlanRuns("another plan is being searched; it takes at most a minute and a half")
        async with self._running:
            with tempfile.TemporaryDirectory(prefix="loramux-plan-") as folder:
                file = Path(folder) / "workload.toml"
                await asyncio.to_thread(file.write_text, _described(workload))
                return await _searched(file, workload)


def _described(workload: Workload) -> str:
    """Return the traffic as `loramux plan` reads it. No text in it comes from a caller."""
    values = {
        "tenant": "customer",
        "tenants": workload.tenants,
        "rate": workload.rate,
        "adapters": workload.adapters,
        "popularity": "zipf:1.0",
        "ranks": [workload.rank],
    }
    lines = [f"{name} = {json.dumps(value)}" for name, value in values.items()]
    lines += [
        f"prompt_tokens = {_lengths(workload.prompt_tokens)}",
        f"output_tokens = {_lengths(workload.output_tokens)}",
    ]
    return "\n".join([f"duration_s = {MAX_REQUESTS / workload.rate}", "[[clients]]", *lines, ""])


def _lengths(mean: int) -> str:
    """Return log-normal lengths of that mean, as logs of chats have them, as an inline table of TOML."""
    mu = math.log(mean) - SPREAD**2 / 2
    return f'{{ distribution = "lognormal", mu = {mu:.6f}, sigma = {SPREAD}, low = 1, high = {8 * mean} }}'


async def _searched(file: Path, workload: Workload) -> Plan:
    arguments = ["--workload", str(file), "--gpu", workload.gpu, "--model", workload.model]
    goals = ["--ttft-ms", f"{workload.ttft_ms:g}", "--itl-ms", f"{workload.itl_ms:g}", "--json"]
    process = await asyncio.create_subprocess_exec(
        sys.executable,
        "-m",
        "loramux_api",
        "plan",
        *arguments,
        *goals,
        stdin=asyncio.subprocess.DEVNULL,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
        limit=MAX_ANSWER_BYTES,
        preexec_fn=lambda: os.nice(NICE),
    )
    try:
        answer, said = await asyncio.wait_for(process.communicate(), MAX_SECONDS)
    except TimeoutError:
        raise PlanFailed(
            f"no plan was found within {MAX_SECONDS} seconds; try less traffic or fewer adapters"
        ) from None
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()
    if process.returncode != 0:
        words = said.decode(errors="replace").strip().splitlines()
        raise PlanFailed(words[-1][:500] if words else "the planner ended without a word")
    return msgspec.json.decode(answer, type=Plan)
