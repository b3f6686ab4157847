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
from loramux.simulator.hardware import DEVICES, MODELS, WEIGHT_BITS
from loramux.simulator.plan_report import PlanReason, alternative_text, reason_of, settings_of
from loramux.simulator.planner import Plan, Plans, Trial
from loramux.simulator.profiles import profile_names
from loramux.simulator.report import Resource
from loramux_api.answering import run_while_connected
from loramux_api.bodies import AnyRequest, Body
from loramux_api.openapi import OperatorController
from loramux_api.schemas.bounds import Name

MAX_SECONDS = 90
MAX_REQUESTS = 600
"""Number of requests in the simulated traffic: a plan simulates this traffic about 40 times."""
MAX_ANSWER_BYTES = 4 << 20
MAX_BASES, MAX_RANKS = 8, 16
NICE = 10
SPREAD = 0.7


class PlanBaseBody(Body, forbid_unknown_fields=True):
    """One of several bases."""

    name: Annotated[str, Meta(pattern=r"^[a-z0-9][a-z0-9._-]{0,63}$", max_length=64)]
    """The base's name in the answer."""
    model: Name
    share: Annotated[float, Meta(gt=0, le=1)] = 1.0
    """Share of the requests; the shares are divided by their sum."""


class PlanBody(Body, forbid_unknown_fields=True, kw_only=True):
    """A what-if question."""

    gpu: Name | None = None
    """A device, estimated from its data sheet; give this or `profile`."""
    profile: Name | None = None
    """A measured device."""
    model: Name | None = None
    """The base; give this or `bases`."""
    bases: Annotated[tuple[PlanBaseBody, ...], Meta(max_length=MAX_BASES)] = ()
    """Several bases, each on separate GPUs. Each base has the given number of adapters."""
    quantization: Literal["none", "int8", "fp8", "int4", "nf4"] | None = None
    """The form of the linears' weights in memory. Unset: none, or that of the profile."""
    kv_cache_dtype: Literal["auto", "fp8"] | None = None
    """The form of keys and values. Unset: auto, or that of the profile."""
    tensor_parallel_size: Annotated[int, Meta(ge=1, le=64)] = 1
    """Ranks of an engine, each on a separate GPU."""
    rate: Annotated[float, Meta(ge=0.1, le=1000)]
    """Requests per second, of all bases together."""
    prompt_tokens: Annotated[int, Meta(ge=1, le=8192)] = 500
    output_tokens: Annotated[int, Meta(ge=1, le=1024)] = 100
    adapters: Annotated[int, Meta(ge=0, le=2000)] = 20
    rank: Annotated[int, Meta(ge=1, le=256)] = 16
    ranks: Annotated[tuple[Annotated[int, Meta(ge=1, le=256)], ...], Meta(max_length=MAX_RANKS)] = ()
    """Ranks of the adapters in turn, instead of `rank`."""
    tenants: Annotated[int, Meta(ge=1, le=1000)] = 5
    ttft_ms: Annotated[float, Meta(ge=1, le=600_000)] = 2000
    itl_ms: Annotated[float, Meta(ge=1, le=600_000)] = 100
    compare_static: bool = False
    """Simulate static batching too."""

    @property
    def models(self) -> dict[str, tuple[str, float]]:
        """Model and share of the requests of each base, by its name."""
        if self.model is not None:
            return {self.model: (self.model, 1.0)}
        total = sum(base.share for base in self.bases)
        return {base.name: (base.model, base.share / total) for base in self.bases}


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


class AlternativeObject(msgspec.Struct, kw_only=True):
    """Something cheaper than the recommendation."""

    gpu: str
    gpus: int
    dollars_per_hour: float
    goals_met: bool
    excess: float
    """Factor by which the worse goal is missed; at most 1 if both goals are met."""
    text: str
    """The alternative in one sentence."""


class BasePlanObject(msgspec.Struct, kw_only=True):
    """The recommendation for one base, its reason, and all settings that were tried."""

    base: str
    times: str
    """Source of the times of steps: a data sheet, or a measurement."""
    goals_met: bool
    reason: PlanReason
    settings: str
    """The recommended settings as a part of the settings file, in TOML."""
    dollars_per_hour: float
    recommended: TrialObject
    alternatives: list[AlternativeObject]
    """Cheaper choices: one GPU less, or other GPUs for less money."""
    static: list[TrialObject]
    """Static batching, if it was asked for: with as many GPUs, and with the fewest that keep the goals."""
    tried: list[TrialObject]


class PlanObject(msgspec.Struct, kw_only=True):
    """A plan for each base."""

    object: Literal["plan"] = "plan"
    goals: GoalsObject
    goals_met: bool
    """True if the goals of all bases are met."""
    dollars_per_hour: float
    """Cost of all bases together."""
    bases: list[BasePlanObject]


class PlanChoices(msgspec.Struct, kw_only=True):
    """The devices and models that a plan can be made for."""

    object: Literal["plan.choices"] = "plan.choices"
    gpus: list[str]
    """Devices that are estimated from their data sheets."""
    profiles: list[str]
    """Devices that were measured."""
    models: list[str]
    quantizations: list[str]
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
        return PlanChoices(
            gpus=list(DEVICES),
            profiles=profile_names(),
            models=list(MODELS),
            quantizations=["none", *WEIGHT_BITS],
            running_since=what_if.running_since,
        )

    @post(status_code=200, summary="Make a plan")
    async def plan(self, data: JSONBody[PlanBody], request: AnyRequest, state: State) -> PlanObject:
        """Simulate the workload on more and more GPUs until the goals are met, then tune the settings. The search takes
        up to 90 seconds.

        Only one plan is searched at a time: another request gets 429. DELETE, or closing the connection, ends the
        search.
        """
        _check(data)
        what_if: WhatIf = state.what_if
        plans = await run_while_connected(request, what_if.plan(data))
        return _plan_object(plans, data)

    @delete(status_code=200, summary="Cancel a plan")
    async def cancel(self, state: State) -> PlanCancelled:
        """End the running search, also one of another caller: that caller gets 409."""
        what_if: WhatIf = state.what_if
        return PlanCancelled(cancelled=what_if.cancel())


def _check(data: PlanBody) -> None:
    """Raise InvalidRequest unless the question names one device, and known models."""
    if (data.gpu is None) == (data.profile is None):
        raise InvalidRequest("Give either 'gpu', an estimate from a data sheet, or 'profile'.", field="gpu")
    if (data.model is None) == (not data.bases):
        raise InvalidRequest("Give either 'model' or 'bases'.", field="model")
    if len({base.name for base in data.bases}) < len(data.bases):
        raise InvalidRequest("Each of 'bases' has a name of its own.", field="bases")
    named = [("gpu", data.gpu, list(DEVICES)), ("profile", data.profile, profile_names())]
    field_of_model = "model" if data.model is not None else "bases"
    named += [(field_of_model, model, list(MODELS)) for model, _ in data.models.values()]
    for field, value, known in named:
        if value is not None and value not in known:
            raise InvalidRequest(f"'{field}' is one of {', '.join(known)}.", field=field)


def _plan_object(found: Plans, data: PlanBody) -> PlanObject:
    return PlanObject(
        goals=GoalsObject(ttft_ms=data.ttft_ms, itl_ms=data.itl_ms),
        goals_met=all(plan.goals_met for plan in found.plans.values()),
        dollars_per_hour=found.dollars_per_hour,
        bases=[_base_plan_object(name, plan, data) for name, plan in found.plans.items()],
    )


def _base_plan_object(base: str, plan: Plan, data: PlanBody) -> BasePlanObject:
    return BasePlanObject(
        base=base,
        times=plan.times,
        goals_met=plan.goals_met,
        reason=reason_of(plan),
        settings=settings_of(plan, data.kv_cache_dtype or "auto", data.quantization or "none"),
        dollars_per_hour=plan.dollars_per_hour,
        recommended=_trial_object(plan.recommended),
        alternatives=[
            AlternativeObject(
                gpu=one.gpu,
                gpus=one.trial.settings.gpus,
                dollars_per_hour=one.dollars_per_hour,
                goals_met=one.excess <= 1,
                excess=one.excess,
                text=alternative_text(one, plan.goals),
            )
            for one in plan.alternatives
        ],
        static=[_trial_object(trial) for trial in plan.static],
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
        self._search: asyncio.Task[Plans] | None = None
        self.running_since: int | None = None
        """Start of the running search, in Unix seconds."""

    async def plan(self, asked: PlanBody) -> Plans:
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


async def _search(asked: PlanBody) -> Plans:
    with tempfile.TemporaryDirectory(prefix="loramux-plan-") as folder:
        file = Path(folder) / "workload.toml"
        await run_blocking(SERVER, file.write_text, _described(asked))
        return await _searched(file, asked)


def _described(asked: PlanBody) -> str:
    """Return the traffic in the format of `loramux plan`. The only text of a caller in it are the bases' names."""
    text = [f"duration_s = {MAX_REQUESTS / asked.rate}"]
    for name, (_, share) in asked.models.items():
        values = {
            "tenant": f"customer-{name}",
            "base": name,
            "tenants": asked.tenants,
            "rate": asked.rate * share,
            "adapters": asked.adapters,
            "popularity": "zipf:1.0",
            "ranks": asked.ranks or [asked.rank],
        }
        text += ["[[clients]]", *(f"{field} = {json.dumps(value)}" for field, value in values.items())]
        text.append(f"prompt_tokens = {_lengths(asked.prompt_tokens)}")
        text.append(f"output_tokens = {_lengths(asked.output_tokens)}")
    return "\n".join([*text, ""])


def _lengths(mean: int) -> str:
    """Return log-normal lengths with that mean, as in logs of chats, as an inline table of TOML."""
    mu = math.log(mean) - SPREAD**2 / 2
    return f'{{ distribution = "lognormal", mu = {mu:.6f}, sigma = {SPREAD}, low = 1, high = {8 * mean} }}'


async def _searched(file: Path, asked: PlanBody) -> Plans:
    arguments = ["--workload", str(file), "--json"]
    arguments += ["--gpu", asked.gpu] if asked.gpu is not None else ["--profile", str(asked.profile)]
    for name, (model, _) in asked.models.items():
        arguments += ["--model", f"{name}={model}"]
    arguments += ["--ttft-ms", f"{asked.ttft_ms:g}", "--itl-ms", f"{asked.itl_ms:g}"]
    for option, form in (("--quantization", asked.quantization), ("--kv-cache-dtype", asked.kv_cache_dtype)):
        arguments += [] if form is None else [option, form]
    arguments += ["--tensor-parallel-size", str(asked.tensor_parallel_size)]
    arguments += ["--compare-static"] * asked.compare_static
    process = await asyncio.create_subprocess_exec(
        sys.executable,
        "-m",
        "loramux_api",
        "plan",
        *arguments,
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
    if len(asked.models) > 1:
        return msgspec.json.decode(answer, type=Plans)
    [name] = asked.models
    plan = msgspec.json.decode(answer, type=Plan)
    return Plans(plans={name: plan}, dollars_per_hour=plan.dollars_per_hour)
