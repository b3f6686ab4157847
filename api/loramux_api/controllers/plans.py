"""/admin/plan: capacity plans, which `loramux plan` computes in a separate process with bounds, one plan at a time.

The search simulates thousands of steps in plain Python. In the server's process, this work would slow every stream.
"""

from __future__ import annotations

import asyncio
import json
import math
import os
import sys
import tempfile
import time
from http import HTTPStatus
from pathlib import Path
from typing import Annotated, Literal

import msgspec
from litestar import delete, get, post
from litestar.datastructures import State
from litestar.params import JSONBody
from msgspec import Meta

from loramux.common.errors import LoramuxError
from loramux.common.jobs import SERVER, run_blocking
from loramux.serving.errors import InvalidRequest
from loramux.simulator.hardware import DEVICES, MODELS
from loramux.simulator.plan_report import PlanReason, reason_of, settings_of
from loramux.simulator.planner import Plan, Trial
from loramux.simulator.report import Resource
from loramux_api.answering import run_while_connected
from loramux_api.bodies import AnyRequest, Body
from loramux_api.openapi import OperatorController
from loramux_api.schemas.bounds import Name

MAX_SECONDS = 90
MAX_REQUESTS = 600
"""Number of requests in the simulated traffic: a plan simulates this traffic about 40 times."""
MAX_ANSWER_BYTES = 4 << 20
NICE = 10
SPREAD = 0.7


class PlanBody(Body, forbid_unknown_fields=True):
    """A what-if question."""

    gpu: Name
    model: Name
    rate: Annotated[float, Meta(ge=0.1, le=1000)]
    """Requests per second."""
    prompt_tokens: Annotated[int, Meta(ge=1, le=8192)] = 500
    output_tokens: Annotated[int, Meta(ge=1, le=1024)] = 100
    adapters: Annotated[int, Meta(ge=0, le=2000)] = 20
    rank: Annotated[int, Meta(ge=1, le=256)] = 16
    tenants: Annotated[int, Meta(ge=1, le=1000)] = 5
    ttft_ms: Annotated[float, Meta(ge=1, le=600_000)] = 2000
    itl_ms: Annotated[float, Meta(ge=1, le=600_000)] = 100


class TrialObject(msgspec.Struct, kw_only=True):
    """Settings and their results in the simulator."""

    gpus: int
    max_num_batched_tokens: int
    max_num_seqs: int
    block_size: int
    class_shares: list[float]
    """Shares of the service classes, interactive : standard : batch."""
    ttft_ms_p50: float
    ttft_ms_p99: float
    itl_ms_p50: float
    itl_ms_p99: float
    preemption_rate: float
    """Share of the requests that were preempted by other requests."""
    pool_use: float
    adapters_resident: int
    """Largest number of adapters that one GPU's pool held at once."""
    simulated: int
    """Number of GPUs that were simulated: one GPU with its part of the traffic, or all GPUs with the router."""
    tokens_per_s: float
    dollars_per_million_tokens: float
    bound_by: Resource
    """Resource that is closest to its limit."""


class GoalsObject(msgspec.Struct, kw_only=True):
    """Latencies that the plan must keep: P99, in milliseconds."""

    ttft_ms: float
    itl_ms: float


class PlanObject(msgspec.Struct, kw_only=True):
    """The recommendation, its reason, and all settings that were tried."""

    object: Literal["plan"] = "plan"
    goals: GoalsObject
    goals_met: bool
    reason: PlanReason
    settings: str
    """The recommended settings as a part of the settings file, in TOML."""
    recommended: TrialObject
    tried: list[TrialObject]


class PlanChoices(msgspec.Struct, kw_only=True):
    """The devices and models that a plan can be made for."""

    object: Literal["plan.choices"] = "plan.choices"
    gpus: list[str]
    models: list[str]
    running_since: int | None
    """Start of the running search, in Unix seconds; null: no search runs."""


class PlanCancelled(msgspec.Struct, kw_only=True):
    """The answer to a cancellation."""

    object: Literal["plan.cancelled"] = "plan.cancelled"
    cancelled: bool
    """False: no search was running."""


class AdminPlanController(OperatorController):
    """Plans for operators: the number of GPUs that a workload needs."""

    path = "/admin/plan"

    @get(summary="Choices of a plan")
    async def choices(self, state: State) -> PlanChoices:
        """Return the devices and models that a plan can be made for, and whether a search runs."""
        what_if: WhatIf = state.what_if
        return PlanChoices(gpus=list(DEVICES), models=list(MODELS), running_since=what_if.running_since)

    @post(status_code=200, summary="Make a plan")
    async def plan(self, data: JSONBody[PlanBody], request: AnyRequest, state: State) -> PlanObject:
        """Simulate the workload on more and more GPUs until the goals are met, then tune the settings. The search takes
        up to 90 seconds.

        Only one plan is searched at a time: another request gets 429. DELETE, or closing the connection, ends the
        search.
        """
        for field, value, known in (("gpu", data.gpu, DEVICES), ("model", data.model, MODELS)):
            if value not in known:
                raise InvalidRequest(f"'{field}' is one of {', '.join(known)}.", field=field)
        what_if: WhatIf = state.what_if
        return _plan_object(await run_while_connected(request, what_if.plan(data)))

    @delete(status_code=200, summary="Cancel a plan")
    async def cancel(self, state: State) -> PlanCancelled:
        """End the running search, also one of another caller: that caller gets 409."""
        what_if: WhatIf = state.what_if
        return PlanCancelled(cancelled=what_if.cancel())


def _plan_object(plan: Plan) -> PlanObject:
    return PlanObject(
        goals=GoalsObject(ttft_ms=plan.goals.ttft_ms, itl_ms=plan.goals.itl_ms),
        goals_met=plan.goals_met,
        reason=reason_of(plan),
        settings=settings_of(plan),
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
        class_shares=list(settings.class_shares),
        ttft_ms_p50=trial.ttft_ms_p50,
        ttft_ms_p99=trial.ttft_ms_p99,
        itl_ms_p50=trial.itl_ms_p50,
        itl_ms_p99=trial.itl_ms_p99,
        preemption_rate=trial.preemption_rate,
        pool_use=trial.pool_use,
        adapters_resident=trial.adapters_resident,
        simulated=trial.simulated,
        tokens_per_s=trial.tokens_per_s,
        dollars_per_million_tokens=trial.dollars_per_million_tokens,
        bound_by=trial.bound_by,
    )


class PlanRuns(LoramuxError):
    """A search for another plan is running."""

    code = "plan_under_way"
    status = HTTPStatus.TOO_MANY_REQUESTS
    retry_after = 5


class PlanFailed(LoramuxError):
    """The message contains the planner's own message."""

    code = "no_plan"


class SearchCancelled(LoramuxError):
    """The search was ended before it found a plan."""

    code = "plan_cancelled"
    status = HTTPStatus.CONFLICT


class WhatIf:
    """Plans for operators, one at a time."""

    def __init__(self) -> None:
        self._search: asyncio.Task[Plan] | None = None
        self.running_since: int | None = None
        """Start of the running search, in Unix seconds."""

    async def plan(self, asked: PlanBody) -> Plan:
        """Search for the fewest GPUs that keep the goals. Raises PlanRuns, PlanFailed, SearchCancelled."""
        if self._search is not None:
            raise PlanRuns("another plan is being searched; wait a minute and a half at most, or cancel it")
        search = self._search = asyncio.ensure_future(_search(asked))
        self.running_since = int(time.time())
        try:
            await asyncio.wait([search])
        finally:
            search.cancel()  # the client has disconnected
            self._search = self.running_since = None
        if search.cancelled():
            raise SearchCancelled("the search was cancelled; ask again for a plan")
        return search.result()

    def cancel(self) -> bool:
        """End the running search, and return whether there was one."""
        return self._search is not None and self._search.cancel()


async def _search(asked: PlanBody) -> Plan:
    with tempfile.TemporaryDirectory(prefix="loramux-plan-") as folder:
        file = Path(folder) / "workload.toml"
        await run_blocking(SERVER, file.write_text, _described(asked))
        return await _searched(file, asked)


def _described(asked: PlanBody) -> str:
    """Return the traffic in the format of `loramux plan`. No text in it comes from a caller."""
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
    """Return log-normal lengths with that mean, as in logs of chats, as an inline table of TOML."""
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
