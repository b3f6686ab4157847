"""/admin/plan: what-if questions, which `loramux plan` answers in a process of its own, bounded, one at a time.

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
from typing import Annotated, Literal

import msgspec
from litestar import get, post
from litestar.datastructures import State
from litestar.params import JSONBody
from msgspec import Meta

from loramux.common.errors import LoramuxError
from loramux.serving.errors import InvalidRequest
from loramux.simulator.hardware import DEVICES, MODELS
from loramux.simulator.planner import Plan, Trial
from loramux_api.bodies import Body
from loramux_api.openapi import OperatorController

MAX_SECONDS = 90
MAX_REQUESTS = 600
"""Requests of the simulated traffic: a plan takes some forty simulations of them."""
MAX_ANSWER_BYTES = 4 << 20
NICE = 10
SPREAD = 0.7


class PlanBody(Body, forbid_unknown_fields=True):
    """A what-if question."""

    gpu: str
    model: str
    rate: Annotated[float, Meta(ge=0.1, le=1000)]
    """Requests a second."""
    prompt_tokens: Annotated[int, Meta(ge=1, le=8192)] = 500
    output_tokens: Annotated[int, Meta(ge=1, le=1024)] = 100
    adapters: Annotated[int, Meta(ge=0, le=2000)] = 20
    rank: Annotated[int, Meta(ge=1, le=256)] = 16
    tenants: Annotated[int, Meta(ge=1, le=1000)] = 5
    ttft_ms: Annotated[float, Meta(ge=1, le=600_000)] = 2000
    itl_ms: Annotated[float, Meta(ge=1, le=600_000)] = 100


class TrialObject(msgspec.Struct, kw_only=True):
    """Settings, and what the simulator says of them."""

    gpus: int
    max_num_batched_tokens: int
    max_num_seqs: int
    block_size: int
    ttft_ms_p99: float
    itl_ms_p99: float
    pool_use: float
    tokens_per_s: float
    dollars_per_million_tokens: float


class PlanObject(msgspec.Struct, kw_only=True):
    """The recommendation, and all that was tried for it."""

    object: Literal["plan"] = "plan"
    goals_met: bool
    recommended: TrialObject
    tried: list[TrialObject]


class PlanChoices(msgspec.Struct, kw_only=True):
    """The devices and models that a plan can be made for."""

    object: Literal["plan.choices"] = "plan.choices"
    gpus: list[str]
    models: list[str]


class AdminPlanController(OperatorController):
    """What-if questions."""

    path = "/admin/plan"

    @get(summary="Choices of a plan")
    async def choices(self) -> PlanChoices:
        """Return the devices and models that a plan can be made for."""
        return PlanChoices(gpus=list(DEVICES), models=list(MODELS))

    @post(status_code=200, summary="Make a plan")
    async def plan(self, data: JSONBody[PlanBody], state: State) -> PlanObject:
        """Simulate the workload on more and more GPUs until the goals are kept, then tune. It takes up to 90 seconds.

        One plan at a time: 429 while another one is searched.
        """
        for field, value, known in (("gpu", data.gpu, DEVICES), ("model", data.model, MODELS)):
            if value not in known:
                raise InvalidRequest(f"'{field}' is one of {', '.join(known)}.", field=field)
        what_if: WhatIf = state.what_if
        return _plan_object(await what_if.plan(data))


def _plan_object(plan: Plan) -> PlanObject:
    return PlanObject(
        goals_met=plan.goals_met,
        recommended=_trial_object(plan.recommended),
        tried=[_trial_object(trial) for trial in plan.tried],
    )


def _trial_object(trial: Trial) -> TrialObject:
    settings = trial.settings
    return TrialObject(
        gpus=settings.gpus,
        max_num_batched_tokens=settings.max_num_batched_tokens,
        max_num_seqs=settings.max_num_seqs,
        block_size=settings.block_size,
        ttft_ms_p99=trial.ttft_ms_p99,
        itl_ms_p99=trial.itl_ms_p99,
        pool_use=trial.pool_use,
        tokens_per_s=trial.tokens_per_s,
        dollars_per_million_tokens=trial.dollars_per_million_tokens,
    )


class PlanRuns(LoramuxError):
    """Another plan is being searched."""

    code = "plan_under_way"
    status = 429
    retry_after = 5


class PlanFailed(LoramuxError):
    """The message has the planner's own words."""

    code = "no_plan"


class WhatIf:
    """Plans for operators."""

    def __init__(self) -> None:
        self._running = asyncio.Lock()

    async def plan(self, asked: PlanBody) -> Plan:
        """Search for the fewest GPUs that keep the goals. Raises PlanRuns, PlanFailed."""
        if self._running.locked():
            raise PlanRuns("another plan is being searched; it takes at most a minute and a half")
        async with self._running:
            with tempfile.TemporaryDirectory(prefix="loramux-plan-") as folder:
                file = Path(folder) / "workload.toml"
                await asyncio.to_thread(file.write_text, _described(asked))
                return await _searched(file, asked)


def _described(asked: PlanBody) -> str:
    """Return the traffic as `loramux plan` reads it. No text in it comes from a caller."""
    values = {
        "tenant": "customer",
        "tenants": asked.tenants,
        "rate": asked.rate,
        "adapters": asked.adapters,
        "popularity": "zipf:1.0",
        "ranks": [asked.rank],
    }
    lines = [f"{name} = {json.dumps(value)}" for name, value in values.items()]
    lines += [
        f"prompt_tokens = {_lengths(asked.prompt_tokens)}",
        f"output_tokens = {_lengths(asked.output_tokens)}",
    ]
    return "\n".join([f"duration_s = {MAX_REQUESTS / asked.rate}", "[[clients]]", *lines, ""])


def _lengths(mean: int) -> str:
    """Return log-normal lengths of that mean, as logs of chats have them, as an inline table of TOML."""
    mu = math.log(mean) - SPREAD**2 / 2
    return f'{{ distribution = "lognormal", mu = {mu:.6f}, sigma = {SPREAD}, low = 1, high = {8 * mean} }}'


async def _searched(file: Path, asked: PlanBody) -> Plan:
    arguments = ["--workload", str(file), "--gpu", asked.gpu, "--model", asked.model]
    goals = ["--ttft-ms", f"{asked.ttft_ms:g}", "--itl-ms", f"{asked.itl_ms:g}", "--json"]
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
