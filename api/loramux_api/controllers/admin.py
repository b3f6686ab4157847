"""/admin, for operators: tenants, tiers, keys, limits, the audit log; engines, activity, the ledger's proof, plans.

Errors are RFC 9457 problem details. Base models and migrations are in `bases`.
"""

from __future__ import annotations

import logging
import time

from litestar import delete, get, patch, post, put
from litestar.datastructures import State
from litestar.di import NamedDependency
from litestar.params import FromPath, FromQuery, JSONBody

from loramux.gateway import InvalidRequest, Platform
from loramux.limits import Limits
from loramux.logs import set_level
from loramux.simulator import DEVICES, MODELS, Plan, Trial
from loramux.tenants import Tenant, Tenants
from loramux_api.openapi import OperatorController
from loramux_api.parameters import BeforeSequence, PageLimit
from loramux_api.schemas.admin import (
    EngineObject,
    EngineOrderBody,
    LogLevelBody,
    OverviewObject,
    ServedTenant,
    TenantBody,
    TenantChange,
    TenantObject,
    TierBody,
    TierObject,
    engine_object,
    overview_object,
    tenant_object,
    tier_object,
)
from loramux_api.schemas.limits import (
    BudgetBody,
    BudgetObject,
    LimitBody,
    LimitObject,
    budget_object,
    budget_state_object,
    limit_object,
)
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
from loramux_api.schemas.tenancy import AuditObject, KeyBody, KeyObject, Listing, audit_object, key_object
from loramux_api.what_if import WhatIf

logger = logging.getLogger(__name__)


class AdminTenantController(OperatorController):
    """Tenants and their keys."""

    path = "/admin/tenants"

    @get(summary="List tenants")
    async def list_tenants(self, operators: NamedDependency[Tenants]) -> Listing[TenantObject]:
        """List every tenant by name."""
        return Listing(data=[tenant_object(tenant) for tenant in await operators.list_tenants()])

    @post(summary="Create a tenant")
    async def create(self, data: JSONBody[TenantBody], operators: NamedDependency[Tenants]) -> TenantObject:
        """Create a tenant with the project `default` and no key."""
        return tenant_object(await operators.create(data.name, data.tier))

    @get("/{name:str}", summary="Describe a tenant")
    async def get_tenant(self, name: FromPath[str], operators: NamedDependency[Tenants]) -> TenantObject:
        """Return one tenant."""
        return tenant_object(await operators.named(name))

    @patch("/{name:str}", summary="Change a tenant")
    async def change(
        self, name: FromPath[str], data: JSONBody[TenantChange], operators: NamedDependency[Tenants]
    ) -> TenantObject:
        """Move it to another tier, suspend or resume it, set zero retention, allow judges: from its next request on."""
        tenant: Tenant = await operators.named(name)
        if isinstance(data.tier, str):
            tenant = await operators.move(name, data.tier)
        if isinstance(data.suspended, bool):
            tenant = await (operators.suspend(name) if data.suspended else operators.resume(name))
        if isinstance(data.zero_retention, bool):
            tenant = await operators.set_zero_retention(name, data.zero_retention)
        if isinstance(data.allow_judges, bool):
            tenant = await operators.set_allow_judges(name, data.allow_judges)
        return tenant_object(tenant)

    @get("/{name:str}/keys", summary="List a tenant's keys")
    async def list_keys(self, name: FromPath[str], operators: NamedDependency[Tenants]) -> Listing[KeyObject]:
        """List a tenant's keys, oldest first, including revoked keys."""
        return Listing(data=[key_object(key) for key in await (await operators.account(name)).keys.all()])

    @post("/{name:str}/keys", summary="Create a key")
    async def create_key(
        self, name: FromPath[str], data: JSONBody[KeyBody], operators: NamedDependency[Tenants]
    ) -> KeyObject:
        """Create a key. Only this answer has its secret, in `key`."""
        return key_object(*await (await operators.account(name)).keys.create(data.request()))


class AdminEngineController(OperatorController):
    """The engines of this server."""

    path = "/admin/engines"

    @get(summary="List engines")
    async def list_engines(self, platform: NamedDependency[Platform]) -> Listing[EngineObject]:
        """List the engines of every base with their state."""
        return Listing(data=[engine_object(status) for status in platform.engines()])

    @post("/drain", status_code=202, summary="Drain an engine")
    async def drain(self, data: JSONBody[EngineOrderBody], platform: NamedDependency[Platform]) -> EngineObject:
        """Give an engine no more requests, and stop it once it has none. It stays stopped until it is restarted."""
        return engine_object(platform.order_engine(data.engine, restart=False, seconds=data.seconds))

    @post("/restart", status_code=202, summary="Restart an engine")
    async def restart(self, data: JSONBody[EngineOrderBody], platform: NamedDependency[Platform]) -> EngineObject:
        """Drain an engine and start it again. The list shows it `ready`, with one more start, when it serves."""
        return engine_object(platform.order_engine(data.engine, restart=True, seconds=data.seconds))


class AdminTierController(OperatorController):
    """Service tiers."""

    path = "/admin/tiers"

    @get(summary="List tiers")
    async def list_tiers(self, operators: NamedDependency[Tenants]) -> Listing[TierObject]:
        """List every tier by name."""
        return Listing(data=[tier_object(tier) for tier in await operators.tiers.all()])

    @put("/{name:str}", summary="Create or change a tier")
    async def put_tier(
        self, name: FromPath[str], data: JSONBody[TierBody], operators: NamedDependency[Tenants]
    ) -> TierObject:
        """Create or change a tier. Applies from its tenants' next requests on."""
        return tier_object(await operators.tiers.put(name, data.service_class, data.weight, data.service_tiers))

    @delete("/{name:str}", status_code=200, summary="Delete a tier")
    async def remove(self, name: FromPath[str], operators: NamedDependency[Tenants]) -> TierObject:
        """Delete a tier. No tenant may be in it."""
        return tier_object(await operators.tiers.remove(name))


class AdminController(OperatorController):
    """Keys by id, and the audit log."""

    path = "/admin"

    @get("/overview", summary="Overview")
    async def overview(
        self, platform: NamedDependency[Platform], operators: NamedDependency[Tenants]
    ) -> OverviewObject:
        """Return health, queues, pools, and service by tenant, of all engines of this server at this moment."""
        weights = {tier.name: tier.weight for tier in await operators.tiers.all()}
        tenants = {
            str(tenant.id): ServedTenant(tenant.name, weights.get(tenant.tier, 1))
            for tenant in await operators.list_tenants()
        }
        reachable = await platform.is_database_reachable()
        return overview_object(platform, tenants, at=time.time(), reachable=reachable)

    @delete("/keys/{key_id:str}", status_code=200, summary="Revoke a key")
    async def revoke_key(self, key_id: FromPath[str], operators: NamedDependency[Tenants]) -> KeyObject:
        """Revoke any tenant's key at once. This cannot be undone."""
        return key_object(await operators.revoke_key(key_id))

    @put("/log-level", summary="Set the log level")
    async def set_log_level(self, data: JSONBody[LogLevelBody]) -> LogLevelBody:
        """Log this level and those above it, in this server until it restarts. The engine's process keeps its own."""
        set_level(data.level)
        logger.warning("the log level is %s from now on", data.level)
        return data

    @get("/audit", summary="Read the audit log")
    async def audit(
        self,
        operators: NamedDependency[Tenants],
        tenant: FromQuery[str | None] = None,
        before: BeforeSequence = None,
        limit: PageLimit = 100,
    ) -> Listing[AuditObject]:
        """List changes of all tenants or of one, newest first. `before` is the previous page's last sequence number."""
        tenant_id = (await operators.named(tenant)).id if tenant else None
        return Listing(
            data=[audit_object(e) for e in await operators.audit.read(tenant=tenant_id, before=before, limit=limit)]
        )


class AdminTierLimitController(OperatorController):
    """Limits of a tier, which apply to its tenants without limits of their own."""

    path = "/admin/tiers/{tier:str}/limits"

    @get(summary="List a tier's limits")
    async def list_limits(self, tier: FromPath[str], operators: NamedDependency[Tenants]) -> Listing[LimitObject]:
        """List a tier's limits by name."""
        return Listing(data=[limit_object(limit) for limit in await Limits(operators.changes).of_tier(tier)])

    @put("/{name:str}", summary="Set a tier's limit")
    async def set_limit(
        self, tier: FromPath[str], name: FromPath[str], data: JSONBody[LimitBody], operators: NamedDependency[Tenants]
    ) -> LimitObject:
        """Set a limit. Applies from the next request on."""
        return limit_object(await Limits(operators.changes).put_for_tier(tier, name, data.value))

    @delete("/{name:str}", status_code=200, summary="Remove a tier's limit")
    async def remove_limit(
        self, tier: FromPath[str], name: FromPath[str], operators: NamedDependency[Tenants]
    ) -> LimitObject:
        """Remove a limit."""
        return limit_object(await Limits(operators.changes).remove_from_tier(tier, name))


class AdminTenantLimitController(OperatorController):
    """Limits and budgets of a tenant as a whole."""

    path = "/admin/tenants/{tenant:str}"

    @get("/limits", summary="List a tenant's limits")
    async def list_limits(self, tenant: FromPath[str], operators: NamedDependency[Tenants]) -> Listing[LimitObject]:
        """List a tenant's own limits, and those of its tier for the other names."""
        found_tenant = await operators.named(tenant)
        found = await Limits(operators.changes).of(found_tenant.id, found_tenant.tier)
        return Listing(data=[limit_object(limit) for limit in found])

    @put("/limits/{name:str}", summary="Set a tenant's limit")
    async def set_limit(
        self, tenant: FromPath[str], name: FromPath[str], data: JSONBody[LimitBody], operators: NamedDependency[Tenants]
    ) -> LimitObject:
        """Set a limit that takes precedence over the tier's. Applies from the next request on."""
        id = (await operators.named(tenant)).id
        return limit_object(await Limits(operators.changes).put(id, id, name, data.value))

    @delete("/limits/{name:str}", status_code=200, summary="Remove a tenant's limit")
    async def remove_limit(
        self, tenant: FromPath[str], name: FromPath[str], operators: NamedDependency[Tenants]
    ) -> LimitObject:
        """Remove a limit. The tier's limit applies again."""
        id = (await operators.named(tenant)).id
        return limit_object(await Limits(operators.changes).remove(id, id, name))

    @get("/budgets", summary="List a tenant's budgets")
    async def list_budgets(self, tenant: FromPath[str], operators: NamedDependency[Tenants]) -> Listing[BudgetObject]:
        """List the budgets of the tenant itself, with the spending of the current periods."""
        found = await Limits(operators.changes).budgets((await operators.named(tenant)).id)
        return Listing(data=[budget_state_object(state) for state in found])

    @put("/budgets/{period:str}", summary="Set a tenant's budget")
    async def set_budget(
        self,
        tenant: FromPath[str],
        period: FromPath[str],
        data: JSONBody[BudgetBody],
        operators: NamedDependency[Tenants],
    ) -> BudgetObject:
        """Set a budget. `period` is day, month (both UTC) or total."""
        id = (await operators.named(tenant)).id
        return budget_object(
            await Limits(operators.changes).put_budget(id, id, period, data.amount_nano, data.thresholds)
        )

    @delete("/budgets/{period:str}", status_code=200, summary="Remove a tenant's budget")
    async def remove_budget(
        self, tenant: FromPath[str], period: FromPath[str], operators: NamedDependency[Tenants]
    ) -> BudgetObject:
        """Remove a budget and its counters. Invoices do not change."""
        id = (await operators.named(tenant)).id
        return budget_object(await Limits(operators.changes).remove_budget(id, id, period))


class AdminActivityController(OperatorController):
    """The batch as it runs, and the ledger's proof."""

    path = "/admin"

    @get("/activity", summary="Activity of the engines")
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

    @get("/ledger", summary="The ledger's proof")
    async def ledger(self, platform: NamedDependency[Platform]) -> LedgerObject:
        """Return the head of the hash chain, its newest checkpoint, how far the sinks are, and parked events."""
        return ledger_object(await platform.ledger_proof.state())

    @post("/ledger/reconcile", status_code=200, summary="Reconcile the ledger")
    async def reconcile(self, platform: NamedDependency[Platform]) -> ReconciliationObject:
        """Compute the whole chain again and compare it with the engines' counts, closed months and checkpoints.

        409 while another one is under way.
        """
        return reconciliation_object(await platform.ledger_proof.reconcile())


class AdminPlanController(OperatorController):
    """What-if questions."""

    path = "/admin/plan"

    @get(summary="Choices of a plan")
    async def choices(self) -> PlanChoices:
        """Return the devices and models that a plan can be made for."""
        return plan_choices()

    @post(status_code=200, summary="Make a plan")
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
