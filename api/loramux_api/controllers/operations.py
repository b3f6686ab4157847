"""/admin/activity, /admin/ledger and /admin/plan: what operators watch, and what-if questions."""

from __future__ import annotations

from litestar import Controller, get, post
from litestar.datastructures import State
from litestar.di import NamedDependency
from litestar.params import JSONBody

from loramux.gateway import InvalidRequest, Platform
from loramux.simulator import DEVICES, MODELS, Plan, Trial
from loramux.tenants import Tenants
from loramux_api.auth import requires
from loramux_api.openapi import PROBLEMS
from loramux_api.schemas.operations import (
    ActivityObject,
    LedgerObject,
    PlanBody,
    PlanChoices,
    PlanObject,
    ReconciliationObject,
    TrialObject,
    activity_object,
    ledger_object,
    plan_choices,
    reconciliation_object,
)
from loramux_api.schemas.strict import StrictJSON
from loramux_api.schemas.tenancy import Listing
from loramux_api.what_if import WhatIf


class AdminActivityController(Controller):
    """The batch as it runs, and the ledger's proof."""

    path = "/admin"
    tags = ("Admin",)
    guards = (requires("operator"),)

    @get("/activity", summary="Activity of the engines", responses=PROBLEMS)
    async def activity(
        self, platform: NamedDependency[Platform], operators: NamedDependency[Tenants]
    ) -> Listing[ActivityObject]:
        """Return each engine's steps of the last minute in which any ran, by model and class, and what leaves its pool
        next.
        """
        stats = [
            (base.name, one, found) for base in platform.bases.values() for one, found in base.engines.stats().items()
        ]
        digests = {
            digest
            for _, _, found in stats
            for digest in (
                *(row.digest for sample in found.meters.timeline for row in sample.rows),
                *(one.digest for one in found.meters.evictable),
            )
            if digest is not None
        }
        models = await platform.model_names(digests)
        tenants = {str(tenant.id): tenant.name for tenant in await operators.list_tenants()}
        return Listing(data=[activity_object(one, base, found.meters, models, tenants) for base, one, found in stats])

    @get("/ledger", summary="The ledger's proof", responses=PROBLEMS)
    async def ledger(self, platform: NamedDependency[Platform]) -> LedgerObject:
        """Return the head of the hash chain, its newest checkpoint, how far the sinks are, and parked events."""
        return ledger_object(await platform.ledger_proof.state())

    @post("/ledger/reconcile", status_code=200, summary="Reconcile the ledger", responses=PROBLEMS)
    async def reconcile(self, platform: NamedDependency[Platform]) -> ReconciliationObject:
        """Compute the whole chain again and compare it with the engines' counts, closed months and checkpoints.

        409 while another one is under way.
        """
        return reconciliation_object(await platform.ledger_proof.reconcile())


class AdminPlanController(Controller):
    """What-if questions."""

    path = "/admin/plan"
    tags = ("Admin",)
    guards = (requires("operator"),)

    @get(summary="Choices of a plan", responses=PROBLEMS)
    async def choices(self) -> PlanChoices:
        """Return the devices and models that a plan can be made for."""
        return plan_choices()

    @post(dto=StrictJSON[PlanBody], return_dto=None, status_code=200, summary="Make a plan", responses=PROBLEMS)
    async def plan(self, data: JSONBody[PlanBody], state: State) -> PlanObject:
        """Simulate the workload on more and more GPUs until the goals are kept, then tune. It takes up to 90 seconds.

        One plan at a time: 429 while another one is searched.
        """
        for field, value, known in (("gpu", data.gpu, DEVICES), ("model", data.model, MODELS)):
            if value not in known:
                raise InvalidRequest(f"'{field}' is one of {', '.join(known)}.", field=field)
        what_if: WhatIf = state.what_if
        return _plan_object(await what_if.plan(data.workload()))


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
